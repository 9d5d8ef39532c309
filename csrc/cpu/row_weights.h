// Finished weights of rows, as bfloat16 in the order of memory: what weights_panel.h multiplies. Under the rule
// of isa/kernels.h: internal linkage.
//
// A step is kTileWords codes of a row. Codes of few bits choose from a table of finished weights, one for each
// group; wider codes become float32 and are scaled.
#pragma once

#include "common/codes.h"
#include "isa/steps.h"

namespace jaxgemv::cpu {
namespace {

// kKeepsRest: what a weight loses by rounding to bfloat16 is kept as a second bfloat16.
template <typename C, bool kKeepsRest>
class RowWeights {
  static constexpr int kBits = C::kBits;
  static constexpr bool kLooksUp = kBits <= 5, kIsFloat8 = is_float8(C::kFormat);
  static constexpr StepOrder<kBits> kOrder{};

 public:
  static constexpr int kStep = kTileWords, kStepBytes = kStep / 8 * kBits;
  static constexpr const uint16_t (&kCodes)[kStep] = kOrder.code;

  // group: codes that share a scale. plan: scratch, of plan_size(p).
  RowWeights(const Problem& p, const C& codes, Index group, int32_t* plan)
      : p_(p), codes_(codes), group_(group), groups_(groups_in(p, group)), plan_(plan) {
    if (kLooksUp)
      for (int half = 0; half < 2; ++half)
        entries_[half] = codes.convert(lane_numbers() + half * kLanes);
    for (Index i = 0; i < plan_size(p, group); ++i)
      plan[i] =
          static_cast<int32_t>(min_of(i / kStep * kStep + kOrder.code[i % kStep], p.K - 1) / group);
  }
  static Index plan_size(const Problem& p, Index group) {
    return groups_in(p, group) == kMany ? ceil_div(p.K, Index{kStep}) * kStep : 0;
  }

  // to[step][part of a weight][row] <- steps [begin, end) of kRowBlock rows, in which codes behind K are zeros.
  // scale, offset: [row][group], with rows `stride` apart. ahead: where as many bytes are prefetched.
  void unpack(const uint8_t* const (&rows)[kRowBlock], Index begin, Index end, const float* scale,
              const float* offset, Index stride, const uint8_t* ahead, uint16_t* to) const {
    const Index whole = min_of(end, p_.K / kStep);
    if (groups_ == kOne && group_ > kStep)
      unpack_groups(rows, begin, whole, scale, offset, stride, ahead, to);
    else
      unpack_steps(rows, begin, whole, scale, offset, stride, ahead, to);
    if (whole == end) return;
    // The last step, which K fills in part: bytes up to the row's end, of which those behind K may be anything.
    const Index left = row_bytes(p_.K, kBits) - whole * kStepBytes;
    const Index group = group_ >= p_.K ? 0 : whole * kStep / group_;
    to += (whole - begin) * kStepSize;
    for (Index r = 0; r < kRowBlock; ++r, scale += stride, offset += stride) {
      uint8_t last[kStepBytes] = {};
      __builtin_memcpy(last, rows[r] + whole * kStepBytes, static_cast<size_t>(left));
      const Rounded weights =
          groups_ == kMany
              ? convert(last, many(whole, scale, offset))
              : Table(*this, scale + group, offset + group, groups_ == kTwo).weights(*this, last);
      put(weights.of_halves(kOrder.halves(p_.K % kStep)), to + r * kStep);
    }
  }

 private:
  enum Groups { kOne, kTwo, kMany };                     // groups that a step has
  static constexpr Index kPartSize = kRowBlock * kStep;  // of weights
  static constexpr Index kStepSize = (1 + kKeepsRest) * kPartSize;

  const Problem& p_;
  const C& codes_;
  const Index group_;
  const Groups groups_;
  const int32_t* plan_;  // with kMany: the group of each code, as steps have them
  Floats entries_[2];    // where kLooksUp, the first ones, and the others or the same again

  static Groups groups_in(const Problem& p, Index group) {
    return group >= p.K || group % kStep == 0 ? kOne : group == kLanes ? kTwo : kMany;
  }

  static void put(const Rounded& weights, uint16_t* to) {
    __builtin_memcpy(to, &weights.kept, sizeof(Ints));
    if (kKeepsRest) __builtin_memcpy(to + kPartSize, &weights.rest, sizeof(Ints));
  }

