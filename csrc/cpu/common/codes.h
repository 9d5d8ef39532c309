// Codes<format, bits, kind of x>: how packed bytes become what a main loop multiplies with x. A new
// format is a specialisation here for each main loop that is to have it, and rows in isa/kernels.h.
// Under the rule of that file: internal linkage.
//
// Every specialisation has kFormat, kBits, kShifted (whether scaled values are shifted, by a zero or an offset) and
// kMid (the value of a code that stands for a weight of 0 in Affine::kSymmetric). An object is made for one stack
// entry of a call, and may hold a table of its weights; suits(p, o) says whether it can for this call.
#pragma once

#include "convert.h"
#include "spread.h"
#include "unroll.h"

namespace jaxgemv::cpu {
namespace {

// What a main loop multiplies weights with.
enum class XKind {
  kFloats,      // float32: f32_panel.h, weights_panel.h, transposed.h
  kBlocks,      // float32 in the order of blocks.h: f32_dot.h
  kSlices,      // slices of fixed-point numbers, of kSliceBits: int8_dot.h
  kParts,       // words of several codes: int8_panel.h
  kPairs,       // pairs of bfloat16: bf16_panel.h
  kPairBlocks,  // the same in the order of memory: bf16_dot.h
  kTileFloats,  // AMX tiles of bfloat16: amx_bf16.h
  kTileSlices,  // AMX tiles of int8 slices: amx_int8.h
};

template <Format kFormat, int kBits, XKind kX>
struct Codes;  // defined only for combinations that exist

template <typename C>
concept Exists = requires { C::kMid; };

template <int kCodeBits>
struct AffineCodes {
  static constexpr Format kFormat = Format::kAffine;
  static constexpr bool kShifted = true;
  static constexpr int kBits = kCodeBits;
  static constexpr float kMid = mid_code(kBits);

  AffineCodes(const Problem&, const Operands&, Index /*stack*/) {}
  static bool suits(const Problem&, const Operands&) { return true; }
};

// The base for formats whose codes stand for floats: a weight is such a float times a scale.
template <Format kOf, int kCodeBits>
struct FloatCodes {
  static constexpr Format kFormat = kOf;
  static constexpr bool kShifted = false;
  static constexpr int kBits = kCodeBits;
  static constexpr float kMid = 0;

  FloatCodes() = default;
  FloatCodes(const Problem&, const Operands&, Index /*stack*/) {}
  static bool suits(const Problem&, const Operands&) { return true; }
};

// convert(): the values of codes in the lowest bits of lanes, with anything in the bits above.
template <int kBits>
struct Codes<Format::kAffine, kBits, XKind::kFloats> : AffineCodes<kBits> {
  using AffineCodes<kBits>::AffineCodes;
  static constexpr bool kLookup = (1 << kBits) <= kLookupSize;  // faster than to convert

  // is_clean: the bits above are zero.
  Floats convert(Ints codes, bool is_clean = false) const {
    return to_floats(is_clean ? codes : codes & ((1 << kBits) - 1));
  }
  // With kLookup: lane j <- the value of code j; behind the last code, the same again.
  Floats all() const {
    Floats values = {};
    for (int j = 0; j < kLanes; ++j) values[j] = j % (1 << kBits);
    return values;
  }
};

// Values are entries of the codebook, which the table repeats where a vector holds more.
template <int kBits>
struct Codes<Format::kCodebook, kBits, XKind::kFloats> : FloatCodes<Format::kCodebook, kBits> {
  static constexpr int kEntries = 1 << kBits;
  static constexpr bool kLookup = kEntries <= kLookupSize;
  float table[kEntries > kLanes ? kEntries : kLanes];

  Codes(const Problem&, const Operands& o, Index stack) {
    const Param& book = o.codebook;
    read_floats(book.dtype, book.data, stack * book.stack_stride, kEntries, table);
    for (int i = kEntries; i < kLanes; ++i) table[i] = table[i - kEntries];
  }
  Floats convert(Ints codes, bool = false) const { return lookup<kEntries>(table, codes); }
  Floats all() const { return load_floats(table); }
};

// at(from): the values of kLanes neighbouring bytes, in units of kUnit.
template <Format kFloat8>
  requires(is_float8(kFloat8))
struct Codes<kFloat8, 8, XKind::kFloats> : FloatCodes<kFloat8, 8> {
  using FloatCodes<kFloat8, 8>::FloatCodes;
  static constexpr bool kLookup = false;
  static constexpr float kUnit = kFloat8 == Format::kE4M3 ? kE4M3Unit : 1;
  static Floats convert(Ints codes, bool = false) {
    return kFloat8 == Format::kE4M3 ? floats_of_e4m3(codes) : floats_of_e5m2(codes);
  }
  static Floats at(const uint8_t* bytes) {
    const char* from = reinterpret_cast<const char*>(bytes);
    return kFloat8 == Format::kE4M3 ? e4m3_at(from) : e5m2_at(from);
  }
};

// A block is one vector of packed weights, and unpacks to kSteps vectors of codes, in units as wide as a
// slice. A 32-bit lane of the block's sums belongs to kCodes / kLanes neighbouring codes. Where units are
// whole codes, unit i of the packed block holds codes i * kSteps .. + kSteps.
template <int kBits>
  requires(kSliceBits > 0 && 8 % kBits == 0)
struct Codes<Format::kAffine, kBits, XKind::kSlices> : AffineCodes<kBits> {
  using AffineCodes<kBits>::AffineCodes;
  static constexpr int kSteps = kSliceBits / kBits;
  static constexpr int kWords = kLanes;  // in a block
  static constexpr int kLargest = (1 << kBits) - 1;

