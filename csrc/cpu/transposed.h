// The CPU kernel of the transposed product, y = x @ w, which sums over the rows of the weight and
// not along them. Part of kernel.h, and under its rule: internal linkage.
//
// The weight is cut into tiles of codes and rows. In a tile kStrip rows are decoded a vector at a
// time, which goes into the sums of all rows of x while it is in a register; the sums are in cache.
// They lie in the order in which blocks of codes are met until `finish` puts them right. Each is
// filled in the order of the rows, whatever x has besides and however many threads there are.
#pragma once

#include "convert.h"
#include "level.h"
#include "weights.h"

namespace jaxgemv {
namespace {

// Rows of the weight whose parameters are converted together.
constexpr Index kRowBlock = 32;

// Codes [k0, k0 + codes) of kStrip rows, ready to be multiplied.
struct Columns {
  const uint8_t* body[kStrip];
  const uint8_t* tail[kStrip];  // copies of the ends of the rows, which may end where memory does
  Index body_blocks, blocks;    // those that can be read in place, and all
  Index first_blocks, group_blocks;    // blocks in the first group and in the others
  const float *zero, *scale, *offset;  // [kStrip][row_size]: a value per group, or per code
  Index row_size;
};

// sums[m][code] += the products of `rows` rows of x, [row][kStrip], with the strip. kWhole: groups
// are whole blocks.
template <int kBits, bool kWhole>
inline void add_products(const Columns& strip, const float* x, Index rows, float* sums,
                         Index stride) {
  using B = Block<kBits>;
  const uint8_t* at[kStrip];
  for (int r = 0; r < kStrip; ++r) at[r] = strip.body[r];
  Index block = 0, end = kWhole ? strip.first_blocks : strip.blocks;
  for (Index g = 0; block < strip.blocks; ++g, end += strip.group_blocks) {
    Group<kBits> group[kStrip];
    if constexpr (kWhole)
      for (int r = 0; r < kStrip; ++r) {
        const Index i = r * strip.row_size + g;
        group[r].set(strip.zero[i], strip.scale[i], strip.offset[i]);
      }
    for (; block < min_of(end, strip.blocks); ++block) {
      if (block == strip.body_blocks)
        for (int r = 0; r < kStrip; ++r) at[r] = strip.tail[r];
      Ints units[kStrip];
      for (int r = 0; r < kStrip; ++r) {
        units[r] = load_units<kBits>(at[r]);
        at[r] += B::kBytes;
      }
      for (int i = 0; i < B::kUnit; ++i) {
        const Index code = block * B::kCodes + i * kLanes;
        Floats w[kStrip];
        for (int r = 0; r < kStrip; ++r) {
          if constexpr (kWhole) {
            w[r] = group[r].weights(units[r], i);
          } else {
            const Index at_code = r * strip.row_size + code;
            w[r] = (codes_of<kBits>(units[r], i) - load_floats(strip.zero + at_code)) *
                       load_floats(strip.scale + at_code) +
                   load_floats(strip.offset + at_code);
          }
        }
        for (Index m = 0; m < rows; ++m) {
          float* to = sums + m * stride + code;
          Floats sum = load_floats(to);
          for (int r = 0; r < kStrip; ++r) sum += w[r] * x[m * kStrip + r];
          __builtin_memcpy(to, &sum, sizeof(sum));
        }
      }
    }
  }
}

// Everything for one width.
template <int kBits>
struct Transposed {
  using B = Block<kBits>;
  static_assert(kTileUnit % B::kCodes == 0, "tiles start on whole blocks");

  static bool is_whole(const Problem& p) { return p.group % B::kCodes == 0 || p.group >= p.K; }

  static Index arranged_size(const Problem& p) { return ceil_div(p.N, kStrip) * kStrip * p.M; }

  // out[strip of rows of the weight][row of x][row of the strip]
  static void arrange(const Problem& p, const Operands& o, Index slice, float* out) {
    for (Index n = 0; n < p.N; n += kRowBlock)
      for (Index m = 0; m < p.M; ++m) {
        float natural[kRowBlock] = {};
        const Index count = min_of(kRowBlock, p.N - n);
        read_floats(p.x, o.x, (slice * p.M + m) * p.N + n, count, natural);
        for (Index i = 0; i < count; i += kStrip)
          __builtin_memcpy(out + (n + i) * p.M + m * kStrip, natural + i, kStrip * sizeof(float));
      }
  }

  // Values that a parameter has for a row of a tile.
  static Index row_size(const Problem& p, Index codes) {
    return is_whole(p) ? codes / p.group + 2 : codes;
  }

  // What run() keeps: the parameters of kRowBlock rows as Columns has them, and when groups are not
  // whole blocks, the group of each code and room for one value per group.
  static Index scratch_size(const Problem& p, Index codes) {
    return 3 * kRowBlock * row_size(p, codes) + (is_whole(p) ? 0 : 2 * codes);
  }

  // group_of[i]: the group of the code that comes i-th in the blocks of a tile, the first being 0.
  static void list_groups(const Problem& p, const Tile& tile, int32_t* group_of) {
    for (Index i = 0; i < tile.codes; ++i) {
      const Index k = min_of(tile.k0 + i, p.K - 1), code = i % B::kCodes;
      group_of[i - code + code % B::kUnit * kLanes + code / B::kUnit] =
          static_cast<int32_t>(k / p.group - tile.k0 / p.group);
    }
  }

  static void fill(float value, Index count, float* out) {
    for (Index i = 0; i < count; ++i) out[i] = value;
  }

  static Index stack_of(const Operands& o, Index slice) {
    return o.index == nullptr ? 0 : load<int32_t>(o.index, slice);
  }

