// The handler of XLA's calls: takes buffers, and launches a kernel, after one that makes an image of x where the kernel
// needs it.
#include "handler.h"

#include <new>
#include <optional>
#include <vector>

#include "../call.h"
#include "dequantize/launch.h"
#include "image/image.h"
#include "launch.h"
#include "table.h"

namespace jaxgemv::cuda {
namespace {

// The second result, if there is one: room for the image of x, uint8 (B, M, bytes).
std::optional<ffi::Error> take_image(ffi::RemainingRets scratch, Call* call) {
  if (scratch.size() == 0) return std::nullopt;
  auto image = scratch.get<ffi::AnyBuffer>(0);
  const Problem& problem = call->problem;
  const auto invalid = ffi::Error(ffi::ErrorCode::kInvalidArgument,
                                  "jaxgemv: the second result must be uint8 (batch, M, bytes)");
  if (image.has_error() || scratch.size() > 1) return invalid;
  const auto dims = (*image)->dimensions();
  if ((*image)->element_type() != ffi::DataType::U8 || dims.size() != 3 ||
      dims[0] != problem.batch || dims[1] != problem.M)
    return invalid;
  // The least that an image takes: programs for any number of rows have no more than this.
  const Index bytes =
      image::least_image_row_bytes(problem.M, problem.K, image::parts_of(problem, call->operands));
  if (dims[2] < bytes) return invalid;
  call->operands.image = (*image)->untyped_data(), call->operands.image_row_bytes = dims[2];
  return std::nullopt;
}

ffi::Error enqueue(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y,
                   ffi::RemainingRets scratch, ffi::Dictionary attributes, cudaStream_t stream) {
  static const Taken taken(table(), dequantize::kOperands);
  auto call = Call::from(args, *y, attributes, "cuda", taken);
  if (call.has_error()) return call.error();
  const Problem& problem = call->problem;
  if (problem.batch == 0 || problem.M == 0) return ffi::Error::Success();
  if (const auto error = call->overlap(/*copies_x=*/false)) return *error;
  if (const auto error = take_image(scratch, &*call)) return *error;
  const char* only = trace().only;
  const cudaError_t status =
      launch(problem, call->operands, call->given, stream, only == nullptr ? "" : only);
  if (status == cudaSuccess) return ffi::Error::Success();
  if (status == cudaErrorNotSupported)
    return ffi::Error(ffi::ErrorCode::kUnimplemented, "jaxgemv: no CUDA kernel for this call");
  return ffi::Error(ffi::ErrorCode::kInternal,
                    std::string("jaxgemv: CUDA kernel: ") + cudaGetErrorString(status));
}

ffi::Error gemv(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, ffi::RemainingRets scratch,
                ffi::Dictionary attributes, cudaStream_t stream) {
  try {
    return enqueue(args, y, scratch, attributes, stream);
  } catch (const std::bad_alloc&) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxgemv: no memory");
  }
}

}  // namespace

XLA_FFI_DEFINE_HANDLER(kGemv, gemv,
                       bind_call<ffi::RemainingRets>().Ctx<ffi::PlatformStream<cudaStream_t>>(),
                       {ffi::Traits::kCmdBufferCompatible});

void* gemv_handler() { return reinterpret_cast<void*>(kGemv); }
int ffi_api_minor() { return XLA_FFI_API_MINOR; }

}  // namespace jaxgemv::cuda
