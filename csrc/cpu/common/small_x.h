// Elements of fixed-point x that lose more than kFixedError of themselves, where they are few: what
// they lose is multiplied by itself, so that the others need no slice more. Under the rule of
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

// Of a row of x. Zeros are none.
struct SmallX {
  // What code k of the weight has to be multiplied by: rest * factors[factor]. Where that code is.
  struct Element {
    float rest;
    int32_t factor, byte, next, shift;
  };
  static constexpr int kMost = 32;
  int32_t count;  // above kMost: too many
  Element elements[kMost];

  // Each takes as long as two blocks, of 64 to 512 codes, do with a slice more.
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

  // Of a row of the weight: what is missing in its sum.
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
