// For 17 to 64 rows of x on GPUs other than Hopper, and for what the streaming kernel refuses:
// weights from memory straight into registers, each warp a share of K for 16 output rows, on tensor
// cores even for one row of x.
//
// A chunk is 16 rows x 64 bytes of weights. Lane (g, t) = (lane / 4, lane % 4) loads 16 bytes of
// row g and of row g + 8 at byte 16 t: the A operand of mma.m16n8k16, in a permutation of k
// (dequant.cuh) that x, the B operand, follows. The affine part is two fp32 terms a group:
// y += f * dot(q, x) + c * sum(x), where sum(x) comes from an mma with ones.
#pragma once

#include <cmath>

#include "dequant.cuh"
#include "dtype.cuh"
#include "ptx.cuh"

namespace jaxgemv::cuda {

namespace mma {

constexpr int kTileN = 16;       // rows of the weights a CTA computes
constexpr int kChunkBytes = 64;  // of each of them
constexpr int kMaxWarps = 8;     // that share K; how many, `choose_warps` says
constexpr int kUnroll = 4;       // chunks in flight; 4 is built into GroupLoader
constexpr int kMaxTilesM = 4;    // tiles of 8 rows of x in a CTA

// How scale and shift lie. kChunks, kPairs: a group is one chunk, or two; 16-bit, of one layout,
// and the groups of kUnroll chunks are one aligned load. kOne: one group a row. For all but kAny, K
// is a multiple of kUnroll chunks, so that no load needs a bound.
enum class Groups { kAny, kChunks, kPairs, kOne };

// Groups in a round of kUnroll chunks.
constexpr int groups_in_round(Groups groups) {
  return groups == Groups::kChunks ? kUnroll : groups == Groups::kPairs ? kUnroll / 2 : 0;
}

// Each lane of a quad loads one of the four values of a group that all of them need: scale or shift
// (t / 2), of row g or g + 8 (t % 2). `load` keeps the raw bits, so that waiting for them does not
// hold up the loads of x behind it; `get` converts.
template <Groups kGroups>
struct GroupLoader {
  static constexpr bool kAlike = kGroups == Groups::kChunks || kGroups == Groups::kPairs;
  const Param& param;
  const uint8_t* data;  // group 0 of the row
  int chunks, chunks_per_group;
  uint32_t raw[kUnroll];

  __device__ __forceinline__ GroupLoader(const Problem& problem, const Operands& operands, int t,
                                         int s, int row, int chunk_k)
      : param(kAlike || t < 2 ? operands.scale : operands.shift),
        data(static_cast<const uint8_t*>(t < 2 ? operands.scale.data : operands.shift.data)),
        chunks((static_cast<int>(problem.K) + chunk_k - 1) / chunk_k),
        chunks_per_group(max(static_cast<int>(problem.group) / chunk_k, 1)) {
    const int size = kAlike ? 2 : size_of(param.dtype);
    if (operands.index != nullptr) data += s * param.stack_stride * size;
    data += Index{row} * (static_cast<int>(param.n_stride) * size);
  }

  // The groups of chunks [chunk, chunk + kUnroll); those past the last repeat it.
  __device__ __forceinline__ void load(int chunk) {
    if constexpr (kGroups == Groups::kChunks) {
      const uint2 four = __ldg(reinterpret_cast<const uint2*>(data + chunk * 2));
      raw[0] = four.x, raw[1] = four.y;
    } else if constexpr (kGroups == Groups::kPairs) {
      raw[0] = __ldg(reinterpret_cast<const uint32_t*>(data + chunk));
    } else if constexpr (kGroups == Groups::kOne) {
      raw[0] = load_bits(data, param.dtype, 0);
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int group = min(chunk + u, chunks - 1) / chunks_per_group;
        raw[u] = load_bits(data, param.dtype, group * static_cast<int>(param.g_stride));
      }
    }
  }

  __device__ __forceinline__ float get(int u) const {
    if constexpr (kAlike) {
      const int i = kGroups == Groups::kPairs ? u / 2 : u;
      return float_of_bits(i % 2 ? raw[i / 2] >> 16 : raw[i / 2] & 0xffffu, param.dtype);
    }
    return float_of_bits(raw[kGroups == Groups::kOne ? 0 : u], param.dtype);
  }
};

// For the rows g and g + 8 of a lane: y += f * dot(q - centre, x) + c * sum(x).
struct GroupTerms {
  float f[2], c[2];

