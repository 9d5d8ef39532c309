// The kernel for everything: any width, dtype, shape, group and alignment. One warp a row of the
// weights; each weight is dequantised in float32, exactly as the format says, and used for up to
// kRows rows of x.
#pragma once

#include <cmath>

#include "dtype.cuh"
#include "ptx.cuh"

namespace jaxgemv::cuda {

namespace simt {

constexpr int kWarps = 4;
constexpr int kRows = 4;

// The bytes of one octet in the low bits of the result; `available` < kBits only at a row's end.
template <int kBits>
__device__ __forceinline__ uint64_t load_octet(const uint8_t* p, Index available, bool aligned) {
  if constexpr (kBits % 4 == 0) {
    if (aligned && available >= kBits) {
      uint64_t octet = __ldg(reinterpret_cast<const uint32_t*>(p));
      if (kBits == 8) octet |= uint64_t{__ldg(reinterpret_cast<const uint32_t*>(p) + 1)} << 32;
      return octet;
    }
  }
  uint64_t octet = 0;
#pragma unroll
  for (int i = 0; i < kBits; ++i)
    if (i < available) octet |= uint64_t{__ldg(p + i)} << (8 * i);
  return octet;
}

template <int kBits, typename X>
__global__ void __launch_bounds__(kWarps * 32, 4)
    gemv_simt(const Problem problem, const Operands operands) {
  const int lane = threadIdx.x % 32;
  const Index N = problem.N, K = problem.K, M = problem.M;
  const unsigned n_tiles = static_cast<unsigned>(ceil_div(N, kWarps));
  const Index n = Index{blockIdx.x % n_tiles} * kWarps + threadIdx.x / 32;
  const Index m0 = Index{blockIdx.x / n_tiles} * kRows;
  const Index b = blockIdx.y;
  if (n >= N) return;

  const int rows = static_cast<int>(min(Index{kRows}, M - m0));
  const Index s = stack_entry(problem, operands, b);
  const X* x = static_cast<const X*>(operands.x) + (b * M + m0) * K;
  const Index bytes = row_bytes(K, kBits);
  const bool aligned = reinterpret_cast<uintptr_t>(operands.packed) % 4 == 0;
  const uint8_t* row = operands.packed + s * operands.packed_stack_stride + n * bytes;

  float y[kRows] = {};
  const Index octets = s < 0 ? 0 : ceil_div(K, kOctet);
  for (Index octet = lane; octet < octets; octet += 32) {
    const Index k0 = octet * kOctet;
    const uint64_t codes = load_octet<kBits>(row + octet * kBits, bytes - octet * kBits, aligned);
    Index g = k0 / problem.group, next = (g + 1) * problem.group;
    float scale = load(operands.scale, s, n, g);
    float shift =
        problem.affine == Affine::kSymmetric ? mid_code(kBits) : load(operands.shift, s, n, g);
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const Index k = k0 + i;
      if (k >= K) break;
      if (k == next) {
        ++g, next += problem.group;
        scale = load(operands.scale, s, n, g);
        if (problem.affine != Affine::kSymmetric) shift = load(operands.shift, s, n, g);
      }
      const float q = code_of<kBits>(codes, i);
      const float w = problem.affine == Affine::kOffset ? q * scale + shift : (q - shift) * scale;
#pragma unroll
      for (int m = 0; m < kRows; ++m)
        if (m < rows) y[m] += w * to_float(__ldg(x + m * K + k));
    }
  }
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
    // A butterfly: the same order of additions on every run.
    for (int step = 16; step > 0; step /= 2) y[m] += __shfl_xor_sync(~0u, y[m], step);
    if (lane == 0 && m < rows) {
      const float bias = operands.bias.data != nullptr && s >= 0 ? load(operands.bias, s, n, 0) : 0;
      store(operands.y, problem.y, (b * M + m0 + m) * N + n, s < 0 ? NAN : y[m] + bias);
    }
  }
}

}  // namespace simt

template <int kBits, typename X>
struct Simt {
  static constexpr KernelInfo kInfo{"simt", kBits, kDtypeOf<X>, simt::kRows, kProductOperands};

  static bool accepts(const Problem&, const Operands&) { return true; }

  static cudaError_t run(const Problem& problem, const Operands& operands, cudaStream_t stream) {
    const Index tiles = ceil_div(problem.N, simt::kWarps) * ceil_div(problem.M, simt::kRows);
    return launch_kernel(simt::gemv_simt<kBits, X>, tiles, problem.batch, simt::kWarps * 32,
                         problem, operands, stream);
  }
};

}  // namespace jaxgemv::cuda
