// The CPU kernel. Each level_*.cc defines its vectors and includes this file, which then compiles
// for the level's instructions. Everything has internal linkage and nothing of the standard library
// is called: a shared inline function would be linked once, from any level, and fault on lesser
// processors.
//
// A block of codes (see weights.h) of each of kStrip rows becomes float32 weights,
// (q - zero) * scale + offset, each multiplied with the rows of x, which was put in the same order
// beforehand. Every y has one vector accumulator, filled in the order of k: the result depends
// neither on the number of threads nor on the rows that x has besides.
#pragma once

#include "convert.h"
#include "level.h"
#include "transposed.h"
#include "weights.h"

namespace jaxgemv {
namespace {

// kStrip rows of weights, ready to be multiplied.
struct Strip {
  const uint8_t* body[kStrip];
  const uint8_t* tail[kStrip];  // copies of the ends of the rows, which may end where memory does
  Index body_blocks, blocks;    // those that can be read in place, and all
  Index group_blocks;           // blocks in a group
  const float *zero, *scale, *offset;  // [kStrip][row_size]: a value per group, or per code
  Index row_size;
};

// Rows of a strip multiplied at once with kRows of x, so that the accumulators stay in registers:
// AVX-512 has 32 of them, AVX2 16.
template <int kRows>
constexpr int kTogether = kLanes < 16 && kRows > 1 ? 2 : kStrip;

// sum[r][m] = dot(weights of row r0 + r, row m of x). kWhole: groups are whole blocks.
template <int kBits, int kRows, bool kWhole, int kCount = kTogether<kRows>>
inline void multiply(const Strip& strip, int r0, const float* x, Floats (&sum)[kCount][kRows]) {
  using B = Block<kBits>;
  const uint8_t* at[kCount];
  Floats acc[kCount][kRows] = {};
  for (int r = 0; r < kCount; ++r) at[r] = strip.body[r0 + r];

  Index block = 0;
  for (Index g = 0; block < strip.blocks; ++g) {
    Group<kBits> group[kCount];
    if constexpr (kWhole)
      for (int r = 0; r < kCount; ++r) {
        const Index i = (r0 + r) * strip.row_size + g;
        group[r].set(strip.zero[i], strip.scale[i], strip.offset[i]);
      }
    const Index end = kWhole ? min_of(strip.blocks, (g + 1) * strip.group_blocks) : strip.blocks;
    for (; block < end; ++block) {
      if (block == strip.body_blocks)
        for (int r = 0; r < kCount; ++r) at[r] = strip.tail[r0 + r];
      Ints units[kCount];
      for (int r = 0; r < kCount; ++r) {
        units[r] = load_units<kBits>(at[r]);
        at[r] += B::kBytes;
      }
      for (int i = 0; i < B::kUnit; ++i) {
        Floats xs[kRows];
        for (int m = 0; m < kRows; ++m, x += kLanes) xs[m] = load_floats(x);
        for (int r = 0; r < kCount; ++r) {
          Floats w;
          if constexpr (kWhole) {
            w = group[r].weights(units[r], i);
          } else {
            const Index at_code = (r0 + r) * strip.row_size + block * B::kCodes + i * kLanes;
            w = (codes_of<kBits>(units[r], i) - load_floats(strip.zero + at_code)) *
                    load_floats(strip.scale + at_code) +
                load_floats(strip.offset + at_code);
          }
          for (int m = 0; m < kRows; ++m) acc[r][m] += w * xs[m];
        }
      }
    }
  }
  for (int r = 0; r < kCount; ++r)
    for (int m = 0; m < kRows; ++m) sum[r][m] = acc[r][m];
}

inline float sum_of(Floats vector) {
  float lane[kLanes];
  __builtin_memcpy(lane, &vector, sizeof(lane));
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  return lane[0];
}

// Everything for one width.
template <int kBits>
struct Gemv {
  using B = Block<kBits>;