  // v: the quad's four values of the group.
  __device__ __forceinline__ GroupTerms(float v, Affine affine, float centre, float mid) {
    const int quad = threadIdx.x & 28;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      f[r] = __shfl_sync(~0u, v, quad + r);
      const float shift = __shfl_sync(~0u, v, quad + 2 + r);
      const float zero = affine == Affine::kZero ? shift : affine == Affine::kSymmetric ? mid : 0.f;
      c[r] = fmaf(centre - zero, f[r], affine == Affine::kOffset ? shift : 0.f);
    }
  }
};

template <int kBits, typename X, int kTilesM, Groups kGroups>
__global__ void __launch_bounds__(kMaxWarps * 32, kTilesM == 1 ? 2 : 1)
    gemv_mma(const Problem problem, const Operands operands) {
  using D = Dequant<kBits, X>;
  constexpr int kLaneK = 128 / kBits;  // codes in a lane's 16 bytes
  constexpr int kWordK = 32 / kBits;
  constexpr int kChunkK = 4 * kLaneK;
  constexpr int kTileM = 8 * kTilesM;
  constexpr bool kWhole = kGroups != Groups::kAny;  // every round is full
  constexpr uint32_t kOnes = std::is_same_v<X, __half> ? 0x3c003c00u : 0x3f803f80u;
  __shared__ float partial[kMaxWarps][kTileM][kTileN + 1];

  const int warps = blockDim.x / 32, warp = threadIdx.x / 32, g = threadIdx.x / 4 % 8,
            t = threadIdx.x % 4;
  const int N = static_cast<int>(problem.N), K = static_cast<int>(problem.K);
  const int M = static_cast<int>(problem.M);
  // Tiles of the same weights run next to each other, so that only one of them reads memory.
  const unsigned m_tiles = kTilesM == kMaxTilesM ? (M + kTileM - 1) / kTileM : 1;
  const int m0 = blockIdx.x % m_tiles * kTileM, n0 = blockIdx.x / m_tiles * kTileN;
  const int rows_m = min(M - m0, kTileM), rows_n = min(N - n0, kTileN);
  // Rows past the end repeat the last one and are not stored.
  const int row0 = n0 + min(g, rows_n - 1), row1 = n0 + min(g + 8, rows_n - 1);
  const int bytes = K / 8 * kBits;
  const uint8_t *w0 = operands.packed + (row0 * Index{bytes} + 16 * t),
                *w1 = operands.packed + (row1 * Index{bytes} + 16 * t);
  const int s = stack_entry(problem, operands, blockIdx.y);
  if (operands.index != nullptr)
    w0 += s * operands.packed_stack_stride, w1 += s * operands.packed_stack_stride;
  const X* x = static_cast<const X*>(operands.x) + static_cast<int>(blockIdx.y * M + m0) * Index{K};
  GroupLoader<kGroups> loader(problem, operands, t, s, t % 2 ? row1 : row0, kChunkK);
  const int chunks = loader.chunks;

  float y[kTilesM][4] = {};
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
      float dot[kTilesM][2][4] = {}, sum[kTilesM][4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t a[2][2][2];
        D::fragments(words[0][i], a[0]);
        D::fragments(words[1][i], a[1]);
#pragma unroll
        for (int m = 0; m < kTilesM; ++m) {
          uint32_t columns[2][2];
          // Rows of x past the end repeat the last one too.
          const X* xm = x + (min(8 * m + g, rows_m - 1) * K + kLaneK * t) + chunk * kChunkK;
          load_columns<kBits>(xm + (u * kChunkK + kWordK * i), inside, columns);
#pragma unroll
          for (int p = 0; p < D::kProducts; ++p)
            mma_m16n8k16<X>(dot[m][p], a[0][p][0], a[1][p][0], a[0][p][1], a[1][p][1],
                            columns[p % D::kColumns]);
#pragma unroll
          for (int p = 0; p < D::kColumns; ++p)
            mma_m16n8k16<X>(sum[m], kOnes, kOnes, kOnes, kOnes, columns[p]);
        }
      }
      const GroupTerms terms(loader.get(u), problem.affine, D::kCentre, mid_code(kBits));
#pragma unroll
      for (int m = 0; m < kTilesM; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float d = dot[m][0][e];
          if constexpr (D::kProducts == 2) d = fmaf(dot[m][1][e], D::kSecond / D::kFirst, d);
          const float f = terms.f[e / 2] * D::kFirst;
          y[m][e] = fmaf(f, d, fmaf(terms.c[e / 2], sum[m][e], y[m][e]));
        }
    }
  }

#pragma unroll
  for (int m = 0; m < kTilesM; ++m)
