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
Rows wgmma_tma_narrow();
Rows wgmma_tma_wide();
Rows wgmma_tma_table4();
Rows wgmma_tma_float8();
Rows direct_integers();
Rows direct_table4();
Rows direct_float8();
Rows fma_rows();
Rows wgmma_any_narrow();
Rows wgmma_any_wide();
Rows wgmma_any_table4();
Rows wgmma_any_float8();
Rows gemm_tma_narrow();
Rows gemm_tma_wide();
Rows gemm_tma_table4();
Rows gemm_tma_float8();
Rows gemm_narrow();
Rows gemm_wide();
Rows gemm_table4();
Rows gemm_float8();
Rows mma_any_narrow();
Rows mma_any_wide();
Rows mma_any_table4();
Rows mma_any_float8();
Rows simt_rows();
Rows transposed_rows();
Rows transposed_simt_rows();

// All of them.
Rows table();

}  // namespace jaxgemv::cuda
