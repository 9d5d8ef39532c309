// What the gemm kernel keeps in shared memory, and its products: a block of the weights of a
// warpgroup, 64 rows, rounded in registers, times that block of x.
#pragma once

#include "../common/wgmma.cuh"
#include "numbers.cuh"

namespace jaxgemv::cuda::gemm {

using namespace hopper;
using namespace image;

constexpr int kBlockK = 32, kBlocks = kQuadK / kBlockK;

// X: of x and of the rounded weights; float is TF32.
template <Format kFormat, int kBits, typename X>
struct Shape : Ring<kBits, 1, kBits <= 4 ? 2 : 1, 2> {
  using R = typename Shape::Ring;
  using C = Numbers<kFormat, kBits>;
  static constexpr bool kWide = sizeof(X) == 4;
  static constexpr int kColumns = 128;   // rows of x
  static constexpr int kMostGroups = 4;  // of four warps, 64 rows of the weights each
  static constexpr float kWorth = 1;     // factor of a sum
  static constexpr bool kHasGlobalScale = !C::kHasShift;
  static constexpr bool kKeepsPlace = false;
  // Registers per thread, of the 64 K of all threads, which these have evenly at first.
  static constexpr int kRegisters = 112, kRegistersOfCopies = 24;
  // Stages of x, of kStageBlocks blocks each; a column's part of a block is kGranules granules of 16 bytes.
  static constexpr int kStageBlocks = kWide ? 2 : 4, kXStages = 3;
  static constexpr int kGranules = kBlockK * sizeof(X) / 16;
  static constexpr int kXStageBytes = kStageBlocks * kGranules * kColumns * 16;

  // Blocks whose products go on while the next one is made, as registers allow.
  static constexpr int kPending = kWide || kBits > 4 ? 0 : 1;

  static JAXGEMV_HD constexpr int threads(int groups) { return 128 * (groups + 1); }
  static JAXGEMV_HD constexpr int shared_bytes(int groups, int pieces) {
    return 4 * groups * R::bytes(pieces) + kXStages * kXStageBytes;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The sums of a warp, rows g and g + 8: y[4 p + 2 r + e] of row g + 8 r, column 8 p + 2 t + e.
template <Format kFormat, int kBits, typename X>
class Sums {
  using S = Shape<kFormat, kBits, X>;
  using C = typename S::C;

 public:
  float y[S::kColumns / 2] = {};

  __device__ __forceinline__ explicit Sums(const float* table) : table_(table) {}

  // The terms of weights for all blocks until the next call.
  __device__ __forceinline__ void set(const Terms& terms) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      shift_[h] = C::kHasShift ? terms.c[h] : 0;
#pragma unroll
      for (int p = 0; p < 4; ++p) scale_[h][p] = terms.f[h] * C::worth(p);
    }
  }

  // Adds the products of block j of the quad whose codes begin `words` words into both rows of this lane. x: the low
  // half of the block's descriptor as operand B, not swizzled: 8 columns of 16 bytes are 128 bytes, and the next k are
  // a granule further on. The products own y until finish(). when_done() is called when products but those of the last
  // S::kPending blocks have ended.
  // Behind the end of a row weights are shifts, which meet zeros of x: if float16 cannot hold one, with a scale of 250
  // or more, the result is NaN.
  template <bool kRuns>
  __device__ __forceinline__ void add(const uint32_t* const (&rows)[2], int words, int j,
                                      uint32_t x, int columns, auto&& when_done) {
    // Parts of a block, two steps each; codes are loaded again for the second.
    constexpr int kParts = S::kWide ? 2 : 1;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      C q[2];
      load_octets<C>(rows, words, j, kRuns,
                     [&](int h, uint32_t low, uint32_t high) { q[h].set(low, high); });
      wgmma_wait<S::kPending>();
      if (part == 0) when_done();
      // Named here, an operand keeps its registers through the products before, and ptxas lets these go on
      // (docs/cuda-notes.md, "Products that go on").
      uint32_t (&a)[2][4] = operands_[(kParts * j + part) % (S::kPending + 1)];
#pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int step = 0; step < 2; ++step)
#pragma unroll
          for (int i = 0; i < 2 / kParts; ++i) {  // two codes
            const int p = S::kWide ? 2 * part + step : 2 * step + i;
            const float2 pair = q[h].pair(p, table_);
            const float w[2] = {fmaf(scale_[h][p], pair.x, shift_[h]),
                                fmaf(scale_[h][p], pair.y, shift_[h])};
            if constexpr (S::kWide)
              a[step][h] = to_tf32(w[0]), a[step][2 + h] = to_tf32(w[1]);
            else
              a[step][2 * i + h] = rounded_pair<X>(w[0], w[1]);
          }
      // Operand A is complete before any of the products: else ptxas lets them wait for one another.
#pragma unroll
      for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a[i / 4][i % 4])::"memory");
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step)
        wgmma_m64k16<X>(y, a[step], uint64_t{8} << 32 | (x + (4 * part + 2 * step) * columns),
                        true);
      wgmma_commit();
    }
  }

  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    wgmma_done(y);
  }

 private:
  const float* const table_;
  float scale_[2][4], shift_[2];
  uint32_t operands_[S::kPending + 1][2][4] = {};
};

#endif

}  // namespace jaxgemv::cuda::gemm
