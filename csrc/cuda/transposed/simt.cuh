// The transposed product for everything else: any width, dtype, shape, group and alignment. A lane
// takes one octet of codes of each row of the weights, in float32, exactly as the format says.
#pragma once

#include "simt.cuh"
#include "transposed_sum.cuh"

namespace jaxgemv::cuda {

namespace transposed {

constexpr int kSimtRows = 4;  // of x, that share a decoding

// kWhole: no group ends inside an octet.
template <int kBits, bool kWhole>
__global__ void __launch_bounds__(kWarps * 32, 2)
    gemv_transposed_simt(const Problem problem, const Operands operands) {
  constexpr int kUnroll = kWhole ? 2 : 1;  // rows of the weights whose loads are under way at once
  using Parts = transposed::Parts<kSimtRows, kOctet, 32>;
  __shared__ Parts parts;
  const Team team;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index N = problem.N, K = problem.K, M = problem.M, b = blockIdx.y;
  const Index m_tiles = ceil_div(M, kSimtRows), tile = blockIdx.x / team.ranks();
  const Index m0 = tile % m_tiles * kSimtRows, strip0 = tile / m_tiles * Parts::kStrip;
  const int rows = static_cast<int>(min(Index{kSimtRows}, M - m0));
  const int s = stack_entry(problem, operands, b);
  const Index k0 = strip0 + lane * kOctet, bytes = row_bytes(K, kBits);
  const Index available = bytes - k0 / kOctet * kBits;
  const Index group0 = k0 / problem.group;
  const bool aligned = reinterpret_cast<uintptr_t>(operands.packed) % 4 == 0;
  const uint8_t* packed =
      operands.packed + max(s, 0) * operands.packed_stack_stride + k0 / kOctet * kBits;

  const auto shift_of = [&](Index n, Index g) {
    return problem.affine == Affine::kSymmetric ? mid_code(kBits) : load(operands.shift, s, n, g);
  };
  float y[kSimtRows][kOctet] = {};
  const Index end = s < 0 || k0 >= K ? 0 : N, step = Index{team.ranks()} * kWarps * kUnroll;
  for (Index n0 = (team.rank() * kWarps + warp) * kUnroll; n0 < end; n0 += step) {
    uint64_t codes[kUnroll];
    float scale[kUnroll], shift[kUnroll], x[kUnroll][kSimtRows];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Index n = min(n0 + u, N - 1);
      codes[u] = simt::load_octet<kBits>(packed + n * bytes, available, aligned);
      scale[u] = load(operands.scale, s, n, group0);
      shift[u] = shift_of(n, group0);
#pragma unroll
      for (int m = 0; m < kSimtRows; ++m)
        x[u][m] = load(operands.x, problem.x, (b * M + m0 + min(m, rows - 1)) * N + n);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (n0 + u >= N) break;
      Index g = group0, next = (g + 1) * problem.group;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        if (!kWhole && k0 + i == next && next < K) {
          ++g, next += problem.group;
          scale[u] = load(operands.scale, s, n0 + u, g), shift[u] = shift_of(n0 + u, g);
        }
        const float q = code_of<kBits>(codes[u], i);
        const bool offset = problem.affine == Affine::kOffset;
        const float w = offset ? q * scale[u] + shift[u] : (q - shift[u]) * scale[u];
#pragma unroll
        for (int m = 0; m < kSimtRows; ++m) y[m][i] += w * x[u][m];
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kSimtRows; ++m)
#pragma unroll
    for (int i = 0; i < kOctet; ++i) parts.of_warp[warp][Parts::at(m, lane * kOctet + i)] = y[m][i];
  parts.store(team, problem, operands, b * M + m0, rows, strip0, s >= 0);
}

}  // namespace transposed

template <int kBits, typename X>
struct TransposedSimt {
  static constexpr KernelInfo kInfo{"transposed simt",   kBits, kDtypeOf<X>, transposed::kSimtRows,
                                    kTransposedOperands, true};

  static bool accepts(const Problem&, const Operands&) { return true; }

  static cudaError_t run(const Problem& problem, const Operands& operands, cudaStream_t stream) {
    const bool whole = problem.group >= problem.K || problem.group % kOctet == 0;
    const auto kernel = whole ? transposed::gemv_transposed_simt<kBits, true>
                              : transposed::gemv_transposed_simt<kBits, false>;
    const Index tiles =
        ceil_div(problem.K, 32 * kOctet) * ceil_div(problem.M, transposed::kSimtRows);
    return transposed::launch(kernel, tiles, 2, transposed::kWarps * 4, problem, operands, stream);
  }
};

}  // namespace jaxgemv::cuda
