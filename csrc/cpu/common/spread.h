// Codes of 3, 5, 6 and 7 bits, which straddle bytes, as units of slices. Under the rule of
// isa/kernels.h: internal linkage.
//
// 16 codes are 2 * kBits bytes, which 16 bytes of a vector have room for, with what lies before them
// in their first word. There a shuffle puts a code into 16 bits of its own, which hold all of it
// wherever it begins, and a multiplication by a power of two moves it to its place.
#pragma once

#include "vector.h"

namespace jaxgemv::cpu {
namespace {

// For the bytes of a vector: from which word and byte each comes, and the factors.
template <int kBits>
struct SpreadPlaces {
  static constexpr int kParts = kLanes / 4;
  // Codes that are treated alike: with 8-bit units the even ones or the odd ones, with 16-bit units those of
  // a step.
  struct Half {
    alignas(64) uint8_t byte[4 * kLanes];
    alignas(64) uint16_t factor[2 * kLanes];
  };
  alignas(64) int32_t word[kLanes];
  Half half[2];

  constexpr SpreadPlaces() : word(), half() {
    for (int part = 0; part < kParts; ++part) {
      const int first = part * 2 * kBits;
      for (int i = 0; i < 4; ++i) word[part * 4 + i] = (first / 4 + i) % kLanes;
      for (int h = 0; h < 2; ++h)
        for (int i = 0; i < 8; ++i) {
          const int code = kSliceBits == 8 ? 2 * i + h : i / 2 * 4 + 2 * h + i % 2;
          place(half[h], part * 8 + i, first % 4 * 8 + code * kBits, kSliceBits == 8 && h == 1);
        }
    }
  }

  // The upper half of a product with 2^n is a right shift by 16 - n, which cannot be 0: so a code that lies
  // within a byte is placed in the upper one. Odd codes become upper bytes by a left shift.
  constexpr void place(Half& to, int at, int bit, bool is_left) {
    const int shift = bit % 8, byte = bit / 8;
    const bool is_within = shift + kBits <= 8;
    constexpr int kZero = 128;
    const int low = is_within && !is_left ? kZero : byte;
    const int high = is_within ? (is_left ? kZero : byte) : byte + 1;
    to.byte[2 * at] = static_cast<uint8_t>(low);
    to.byte[2 * at + 1] = static_cast<uint8_t>(high);
    const int log = is_left ? 8 - shift : 16 - shift - (is_within ? 8 : 0);
    to.factor[at] = static_cast<uint16_t>(1 << log);
  }
};

// The units of step `step` of a block (common/codes.h) whose packed codes are words[0, kLanes * kBits / 8).
template <int kBits>
inline Ints spread(Ints words, int step) {
  static constexpr SpreadPlaces<kBits> kPlaces;
  constexpr int32_t kMask = (1 << kBits) - 1;
  if constexpr (kCanMultishift) {
    return multishift<kBits>(words) & kMask * 0x01010101;
  } else {
    const Ints parts = (Ints)lookup((Floats)words, load_ints(kPlaces.word));
    const auto half = [&](int h) { return shuffle_bytes(parts, load_ints(kPlaces.half[h].byte)); };
    const auto factor = [&](int h) { return load_ints(kPlaces.half[h].factor); };
    if constexpr (kSliceBits == 16) {
      return multiply_high(half(step), factor(step)) & kMask * 0x00010001;
    } else {
      const Ints even = multiply_high(half(0), factor(0)), odd = multiply_low(half(1), factor(1));
      return (even & kMask * 0x00010001) | (odd & kMask * 0x01000100);
    }
  }
}

}  // namespace
}  // namespace jaxgemv::cpu
