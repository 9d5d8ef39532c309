// The weights as a tensor map, for copies of boxes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../../gemv.h"

namespace jaxgemv::cuda {

// (stack, N, row_bytes) bytes in boxes of `box_bytes` of `box_rows` rows, of 128 bytes swizzled by as many. Past
// the end of a row are zeros.
inline cudaError_t map_of_bytes(const Problem& problem, const Operands& operands, int row_bytes,
                                int box_bytes, int box_rows, CUtensorMap* map) {
  // Of the driver, which this module is not linked with.
  static const auto encode = [] {
    constexpr const char* kName = "cuTensorMapEncodeTiled";
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    const cudaError_t status =
        cudaGetDriverEntryPointByVersion(kName, &found, 12000, cudaEnableDefault, &result);
#else
    const cudaError_t status = cudaGetDriverEntryPoint(kName, &found, cudaEnableDefault, &result);
#endif
    return status == cudaSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found)
                                 : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const auto N = static_cast<cuuint64_t>(problem.N), row = static_cast<cuuint64_t>(row_bytes);
  const auto matrix = static_cast<cuuint64_t>(operands.packed_stack_stride);
  const cuuint64_t sizes[] = {row, N, matrix == 0 ? 1 : static_cast<cuuint64_t>(problem.stack)};
  const cuuint64_t strides[] = {row, matrix == 0 ? row * N : matrix};
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_bytes), static_cast<cuuint32_t>(box_rows),
                            1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<uint8_t*>(operands.packed), sizes,
             strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             box_bytes == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jaxgemv::cuda
