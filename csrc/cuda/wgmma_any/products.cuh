// What the wgmma_any kernel keeps in shared memory, and its products: a quad of the weights of a
// warpgroup, 64 rows, times the image of x.
#pragma once

#include <algorithm>

#include "../common/wgmma.cuh"
#include "scaled.cuh"

namespace jaxgemv::cuda::wgmma_any {

using namespace hopper;
using namespace image;

// Roles and shared memory for up to kColumns columns of x. A table comes first; the sums, at the end, take the place of
// all else.
template <Format kFormat, int kBits, int kMostColumns>
struct Shape : Ring<kBits, 1, kBits <= 4 ? 2 : 1, kMostColumns <= 64 && kBits % 4 != 0 ? 3 : 2> {
  using R = typename Shape::Ring;
  using C = Decoder<kFormat, kBits>;
  static constexpr float kWorth = C::kWorth;  // factor of a sum
  static constexpr bool kHasGlobalScale = !C::kHasShift;
  static constexpr int kColumns = kMostColumns;
  static constexpr int kWarps = kColumns <= 64 ? 16 : 8, kGroups = kWarps / 4;  // of four warps
  static constexpr int kConsumers = 32 * kWarps, kThreads = kConsumers + 128;   // and to copy x
  // Registers per thread, of the 64 K of all threads, which these have evenly at first.
  static constexpr int kRegisters = kColumns <= 64 ? 112 : 232;
  static constexpr int kRegistersOfCopies = kColumns <= 64 ? 32 : 40;
  // Stages of x, a quad each; a table takes the room of the others.
  static constexpr int kXStages = (kColumns <= 32 ? 8 : 4) / C::kParts;
  // The most groups that share K: each uses stages of x of its own.
  static constexpr int kMostDeep = std::min(kGroups, kXStages / R::kQuads);
  // What lies behind the last column has room too: it is read, for sums that are not used.
  static JAXGEMV_HD constexpr int shared_bytes(int columns, int pieces) {
    return C::kTableBytes + kWarps * R::bytes(pieces) + kXStages * columns * kRecordBytes +
           kColumns * kMetaWords * 4;
  }
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The sums of a warp, rows g and g + 8: y[4 p + 2 r + e] of row g + 8 r, column 8 p + 2 t + e.
// kScaled: scales have one byte, and groups are smaller than a quad.
template <Format kFormat, int kBits, int kColumns, bool kScaled>
class Sums {
  using C = Decoder<kFormat, kBits>;
  using F = TakesScales<kFormat>;

 public:
  float y[kColumns / 2] = {};

  // Called by a whole warp.
  __device__ __forceinline__ Sums(const Params& params, const uint8_t* table)
      : decoder_(table),
        takes_scales_(kScaled &&
                      F::are_short(table, params.scales[0].dtype == Dtype::kE8M0 ? 1 : 4)) {}

  // Adds the products of the quad that begins at k, `words` words into both rows of this lane in the ring. window: of
  // scales, in which first_group is at byte `inside`; record: the quad's x.
  __device__ __forceinline__ void add(const Params& params, const uint32_t* const (&rows)[2],
                                      int words, const RowScale& scales, const uint8_t* window,
                                      int inside, int first_group, const uint8_t* record,
                                      int columns, int k) {
    const int slots = params.groups.slots;
    // Descriptor of operand B, without a swizzle: 8 columns of 16 bytes are 128 bytes, and 8 k further on is the next
    // register. The bits of an address above 18 are the number of a CTA in its cluster.
    const uint32_t low =
        static_cast<uint32_t>(columns) << 16 | (shared_address(record) & 0x3ffff) >> 4;
    const auto multiply = [&](int j, const uint32_t (&a)[2][4], bool add) {
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step)
        wgmma_m64k16<__half>(
            dot_, {a[0][2 * step], a[1][2 * step], a[0][2 * step + 1], a[1][2 * step + 1]},
            uint64_t{8} << 32 | (low + (4 * j + 2 * step) * columns), add || step > 0);
      wgmma_commit();
    };
    const uint8_t* meta = record + columns * (kQuadK * 2) + lane_meta_;
    const auto terms_of = [&](int i) {
      return scales.terms(window, inside, params.groups.of(k + i * (kQuadK / slots)) - first_group,
                          params.scales, params.shift);
    };
    const auto scale = [&](int i) {
      const Terms terms = terms_of(i);
      end(meta, terms.f);
      if constexpr (C::kHasShift)
        for_each_sum(meta, [&](int e, int r, const float* column) {
          y[e] = fmaf(terms.c[r], column[kSums + i], y[e]);
        });
    };

    const auto load = [&](bool runs, int j, int part, uint32_t (&a)[2][4]) {
      load_octets<C>(rows, words, j, runs, [&](int h, uint32_t low, uint32_t high) {
        decoder_.decode(low, high, part, a[h]);
      });
    };
    const auto for_each_part = [&](auto&& add_products) {
      add_products(0);
      if (C::kParts == 1 || !decoder_.has_second()) return;
      wgmma_wait<0>();
      add_products(C::kParts - 1);
    };

