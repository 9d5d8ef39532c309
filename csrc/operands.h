// The operands of a call, by the names that the custom call, the kernel tables and Python use.
#pragma once

#include <cstdint>
#include <iterator>
#include <string_view>

namespace jaxgemv {

// Up to and including kIndex they are arrays; the rest are properties of a call that no array shows by its presence.
enum class Operand : uint8_t {
  kX,
  kPacked,
  kScale,
  kZero,
  kOffset,
  kCodebook,
  kGlobalScale,
  kPerm,
  kXScale,
  kNorm,
  kBias,
  kResidual,
  kIndex,
  kActivation,    // an attribute
  kOneByteScale,  // scale is of a dtype of one byte
};

inline constexpr std::string_view kOperandNames[] = {
    "x",       "packed", "scale", "zero",     "offset", "codebook",   "global_scale",   "perm",
    "x_scale", "norm",   "bias",  "residual", "index",  "activation", "one_byte_scale",
};
inline constexpr int kOperandCount = static_cast<int>(std::size(kOperandNames));
inline constexpr int kArrayCount = static_cast<int>(Operand::kIndex) + 1;
static_assert(kOperandCount == static_cast<int>(Operand::kOneByteScale) + 1);

class OperandSet {
 public:
  template <typename... Each>
  static constexpr OperandSet of(Each... each) {
    OperandSet set;
    ((set.bits_ |= bit(each)), ...);
    return set;
  }

  constexpr bool has(Operand operand) const { return (bits_ & bit(operand)) != 0; }
  constexpr void add(Operand operand) { bits_ |= bit(operand); }
  constexpr bool has_any(OperandSet other) const { return (bits_ & other.bits_) != 0; }
  constexpr bool empty() const { return bits_ == 0; }

  constexpr OperandSet operator|(OperandSet other) const { return from(bits_ | other.bits_); }
  constexpr OperandSet without(OperandSet other) const { return from(bits_ & ~other.bits_); }

 private:
  static constexpr uint32_t bit(Operand operand) { return 1u << static_cast<int>(operand); }
  static constexpr OperandSet from(uint32_t bits) {
    OperandSet set;
    set.bits_ = bits;
    return set;
  }

  uint32_t bits_ = 0;
};

// Calls f(name) for each operand of the set.
template <typename F>
constexpr void for_each_name(OperandSet set, F&& f) {
  for (int i = 0; i < kOperandCount; ++i)
    if (set.has(static_cast<Operand>(i))) f(kOperandNames[i]);
}

// The operands that every product needs; only the exact integer product has no scale.
inline constexpr OperandSet kRequired =
    OperandSet::of(Operand::kX, Operand::kPacked, Operand::kScale);
// What the exact integer product (int32 y) may have besides x and packed.
inline constexpr OperandSet kExactOperands = OperandSet::of(Operand::kZero, Operand::kIndex);

}  // namespace jaxgemv
