// The transposed product for everything else: any width, dtype, shape, group and alignment. A lane
// decodes one octet of codes of each row of the weights, in float32, exactly as the format says.
#pragma once

#include "../common/affine.cuh"
#include "../common/formats.cuh"
#include "../common/grid.cuh"
#include "sum.cuh"

namespace jaxgemv::cuda::transposed {

constexpr int kSimtRows = 4;  // rows of x that share a decoding

// kWhole: no group ends inside an octet.
template <Format kFormat, int kBits, bool kWhole>
__global__ void __launch_bounds__(kWarps * 32, 2)
    gemv_transposed_simt(const Problem problem, const Operands operands) {
  constexpr int kUnroll = kWhole ? 2 : 1;  // rows of the weights whose loads are under way at once
  using C = Codes<kFormat, kBits, float>;
  using Parts = transposed::Parts<kSimtRows, kOctet, 32>;
  __shared__ Parts parts;
  wait_for_earlier();
  const Team team;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Index N = problem.N, K = problem.K, M = problem.M, b = blockIdx.y;
  const Index m_tiles = ceil_div(M, kSimtRows), tile = blockIdx.x / team.ranks();
  const Index m0 = tile % m_tiles * kSimtRows, k0_of_tile = tile / m_tiles * Parts::kTileK;
  const int rows = static_cast<int>(min(Index{kSimtRows}, M - m0));
  const int s = stack_entry(operands.index, problem.stack, b);
  const Index k0 = k0_of_tile + lane * kOctet, bytes = row_bytes(K, kBits);
  const Index available = bytes - k0 / kOctet * kBits;
  const Index group0 = k0 / problem.group;
  const bool aligned = reinterpret_cast<uintptr_t>(operands.packed) % 4 == 0;
  const uint8_t* packed =
      operands.packed + max(s, 0) * operands.packed_stack_stride + k0 / kOctet * kBits;

  const C code(operands.codebook, s);
  const auto shift_of = [&](Index n, Index g) {
    return problem.affine == Affine::kSymmetric ? C::kMid : load(operands.shift, s, n, g);
  };
  float y[kSimtRows][kOctet] = {};
  const Index end = s < 0 || k0 >= K ? 0 : N, step = Index{team.ranks()} * kWarps * kUnroll;
  for (Index n0 = (team.rank() * kWarps + warp) * kUnroll; n0 < end; n0 += step) {
    uint64_t codes[kUnroll];
    float scale[kUnroll], shift[kUnroll], x[kUnroll][kSimtRows];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const Index n = min(n0 + u, N - 1);
      codes[u] = load_octet<kBits>(packed + n * bytes, available, aligned);
      scale[u] = load_scale(operands.scale, s, n, group0);
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
          scale[u] = load_scale(operands.scale, s, n0 + u, g), shift[u] = shift_of(n0 + u, g);
        }
        const float w = weight_of(problem.affine, code.value(codes[u], i), scale[u], shift[u]);
#pragma unroll
        for (int m = 0; m < kSimtRows; ++m) y[m][i] += w * x[u][m];
      }
    }
  }
#pragma unroll
  for (int m = 0; m < kSimtRows; ++m)
#pragma unroll
    for (int i = 0; i < kOctet; ++i) parts.of_warp[warp][Parts::at(m, lane * kOctet + i)] = y[m][i];
  parts.store(team, problem, operands, b * M + m0, rows, k0_of_tile, s >= 0);
}

}  // namespace jaxgemv::cuda::transposed