  // Code `step` of each unit, as an unsigned number.
  static Ints at(Ints words, int step) {
    constexpr uint32_t kUnits = kSliceBits == 8 ? 0x01010101 : 0x00010001;
    return kBits == kSliceBits ? words
                               : words >> (step * kBits) & static_cast<int32_t>(kUnits * kLargest);
  }
  // Which code of the block is in that unit of that step.
  static constexpr int place(int step, int unit) { return unit * kSteps + step; }
};

// For widths whose codes straddle bytes: a lane gets four neighbouring codes.
template <int kBits>
  requires(kSliceBits > 0 && 8 % kBits != 0 && kCanSpread)
struct Codes<Format::kAffine, kBits, XKind::kSlices> : AffineCodes<kBits> {
  using AffineCodes<kBits>::AffineCodes;
  static constexpr int kSteps = kSliceBits / 8;
  static constexpr int kWords = kLanes * kBits / 8;
  static constexpr int kLargest = (1 << kBits) - 1;
  static constexpr int kLaneUnits = 32 / kSliceBits;

  static Ints at(Ints words, int step) { return spread<kBits>(words, step); }
  static constexpr int place(int step, int unit) {
    return unit / kLaneUnits * 4 + step * kLaneUnits + unit % kLaneUnits;
  }
};

// How 32 codes become pairs, one a lane, with a code in each 16-bit half: pair j is codes first(j) and
// first(j) + kApart, which is half a word of codes, or half of the 32.
template <int kBits>
struct PairOrder {
  static constexpr int kApart = 8 % kBits == 0 ? 16 / kBits : 16;
  uint16_t code[32] = {};  // the code in each half

  static constexpr int first(int pair) { return pair / kApart * 2 * kApart + pair % kApart; }
  constexpr PairOrder() {
    for (int i = 0; i < 32; ++i) code[i] = static_cast<uint16_t>(first(i / 2) + i % 2 * kApart);
  }
};

// Codes as bfloat16: the lowest kTableBits of each half of a lane choose from a table; wider codes are converted.
template <int kBits>
struct Codes<Format::kAffine, kBits, XKind::kPairs> : AffineCodes<kBits> {
  static constexpr PairOrder<kBits> kOrder{};
  static constexpr int kTableBits = kBits <= 5 ? 5 : 6;
  static constexpr bool kIsLookedUp = kBits <= kTableBits;
  uint16_t table[1 << kTableBits];  // bfloat16

  Codes(const Problem& p, const Operands& o, Index stack) : AffineCodes<kBits>(p, o, stack) {
    for (int i = 0; i < 1 << kTableBits; ++i)
      table[i] = static_cast<uint16_t>(bits_of_f32(static_cast<float>(i % (1 << kBits))) >> 16);
  }
};

// Every float8 is exact in bfloat16. The table holds magnitudes, to which lookups add the sign.
template <Format kFloat8>
struct Float8Pairs : FloatCodes<kFloat8, 8> {
  uint16_t table[128];

  Float8Pairs(const Problem&, const Operands&, Index) {
    for (uint32_t i = 0; i < 128; ++i)
      table[i] = static_cast<uint16_t>(
          (kFloat8 == Format::kE4M3 ? bits_of_e4m3(i) : bits_of_e5m2(i)) >> 16);
  }
};

// Entries of a codebook as bfloat16, and what these lose as another bfloat16; the tables repeat them up to kSize.
template <int kBits, int kTableBits>
struct BookPairs : FloatCodes<Format::kCodebook, kBits> {
  static constexpr int kEntries = 1 << kBits, kSize = 1 << kTableBits;
  // Limits on an entry's magnitude: products with x stay finite, and are as exact as with normal numbers.
  static constexpr float kLargest = 0x1p16f, kLeast = 0x1p-60f;
  uint16_t table[kSize], rest[kSize];
  bool has_rest = false;

