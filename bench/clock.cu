// A stopwatch inside a jitted program: device time of what XLA runs between two calls, whatever
// the host does meanwhile.

#include "floor.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

cudaEvent_t new_event() {
  cudaEvent_t event;
  cudaEventCreate(&event);
  return event;
}

cudaEvent_t started() {
  static const cudaEvent_t event = new_event();
  return event;
}

cudaEvent_t stopped() {
  static const cudaEvent_t event = new_event();
  return event;
}

ffi::Error to_error(cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, cudaGetErrorString(status));
}

// Hands on x. The L2 is emptied first, which also gives the host time to launch what follows.
ffi::Error start(cudaStream_t stream, ffi::AnyBuffer x, ffi::Buffer<ffi::U32> scratch,
                 ffi::Result<ffi::AnyBuffer> out) {
  cudaError_t status = cudaMemcpyAsync(out->untyped_data(), x.untyped_data(), x.size_bytes(),
                                       cudaMemcpyDeviceToDevice, stream);
  if (status != cudaSuccess) return to_error(status);
  const Scratch all{scratch.untyped_data(), static_cast<int64_t>(scratch.size_bytes())};
  status = launch_flush(all, stream);
  if (status != cudaSuccess) return to_error(status);
  return to_error(cudaEventRecord(started(), stream));
}

// Its arguments are what it waits for; its result is only there to be asked for.
ffi::Error stop(cudaStream_t stream, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer>) {
  return to_error(cudaEventRecord(stopped(), stream));
}

}  // namespace

// Without kCmdBufferCompatible: they stay outside the CUDA graph that XLA makes of the rest.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgemv_bench_start, start,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::U32>>()  // scratch
                                  .Ret<ffi::AnyBuffer>());       // x

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgemv_bench_stop, stop,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .RemainingArgs()
                                  .Ret<ffi::AnyBuffer>());

// Microseconds from the last start to the last stop, or minus a cudaError_t.
extern "C" float jaxgemv_bench_elapsed() {
  float milliseconds = 0;
  cudaError_t status = cudaEventSynchronize(stopped());
  if (status == cudaSuccess) status = cudaEventElapsedTime(&milliseconds, started(), stopped());
  return status == cudaSuccess ? 1e3f * milliseconds : -static_cast<float>(status);
}
