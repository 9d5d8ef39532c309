// From packed bytes to vectors of float32 weights. Part of kernel.h, and under its rule: internal
// linkage.
//
// Codes are met in blocks: lane j of a vector holds unit j, one or two consecutive codes, so that
// unpacking takes a widening load, shifts and masks. A level defines kLanes and the vectors Floats
// and Ints of so many lanes;
//   widen_bytes(from): lane j <- byte j;
//   gather_words(from, places): lane j <- the 32 bits at from + places[4 j], a place below 16. It
//   may
//     read 16 bytes, and leave anything in those beyond them;
//   lookup(table, index): table[index % kLookupSize], where the processor has that.
#pragma once

#include <cstdint>

#include "../format.h"

namespace jaxgemv {
namespace {

template <int kBits>
struct Block {
  static constexpr int kUnit = kBits <= 4 || kLanes < kOctet ? 2 : 1;  // codes in a lane
  static constexpr int kCodes = kUnit * kLanes;
  static constexpr int kBytes = kCodes * kBits / 8;
  static constexpr bool kUnitIsByte = kUnit * kBits == 8;
  static constexpr int kReach = kUnitIsByte ? kBytes : 16;  // bytes that a load touches
  static constexpr int kTail = 2 * (kReach > kBytes ? kReach : kBytes);
  static_assert(kCodes % kOctet == 0, "blocks start on whole octets");
};

inline Floats load_floats(const float* from) {
  Floats value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

inline Floats broadcast(float value) { return Floats{} + value; }

// Where the units of a block start when they are not bytes.
template <int kUnitBits>
struct Places {
  alignas(64) uint8_t byte[4 * kLanes] = {};
  alignas(64) int32_t shift[kLanes] = {};

  constexpr Places() {
    for (int j = 0; j < kLanes; ++j) {
      for (int i = 0; i < 4; ++i) byte[4 * j + i] = static_cast<uint8_t>(j * kUnitBits / 8 + i);
      shift[j] = j * kUnitBits % 8;
    }
  }
};

// Lane j <- unit j, with anything above it.
template <int kBits>
inline Ints load_units(const uint8_t* from) {
  if constexpr (Block<kBits>::kUnitIsByte) {
    return widen_bytes(from);
  } else {
    static constexpr Places<Block<kBits>::kUnit * kBits> kPlaces;
    Ints shift;
    __builtin_memcpy(&shift, kPlaces.shift, sizeof(shift));
    return gather_words(from, kPlaces.byte) >> shift;
  }
}

template <int kBits>
inline Floats codes_of(Ints units, int i) {
  const Ints code = units >> (i * kBits);
  const bool is_clean = Block<kBits>::kUnitIsByte && i == Block<kBits>::kUnit - 1;
  return __builtin_convertvector(is_clean ? code : code & ((1 << kBits) - 1), Floats);
}

// The affine map of one row of weights in one group. Where a vector holds the weights of all codes,
// they are looked up.
template <int kBits>
struct Group {
  static constexpr bool kLookup = (1 << kBits) <= kLookupSize;
  Floats zero, scale, offset, table;

  static Floats all_codes() {
    Floats codes = {};
    for (int j = 0; j < kLanes; ++j) codes[j] = j % (1 << kBits);
    return codes;
  }
  void set(float z, float s, float o) {
    zero = broadcast(z), scale = broadcast(s), offset = broadcast(o);
    if constexpr (kLookup) table = (all_codes() - zero) * scale + offset;
  }
  Floats weights(Ints units, int i) const {
    if constexpr (kLookup)
      return lookup(table, units >> (i * kBits));
    else
      return (codes_of<kBits>(units, i) - zero) * scale + offset;
  }
};

}  // namespace
}  // namespace jaxgemv
