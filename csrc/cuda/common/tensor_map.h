// Arrays as tensor maps, for copies of boxes.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "../../gemv.h"

namespace jaxgemv::cuda {

// Tensor map of a 3-D array, the fastest dimension first, with the strides in bytes of the other two, in 2-D boxes.
// `swizzles`: for boxes 128 bytes wide, by 128 bytes. Past the end are zeros.
inline cudaError_t map_of(const void* data, CUtensorMapDataType type, const cuuint64_t (&sizes)[3],
                          const cuuint64_t (&strides)[2], int box_width, int box_rows,
                          bool swizzles, CUtensorMap* map) {
  // A function of the driver, which this module is not linked with: looked up at run time.
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
  const cuuint32_t box[] = {static_cast<cuuint32_t>(box_width), static_cast<cuuint32_t>(box_rows),
                            1};
  const cuuint32_t steps[] = {1, 1, 1};
  const CUresult result =
      encode(map, type, 3, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzles ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Whether the weights can have a tensor map: rows are whole 16 bytes, at aligned addresses, and the stack is not empty.
inline bool has_map_of_bytes(const Problem& problem, const Operands& operands) {
  return problem.K * problem.bits % 128 == 0 && operands.packed != nullptr &&
         is_aligned(operands.packed, 16) && operands.packed_stack_stride % 16 == 0;
}

// The weights, (stack, N, row_bytes) bytes, in boxes of `box_rows` rows of `box_bytes` bytes.
inline cudaError_t map_of_bytes(const Problem& problem, const Operands& operands, int row_bytes,
                                int box_bytes, int box_rows, CUtensorMap* map) {
  const auto N = static_cast<cuuint64_t>(problem.N), row = static_cast<cuuint64_t>(row_bytes);
  const auto matrix = static_cast<cuuint64_t>(operands.packed_stack_stride);
  return map_of(operands.packed, CU_TENSOR_MAP_DATA_TYPE_UINT8,
                {row, N, matrix == 0 ? 1 : static_cast<cuuint64_t>(problem.stack)},
                {row, matrix == 0 ? row * N : matrix}, box_bytes, box_rows, box_bytes == 128, map);
}

// x, (batch, M, K), in boxes of `box_rows` rows of 128 bytes. float32 is rounded to TF32 on the way.
inline cudaError_t map_of_x(const Problem& problem, const Operands& operands, int box_rows,
                            CUtensorMap* map) {
  const auto M = static_cast<cuuint64_t>(problem.M), K = static_cast<cuuint64_t>(problem.K);
  const int bytes = size_of(problem.x);
  const cuuint64_t row = K * bytes;
  return map_of(operands.x,
                bytes == 4 ? CU_TENSOR_MAP_DATA_TYPE_TFLOAT32 : CU_TENSOR_MAP_DATA_TYPE_UINT16,
                {K, M, static_cast<cuuint64_t>(problem.batch)}, {row, row * M}, 128 / bytes,
                box_rows, true, map);
}

}  // namespace jaxgemv::cuda
