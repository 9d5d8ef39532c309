// Few rows of x by integer dot products. Part of kernel.h, and under its rule: internal linkage.
//
// Converting codes to float32 takes more instructions than memory leaves time for. So x becomes
// fixed point, by a power of two for each run of codes, and is cut into digits, signed bytes or
// 16-bit words; products of digits and codes are summed exactly, and become float32 once a run.
// Where an element of x would lose more than rounding may (below), `arrange` says so, and the
// kernel of panel.h computes the call.
//
// A vector of weights needs no unpacking but shifts and masks: unit i of it, as wide as a digit,
// holds codes i * kSteps .. + kSteps, and the digits of x are put in the same order beforehand.
#pragma once

#include "params.h"

namespace jaxgemv {
namespace {

// Rows of weights times rows of x in registers at once.
constexpr int kDigitTile = 4;
// Rows in registers at once are far apart, and each is the head of a stream that reads a quarter of
// the task in the order of memory; so many bytes of it are asked for ahead. (On a Xeon with AMX
// 0.67 ms, for 0.88 with neighbouring rows and 0.74 with a quarter of the distance:
// docs/cpu-notes.md.)
constexpr int kAhead = 1024;

// Bits of an element in fixed point; float32 gets one digit more.
constexpr int kFixedBits = 30;
// An element may be off by so much of itself: 16 roundings of float32.
constexpr float kFixedError = 0x1p-20f;

constexpr int planes_of(Dtype x) {
  return kDigitBits == 0 ? 0 : 32 / kDigitBits + (x == Dtype::kF32);
}

template <int kBits>
struct Digits {
  static constexpr bool kExists = kDigitBits > 0 && 8 % kBits == 0;
  static constexpr int kDigit = kExists ? kDigitBits : kBits;
  static constexpr int kSteps = kDigit / kBits;
  static constexpr int kUnits = 32 * kLanes / kDigit;
  static constexpr int kCodes = kSteps * kUnits;  // in a block, a vector of weights
  static constexpr int kLaneCodes = 32 / kBits;
  static constexpr Index kBytes = 4 * kLanes;
  // Blocks whose sums fit into 32 bits, and whose elements of x are not too different.
  static constexpr Index kMaxRun = 512 / kCodes > 1 ? 512 / kCodes : 1;
  static_assert(kMaxRun * kLaneCodes * ((1 << kBits) - 1) < 1 << 15);
  using Digit = std::conditional_t<kDigitBits == 8, uint8_t, uint16_t>;

  static Index blocks_of(const Problem& p) { return ceil_div(p.K, Index{kCodes}); }

  // Groups are whole blocks, or blocks are whole groups and these whole lanes.
  static bool accepts(const Problem& p) {
    return kExists && p.M <= kDigitRows &&
           (p.group >= p.K || p.group % kCodes == 0 ||
            (kCodes % p.group == 0 && p.group % kLaneCodes == 0));
  }

  // Worked out once: divisions are slow.
  struct Shape {
    Index blocks, whole_blocks;      // of a row of weights
    Index groups;                    // of it
    Index group_blocks, group_runs;  // of a group
    Index runs;
    bool is_narrow;    // blocks hold several groups each
    Index worth_size;  // floats for a row of weights and one of x

    explicit Shape(const Problem& p) {
      blocks = blocks_of(p), whole_blocks = row_bytes(p.K, kBits) / kBytes;
      groups = groups_of(p);
      is_narrow = p.group < kCodes && p.group < p.K;
      group_blocks = p.group >= p.K ? blocks : max_of(1, p.group / kCodes);
      group_runs = ceil_div(group_blocks, kMaxRun);
      runs = ceil_div(blocks, group_blocks) * group_runs;
      worth_size = is_narrow ? blocks * kLanes : padded(runs);
    }
  };

  // x as the kernel reads it, in this order.
  struct Arranged {
    float* sums;    // [row][group]: of x
    float* powers;  // [row][run]: what a unit is worth
    float* digits;  // [block][step][row][plane]: vectors
    Index size;     // in floats

    Arranged(const Problem& p, float* at) {
      const Shape shape(p);
      const Index rows = p.M;
      sums = at;
      powers = sums + rows * padded(shape.groups);
      digits = powers + rows * padded(shape.runs);
      size = digits - at + shape.blocks * kSteps * rows * planes_of(p.x) * kLanes;
    }
  };

