// For 17 to 64 rows of x on GPUs other than Hopper, and for what the streaming kernel refuses:
// weights from memory straight into registers, each warp a share of K for 16 output rows, on tensor
// cores even for one row of x.
//
// A chunk is 16 rows x 64 bytes of weights. Lane (g, t) = (lane / 4, lane % 4) loads 16 bytes of
// row g and of row g + 8 at byte 16 t: the A operand of mma.m16n8k16, in a permutation of k that x,
// the B operand, follows. The affine part is two fp32 terms a group:
// y += f * dot(q, x) + c * sum(x), where sum(x) comes from an mma with ones.
#pragma once

#include "../common/epilogue.cuh"
#include "groups.cuh"
#include "x.cuh"

namespace jaxgemv::cuda::mma {

constexpr int kTileN = 16;       // rows of the weights a CTA computes
constexpr int kChunkBytes = 64;  // of each of them
constexpr int kMaxWarps = 8;     // that share K; how many, `choose_warps` says
constexpr int kMaxTilesM = 4;    // tiles of 8 rows of x in a CTA

// kMTiles: there may be more rows of x. With a gated activation rows g + 8 are those of its second
// half that belong to rows g.
template <int kBits, typename X, int kTilesM, bool kMTiles, Groups kGroups, Parts kParts>
__global__ void __launch_bounds__(kMaxWarps * 32,
                                  kTilesM == 1 && kParts != Parts::kNormAndEpilogue ? 2 : 1)
    gemv_mma(const Problem problem, const Operands operands) {
  constexpr bool kNormed = kParts == Parts::kNormAndEpilogue;
  using XOperand = std::conditional_t<kNormed, XNormed<kBits, X>, XAsIs<kBits, X>>;
  using Kind = typename XOperand::Kind;
  using C = Codes<Format::kAffine, kBits, Kind>;
  constexpr int kLaneK = 128 / kBits;  // codes in a lane's 16 bytes
  constexpr int kWordK = C::kWordCodes;
  constexpr int kChunkK = 4 * kLaneK;
  constexpr int kTileM = 8 * kTilesM;
  constexpr bool kWhole = kGroups != Groups::kAny;  // every round is full
  constexpr uint32_t kOnes = std::is_same_v<Kind, __half> ? 0x3c003c00u : 0x3f803f80u;
  __shared__ float partial[kMaxWarps][kTileM][kTileN + 1];

  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, g = threadIdx.x / 4 % 8,
            t = threadIdx.x % 4;
  const int K = static_cast<int>(problem.K), M = static_cast<int>(problem.M);
  const bool gated = kParts != Parts::kNone && is_gated(problem.activation);
  const int N = static_cast<int>(problem.N) / (gated ? 2 : 1);  // of the result
  const int tile_n = gated ? kTileN / 2 : kTileN;
  // Tiles of the same weights run next to each other, so that only one of them reads memory.
  const unsigned m_tiles = kMTiles ? (M + kTileM - 1) / kTileM : 1;
  const int m0 = blockIdx.x % m_tiles * kTileM, n0 = blockIdx.x / m_tiles * tile_n;
  const int rows_m = min(M - m0, kTileM), rows_n = min(N - n0, tile_n);
  // Rows past the end repeat the last one and are not stored.
  const int row0 = n0 + min(g, rows_n - 1), row1 = gated ? row0 + N : n0 + min(g + 8, rows_n - 1);
  const int bytes = K / 8 * kBits;
  const uint8_t *w0 = operands.packed + (row0 * Index{bytes} + 16 * t),
                *w1 = operands.packed + (row1 * Index{bytes} + 16 * t);
  const int s = stack_entry(operands.index, problem.stack, blockIdx.y);
  if (operands.index != nullptr)
    w0 += s * operands.packed_stack_stride, w1 += s * operands.packed_stack_stride;
  const X* x = static_cast<const X*>(operands.x) + static_cast<int>(blockIdx.y * M + m0) * Index{K};
  const NormValues norm(operands.norm, s, 0);
  const XOperand x_operand(norm);
  GroupLoader<kGroups> loader(problem, operands, t, s, t % 2 ? row1 : row0, kChunkK);
  const int chunks = loader.chunks;

  float y[kTilesM][4] = {}, squares[kTilesM] = {};
  // Rounds of kUnroll chunks, dealt to the warps in turn.
  for (int chunk = s < 0 ? chunks : warp * kUnroll; chunk < chunks; chunk += warps * kUnroll) {
    uint4 q[kUnroll][2];
    const uint8_t *at0 = w0 + chunk * kChunkBytes, *at1 = w1 + chunk * kChunkBytes;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const bool inside = kWhole || (chunk + u) * kChunkK + kLaneK * t < K;
      q[u][0] = inside ? load_stream(at0 + u * kChunkBytes) : uint4{};
      q[u][1] = inside ? load_stream(at1 + u * kChunkBytes) : uint4{};
    }
    loader.load(chunk);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int k = (chunk + u) * kChunkK;
      if (!kWhole && k >= K) break;
      const bool inside = kWhole || k + kLaneK * t < K;
      const uint32_t words[2][4] = {{q[u][0].x, q[u][0].y, q[u][0].z, q[u][0].w},
                                    {q[u][1].x, q[u][1].y, q[u][1].z, q[u][1].w}};
      float dot[kTilesM][C::kProducts][4] = {}, sum[kTilesM][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t a[2][C::kProducts][2];
#pragma unroll
        for (int p = 0; p < C::kProducts; ++p)
#pragma unroll
          for (int half = 0; half < 2; ++half)
            a[0][p][half] = C::product(words[0][i], p, half),
            a[1][p][half] = C::product(words[1][i], p, half);
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
          typename XOperand::Registers b;
          // Rows of x past the end repeat the last one too.
          const X* xm = x + (min(8 * m + g, rows_m - 1) * K + kLaneK * t) + chunk * kChunkK;
          x_operand.load(xm + (u * kChunkK + kWordK * i), k + kLaneK * t + kWordK * i, inside, b,
                         squares[m]);
#pragma unroll
          for (int split = 0; split < XOperand::kSplit; ++split)
#pragma unroll
            for (int p = 0; p < C::kProducts; ++p) {
              mma_m16n8k16<Kind>(dot[m][p], a[0][p][0], a[1][p][0], a[0][p][1], a[1][p][1],
                                 b[split][p]);
              mma_m16n8k16<Kind>(sum[m], kOnes, kOnes, kOnes, kOnes, b[split][p]);
            }
        }
      }
      const GroupTerms terms(loader.get(u), problem.affine, C::kCentre, mid_code(kBits));
#pragma unroll
      for (int m = 0; m < kTilesM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float d = dot[m][0][e];
#pragma unroll
          for (int p = 1; p < C::kProducts; ++p)
            d = fmaf(dot[m][p][e], C::worth(p) / C::worth(0), d);
          const float f = terms.f[e / 2] * C::worth(0);
          y[m][e] = fmaf(f, d, fmaf(terms.c[e / 2], sum[m][e], y[m][e]));
        }
    }
  }

  constexpr int kSquares = kTileN;  // where these lie, behind the sums
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
#pragma unroll
    for (int e = 0; e < 4; ++e) partial[warp][8 * m + 2 * t + e % 2][g + 8 * (e / 2)] = y[m][e];
    if constexpr (kNormed) {
      squares[m] += __shfl_xor_sync(~0u, squares[m], 1);
      squares[m] += __shfl_xor_sync(~0u, squares[m], 2);
      if (t == 0) partial[warp][8 * m + g][kSquares] = squares[m];
    }
  }
  __syncthreads();
  // The shares of K, added in a fixed order.
  const Output output = output_of(problem, operands);
  const auto sum_of = [&](float sum, int m, int n) {
    for (int w = 0; w < warps; ++w) sum += partial[w][m][n];
    return sum;
  };
  for (int e = threadIdx.x; e < kTileM * tile_n; e += blockDim.x) {
    const int m = e / tile_n, n = e % tile_n;
    if (m >= rows_m || n >= rows_n) continue;
    const Index at = (static_cast<int>(blockIdx.y * M) + m0 + m) * Index{N} + n0 + n;
    const auto result = [&](int row, int n) {
      const float bias = bias_of(output, s >= 0, s, row);
      if constexpr (!kNormed) return sum_of(bias, m, n);
      return sum_of(0, m, n) * norm_factor(sum_of(0, m, kSquares), K, problem.eps) + bias;
    };
    finish<kParts>(output, at, result(n0 + n, n), gated ? result(n0 + n + N, n + kTileN / 2) : 1);
  }
}

}  // namespace jaxgemv::cuda::mma
