// XLA's call: buffers in, one kernel launch out.
#include "handler.h"

#include "../call.h"
#include "launch.h"

namespace jaxgemv::cuda {
namespace {

ffi::Error gemv(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary attributes,
                cudaStream_t stream) {
  static const Taken taken(kernels());
  auto call = Call::from(args, *y, attributes, "cuda", taken);
  if (call.has_error()) return call.error();
  const Problem& problem = call->problem;
  if (problem.batch == 0 || problem.M == 0) return ffi::Error::Success();
  if (call->x_overlaps_y())
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "jaxgemv: x and the result share memory (an in-place update of a donated x "
                      "that the call reads); copy x, or do not donate it");
  const cudaError_t status = launch(problem, call->operands, call->given, stream);
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string("jaxgemv: CUDA kernel: ") + cudaGetErrorString(status));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kGemv, gemv, bind_call().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

void* gemv_handler() { return reinterpret_cast<void*>(kGemv); }
int ffi_api_minor() { return XLA_FFI_API_MINOR; }

}  // namespace jaxgemv::cuda
