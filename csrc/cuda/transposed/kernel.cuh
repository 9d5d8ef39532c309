// The transposed product, y[m, k] = sum_n x[m, n] w[n, k], on tensor cores. Weights lie along k, so
// a lane takes the same codes of two neighbouring rows n, and one byte permutation makes pairs along n
// of them, as an mma wants. Unlike in the product, scales differ along the sum:
//
//   y[m, k] = sum_n v[m, n] q[n, k] + sum_n x[m, n] shift[n],   v = x scale, of the group of k
//
// q is exact in fp16 (Bits); v is the sum of two fp16, 22 bits, in a unit that each row of x has and that
// grows with the largest v seen so far. A warp takes a tile of K, of one or two groups.
#pragma once

#include <type_traits>

#include "../common/codes.cuh"
#include "../common/grid.cuh"
#include "sum.cuh"

namespace jaxgemv::cuda::transposed {

constexpr int kMmaN = 16;  // rows of the weights that an mma sums over

template <int kWords>
__device__ __forceinline__ void load_words(uint32_t (&to)[kWords], const uint8_t* from) {
  using Words =
      std::conditional_t<kWords == 4, uint4, std::conditional_t<kWords == 2, uint2, uint>>;
  const Words v = __ldcs(reinterpret_cast<const Words*>(from));
  memcpy(to, &v, sizeof(v));
}

// The power of two in whose units v is held: v * unit() is at most 2^15 for v up to limit().
struct Quantum {
  uint32_t exponent = 13;  // exponent field of limit() / 8; 13 to 252 keep all in range