  BookPairs(const Problem&, const Operands& o, Index stack) {
    float book[kEntries];
    read(o, stack, book);
    for (int i = 0; i < kSize; ++i) {
      const float entry = book[i % kEntries];
      table[i] = bf16_of_f32(entry);
      rest[i] = bf16_of_f32(entry - f32_of_bf16(table[i]));
      has_rest |= rest[i] != 0;
    }
  }
  static void read(const Operands& o, Index stack, float* book) {
    read_floats(o.codebook.dtype, o.codebook.data, stack * o.codebook.stack_stride, kEntries, book);
  }
  // Whether f(entry) is true for all entries of all codebooks of a call.
  template <typename F>
  static bool all(const Problem& p, const Operands& o, F&& f) {
    for (Index stack = 0; stack < (o.codebook.stack_stride > 0 ? p.stack : 1); ++stack) {
      float book[kEntries];
      read(o, stack, book);
      for (const float entry : book)
        if (!f(entry)) return false;
    }
    return true;
  }
  static bool is_fine(float entry) {
    const float magnitude = __builtin_fabsf(entry);
    return magnitude == 0 || (magnitude >= kLeast && magnitude <= kLargest);
  }
};

// Only codebooks whose entries are exact in bfloat16, such as E2M1's; suits() looks at the values.
template <int kBits>
  requires(kBits <= 6)
struct Codes<Format::kCodebook, kBits, XKind::kPairs> : BookPairs<kBits, kBits <= 5 ? 5 : 6> {
  using Base = BookPairs<kBits, kBits <= 5 ? 5 : 6>;
  using Base::Base;
  static constexpr PairOrder<kBits> kOrder{};
  static constexpr bool kIsLookedUp = true;
  static bool suits(const Problem& p, const Operands& o) {
    return Base::all(p, o, [](float entry) {
      return Base::is_fine(entry) && (bits_of_f32(entry) & 0xffff) == 0;
    });
  }
};

// Groups have to be whole chunks: where one ended inside of a chunk, infinite codes beside it would meet x = 0.
template <Format kFloat8>
  requires(is_float8(kFloat8))
struct Codes<kFloat8, 8, XKind::kPairs> : Float8Pairs<kFloat8> {
  using Float8Pairs<kFloat8>::Float8Pairs;
  static constexpr PairOrder<8> kOrder{};
  static constexpr bool kIsLookedUp = true;
  static bool suits(const Problem& p, const Operands&) {
    return p.group % 32 == 0 || p.group >= p.K;
  }
};

// Codes as bfloat16: the lowest five bits of a 16-bit word choose from a table.
template <int kBits>
  requires(4 % kBits == 0)
struct Codes<Format::kAffine, kBits, XKind::kTileFloats> : AffineCodes<kBits> {
  static constexpr int kSteps = 16 / kBits;
  static constexpr bool has_rest = false;
  uint16_t table[32], rest[32];  // bfloat16

  Codes(const Problem& p, const Operands& o, Index stack) : AffineCodes<kBits>(p, o, stack) {
    for (int i = 0; i < 32; ++i)
      table[i] = static_cast<uint16_t>(bits_of_f32(static_cast<float>(i % (1 << kBits))) >> 16);
  }
};

// Entries of a codebook have a second part if one bfloat16 is not exact: both are within 2^-17 of an entry.
template <int kBits>
  requires(4 % kBits == 0)
struct Codes<Format::kCodebook, kBits, XKind::kTileFloats> : BookPairs<kBits, 5> {
  using Base = BookPairs<kBits, 5>;
  using Base::Base;
  static constexpr int kSteps = 16 / kBits;
  static bool suits(const Problem& p, const Operands& o) { return Base::all(p, o, Base::is_fine); }
};
template <Format kFloat8>
  requires(is_float8(kFloat8))
struct Codes<kFloat8, 8, XKind::kTileFloats> : Float8Pairs<kFloat8> {
  using Float8Pairs<kFloat8>::Float8Pairs;
  static constexpr int kSteps = 2;
  static constexpr bool has_rest = false;
  uint16_t rest[128];
};

// A byte with codes c[0], c[1], .. from its lowest bit on is multiplied as remainders,
// r[s] = byte % 2^((s + 1) kBits), of which the last is the byte itself, where it lies in memory.
// Because c[s] = (r[s] - r[s - 1]) / 2^(s kBits), the sum of x[s] c[s] is that of z[s] r[s] with
// z[s] = x[s] / 2^(s kBits) - x[s + 1] / 2^((s + 1) kBits).
template <int kBits>
  requires(8 % kBits == 0)
struct Codes<Format::kAffine, kBits, XKind::kTileSlices> : AffineCodes<kBits> {
  using AffineCodes<kBits>::AffineCodes;
  static constexpr int kSteps = 8 / kBits;
  static constexpr int kShift = 8 - kBits;  // z is a multiple of 2^-kShift

  // r[step], for all but the last.
  Ints at(Ints words, int step) const {
    return words & static_cast<int32_t>(0x01010101 * ((1u << (step + 1) * kBits) - 1));
  }
  // z[step] of x[0..kSteps), times 2^kShift.
  static int64_t x_at(const int64_t* x, int step) {
    const int shift = kShift - kBits * step;
    return step + 1 < kSteps ? (x[step] << shift) - (x[step + 1] << (shift - kBits))
                             : x[step] << shift;
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