  static Index blocks_of(const Problem& p) { return ceil_div(p.K, B::kCodes); }
  static Index groups_of(const Problem& p) { return ceil_div(p.K, p.group); }
  static bool is_whole(const Problem& p) { return p.group % B::kCodes == 0 || p.group >= p.K; }
  static Index row_size(const Problem& p) {
    return is_whole(p) ? groups_of(p) : blocks_of(p) * B::kCodes;
  }

  // The tile of rows of x to which row m belongs has 1, 2 or 4 of them; three are padded to four.
  static int tile_rows(Index rows_left) { return rows_left >= 3 ? 4 : static_cast<int>(rows_left); }

  static Index arranged_size(const Problem& p) {
    return ceil_div(p.M, 4) * 4 * blocks_of(p) * B::kCodes;
  }

  // out[tile][block][code of the unit][row of the tile][lane]
  static void arrange(const Problem& p, const Operands& o, Index slice, float* out) {
    const Index blocks = blocks_of(p);
    for (Index m0 = 0, rows; m0 < p.M; m0 += rows) {
      rows = tile_rows(p.M - m0);
      for (Index block = 0; block < blocks; ++block)
        for (Index m = 0; m < rows; ++m) {
          float natural[B::kCodes] = {};
          const Index k = block * B::kCodes, row = slice * p.M + m0 + m;
          if (m0 + m < p.M)
            read_floats(p.x, o.x, row * p.K + k, min_of(B::kCodes, p.K - k), natural);
          for (int i = 0; i < B::kUnit; ++i)
            for (int lane = 0; lane < kLanes; ++lane)
              out[((block * B::kUnit + i) * rows + m) * kLanes + lane] =
                  natural[lane * B::kUnit + i];
        }
      out += rows * blocks * B::kCodes;
    }
  }

  // What run() keeps for a strip: the parameters as Strip has them, and when groups are not whole
  // blocks, the group of each code and room for one value per group.
  static Index scratch_size(const Problem& p) {
    return 3 * kStrip * row_size(p) + (is_whole(p) ? 0 : row_size(p) + groups_of(p));
  }

  // The values of a parameter for row n, one per group.
  static void load_groups(const Problem& p, const Param& param, Index stack, Index n, float* out) {
    const Index groups = groups_of(p), first = stack * param.stack_stride + n * param.n_stride;
    read_floats(param.dtype, param.data, first, param.g_stride == 0 ? 1 : groups, out);
    if (param.g_stride == 0) fill(out[0], groups, out);
  }

  // group_of[i]: the group of the code that comes i-th in a row of blocks.
  static void list_groups(const Problem& p, int32_t* group_of) {
    const Index codes = row_size(p);
    for (Index k = 0, g = 0, left = p.group; k < codes; ++k, --left) {
      if (left == 0 && k < p.K) ++g, left = p.group;
      const Index code = k % B::kCodes;
      group_of[k - code + code % B::kUnit * kLanes + code / B::kUnit] = static_cast<int32_t>(g);
    }
  }

  static void fill(float value, Index count, float* out) {
    for (Index i = 0; i < count; ++i) out[i] = value;
  }

  template <int kRows>
  static void multiply_tile(const Problem& p, const Operands& o, const Strip& strip, const float* x,
                            Index slice, Index m0, Index n0, const float* bias) {
    constexpr int kCount = kTogether<kRows>;
    for (int r0 = 0; r0 < kStrip; r0 += kCount) {
      Floats sum[kCount][kRows];
      if (is_whole(p))
        multiply<kBits, kRows, true>(strip, r0, x, sum);
      else
        multiply<kBits, kRows, false>(strip, r0, x, sum);
      for (Index m = 0; m < kRows && m0 + m < p.M; ++m)
        for (Index r = 0; r < kCount && n0 + r0 + r < p.N; ++r)
          write_float(p.y, o.y, (slice * p.M + m0 + m) * p.N + n0 + r0 + r,
                      sum_of(sum[r][m]) + bias[r0 + r]);
    }
  }

