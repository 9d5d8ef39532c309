// x for int8_dot.h: fixed point, cut into slices, which are signed integers of kSliceBits. Under the rule of
// isa/kernels.h: internal linkage.
#pragma once

#include <type_traits>

#include "common/fixed_point.h"
#include "common/params.h"
#include "common/small_x.h"
#include "common/x.h"

namespace jaxgemv::cpu {
namespace {

// Without an instruction for slices any width will do that compiles: nothing uses it.
constexpr int kSliceWidth = kSliceBits > 0 ? kSliceBits : 8;

// Bits of an element. float32 gets one slice more where many elements need it (common/small_x.h).
constexpr int kFixedBits = 30;
constexpr int kFewSlices = 32 / kSliceWidth, kAllSlices = kFewSlices + 1;
constexpr float kNextSlice = 1 << kSliceWidth;

template <typename C>
struct SlicedX {
  static constexpr int kSteps = C::kSteps;
  static constexpr int kUnits = 32 * kLanes / kSliceWidth;
  static constexpr int kCodes = kSteps * kUnits;  // in a block
  static constexpr Index kWords = C::kWords, kBytes = 4 * kWords;
  static constexpr Index kMaxRun = kRunCodes / kCodes > 1 ? kRunCodes / kCodes : 1;  // blocks
  static_assert(kMaxRun * kCodes / kLanes * C::kLargest < 1 << 15);
  using Slice = std::conditional_t<kSliceWidth == 8, uint8_t, uint16_t>;

  // Computed once, because divisions are slow.
  struct Shape {
    Index blocks, whole_blocks;      // blocks of a row of the weight; whole ones
    Index last_words, groups;        // words behind whole blocks; groups of a row
    Index group_blocks, group_runs;  // blocks and runs of a group
    Index runs;
    bool is_narrow;      // blocks hold several groups each:
    Index block_groups;  // groups in a block
    Index factors_size;  // floats for a row of weights and one of x

    explicit Shape(const Problem& p) {
      // A block that lacks codes is not whole, even if it lacks no word: some of its lanes may have no group.
      blocks = ceil_div(p.K, Index{kCodes}), whole_blocks = p.K / kCodes;
      last_words = row_bytes(p.K, C::kBits) / 4 - whole_blocks * kWords;
      groups = groups_of(p);
      is_narrow = p.group < kCodes && p.group < p.K;
      block_groups = is_narrow ? kCodes / p.group : 1;
      group_blocks = p.group >= p.K ? blocks : max_of(1, p.group / kCodes);
      group_runs = ceil_div(group_blocks, kMaxRun);
      runs = ceil_div(blocks, group_blocks) * group_runs;
      factors_size = padded(runs);
    }
  };

  // The packed x, in this order.
  struct Packed {
    float* sums;    // [row][group]: of x
    float* quanta;  // [row][run]
    SmallX* small;  // [with all slices][row]
    float* slices;  // [block][step][row][slice]: vectors, with room for all
    Index size;     // in floats

    Packed(const Problem& p, float* at) {
      const Shape shape(p);
      const Index rows = p.M;
      sums = at;
      quanta = sums + rows * padded(shape.groups);
      float* end = quanta + rows * padded(shape.runs);
      small = reinterpret_cast<SmallX*>(end);
      slices = end + padded(2 * rows * Index{sizeof(SmallX) / 4});
      size = slices - at + shape.blocks * kSteps * rows * kAllSlices * kLanes;
    }

    bool needs_all_slices(const Problem& p) const {
      for (Index m = 0; m < p.M; ++m)
        if (small[m].is_too_many()) return true;
      return false;
    }
  };

  static Index x_size(const Problem& p, const Operands&) { return Packed(p, nullptr).size; }

