// For up to 8 rows of x, where the streaming kernel refuses the groups or the scales: weights from
// memory straight into registers, each warp a share of K for 16 output rows, on tensor cores even for
// one row of x.
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
constexpr int kRowsM = 8;        // of x

template <int kBits, typename X, Groups kGroups>
__global__ void __launch_bounds__(kMaxWarps * 32, 2)
    gemv_mma(const Problem problem, const Operands operands) {
  using C = Codes<Format::kAffine, kBits, X>;
  constexpr int kLaneK = 128 / kBits;  // codes in a lane's 16 bytes
  constexpr int kWordK = C::kWordCodes;
  constexpr int kChunkK = 4 * kLaneK;
  constexpr bool kWhole = kGroups != Groups::kAny;  // every round is full
  constexpr uint32_t kOnes = std::is_same_v<X, __half> ? 0x3c003c00u : 0x3f803f80u;
  __shared__ float partial[kMaxWarps][kRowsM][kTileN + 1];

  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, g = threadIdx.x / 4 % 8,
            t = threadIdx.x % 4;
  const int K = static_cast<int>(problem.K), M = static_cast<int>(problem.M);
  const int N = static_cast<int>(problem.N), n0 = static_cast<int>(blockIdx.x) * kTileN;
  const int rows_n = min(N - n0, kTileN);
  // Rows past the end repeat the last one and are not stored.
  const int row0 = n0 + min(g, rows_n - 1), row1 = n0 + min(g + 8, rows_n - 1);
  const int bytes = K / 8 * kBits;
  const uint8_t *w0 = operands.packed + (row0 * Index{bytes} + 16 * t),
                *w1 = operands.packed + (row1 * Index{bytes} + 16 * t);
  const int s = stack_entry(operands.index, problem.stack, blockIdx.y);
  if (operands.index != nullptr)
    w0 += s * operands.packed_stack_stride, w1 += s * operands.packed_stack_stride;
  // Rows of x past the end repeat the last one too.
  const X* const x = static_cast<const X*>(operands.x) +
                     static_cast<int>(blockIdx.y * M + min(g, M - 1)) * Index{K} + kLaneK * t;
  GroupLoader<kGroups> loader(problem, operands, t, s, t % 2 ? row1 : row0, kChunkK);
  const int chunks = loader.chunks;

  float y[4] = {};
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
      float dot[C::kProducts][4] = {}, sum[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t b[C::kProducts][2];
        load_word_of_x(x + (k + kWordK * i), inside, b);
#pragma unroll
        for (int p = 0; p < C::kProducts; ++p) {
          mma_m16n8k16<X>(dot[p], C::product(words[0][i], p, 0), C::product(words[1][i], p, 0),
                          C::product(words[0][i], p, 1), C::product(words[1][i], p, 1), b[p]);
          mma_m16n8k16<X>(sum, kOnes, kOnes, kOnes, kOnes, b[p]);
        }
      }
      const GroupTerms terms(loader.get(u), problem.affine, mid_code(kBits));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float d = dot[0][e];
#pragma unroll
        for (int p = 1; p < C::kProducts; ++p) d += dot[p][e];
        y[e] = fmaf(terms.f[e / 2] * C::kWorth, d, fmaf(terms.c[e / 2], sum[e], y[e]));
      }
    }
  }

#pragma unroll
  for (int e = 0; e < 4; ++e) partial[warp][2 * t + e % 2][g + 8 * (e / 2)] = y[e];
  __syncthreads();
  // The shares of K, added in a fixed order.
  for (int e = threadIdx.x; e < M * kTileN; e += blockDim.x) {
    const int m = e / kTileN, n = e % kTileN;
    if (n >= rows_n) continue;
    float sum = bias_of(output_of(problem, operands), s >= 0, s, n0 + n);
    for (int w = 0; w < warps; ++w) sum += partial[w][m][n];
    store(operands.y, problem.y, (static_cast<int>(blockIdx.y * M) + m) * Index{N} + n0 + n, sum);
  }
}

}  // namespace jaxgemv::cuda::mma
