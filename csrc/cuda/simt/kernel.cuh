// The kernel that takes everything: any width, dtype, shape, group and alignment. A warp takes one row of the
// weights, or with a gated activation a pair of rows; each weight is dequantised in float32, exactly
// as the format says, and used for up to kRows rows of x.
#pragma once

#include "../common/affine.cuh"
#include "../common/epilogue.cuh"
#include "../common/formats.cuh"
#include "../common/grid.cuh"
#include "../common/norm.cuh"

namespace jaxgemv::cuda::simt {

constexpr int kWarps = 4;
constexpr int kRows = 4;

// y[m] += this lane's part of dot(row n of the weights, row m of x * norm); with a norm, squares[m] += that of the
// row's squares. first_x: the element of x at which these rows begin.
template <Format kFormat, int kBits>
__device__ __forceinline__ void multiply(const Problem& problem, const Operands& operands, Index s,
                                         Index n, Index first_x, int rows, float (&y)[kRows],
                                         float (&squares)[kRows]) {
  using C = Codes<kFormat, kBits, float>;
  const int lane = threadIdx.x % 32;
  const Index K = problem.K, bytes = row_bytes(K, kBits);
  const bool aligned = reinterpret_cast<uintptr_t>(operands.packed) % 4 == 0;
  const uint8_t* row = operands.packed + s * operands.packed_stack_stride + n * bytes;
  const C codes(operands.codebook, s);
  const NormValues norm(operands.norm, s, 0);
  // One kernel for all types of x, since it is the slowest kernel anyway.
  const auto x = [&](int m, Index k) { return load(operands.x, problem.x, first_x + m * K + k); };
  const auto shift_of = [&](Index g) {
    return problem.affine == Affine::kSymmetric ? C::kMid : load(operands.shift, s, n, g);
  };
  for (Index octet = lane; octet < ceil_div(K, kOctet); octet += 32) {
    const Index k0 = octet * kOctet;
    const uint64_t packed = load_octet<kBits>(row + octet * kBits, bytes - octet * kBits, aligned);
    Index g = k0 / problem.group, next = (g + 1) * problem.group;
    float scale = load_scale(operands.scale, s, n, g), shift = shift_of(g);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const Index k = k0 + i;
      if (k >= K) break;
      if (k == next) {
        ++g, next += problem.group;
        scale = load_scale(operands.scale, s, n, g), shift = shift_of(g);
      }
      const float w = weight_of(problem.affine, codes.value(packed, i), scale, shift);
      if (norm.data == nullptr) {
#pragma unroll
        for (int m = 0; m < kRows; ++m)
          if (m < rows) y[m] += w * x(m, k);
      } else {
        const float factor = load(norm.data, norm.dtype, k);
#pragma unroll
        for (int m = 0; m < kRows; ++m)
          if (m < rows) {
            const float v = x(m, k);
            y[m] += w * (factor * v), squares[m] = fmaf(v, v, squares[m]);
          }
      }
    }
  }
}

// The sum over the lanes of a warp, by a butterfly: the same order of additions on every run.
__device__ __forceinline__ float sum_over_warp(float v) {
  for (int step = 16; step > 0; step /= 2) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

template <Format kFormat, int kBits>
__global__ void __launch_bounds__(kWarps * 32, 4)
    gemv_simt(const Problem problem, const Operands operands) {
  wait_for_earlier();
  const bool gated = is_gated(problem.activation);
  const Index N = gated ? problem.N / 2 : problem.N, M = problem.M, b = blockIdx.y;
  const unsigned n_tiles = static_cast<unsigned>(ceil_div(N, kWarps));
  const Index n = Index{blockIdx.x % n_tiles} * kWarps + threadIdx.x / 32;
  const Index m0 = Index{blockIdx.x / n_tiles} * kRows;
  if (n >= N) return;

  const int rows = static_cast<int>(min(Index{kRows}, M - m0));
  const Index s = stack_entry(operands.index, problem.stack, b);
  const Output output = output_of(problem, operands);
  float first[kRows] = {};  // the first sums of a pair
#pragma unroll 1
  for (int half = gated ? 0 : 1; half < 2; ++half) {
    const Index row = gated && half == 1 ? n + N : n;
    float y[kRows] = {}, squares[kRows] = {};
    if (s >= 0)
      multiply<kFormat, kBits>(problem, operands, s, row, (b * M + m0) * problem.K, rows, y,
                               squares);
    const float bias = bias_of(output, s >= 0, s, row);
    const float scale = global_scale_of(output, s >= 0, s, row);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      float sum = sum_over_warp(y[m]);
      if (operands.norm.data != nullptr)
        sum *= norm_factor(sum_over_warp(squares[m]), problem.K, problem.eps);
      sum = fmaf(sum, scale, bias);
      if (half == 0)
        first[m] = sum;
      else if (threadIdx.x % 32 == 0 && m < rows)
        finish<Parts::kNormAndEpilogue>(output, (b * M + m0 + m) * N + n, gated ? first[m] : sum,
                                        sum);
    }
  }
}

}  // namespace jaxgemv::cuda::simt
