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

// Bytes from a load of weights to what is asked for ahead of its time.
constexpr Index kAhead = 2048;

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

  // Rows of x that are multiplied together; three are padded to four.
  static int tile_rows(const Problem& p) { return p.M > 2 ? 4 : static_cast<int>(p.M); }

  // x as the kernel reads it, in this order.
  struct Arranged {
    float* sums;    // [row][group]: of x
    float* powers;  // [block][row]: what a unit of the run is worth, at its first block
    float* digits;  // [block][step][row][plane]: vectors
    Index size;     // in floats

    Arranged(const Problem& p, float* at) {
      const Index rows = tile_rows(p), blocks = blocks_of(p);
      sums = at;
      powers = sums + rows * padded(groups_of(p));
      digits = powers + padded(rows * blocks);
      size = digits - at + blocks * kSteps * rows * planes_of(p.x) * kLanes;
    }
  };

  // Blocks that share a scale, or hold several groups each.
  static Index group_blocks(const Problem& p) {
    return p.group >= p.K ? blocks_of(p) : max_of(1, p.group / kCodes);
  }

  // False where an element would be too far off.
  static bool arrange(const Problem& p, const Operands& o, Index slice, float* out) {
    const Arranged a(p, out);
    const Index rows = tile_rows(p), groups = groups_of(p), blocks = blocks_of(p);
    const Index group_size = group_blocks(p);
    for (Index i = 0; i < a.size; ++i) out[i] = 0;
    float natural[kMaxRun * kCodes];
    for (Index m = 0; m < p.M; ++m) {
      float* sums = a.sums + m * padded(groups);
      for (Index block = 0, end; block < blocks; block = end) {
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
        float power;
        if (!unit_of(natural, (end - block) * kCodes, &power)) return false;
        a.powers[block * rows + m] = power;
        for (Index b = block; b < end; ++b) {
          float* to = a.digits + (b * kSteps * rows + m) * planes_of(p.x) * kLanes;
          if (!cut(p, natural + (b - block) * kCodes, 1 / power, rows, to)) return false;
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

  // total[r][m]: lanes whose sum is dot(weights of row r, row m of x).
  template <int kRows, int kPlanes, int kCount = kDigitTile / kRows>
  static void multiply(const Problem& p, const Arranged& x, const uint8_t* const* rows,
                       const Params& params, Ints group_of_lane, Floats (&total)[kCount][kRows]) {
    const Index blocks = blocks_of(p), words = row_bytes(p.K, kBits) / 4;
    const Index lane_groups = p.group >= kCodes || p.group >= p.K ? 1 : kCodes / p.group;
    Floats acc[kCount][kRows] = {};
    const float* digits = x.digits;
    const Index group_size = group_blocks(p);
    Index g = 0, group_end = group_size;
    for (Index block = 0; block < blocks;) {
      const Index end = min_of(min_of(block + kMaxRun, group_end), blocks);
      Ints sum[kCount][kRows][kPlanes] = {};
      const Index first = block;
      for (; block < end; ++block) {
        Ints w[kCount];
        JAXGEMV_UNROLL
        for (int r = 0; r < kCount; ++r) {
          const uint8_t* from = rows[r] + block * kBytes;
          __builtin_prefetch(from + kAhead);
          w[r] = (block + 1) * kLanes <= words ? load_words(from)
                                               : load_words(from, words - block * kLanes);
        }
        JAXGEMV_UNROLL
        for (int step = 0; step < kSteps; ++step) JAXGEMV_UNROLL
        for (int m = 0; m < kRows; ++m) {
          JAXGEMV_UNROLL
          for (int r = 0; r < kCount; ++r) {
            const Ints codes = kBits == kDigit ? w[r] : w[r] >> (step * kBits) & kMask;
            JAXGEMV_UNROLL
            for (int plane = 0; plane < kPlanes; ++plane)
              sum[r][m][plane] = dot(sum[r][m][plane], codes, load_ints(digits + plane * kLanes));
          }
          digits += kPlanes * kLanes;
        }
      }
      JAXGEMV_UNROLL
      for (int r = 0; r < kCount; ++r) {
        const Floats scale = lookup(load_floats(params.scale + r * params.size + g), group_of_lane);
        JAXGEMV_UNROLL
        for (int m = 0; m < kRows; ++m)
          acc[r][m] += value_of(sum[r][m]) * (scale * x.powers[first * kRows + m]);
      }
      if (end == group_end) g += lane_groups, group_end += group_size;
    }
    const Index groups = groups_of(p);
    JAXGEMV_UNROLL
    for (int r = 0; r < kCount; ++r) JAXGEMV_UNROLL
    for (int m = 0; m < kRows; ++m) {
      for (Index i = 0; i < groups; i += kLanes)
        acc[r][m] += load_floats(params.offset + r * params.size + i) *
                     load_floats(x.sums + m * padded(groups) + i);
      total[r][m] = acc[r][m];
    }
  }

  static constexpr int32_t kMask = static_cast<int32_t>(
      kDigit == 8 ? ((1u << kBits) - 1) * 0x01010101u : ((1u << kBits) - 1) * 0x00010001u);

  static Index scratch_size(const Problem& p) { return Params::scratch_size(p, kDigitTile); }

  template <int kRows, int kPlanes>
  static void run_tile(const Problem& p, const Operands& o, Index slice, Index stack,
                       const Arranged& x, Index begin, Index end, float* scratch) {
    constexpr int kCount = kDigitTile / kRows;
    Params params(p, scratch, kCount);
    int32_t lane_group[kLanes] = {};
    if (p.group < kCodes && p.group < p.K)
      for (Index i = 0; i < kLanes; ++i)
        lane_group[i] = static_cast<int32_t>(i * kLaneCodes / p.group);
    for (Index n0 = begin; n0 < end; n0 += kCount) {
      const uint8_t* rows[kCount];
      for (Index r = 0; r < kCount; ++r) {
        const Index n = min_of(n0 + r, end - 1);  // the last strip may repeat the last row
        rows[r] = o.packed + stack * o.packed_stack_stride + n * row_bytes(p.K, kBits);
        params.load(p, o, stack, n, r);
      }
      Floats total[kCount][kRows];
      multiply<kRows, kPlanes>(p, x, rows, params, load_ints(lane_group), total);
      for (Index r = 0; r < kCount && n0 + r < end; ++r) {
        const float bias = bias_of(o, stack, n0 + r);
        for (Index m = 0; m < min_of(kRows, p.M); ++m)
          write_float(p.y, o.y, (slice * p.M + m) * p.N + n0 + r, sum_of(total[r][m]) + bias);
      }
    }
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, float* arranged,
                  Index begin, Index end, float* scratch) {
    const Arranged x(p, arranged);
    const auto run_rows = [&]<int kRows>(std::integral_constant<int, kRows>) {
      constexpr int kFewer = planes_of(Dtype::kBF16), kMore = planes_of(Dtype::kF32);
      if (p.x == Dtype::kF32)
        run_tile<kRows, kMore>(p, o, slice, stack, x, begin, end, scratch);
      else
        run_tile<kRows, kFewer>(p, o, slice, stack, x, begin, end, scratch);
    };
    if (p.M == 1)
      run_rows(std::integral_constant<int, 1>());
    else if (p.M == 2)
      run_rows(std::integral_constant<int, 2>());
    else
      run_rows(std::integral_constant<int, 4>());
  }
};

}  // namespace
}  // namespace jaxgemv
