// Elements of fixed-point x that lose more than kFixedError of themselves, where they are few: what they
// lose is multiplied separately, so that all the others need no further slice. Under the rule of
// isa/kernels.h: internal linkage.
//
// An element is held to half a quantum, a quantum being about 2^-30 of the largest element of its
// run: so one below 2^-11 of that may be one of these, about 4 of 4096 Gaussian values. Each has to
// be right to 2^-20 of itself, since a weight may be 0 where x is large: docs/cpu-notes.md, "Every
// width in int8_dot".
#pragma once

#include "codes.h"
#include "fixed_point.h"

namespace jaxgemv::cpu {
namespace {

// The small elements of a row of x. Zeros do not count.
struct SmallX {
  // Code k of the weight is to be multiplied by rest * factors[factor]; byte, next and shift say where it lies.
  struct Element {
    float rest;
    int32_t factor, byte, next, shift;
  };
  static constexpr int kMost = 32;
  int32_t count;  // above kMost: too many
  Element elements[kMost];

  // Each takes as long as a further slice does in two blocks, of 64 to 512 codes.
  static Index most(const Problem& p) { return min_of(kMost, 2 + p.K / 256); }

  void add(const Problem& p, Index k, Index factor, float rest) {
    if (count >= most(p)) {
      count = kMost + 1;
      return;
    }
    const auto bit = static_cast<int32_t>(k % kOctet * p.bits), shift = bit % 8;
    elements[count++] = {rest, static_cast<int32_t>(factor),
                         static_cast<int32_t>(k / kOctet * p.bits) + bit / 8, shift + p.bits > 8,
                         shift};
  }
  bool is_too_many() const { return count > kMost; }

  // What is missing in the sum of a row of the weight.
  template <typename C>
  float times(const uint8_t* row, const float* factors) const {
    float sum = 0;
    for (const Element *e = elements, *end = e + count; e < end; ++e) {
      const int both = row[e->byte] | row[e->byte + e->next] << 8;
      sum += e->rest * factors[e->factor] * static_cast<float>(both >> e->shift & C::kLargest);
    }
    return sum;
  }
};
static_assert(sizeof(SmallX) % 4 == 0);

}  // namespace
}  // namespace jaxgemv::cpu