  static Index arranged_size(const Problem& p) { return Arranged(p, nullptr).size; }

  static void prepare(const Problem& p, float* out) {
    for (float* end = out + arranged_size(p); out < end; ++out) *out = 0;
  }

  // False where an element would be too far off.
  static bool arrange(const Problem& p, const Operands& o, Index slice, Index m0, Index m1,
                      float* out) {
    const Arranged a(p, out);
    const Shape shape(p);
    const Index rows = p.M, blocks = shape.blocks, group_size = shape.group_blocks;
    float natural[kMaxRun * kCodes];
    for (Index m = m0; m < m1; ++m) {
      float* sums = a.sums + m * padded(shape.groups);
      float* power = a.powers + m * padded(shape.runs);
      for (Index block = 0, end; block < blocks; block = end, ++power) {
        end = min_of(min_of(block + kMaxRun, (block / group_size + 1) * group_size), blocks);
        const Index k = block * kCodes, count = min_of(end * kCodes, p.K) - k;
        for (Index i = count; i < (end - block) * kCodes; ++i) natural[i] = 0;
        read_floats(p.x, o.x, (slice * p.M + m) * p.K + k, count, natural);
        for (Index i = 0; i < count;) {
          const Index g = p.group >= p.K ? 0 : (k + i) / p.group;
          const Index stop = p.group >= p.K ? count : min_of((g + 1) * p.group - k, count);
          float sum = 0;
          for (; i < stop; ++i) sum += natural[i];
          sums[g] += sum;
        }
        if (!unit_of(natural, (end - block) * kCodes, power)) return false;
        for (Index b = block; b < end; ++b) {
          float* to = a.digits + (b * kSteps * rows + m) * planes_of(p.x) * kLanes;
          if (!cut(p, natural + (b - block) * kCodes, 1 / *power, rows, to)) return false;
        }
      }
    }
    return true;
  }

  // The power of two by which x becomes fixed point.
  static bool unit_of(const float* x, Index count, float* power) {
    uint32_t largest = 0;
    for (Index i = 0; i < count; ++i) {
      const uint32_t magnitude = bits_of_f32(x[i]) & 0x7fffffff;
      largest = magnitude > largest ? magnitude : largest;
    }
    const int exponent = static_cast<int>(largest >> 23);
    if (largest == 0) return *power = 1, true;
    if (exponent == 255 || exponent <= kFixedBits + 24) return false;
    *power = f32_of_bits(static_cast<uint32_t>(exponent + 1 - kFixedBits) << 23);
    return true;
  }

  // The digits of a block.
  static bool cut(const Problem& p, const float* x, float inverse, Index rows, float* out) {
    constexpr float kNextDigit = 1 << kDigit;
    constexpr int kLast = (1 << (kDigit - 1)) - 1;
    constexpr uint32_t kBias = kDigit == 8 ? 0x808080 : 0x8000;
    const int planes = planes_of(p.x);
    const bool more = p.x == Dtype::kF32;
    uint32_t fixed[kCodes];
    int32_t last[kCodes];
    int32_t bad = 0;
    for (int i = 0; i < kCodes; ++i) {
      const float value = x[i] * inverse;
      // Below one half, so that no sum is rounded up to the next integer.
      const int32_t whole =
          static_cast<int32_t>(value + __builtin_copysignf(0x1.fffffep-2f, value));
      const float rest = value - static_cast<float>(whole);
      const float scaled = rest * kNextDigit;
      int32_t next = static_cast<int32_t>(scaled + __builtin_copysignf(0x1.fffffep-2f, scaled));
      next = next > kLast ? kLast : next;
      const float error = more ? (scaled - static_cast<float>(next)) / kNextDigit : rest;
      bad |= __builtin_fabsf(error) > kFixedError * __builtin_fabsf(value);
      bad |= (value == 0) != (x[i] == 0);
      fixed[i] = (static_cast<uint32_t>(whole) + kBias) ^ kBias;
      last[i] = next;
    }
    for (int step = 0; step < kSteps; ++step) {
      Digit* to = reinterpret_cast<Digit*>(out + step * rows * planes * kLanes);
      for (int plane = 0; plane < 32 / kDigit; ++plane, to += kUnits)
        for (int i = 0; i < kUnits; ++i)
          to[i] = static_cast<Digit>(fixed[i * kSteps + step] >> (plane * kDigit));
      if (more)
        for (int i = 0; i < kUnits; ++i) to[i] = static_cast<Digit>(last[i * kSteps + step]);
    }
    return !bad;
  }

