// The products of the mma_any kernel: a unit of the weights, from shared memory, times the image of x.
#pragma once

#include "weights.cuh"

namespace jaxgemv::cuda::mma_any {

// The sums of a warp: rows g and g + 8 of its tiles, columns 2 t and 2 t + 1 of each tile of eight.
template <int kBits, int kColumnTiles>
class Sums {
  using S = Shape<kBits, kColumnTiles>;
  using C = Octet<kBits>;

 public:
  float y[S::kRowTiles][kColumnTiles][4] = {};

  // Adds the products of a unit. shifts: the words by which each lane's rows lie behind the start of
  // theirs; first_k: of the unit.
  __device__ __forceinline__ void add(const Params& params, const uint8_t* unit,
                                      const RowScale (&scales)[S::kRowTiles],
                                      const int (&shifts)[S::kRowTiles][2], const uint8_t* record,
                                      int columns, int first_k) {
    const int lane = threadIdx.x % 32, t = lane % 4, slots = params.groups.slots;
    const uint32_t* rows[S::kRowTiles][2];
#pragma unroll
    for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        rows[r][h] =
            reinterpret_cast<const uint32_t*>(unit + (r * kTileN + lane / 4 + 8 * h) * S::kPitch) +
            shifts[r][h];
    const uint8_t* slot = unit + S::kWeightBytes;
    float dot[S::kRowTiles][kColumnTiles][4] = {};

    // The products of a block of 32 codes; of one half of it where half >= 0.
    const auto multiply = [&](const uint8_t* block, int words, int half) {
      uint32_t a[S::kRowTiles][2][4];
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          uint32_t low, high;
          C::load(rows[r][h] + words, t, low, high);
          C::pairs(low, high, a[r][h]);
          if (half >= 0)
#pragma unroll
            for (uint32_t& pair : a[r][h]) pair = t / 2 == half ? pair : 0;
        }
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        uint32_t b[4];
        // Past the last column lies something else, for sums that are not used.
        load_matrices(b, block + (lane / 8 * columns + lane % 8) * 16 + c * 128);
#pragma unroll
        for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
          for (int step = 0; step < 2; ++step)
            mma_m16n8k16<__half>(dot[r][c], a[r][0][2 * step], a[r][1][2 * step],
                                 a[r][0][2 * step + 1], a[r][1][2 * step + 1],
                                 {b[2 * step], b[2 * step + 1]});
      }
    };
    // The products since the last time, which are all of slot i of a quad.
    const auto scale = [&](const uint8_t* record, int i, int k) {
      const float* const meta =
          reinterpret_cast<const float*>(record + columns * (kQuadK * 2)) + 2 * t;
      const int group = params.groups.of(k);
      // Those of large groups are kept, where registers allow.
      constexpr bool kKeeps = kColumnTiles == 1 || kColumnTiles == 4;
      const bool is_new = !kKeeps || group != group_ || slots > 1;
      group_ = group;
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
        if (is_new)
          terms_[r] = scales[r].terms(slot + 128 * r, group, params.affine, mid_code(kBits));
        const Terms terms = terms_[r];
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float power = meta[kPower * columns + 8 * c + e % 2];
            const float sum = meta[(kSums + i) * columns + 8 * c + e % 2];
            y[r][c][e] =
                fmaf(terms.f[e / 2] * power, dot[r][c][e], fmaf(terms.c[e / 2], sum, y[r][c][e]));
            dot[r][c][e] = 0;
          }
        }
      }
      slot += 128 * S::kRowTiles;
    };

#pragma unroll 1
    for (int quad = 0; quad < S::kQuads; ++quad) {
      const int words = quad * 4 * kBits, k = first_k + quad * kQuadK;
      const int block_bytes = columns * 64;
      constexpr int kUnroll = kColumnTiles > 4    ? 1
                              : kColumnTiles == 2 ? 2
                                                  : 4;  // as registers allow
      if (slots == 1) {
#pragma unroll kUnroll
        for (int j = 0; j < 4; ++j) multiply(record + j * block_bytes, words + j * kBits, -1);
        scale(record, 0, k);
      } else if (slots == 4) {
#pragma unroll kUnroll
        for (int j = 0; j < 4; ++j) {
          multiply(record + j * block_bytes, words + j * kBits, -1);
          scale(record, j, k + j * (kQuadK / 4));
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
          multiply(record + i / 2 * block_bytes, words + i / 2 * kBits, i % 2);
          scale(record, i, k + i * (kQuadK / 8));
        }
      }
      record += columns * kRecordBytes;
    }
  }

 private:
  Terms terms_[S::kRowTiles];
  int group_ = -1;  // whose they are
};

}  // namespace jaxgemv::cuda::mma_any