  static void run(const Problem& p, const Operands& o, Index slice, const float* arranged,
                  const Tile& tile, float* sums, void* scratch) {
    const Index stack = stack_of(o, slice);
    if (stack < 0 || stack >= p.stack) return;
    fill(0, p.M * tile.codes, sums);

    const bool whole = is_whole(p);
    const Index size = row_size(p, tile.codes), last = min_of(tile.k0 + tile.codes, p.K) - 1;
    const Index first_group = tile.k0 / p.group, groups = last / p.group - first_group + 1;
    float* zero = static_cast<float*>(scratch);
    float *scale = zero + kRowBlock * size, *offset = scale + kRowBlock * size;
    int32_t* group_of = reinterpret_cast<int32_t*>(offset + kRowBlock * size);
    float* per_group = reinterpret_cast<float*>(group_of + tile.codes);
    if (!whole) list_groups(p, tile, group_of);
    const auto load_row = [&](const Param& param, Index n, float* out) {
      float* values = whole ? out : per_group;
      const bool one = param.g_stride == 0;
      read_floats(param.dtype, param.data,
                  stack * param.stack_stride + n * param.n_stride + first_group * param.g_stride,
                  one ? 1 : groups, values);
      if (one) fill(values[0], groups, values);
      if (!whole)
        for (Index i = 0; i < size; ++i) out[i] = values[group_of[i]];
    };
    fill(p.affine == Affine::kOffset ? 0 : mid_code(kBits), kRowBlock * size, zero);
    fill(0, kRowBlock * size, offset);

    const Index bytes = row_bytes(p.K, kBits), first_block = tile.k0 / B::kCodes;
    const Index readable = bytes < B::kReach ? 0 : (bytes - B::kReach) / B::kBytes + 1;
    uint8_t tail[kStrip][B::kTail];
    Columns strip;
    strip.row_size = size;
    strip.blocks = last / B::kCodes - first_block + 1;
    strip.body_blocks = min_of(readable > first_block ? readable - first_block : 0, strip.blocks);
    strip.group_blocks = p.group >= p.K ? strip.blocks : p.group / B::kCodes;
    strip.first_blocks = (first_group + 1) * strip.group_blocks - first_block;
    if (p.group >= p.K) strip.first_blocks = strip.blocks;

    for (Index n0 = tile.n0; n0 < tile.n1; n0 += kRowBlock) {
      const Index count = min_of(kRowBlock, tile.n1 - n0);
      const Index padded = ceil_div(count, kStrip) * kStrip;
      for (Index i = 0; i < padded; ++i) {
        // The last strip may repeat the last row, with weights of 0.
        if (i >= count) {
          fill(0, size, zero + i * size), fill(0, size, scale + i * size);
          fill(0, size, offset + i * size);
          continue;
        }
        load_row(o.scale, n0 + i, scale + i * size);
        if (p.affine == Affine::kZero) load_row(o.shift, n0 + i, zero + i * size);
        if (p.affine == Affine::kOffset) load_row(o.shift, n0 + i, offset + i * size);
      }
      for (Index m0 = 0; m0 < p.M; m0 += kTileRows)
        for (Index i = 0; i < padded; i += kStrip) {
          for (Index r = 0; r < kStrip; ++r) {
            const uint8_t* row =
                o.packed + stack * o.packed_stack_stride + min_of(n0 + i + r, p.N - 1) * bytes;
            strip.body[r] = row + first_block * B::kBytes;
            strip.tail[r] = tail[r];
            if (strip.body_blocks == strip.blocks) continue;
            const Index done = (first_block + strip.body_blocks) * B::kBytes;
            __builtin_memset(tail[r], 0, B::kTail);
            if (done < bytes) __builtin_memcpy(tail[r], row + done, bytes - done);
          }
          strip.zero = zero + i * size, strip.scale = scale + i * size;
          strip.offset = offset + i * size;
          const float* x = arranged + (n0 + i) * p.M + m0 * kStrip;
          const Index rows = min_of(kTileRows, p.M - m0);
          float* to = sums + m0 * tile.codes;
          if (whole)
            add_products<kBits, true>(strip, x, rows, to, tile.codes);
          else
            add_products<kBits, false>(strip, x, rows, to, tile.codes);
        }
    }
  }

  static void finish(const Problem& p, const Operands& o, Index slice, const Tile& tile,
                     const float* sums, Index parts) {
    const Index stack = stack_of(o, slice);
    const bool valid = stack >= 0 && stack < p.stack;
    const Index codes = min_of(tile.codes, p.K - tile.k0);
    for (Index m = 0; m < p.M; ++m)
      for (Index first = 0; first < codes; first += B::kCodes) {
        float natural[B::kCodes];
        fill(__builtin_nanf(""), B::kCodes, natural);
        for (int i = 0; i < B::kUnit && valid; ++i) {
          Floats sum = {};
          for (Index part = 0; part < parts; ++part)
            sum += load_floats(sums + (part * p.M + m) * tile.codes + first + i * kLanes);
          for (int lane = 0; lane < kLanes; ++lane) natural[lane * B::kUnit + i] = sum[lane];
        }
        const Index at = (slice * p.M + m) * p.K + tile.k0 + first;
        for (Index i = 0; i < min_of(B::kCodes, codes - first); ++i)
          write_float(p.y, o.y, at + i, natural[i]);
      }
  }

  static constexpr TransposedKernel kKernel = {is_whole,     arranged_size, arrange,
                                               scratch_size, run,           finish};
};

}  // namespace
}  // namespace jaxgemv