  // Sums of a run, in units of its power.
  template <int kPlanes>
  static Floats value_of(const Ints (&sum)[kPlanes]) {
    if constexpr (kDigitBits == 8) {
      const Ints low = sum[0] + (sum[1] << 8), high = sum[2] + (sum[3] << 8);
      Floats value = to_floats(high) * 65536.f + to_floats(low);
      if constexpr (kPlanes == 5) value += to_floats(sum[4]) * 0x1p-8f;
      return value;
    } else {
      Floats value = to_floats(sum[1]) * 65536.f + to_floats(sum[0]);
      if constexpr (kPlanes == 3) value += to_floats(sum[2]) * 0x1p-16f;
      return value;
    }
  }

  // sum += products of a block.
  template <int kRows, int kPlanes, int kCount>
  static void add_block(const Ints (&w)[kCount], const float* digits,
                        Ints (&sum)[kCount][kRows][kPlanes]) {
    JAXGEMV_UNROLL
    for (int step = 0; step < kSteps; ++step) {
      JAXGEMV_UNROLL
      for (int m = 0; m < kRows; ++m, digits += kPlanes * kLanes) {
        JAXGEMV_UNROLL
        for (int r = 0; r < kCount; ++r) {
          const Ints codes = kBits == kDigit ? w[r] : w[r] >> (step * kBits) & kMask;
          JAXGEMV_UNROLL
          for (int plane = 0; plane < kPlanes; ++plane)
            sum[r][m][plane] = dot(sum[r][m][plane], codes, load_ints(digits + plane * kLanes));
        }
      }
    }
  }

  // Of a row of weights: its offsets' part of the sums, and what units are worth: [row of x][run],
  // or where blocks hold several groups [..][block][lane]. `scales` is scratch.
  template <int kRows, bool kNarrow>
  static void load_row(const Problem& p, const Operands& o, Index stack, Index n,
                       const Shape& shape, const Arranged& x, Ints group_of_lane, float* scales,
                       float* worth, Floats (&shift)[kRows]) {
    const Index groups = padded(shape.groups), runs = padded(shape.runs);
    const bool is_direct = !kNarrow && shape.group_runs == 1;
    Floats sum[kRows] = {};
    for (Index g = 0; g < groups; g += kLanes) {
      const GroupParams params = group_params(p, o, stack, n, g, shape.groups);
      if (!is_direct) store_floats(scales + g, params.scale);
      JAXGEMV_UNROLL
      for (int m = 0; m < kRows; ++m) {
        sum[m] += params.offset * load_floats(x.sums + m * groups + g);
        if (is_direct)
          store_floats(worth + m * runs + g, params.scale * load_floats(x.powers + m * runs + g));
      }
    }
    JAXGEMV_UNROLL
    for (int m = 0; m < kRows; ++m, worth += shape.worth_size) {
      shift[m] = sum[m];
      const float* powers = x.powers + m * runs;
      if (kNarrow) {
        const Index block_groups = kCodes / p.group;
        for (Index block = 0; block < shape.blocks; ++block)
          store_floats(
              worth + block * kLanes,
              lookup(load_floats(scales + block * block_groups), group_of_lane) * powers[block]);
      } else if (!is_direct) {
        for (Index run = 0, g = 0; run < shape.runs; ++g)
          for (Index i = 0; i < shape.group_runs; ++i, ++run) worth[run] = scales[g] * powers[run];
      }
    }
  }

