// The products of the mma_any kernel: a unit of the weights in shared memory, times the image of x.
#pragma once

#include "../image/weights.cuh"

namespace jaxgemv::cuda::mma_any {

using namespace image;

// Kernels for 32 columns use each fragment of x for two tiles of rows; for 64 there are not enough
// registers. With few columns a unit is 64 to 128 bytes of each row of a tile.
template <typename C, int kColumnTiles, bool kFew = (kColumnTiles <= 2)>
struct Shape : Ring<C::kWidth, kColumnTiles == 4 ? 2 : 1,
                    kFew && C::kWidth <= 2   ? 4
                    : kFew && C::kWidth <= 4 ? 2
                                             : 1,
                    kFew ? 3 : 4> {
  static constexpr float kWorth = C::kWorth;  // what a sum is worth
  static constexpr bool kHasGlobalScale = !C::kHasShift;
  static constexpr bool kMany = !kFew;
  static constexpr int kMaxWarps = kMany ? 8 : 16;
  static constexpr int kColumns = 8 * kColumnTiles;
};

// The sums of a warp: rows g and g + 8 of its tiles, columns 2 t and 2 t + 1 of each tile of eight.
// C: how codes become numbers, a Decoder.
template <typename C, int kColumnTiles>
class Sums {
  using S = Shape<C, kColumnTiles>;

 public:
  float y[S::kRowTiles][kColumnTiles][4] = {};

  __device__ __forceinline__ explicit Sums(const uint8_t* table) : decoder_(table) {}

  // Adds the products of a unit. window: its scales, which begin with first_group; shifts: by how many
  // words each lane's rows begin behind the start of their copies; first_k: the unit's first k.
  __device__ __forceinline__ void add(const Params& params, const uint8_t* unit,
                                      const RowScale (&scales)[S::kRowTiles], const uint8_t* window,
                                      int first_group, const int (&shifts)[S::kRowTiles][2],
                                      const uint8_t* record, int columns, int first_k) {
    const int lane = threadIdx.x % 32, t = lane % 4, slots = params.groups.slots;
    const uint32_t* rows[S::kRowTiles][2];
#pragma unroll
    for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        rows[r][h] =
            reinterpret_cast<const uint32_t*>(unit + (r * kTileN + lane / 4 + 8 * h) * S::kPitch) +
            shifts[r][h];
    float dot[S::kRowTiles][kColumnTiles][4] = {};

    // The products of a block of 32 codes.
    using Operand = uint32_t[S::kRowTiles][2][C::kParts][4];
    const auto multiply_part = [&](const uint8_t* block, const Operand& a, int part) {
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c) {
        uint32_t b[4];
        // Past the last column this loads other data, for sums that are not used.
        load_matrices(b, block + (lane / 8 * columns + lane % 8) * 16 + c * 128);
#pragma unroll
        for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
          for (int step = 0; step < 2; ++step)
            mma_m16n8k16<__half>(dot[r][c], a[r][0][part][2 * step], a[r][1][part][2 * step],
                                 a[r][0][part][2 * step + 1], a[r][1][part][2 * step + 1],
                                 {b[2 * step], b[2 * step + 1]});
      }
    };
    const auto multiply = [&](const uint8_t* block, const Operand& a) {
      multiply_part(block, a, 0);
      if (C::kParts > 1 && decoder_.has_second()) multiply_part(block, a, C::kParts - 1);
    };
    // Operand A of block j; if half >= 0, of this half of it, with zeros for the other.
    const auto load_block = [&](bool runs, int words, int j, int half, Operand& a) {
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
        load_octets<C>(rows[r], words, j, runs, [&](int h, uint32_t low, uint32_t high) {
#pragma unroll
          for (int part = 0; part < C::kParts; ++part) {
            decoder_.decode(low, high, part, a[r][h][part]);
            if (half >= 0) keep_half(half, a[r][h][part]);
          }
        });
      }
    };
    // Scales the products since the last call, all of which belong to slot i of a quad, and adds them to y.
    const auto scale = [&](const uint8_t* record, int i, int k) {
      const float* const meta = reinterpret_cast<const float*>(record + columns * (kQuadK * 2));
      const int group = params.groups.of(k);
      // The terms of large groups are kept from call to call, where registers allow.
      constexpr bool kKeeps = kColumnTiles == 1 || kColumnTiles == 4;
      const bool is_new = !kKeeps || group != group_ || slots > 1;
      group_ = group;
#pragma unroll
      for (int r = 0; r < S::kRowTiles; ++r) {
        if (is_new)
          terms_[r] = scales[r].terms(window + r * params.windows.pieces * RowScale::kPieceBytes,
                                      scales[r].inside(first_group), group - first_group,
                                      params.scales, params.shift);
        const Terms terms = terms_[r];
#pragma unroll
        for (int c = 0; c < kColumnTiles; ++c) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float* const column = meta + (8 * c + 2 * t + e % 2) * kMetaWords;
            const float power = column[kPower], sum = column[kSums + i];
            if (C::kHasShift) y[r][c][e] = fmaf(terms.c[e / 2], sum, y[r][c][e]);
            y[r][c][e] = fmaf(terms.f[e / 2] * power, dot[r][c][e], y[r][c][e]);
            dot[r][c][e] = 0;
          }
        }
      }
    };

#pragma unroll 1
    for (int quad = 0; quad < S::kQuads; ++quad) {
      const int words = quad * 4 * C::kWidth, k = first_k + quad * kQuadK;
      const int block_bytes = columns * 64;
      constexpr int kUnroll = kColumnTiles > 4    ? 1
                              : kColumnTiles == 2 ? 2
                                                  : 4;  // as registers allow
      Operand a;
      if (slots == 1 && C::kRuns) {
#pragma unroll kUnroll
        for (int j = 0; j < 4; ++j) {
          load_block(true, words, j, -1, a);
          multiply(record + j * block_bytes, a);
        }
        scale(record, 0, k);
      } else if (slots < 8) {
#pragma unroll kUnroll
        for (int j = 0; j < 4; ++j) {
          load_block(false, words, j, -1, a);
          multiply(record + j * block_bytes, a);
          if (slots == 4 || j == 3) scale(record, j & (slots - 1), k + j * (kQuadK / 4));
        }
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
          load_block(false, words, i / 2, i % 2, a);
          multiply(record + i / 2 * block_bytes, a);
          scale(record, i, k + i * (kQuadK / 8));
        }
      }
      record += columns * kRecordBytes;
    }
  }

  // Call it when all units have been added.
  __device__ __forceinline__ void finish() {
    const float unit = decoder_.unit();
#pragma unroll
    for (int r = 0; r < S::kRowTiles; ++r)
#pragma unroll
      for (int c = 0; c < kColumnTiles; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) y[r][c][e] *= unit;
  }

 private:
  C decoder_;
  Terms terms_[S::kRowTiles];
  int group_ = -1;  // the group of terms_
};

}  // namespace jaxgemv::cuda::mma_any