  static void prepare(const Problem& p, const Operands& o, float* out) {
    for (float* end = out + x_size(p, o); out < end; ++out) *out = 0;
  }

  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    const Packed to(p, out);
    const Shape shape(p);
    const bool is_float = is_float_x(p, x.o);
    const Index rows = p.M, blocks = shape.blocks, group_size = shape.group_blocks;
    float natural[kMaxRun * kCodes];
    for (Index m = m0; m < m1; ++m) {
      float* sums = to.sums + m * padded(shape.groups);
      float* quantum = to.quanta + m * padded(shape.runs);
      SmallX &few = to.small[m], &all = to.small[rows + m];
      for (Index block = 0, end; block < blocks; block = end, ++quantum) {
        end = min_of(min_of(block + kMaxRun, (block / group_size + 1) * group_size), blocks);
        const Index k = block * kCodes, count = min_of(end * kCodes, p.K) - k;
        for (Index i = count; i < (end - block) * kCodes; ++i) natural[i] = 0;
        x.read(m, k, count, natural);
        for (Index i = 0; i < count;) {
          const Index g = p.group >= p.K ? 0 : (k + i) / p.group;
          const Index stop = p.group >= p.K ? count : min_of((g + 1) * p.group - k, count);
          float sum = 0;
          for (; i < stop; ++i) sum += natural[i];
          sums[g] += sum;
        }
        if (!quantum_of(natural, (end - block) * kCodes, quantum)) return false;
        const float inverse = 1 / *quantum;
        const Index run = quantum - to.quanta - m * padded(shape.runs);
        for (Index b = block; b < end; ++b) {
          const float* x_block = natural + (b - block) * kCodes;
          const bool is_small = cut(x_block, inverse, is_float, rows,
                                    to.slices + (b * kSteps * rows + m) * kAllSlices * kLanes);
          if (is_small) find_small(p, shape, x_block, b * kCodes, run, *quantum, few, all);
        }
      }
      if (few.is_too_many() && (!is_float || all.is_too_many())) return false;
    }
    return true;
  }

  static bool quantum_of(const float* x, Index count, float* quantum) {
    const uint32_t largest = largest_magnitude(x, count);
    const int exponent = static_cast<int>(largest >> 23);
    if (largest == 0) return *quantum = 1, true;
    if (exponent == 255 || exponent <= kFixedBits + 24) return false;
    *quantum = f32_of_bits(static_cast<uint32_t>(exponent + 1 - kFixedBits) << 23);
    return true;
  }

  // The value of the extra slice, from what the other slices leave.
  static int32_t last_slice(float rest) {
    constexpr int kLast = (1 << (kSliceWidth - 1)) - 1;
    const int32_t next = nearest<int32_t>(rest * kNextSlice);
    return next > kLast ? kLast : next;
  }

  // In a block that begins at code k: adds to `few` the elements that kFewSlices do not hold well enough, and to
  // `all` those that kAllSlices do not.
  static void find_small(const Problem& p, const Shape& shape, const float* x, Index k, Index run,
                         float quantum, SmallX& few, SmallX& all) {
    const auto add = [&](SmallX& small, Index i, float rest) {
      if (shape.is_narrow)
        small.add(p, k + i, (k + i) / p.group, rest * quantum);
      else
        small.add(p, k + i, run, rest);
    };
    for (Index i = 0; i < kCodes; ++i) {
      const float value = x[i] * (1 / quantum);
      const float rest = value - static_cast<float>(nearest<int32_t>(value));
      if (!is_off(x[i], value, rest)) continue;
      if (value == 0) return few.count = all.count = SmallX::kMost + 1, void();
      add(few, i, rest);
      const float left = rest - static_cast<float>(last_slice(rest)) / kNextSlice;
      if (is_off(x[i], value, left)) add(all, i, left);
    }
  }

  // Writes the slices of a block. Returns whether some element needs more than the first kFewSlices.
  static bool cut(const float* x, float inverse, bool is_float, Index rows, float* out) {
    constexpr uint32_t kBias = kSliceWidth == 8 ? 0x808080 : 0x8000;
    uint32_t fixed[kCodes];
    int32_t last[kCodes];
    int32_t small = 0;
    for (int i = 0; i < kCodes; ++i) {
      const float value = x[i] * inverse;
      const int32_t whole = nearest<int32_t>(value);
      const float rest = value - static_cast<float>(whole);
      small |= is_off(x[i], value, rest);
      fixed[i] = (static_cast<uint32_t>(whole) + kBias) ^ kBias;
      last[i] = last_slice(rest);
    }
    for (int step = 0; step < kSteps; ++step) {
      Slice* to = reinterpret_cast<Slice*>(out + step * rows * kAllSlices * kLanes);
      for (int slice = 0; slice < kFewSlices; ++slice, to += kUnits)
        for (int i = 0; i < kUnits; ++i)
          to[i] = static_cast<Slice>(fixed[C::place(step, i)] >> (slice * kSliceWidth));
      if (is_float)
        for (int i = 0; i < kUnits; ++i) to[i] = static_cast<Slice>(last[C::place(step, i)]);
    }
    return small;
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