  // total[r][m]: lanes whose sum is dot(weights of row r, row m of x), without the offsets.
  template <int kRows, int kPlanes, bool kNarrow, int kCount = kDigitTile / kRows>
  static void multiply(const Problem& p, const Shape& shape, const float* digits,
                       const uint8_t* const (&rows)[kCount], const float* worth,
                       Floats (&total)[kCount][kRows]) {
    const Index words = row_bytes(p.K, kBits) / 4, blocks = shape.blocks, size = shape.worth_size;
    const Index whole_blocks = shape.whole_blocks, group_size = shape.group_blocks;
    Floats acc[kCount][kRows] = {};
    Index group_end = group_size;
    for (Index block = 0; block < blocks;) {
      const Index end = min_of(min_of(block + kMaxRun, group_end), blocks);
      Ints sum[kCount][kRows][kPlanes] = {};
      for (; block < end; ++block, digits += kSteps * kRows * kPlanes * kLanes) {
        Ints w[kCount];
        JAXGEMV_UNROLL
        for (int r = 0; r < kCount; ++r) {
          const uint8_t* from = rows[r] + block * kBytes;
          __builtin_prefetch(from + kAhead);
          w[r] = block < whole_blocks ? load_words(from) : load_words(from, words % kLanes);
        }
        add_block(w, digits, sum);
      }
      JAXGEMV_UNROLL
      for (int r = 0; r < kCount; ++r) JAXGEMV_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const float* at = worth + (r * kRows + m) * size;
        if constexpr (kNarrow)
          acc[r][m] += value_of(sum[r][m]) * load_floats(at);
        else
          acc[r][m] += value_of(sum[r][m]) * *at;
      }
      worth += kNarrow ? kLanes : 1;
      if (end == group_end) group_end += group_size;
    }
    JAXGEMV_UNROLL
    for (int r = 0; r < kCount; ++r) JAXGEMV_UNROLL
    for (int m = 0; m < kRows; ++m) total[r][m] = acc[r][m];
  }

  static constexpr int32_t kMask = static_cast<int32_t>(
      kDigit == 8 ? ((1u << kBits) - 1) * 0x01010101u : ((1u << kBits) - 1) * 0x00010001u);

  // A row's scales, with a vector behind the last, and what units are worth.
  static Index scratch_size(const Problem& p) {
    const Shape shape(p);
    return padded(shape.groups) + kLanes + kDigitTile * shape.worth_size;
  }

  template <int kRows, int kPlanes, bool kNarrow>
  static void run_tile(const Problem& p, const Operands& o, Index slice, Index stack,
                       const Arranged& x, Index begin, Index end, float* scratch) {
    constexpr int kCount = kDigitTile / kRows;
    const Shape shape(p);
    float* worth = scratch + padded(shape.groups) + kLanes;
    int32_t lane_group[kLanes] = {};
    for (int lane = 0; kNarrow && lane < kLanes; ++lane)
      lane_group[lane] = static_cast<int32_t>(lane * kLaneCodes / p.group);
    const Ints group_of_lane = load_ints(lane_group);
    const Index step = ceil_div(end - begin, Index{kCount});
    for (Index n0 = begin; n0 < begin + step; ++n0) {
      const uint8_t* rows[kCount];
      Floats total[kCount][kRows], shift[kCount][kRows];
      for (Index r = 0; r < kCount; ++r) {
        const Index n = min_of(n0 + r * step, end - 1);  // the last of them may repeat the last row
        rows[r] = o.packed + stack * o.packed_stack_stride + n * row_bytes(p.K, kBits);
        load_row<kRows, kNarrow>(p, o, stack, n, shape, x, group_of_lane, scratch,
                                 worth + r * kRows * shape.worth_size, shift[r]);
      }
      multiply<kRows, kPlanes, kNarrow>(p, shape, x.digits, rows, worth, total);
      for (Index r = 0; r < kCount && n0 + r * step < end; ++r) {
        const float bias = bias_of(o, stack, n0 + r * step);
        for (Index m = 0; m < kRows; ++m)
          write_float(p.y, o.y, (slice * p.M + m) * p.N + n0 + r * step,
                      sum_of(total[r][m] + shift[r][m]) + bias);
      }
    }
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, float* arranged,
                  Index begin, Index end, float* scratch) {
    const Arranged x(p, arranged);
    const auto run_rows = [&]<int kRows>(std::integral_constant<int, kRows>) {
      const auto run_planes = [&]<int kPlanes>(std::integral_constant<int, kPlanes>) {
        if (Shape(p).is_narrow)
          run_tile<kRows, kPlanes, true>(p, o, slice, stack, x, begin, end, scratch);
        else
          run_tile<kRows, kPlanes, false>(p, o, slice, stack, x, begin, end, scratch);
      };
      if (p.x == Dtype::kF32)
        run_planes(std::integral_constant<int, planes_of(Dtype::kF32)>());
      else
        run_planes(std::integral_constant<int, planes_of(Dtype::kBF16)>());
    };
    if (p.M == 1)
      run_rows(std::integral_constant<int, 1>());
    else
      run_rows(std::integral_constant<int, kDigitRows>());
  }
};

}  // namespace
}  // namespace jaxgemv
