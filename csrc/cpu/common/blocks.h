// Codes of a row as transposed.h and f32_dot.h decode them, in blocks: lane j of a vector holds unit j, one or two
// consecutive codes, so that unpacking takes a widening load, shifts and masks. Under the rule of
// isa/kernels.h: internal linkage.
#pragma once

#include "codes.h"

namespace jaxgemv::cpu {
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

// Lane j <- unit j, with anything in the bits above it; or, of float8 with one code a lane, the value itself in units
// of C::kUnit.
template <typename C>
inline auto load_units(const uint8_t* from) {
  using B = Block<C::kBits>;
  if constexpr (B::kUnit == 1 && requires { C::at(from); }) {
    return C::at(from);
  } else if constexpr (B::kUnitIsByte) {
    return widen_bytes(from);
  } else {
    static constexpr Places<B::kUnit * C::kBits> kPlaces;
    Ints shift;
    __builtin_memcpy(&shift, kPlaces.shift, sizeof(shift));
    return gather_words(from, kPlaces.byte) >> shift;
  }
}

// Lane j <- the value of code i of unit j.
template <typename C>
inline Floats values_of(const C& codes, Ints units, int i) {
  using B = Block<C::kBits>;
  return codes.convert(units >> (i * C::kBits), B::kUnitIsByte && i == B::kUnit - 1);
}
template <typename C>
inline Floats values_of(const C&, Floats values, int) {
  return values * C::kUnit;
}

// The affine map of one row of the weight in one group. Where a vector has room for the weights of all codes
// (C::kLookup), these are computed once and looked up.
template <typename C>
struct Group {
  Floats zero, scale, offset, table;

  // there: whether the row exists; else its weights are 0, whatever codes stand for.
  void set(const C& codes, float z, float s, float o, bool there) {
    zero = broadcast(z), scale = broadcast(s), offset = broadcast(o);
    if constexpr (C::kLookup) table = there ? (codes.all() - zero) * scale + offset : Floats{};
  }
  template <typename Units>
  Floats weights(const C& codes, Units units, int i) const {
    if constexpr (C::kLookup)
      return lookup(table, units >> (i * C::kBits));
    else
      return (values_of(codes, units, i) - zero) * scale + offset;
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
