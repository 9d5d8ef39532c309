// XLA's call: buffers in, one kernel launch out.
#include "handler.h"

#include <vector>

#include "../call.h"
#include "launch.h"
#include "table.h"

namespace jaxgemv::cuda {
namespace {

ffi::Error gemv(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary attributes,
                cudaStream_t stream) {
  static const Taken taken(table());
  auto call = Call::from(args, *y, attributes, "cuda", taken);
  if (call.has_error()) return call.error();
  const Problem& problem = call->problem;
  if (problem.batch == 0 || problem.M == 0) return ffi::Error::Success();
  if (const auto error = call->overlap(/*copies_x=*/false)) return *error;
  const char* only = trace().only;
  const cudaError_t status =
      launch(problem, call->operands, call->given, stream, only == nullptr ? "" : only);
  if (status == cudaSuccess) return ffi::Error::Success();
  if (status == cudaErrorNotSupported)
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "jaxgemv: no CUDA kernel for this call");
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string("jaxgemv: CUDA kernel: ") + cudaGetErrorString(status));
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kGemv, gemv, bind_call().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

void* gemv_handler() { return reinterpret_cast<void*>(kGemv); }
int ffi_api_minor() { return XLA_FFI_API_MINOR; }

}  // namespace jaxgemv::cuda