  // These two unpack whole steps of all rows: unpack_groups where groups are several steps, unpack_steps elsewhere.
  // Not inlined: they need their registers.
  __attribute__((noinline)) void unpack_groups(const uint8_t* const (&rows)[kRowBlock], Index begin,
                                               Index end, const float* scale, const float* offset,
                                               Index stride, const uint8_t* ahead,
                                               uint16_t* to) const {
    const Index steps = group_ >= p_.K ? end : group_ / kStep;
    for (Index r = 0; r < kRowBlock; ++r, scale += stride, offset += stride) {
      ahead = prefetch(ahead, (end - begin) * kStepBytes);
      uint16_t* at = to + r * kStep;
      const uint8_t* from = rows[r] + begin * kStepBytes;
      for (Index step = begin, group = begin / steps, next; step < end; step = next, ++group) {
        next = min_of((group + 1) * steps, end);
        const Table table(*this, scale + group, offset + group, 0);
        for (Index i = step; i < next; ++i, from += kStepBytes, at += kStepSize)
          put(table.weights(*this, from), at);
      }
    }
  }
  __attribute__((noinline)) void unpack_steps(const uint8_t* const (&rows)[kRowBlock], Index begin,
                                              Index end, const float* scale, const float* offset,
                                              Index stride, const uint8_t* ahead,
                                              uint16_t* to) const {
    const Index each = groups_ == kTwo ? 2 : 1;
    for (Index r = 0; r < kRowBlock; ++r, scale += stride, offset += stride) {
      ahead = prefetch(ahead, (end - begin) * kStepBytes);
      uint16_t* at = to + r * kStep;
      for (Index step = begin; step < end; ++step, at += kStepSize) {
        const uint8_t* from = rows[r] + step * kStepBytes;
        if (groups_ == kMany)
          put(convert(from, many(step, scale, offset)), at);
        else
          put(Table(*this, scale + each * step, offset + each * step, each - 1)
                  .weights(*this, from),
              at);
      }
    }
  }

  static constexpr float kUnit = [] {
    if constexpr (kIsFloat8) return C::kUnit;
    return 1.f;
  }();

  // Scale and offset of each lane, for both halves of a step.
  struct Terms {
    Floats scale[2], offset[2];
  };
  Terms many(Index step, const float* scale, const float* offset) const {
    const Ints groups[] = {load_ints(plan_ + step * kStep),
                           load_ints(plan_ + step * kStep + kLanes)};
    return {{gather(scale, groups[0]) * kUnit, gather(scale, groups[1]) * kUnit},
            {gather(offset, groups[0]), gather(offset, groups[1])}};
  }

  // What turns codes into weights in a step with one group, or with two, a half of the step each.
  struct Table {
    Terms terms;
    Rounded chosen;
    bool is_one;

    Table(const RowWeights& self, const float* scale, const float* offset, Index apart)
        : terms{{broadcast(scale[0] * kUnit), broadcast(scale[apart] * kUnit)},
                {broadcast(offset[0]), broadcast(offset[apart])}},
          is_one(apart == 0) {
      if constexpr (kBits <= 4) {
        const Floats first = weight(self.entries_[0], terms, 0);
        chosen = is_one ? Rounded::twice<kKeepsRest>(first)
                        : Rounded::of<kKeepsRest>(first, weight(self.entries_[0], terms, 1));
      } else if (kLooksUp && is_one) {
        chosen = Rounded::of<kKeepsRest>(weight(self.entries_[0], terms, 0),
                                         weight(self.entries_[1], terms, 0));
      }
    }
    Rounded weights(const RowWeights& self, const uint8_t* from) const {
      if constexpr (kBits <= 4)
        return chosen.at<kKeepsRest>(with_upper_halves<kBits>(load_step<kBits>(from)));
      else if (kLooksUp && is_one)
        return chosen.at<kKeepsRest>(load_step<kBits>(from));
      else
        return self.convert(from, terms);
    }
  };

  static Floats weight(Floats value, const Terms& terms, int half) {
    return C::kShifted ? value * terms.scale[half] + terms.offset[half] : value * terms.scale[half];
  }

  Rounded convert(const uint8_t* from, const Terms& terms) const {
    constexpr bool kMayBeInfinite = C::kFormat == Format::kE5M2;
    Floats values[2];
    if constexpr (kIsFloat8) {
      const Halfwords bytes = load_signed_step(from);
      const Halfwords halves = C::kFormat == Format::kE4M3 ? halves_of_e4m3(bytes) : bytes << 8;
      for (int half = 0; half < 2; ++half) values[half] = lanes_of_f16(halves, half);
    } else {
      const Ints codes = load_step<kBits>(from);
      for (int half = 0; half < 2; ++half)
        values[half] = codes_.convert(lanes_of(codes, half), kBits == 8);
    }
    return Rounded::of<kKeepsRest, kMayBeInfinite>(weight(values[0], terms, 0),
                                                   weight(values[1], terms, 1));
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