  __device__ __forceinline__ float limit() const { return __uint_as_float((exponent + 3) << 23); }
  __device__ __forceinline__ float unit() const { return __uint_as_float((266 - exponent) << 23); }
  __device__ __forceinline__ float inverse() const {
    return __uint_as_float((exponent - 12) << 23);
  }
};

// Splits two values into a pair of fp16 (high), and a pair of what that leaves (low).
__device__ __forceinline__ void split(float v0, float v1, uint32_t& high, uint32_t& low) {
  const __half2 rounded = __floats2half2_rn(v0, v1);
  const float2 back = __half22float2(rounded);
  const __half2 rest = __floats2half2_rn(v0 - back.x, v1 - back.y);
  high = reinterpret_cast<const uint32_t&>(rounded), low = reinterpret_cast<const uint32_t&>(rest);
}

// Lane (g, t) has the g-th kWords words of the tile, of each row n = 2t, 2t + 1, 2t + 8, 2t + 9 of a chunk.
// Low halves of words are row g of the mma's A, high ones row g + 8. Where the tile
// has kGroups groups, each has mmas of its own, in which the rows of the others are zeros.
template <int kBits, int kWords, int kGroups, int kTilesM>
__global__ void __launch_bounds__(kWarps * 32, kTilesM == 1 && kGroups == 1 ? 2 : 1)
    gemv_transposed(const Problem problem, const Operands operands) {
  constexpr int kWordCodes = 32 / kBits, kHalf = kWordCodes / 2;
  using Parts = transposed::Parts<8, kWords * kWordCodes, 8>;
  // Chunks whose loads are under way at once: as many as the registers allow.
  constexpr int kChunks = kTilesM == 1 && kWords < 4 && kGroups == 1 ? 4 : 2;
  constexpr int kRoundN = kChunks * kMmaN;
  __shared__ Parts parts;
  wait_for_earlier();

  const Team team;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int M = static_cast<int>(problem.M), N = static_cast<int>(problem.N);
  const int m_tiles = (M + 8 * kTilesM - 1) / (8 * kTilesM), tile = blockIdx.x / team.ranks();
  // Tiles that read the same weights run next to each other, so that only one of them reads memory.
  const int m0 = tile % m_tiles * 8 * kTilesM;
  const int k0 = tile / m_tiles * Parts::kTileK, b = blockIdx.y;
  const int group0 = static_cast<int>(k0 / problem.group);
  const int last_group = static_cast<int>((problem.K - 1) / problem.group);
  const int bytes = static_cast<int>(row_bytes(problem.K, kBits));
  const int s = stack_entry(operands.index, problem.stack, b);
  const int byte0 = k0 / 8 * kBits + 4 * kWords * g;
  const bool inside = byte0 < bytes;
  const uint8_t* packed = operands.packed + max(s, 0) * operands.packed_stack_stride + byte0;
  Index x_row[kTilesM];
#pragma unroll
  for (int m = 0; m < kTilesM; ++m) x_row[m] = (Index{b} * M + min(m0 + 8 * m + g, M - 1)) * N;

  Quantum unit[kTilesM];
  float acc[kWords][kHalf][kTilesM][4] = {}, shifted[kGroups][kTilesM] = {};
  const int rounds = s < 0 ? 0 : (N + kRoundN - 1) / kRoundN;
  for (int round = team.rank() * kWarps + warp; round < rounds; round += team.ranks() * kWarps) {
    const int n0 = round * kRoundN;
    uint32_t words[kChunks][4][kWords] = {};
#pragma unroll
    for (int u = 0; u < kChunks; ++u)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int n = min(n0 + kMmaN * u + 2 * t + i % 2 + 8 * (i / 2), N - 1);
        if (inside) load_words(words[u][i], packed + Index{n} * bytes);
      }
#pragma unroll
    for (int p = 0; p < kGroups; ++p) {
      const int group = min(group0 + p, last_group);
      const uint32_t mask = g * kGroups / 8 == p ? ((1u << kBits) - 1) * 0x10001u : 0;
      // Each lane loads the parameters of some rows for all lanes.
      float scale[kRoundN / 32], shift[kRoundN / 32];
#pragma unroll
      for (int i = 0; i < kRoundN / 32; ++i) {
        const int n = n0 + 32 * i + lane, row = min(n, N - 1);
        const float its = load(operands.scale, s, row, group);
        const float other = load(operands.shift, s, row, group);
        const float zero = problem.affine == Affine::kSymmetric ? mid_code(kBits) : other;
        scale[i] = n < N ? its : 0;
        shift[i] = n < N ? problem.affine == Affine::kOffset ? other : -zero * its : 0;
      }
      uint32_t v[kChunks][kTilesM][2][2];  // [high or low][pair of n]: the mma's B
#pragma unroll
      for (int m = 0; m < kTilesM; ++m) {
        float value[kChunks][4], largest = 0;
#pragma unroll
        for (int u = 0; u < kChunks; ++u)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int at = kMmaN * u + 2 * t + i % 2 + 8 * (i / 2);
            const float x = load(operands.x, problem.x, x_row[m] + min(n0 + at, N - 1));
            value[u][i] = x * __shfl_sync(~0u, scale[u / 2], at % 32);
            shifted[p][m] = fmaf(x, __shfl_sync(~0u, shift[u / 2], at % 32), shifted[p][m]);
            largest = fmaxf(largest, fabsf(value[u][i]));
          }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        const bool grows = largest > unit[m].limit();
        if (__any_sync(~0u, grows)) {
          const float inverse = unit[m].inverse();
          if (grows) unit[m].exponent = min(max(__float_as_uint(largest) >> 23, 13u), 252u);
          const float ratio = unit[m].unit() * inverse;
          const float ratios[] = {__shfl_sync(~0u, ratio, 8 * t),
                                  __shfl_sync(~0u, ratio, 8 * t + 4)};
#pragma unroll
          for (int w = 0; w < kWords; ++w)
#pragma unroll
            for (int j = 0; j < kHalf; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e) acc[w][j][m][e] *= ratios[e % 2];
        }
#pragma unroll
        for (int u = 0; u < kChunks; ++u)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            split(value[u][2 * i] * unit[m].unit(), value[u][2 * i + 1] * unit[m].unit(),
                  v[u][m][0][i], v[u][m][1][i]);
      }
#pragma unroll
      for (int u = 0; u < kChunks; ++u)
#pragma unroll
        for (int w = 0; w < kWords; ++w) {
          uint32_t pairs[4];  // halves of words of two rows: A's registers before the codes are cut
#pragma unroll
          for (int i = 0; i < 4; ++i)
            pairs[i] = __byte_perm(words[u][i / 2 * 2][w], words[u][i / 2 * 2 + 1][w],
                                   i % 2 ? 0x7632 : 0x5410);
#pragma unroll
          for (int j = 0; j < kHalf; ++j) {
            const int place = j * kBits % 8;
            uint32_t a[4];
#pragma unroll
            for (int i = 0; i < 4; ++i)
              a[i] = Bits<__half>::numbers(
                  (j * kBits < 8 ? pairs[i] : pairs[i] >> 8) & mask << place, place);
#pragma unroll
            for (int m = 0; m < kTilesM; ++m)
#pragma unroll
              for (int part = 0; part < 2; ++part)
                mma_m16n8k16<__half>(acc[w][j][m], a[0], a[1], a[2], a[3], v[u][m][part]);
          }
        }
    }
  }

#pragma unroll
  for (int m = 0; m < kTilesM; ++m) {
    float inverse[2], shift[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      inverse[e] = __shfl_sync(~0u, unit[m].inverse(), 8 * t + 4 * e);
#pragma unroll
      for (int p = 0; p < kGroups; ++p) {
        float sum = shifted[p][m];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum = __shfl_sync(~0u, sum + __shfl_xor_sync(~0u, sum, 2), 8 * t + 4 * e);
        if (g * kGroups / 8 == p) shift[e] = sum;
      }
    }
#pragma unroll
    for (int w = 0; w < kWords; ++w)
#pragma unroll
      for (int j = 0; j < kHalf; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int k = (g * kWords + w) * kWordCodes + e / 2 * kHalf + j;
          parts.of_warp[warp][Parts::at(2 * t + e % 2, k)] =
              fmaf(acc[w][j][m][e] * Bits<__half>::kWorth, inverse[e % 2], shift[e % 2]);
        }
      }
    const int rows = min(M - m0 - 8 * m, 8);
    if (rows > 0) parts.store(team, problem, operands, Index{b} * M + m0 + 8 * m, rows, k0, s >= 0);
  }
}

}  // namespace jaxgemv::cuda::transposed
