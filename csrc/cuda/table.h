// The table of kernels: what each folder contributes, and all of it.
#pragma once

#include <algorithm>
#include <array>
#include <span>

#include "../kernel.h"
#include "device.h"

namespace jaxgemv::cuda {

struct Kernel {
  KernelInfo info;
  // Shapes, strides, alignment, processor. Not whether another kernel is faster: choose.h.
  bool (*supports)(const Problem&, const Operands&, const Device&);
  // Asynchronous on the stream.
  cudaError_t (*run)(const Problem&, const Operands&, const Device&, cudaStream_t);
};

// A kernel is a type with these three, for one format, width and dtype of x.
template <typename Type>
constexpr Kernel row() {
  return {Type::kInfo, Type::supports, Type::run};
}

// The rows of some widths and dtypes in one array.
template <size_t... kCounts>
constexpr auto join(const Kernel (&... rows)[kCounts]) {
  std::array<Kernel, (kCounts + ...)> all{};
  auto at = all.begin();
  ((at = std::copy(rows, rows + kCounts, at)), ...);
  return all;
}

using Rows = std::span<const Kernel>;
Rows direct_integers();
Rows direct_table4();
Rows direct_float8();
Rows fma_rows();
Rows stream_int1();
Rows stream_int2();
Rows stream_int3();
Rows stream_int4();
Rows stream_int5();
Rows stream_int6();
Rows stream_int7();
Rows stream_int8();
Rows stream_table4();
Rows stream_float8();
Rows wgmma_rows();
Rows wgmma_tma_int3();
Rows wgmma_tma_int4();
Rows wgmma_tma_int5();
Rows wgmma_tma_int6();
Rows wgmma_tma_int7();
Rows wgmma_tma_int8();
Rows wgmma_tma_table4();
Rows wgmma_tma_float8();
Rows wgmma_any_int1();
Rows wgmma_any_int2();
Rows wgmma_any_int3();
Rows wgmma_any_int4();
Rows wgmma_any_int5();
Rows wgmma_any_int6();
Rows wgmma_any_int7();
Rows wgmma_any_int8();
Rows wgmma_any_table4();
Rows wgmma_any_float8();
Rows gemm_tma_int1();
Rows gemm_tma_int2();
Rows gemm_tma_int3();
Rows gemm_tma_int4();
Rows gemm_tma_int5();
Rows gemm_tma_int6();
Rows gemm_tma_int7();
Rows gemm_tma_int8();
Rows gemm_tma_table4();
Rows gemm_tma_float8();
Rows gemm_int1();
Rows gemm_int2();
Rows gemm_int3();
Rows gemm_int4();
Rows gemm_int5();
Rows gemm_int6();
Rows gemm_int7();
Rows gemm_int8();
Rows gemm_table4();
Rows gemm_float8();
Rows mma_any_int1();
Rows mma_any_int2();
Rows mma_any_int3();
Rows mma_any_int4();
Rows mma_any_int5();
Rows mma_any_int6();
Rows mma_any_int7();
Rows mma_any_int8();
Rows mma_any_table4();
Rows mma_any_float8();
Rows simt_rows();
Rows transposed_rows();
Rows transposed_simt_rows();

// All of them.
Rows table();

}  // namespace jaxgemv::cuda