    if (kScaled && takes_scales_) {
      const QuadScales<F::kLog> of(params, window, __shfl_sync(~0u, inside, threadIdx.x % 16),
                                   first_group, k);
      constexpr int kOperands = 2;
      uint32_t a[kOperands][2][4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (j >= kOperands) wgmma_wait<kOperands - 1>();
        load_octets<C>(rows, words, j, false, [&](int h, uint32_t low, uint32_t high) {
          decoder_.decode(low, high, 0, a[j % kOperands][h]);
          of.multiply(h, j, a[j % kOperands][h]);
        });
        multiply(j, a[j % kOperands], j > 0);
      }
      end(meta, {of.unit(0), of.unit(1)});
      if (!of.any_small) return;
#pragma unroll 1
      for (int i = 0; i < slots; ++i) {
        float f[2] = {terms_of(i).f[0], terms_of(i).f[1]};
        of.keep_small(f);
        if (__any_sync(~0u, f[0] != 0 || f[1] != 0))
          add_slot(rows, words, i, slots, f, record, columns);
      }
    } else if (!kScaled && slots == 1) {
      for_each_part([&](int part) {
        constexpr int kOperands = C::kParts > 1 && kColumns == 64 ? 1 : 2;  // as registers allow
        uint32_t a[kOperands][2][4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          if (j >= kOperands) wgmma_wait<kOperands - 1>();
          load(C::kRuns, j, part, a[j % kOperands]);
          multiply(j, a[j % kOperands], part > 0 || j > 0);
        }
      });
      scale(0);
    } else {
      const auto add_slots = [&]<int kBlocks>() {  // blocks of a slot
#pragma unroll 1
        for (int i = 0; i < slots; ++i) {
          for_each_part([&](int part) {
#pragma unroll
            for (int block = 0; block < kBlocks; ++block) {
              if (block > 0) wgmma_wait<0>();
              uint32_t a[2][4];
              const int j = slots == 8 ? i / 2 : kBlocks * i + block;
              load(false, j, part, a);
              if (kBlocks == 1 && slots == 8) keep_half(i % 2, a[0]), keep_half(i % 2, a[1]);
              multiply(j, a, part + block > 0);
            }
          });
          scale(i);
        }
      };
      if (!kScaled && slots == 2)
        add_slots.template operator()<2>();
      else
        add_slots.template operator()<1>();
    }
  }

  // Called when all quads are added: applies the table's unit.
  __device__ __forceinline__ void finish() {
    const float unit = decoder_.unit();
#pragma unroll
    for (float& sum : y) sum *= unit;
  }

 private:
  C decoder_;
  const bool takes_scales_;
  const int lane_meta_ = kept(threadIdx.x % 4 * 2 * kMetaWords * 4);
  float dot_[kColumns / 2];

  // Calls use(e, its row r, its column's words of the record) for all sums.
  template <typename Use>
  static __device__ __forceinline__ void for_each_sum(const uint8_t* meta, Use&& use) {
#pragma unroll
    for (int c = 0; c < kColumns / 4; ++c)
#pragma unroll
      for (int r = 0; r < 2; ++r)
        use(c / 2 * 4 + 2 * r + c % 2, r,
            reinterpret_cast<const float*>(meta) + (c / 2 * 8 + c % 2) * kMetaWords);
  }

  // Waits for the products and adds them, times f of each row and the power of each column.
  __device__ __forceinline__ void end(const uint8_t* meta, const float (&f)[2]) {
    wgmma_wait<0>();
    wgmma_done(dot_);
    for_each_sum(meta, [&](int e, int r, const float* column) {
      y[e] = fmaf(f[r] * column[kPower], dot_[e], y[e]);
    });
  }

  // Adds the products of one slot, times f of each row: for this warp alone, so by mma and not wgmma.
  __device__ __forceinline__ void add_slot(const uint32_t* const (&rows)[2], int words, int slot,
                                           int slots, const float (&f)[2], const uint8_t* record,
                                           int columns) {
    const int lane = threadIdx.x % 32, j = slots == 4 ? slot : slot / 2;
    const uint8_t* const meta = record + columns * (kQuadK * 2) + lane_meta_;
    uint32_t a[2][4];
    load_octets<C>(rows, words, j, false, [&](int h, uint32_t low, uint32_t high) {
      decoder_.decode(low, high, 0, a[h]);
      if (slots == 8) keep_half(slot % 2, a[h]);
    });
#pragma unroll
    for (int c = 0; c < kColumns / 8; ++c) {
      uint32_t b[4];
      load_matrices(b, record + ((4 * j + lane / 8) * columns + lane % 8) * 16 + c * 128);
      float dot[4] = {};
#pragma unroll
      for (int step = 0; step < 2; ++step)
        mma_m16n8k16<__half>(dot, a[0][2 * step], a[1][2 * step], a[0][2 * step + 1],
                             a[1][2 * step + 1], {b[2 * step], b[2 * step + 1]});
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float power =
            reinterpret_cast<const float*>(meta)[(8 * c + e % 2) * kMetaWords + kPower];
        if (f[e / 2] != 0) y[4 * c + e] = fmaf(f[e / 2] * power, dot[e], y[4 * c + e]);
      }
    }
  }
};

#endif

}  // namespace jaxgemv::cuda::wgmma_any
