// Pairs of bfloat16, of AVX-512 with BF16. Under the rule of kernels.h: internal linkage.
#pragma once

#include "../table.h"
#include "avx512.h"

namespace jaxgemv::cpu {
namespace {

// sum + products of both halves of a lane. Rounds to nearest, and takes subnormal numbers for zero.
inline Floats dot_pairs(Floats sum, Ints a, Ints b) {
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// The lower half of each lane of `low`, the upper of `high`.
inline Ints join_halves(Ints low, Ints high) {
  return (Ints)_mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)low, (__m512i)high);
}

// Looks up each half of a lane, whose lowest five or six bits choose.
inline Ints lookup_halves(Ints index, const uint16_t (&table)[32]) {
  return (Ints)_mm512_maskz_permutexvar_epi16(~0u, (__m512i)index, _mm512_loadu_si512(table));
}

inline Ints lookup_halves(Ints index, const uint16_t (&table)[64]) {
  return (Ints)_mm512_maskz_permutex2var_epi16(~0u, _mm512_loadu_si512(table), (__m512i)index,
                                               _mm512_loadu_si512(table + 32));
}

// For float8: the table has magnitudes, and bit 7 is the sign.
inline Ints lookup_halves(Ints index, const uint16_t (&table)[128]) {
  return (Ints)magnitudes_of((__m512i)index, table);
}

// x as pairs, and whether all that was packed is normal and within 2^kMostExponent, or zero.
class XPairs {
 public:
  // order[i]: which of 32 elements becomes half i.
  explicit XPairs(const uint16_t (&order)[32]) : order_(_mm512_loadu_si512(order)) {}

  // to[16 lanes] <- elements [begin, end) of the 32 that begin at `from`, and zeros. Returns lanes whose
  // sum is theirs.
  Floats pack(const char* from, int64_t begin, int64_t end, float* to) {
    constexpr int kExponent = 7;
    const uint32_t chosen = below(end) & ~below(begin);
    const __m512i x = _mm512_maskz_loadu_epi16(chosen, from);
    const __m512i magnitude = _mm512_and_si512(x, _mm512_set1_epi16(0x7fff));
    const __m512i least = _mm512_set1_epi16(1 << kExponent);
    const __m512i most = _mm512_set1_epi16((127 + kMostExponent) << kExponent);
    bad_ |=
        _mm512_cmpgt_epu16_mask(magnitude, most) |
        (_mm512_cmplt_epu16_mask(magnitude, least) & _mm512_test_epi16_mask(magnitude, magnitude));
    const __m512i pairs = _mm512_maskz_permutexvar_epi16(~0u, order_, x);
    _mm512_storeu_si512(to, pairs);
    return (Floats)((Ints)pairs << 16) + (Floats)((Ints)pairs & static_cast<int32_t>(0xffff0000));
  }

  bool in_range() const { return bad_ == 0; }

 private:
  static uint32_t below(int64_t i) { return i >= 32 ? ~0u : i <= 0 ? 0 : (uint32_t{1} << i) - 1; }

  __m512i order_;
  uint32_t bad_ = 0;
};

}  // namespace
}  // namespace jaxgemv::cpu