  static void run(const Problem& p, const Operands& o, Index slice, const float* arranged,
                  Index begin, Index end, void* scratch) {
    const Index stack = o.index == nullptr ? 0 : load<int32_t>(o.index, slice);
    if (stack < 0 || stack >= p.stack) {
      for (Index m = 0; m < p.M; ++m)
        for (Index n = begin; n < end; ++n)
          write_float(p.y, o.y, (slice * p.M + m) * p.N + n, __builtin_nanf(""));
      return;
    }
    const Index bytes = row_bytes(p.K, kBits), blocks = blocks_of(p), size = row_size(p);
    float* zero = static_cast<float*>(scratch);
    float *scale = zero + kStrip * size, *offset = scale + kStrip * size;
    int32_t* group_of = reinterpret_cast<int32_t*>(offset + kStrip * size);
    float* per_group = reinterpret_cast<float*>(group_of + size);
    if (!is_whole(p)) list_groups(p, group_of);
    const auto load_row = [&](const Param& param, Index n, float* out) {
      if (is_whole(p)) return load_groups(p, param, stack, n, out);
      load_groups(p, param, stack, n, per_group);
      for (Index i = 0; i < size; ++i) out[i] = per_group[group_of[i]];
    };
    uint8_t tail[kStrip][B::kTail];
    float bias[kStrip] = {};

    Strip strip;
    strip.blocks = blocks;
    strip.body_blocks = bytes < B::kReach ? 0 : (bytes - B::kReach) / B::kBytes + 1;
    strip.group_blocks = p.group >= p.K ? blocks : p.group / B::kCodes;
    strip.zero = zero, strip.scale = scale, strip.offset = offset;
    strip.row_size = size;
    fill(p.affine == Affine::kOffset ? 0 : mid_code(kBits), kStrip * size, zero);
    fill(0, kStrip * size, offset);

    for (Index n0 = begin; n0 < end; n0 += kStrip) {
      for (Index r = 0; r < kStrip; ++r) {
        const Index n = min_of(n0 + r, p.N - 1);  // the last strip may repeat the last row
        const uint8_t* row = o.packed + stack * o.packed_stack_stride + n * bytes;
        strip.body[r] = row;
        strip.tail[r] = tail[r];
        const Index done = strip.body_blocks * B::kBytes;
        __builtin_memset(tail[r], 0, B::kTail);
        if (done < bytes) __builtin_memcpy(tail[r], row + done, bytes - done);
        load_row(o.scale, n, scale + r * size);
        if (p.affine == Affine::kZero) load_row(o.shift, n, zero + r * size);
        if (p.affine == Affine::kOffset) load_row(o.shift, n, offset + r * size);
        if (o.bias.data != nullptr)
          read_floats(o.bias.dtype, o.bias.data, stack * o.bias.stack_stride + n * o.bias.n_stride,
                      1, &bias[r]);
      }
      const float* x = arranged;
      for (Index m0 = 0, rows; m0 < p.M; m0 += rows, x += rows * blocks * B::kCodes) {
        rows = tile_rows(p.M - m0);
        if (rows == 1) multiply_tile<1>(p, o, strip, x, slice, m0, n0, bias);
        if (rows == 2) multiply_tile<2>(p, o, strip, x, slice, m0, n0, bias);
        if (rows == 4) multiply_tile<4>(p, o, strip, x, slice, m0, n0, bias);
      }
    }
  }

  static constexpr Kernel kKernel = {is_whole, arranged_size, arrange, scratch_size, run};
};

constexpr Level make_level(const char* name) {
  return {name,
          {Gemv<1>::kKernel, Gemv<2>::kKernel, Gemv<3>::kKernel, Gemv<4>::kKernel, Gemv<5>::kKernel,
           Gemv<6>::kKernel, Gemv<7>::kKernel, Gemv<8>::kKernel},
          {Transposed<1>::kKernel, Transposed<2>::kKernel, Transposed<3>::kKernel,
           Transposed<4>::kKernel, Transposed<5>::kKernel, Transposed<6>::kKernel,
           Transposed<7>::kKernel, Transposed<8>::kKernel}};
}

}  // namespace
}  // namespace jaxgemv