#pragma unroll
    for (int e = 0; e < 4; ++e) partial[warp][8 * m + 2 * t + e % 2][g + 8 * (e / 2)] = y[m][e];
  __syncthreads();
  // The shares of K, added in a fixed order.
  for (int e = threadIdx.x; e < kTileM * kTileN; e += blockDim.x) {
    const int m = e / kTileN, n = e % kTileN;
    if (m >= rows_m || n >= rows_n) continue;
    float sum = s < 0 ? NAN : operands.bias.data ? load(operands.bias, s, n0 + n, 0) : 0.f;
    for (int w = 0; w < warps; ++w) sum += partial[w][m][n];
    store(operands.y, problem.y, (static_cast<int>(blockIdx.y * M) + m0 + m) * Index{N} + n0 + n,
          sum);
  }
}

// Warps of a CTA: 8 finish a tile sooner, 4 let more tiles run at once. Each wave of CTAs costs its
// rounds and about one more for its start and end. (On an H200, int4 M = 1, this picks the better
// of the two for each shape of `python -m bench`; other counts were slower: docs/cuda-notes.md.)
inline int choose_warps(Index tiles, Index rounds, int resident_warps) {
  int device = 0, sms = 1;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  const auto cost = [&](int warps) {
    const Index waves = ceil_div(tiles, Index{sms} * (resident_warps / warps));
    return waves * (1 + ceil_div(rounds, warps));
  };
  return cost(4) < cost(8) ? 4 : 8;
}

}  // namespace mma

template <int kBits, typename X>
struct Mma {
  static constexpr KernelInfo kInfo{"mma", kBits, kDtypeOf<X>, 8 * mma::kMaxTilesM,
                                    kProductOperands};

  // 16-byte loads of the weights and of x, no group boundary inside a chunk, 32-bit m, n and k.
  static bool accepts(const Problem& problem, const Operands& operands) {
    return problem.K % (kChunkK / 4) == 0 && is_aligned(operands.packed, 16) &&
           is_aligned(operands.x, 16) &&
           (problem.group >= problem.K || problem.group % kChunkK == 0) &&
           problem.M * problem.batch < (1 << 30) && problem.N < (1 << 30) && problem.K < (1 << 25);
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, cudaStream_t stream) {
    if (problem.M <= 8) return run_tiles<1>(problem, operands, stream);
    if (problem.M <= 16) return run_tiles<2>(problem, operands, stream);
    return run_tiles<mma::kMaxTilesM>(problem, operands, stream);
  }

 private:
  static constexpr Index kChunkK = 512 / kBits;

  template <int kTilesM>
  static cudaError_t run_tiles(const Problem& problem, const Operands& operands,
                               cudaStream_t stream) {
    using mma::Groups;
    static constexpr Kernel kKernels[] = {mma::gemv_mma<kBits, X, kTilesM, Groups::kAny>,
                                          mma::gemv_mma<kBits, X, kTilesM, Groups::kChunks>,
                                          mma::gemv_mma<kBits, X, kTilesM, Groups::kPairs>,
                                          mma::gemv_mma<kBits, X, kTilesM, Groups::kOne>};
    const Kernel kernel = kKernels[static_cast<int>(groups_of(problem, operands))];
    const Index tiles = ceil_div(problem.M, 8 * kTilesM) * ceil_div(problem.N, mma::kTileN);
    const Index rounds = ceil_div(problem.K, mma::kUnroll * kChunkK);
    constexpr int kResidentWarps = kTilesM == 1 ? 16 : 8;  // of an SM, by their registers
    const int warps = mma::choose_warps(tiles * problem.batch, rounds, kResidentWarps);
    return launch_kernel(kernel, tiles, problem.batch, warps * 32, problem, operands, stream);
  }

  static mma::Groups groups_of(const Problem& problem, const Operands& operands) {
    using mma::Groups;
    const Param &scale = operands.scale, &shift = operands.shift;
    if (problem.K % (mma::kUnroll * kChunkK) != 0) return Groups::kAny;
    if (scale.g_stride == 0 && shift.g_stride == 0) return Groups::kOne;
    const bool alike = scale.dtype == shift.dtype && scale.g_stride == shift.g_stride &&
                       scale.n_stride == shift.n_stride && scale.stack_stride == shift.stack_stride;
    if (!alike || size_of(scale.dtype) != 2) return Groups::kAny;
    for (const Groups groups : {Groups::kChunks, Groups::kPairs}) {
      const Index width = mma::groups_in_round(groups);
      if (problem.group * width == mma::kUnroll * kChunkK &&
          (scale.n_stride | scale.stack_stride) % width == 0 && is_aligned(scale.data, 2 * width) &&
          is_aligned(shift.data, 2 * width))
        return groups;
    }
    return Groups::kAny;
  }
};

}  // namespace jaxgemv::cuda
