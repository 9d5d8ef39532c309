// The CPU kernels. Each .cc here defines its vectors and includes this file, which then compiles for
// its instructions. Everything has internal linkage and nothing of the standard library is called: a
// shared inline function would be linked once, from any file, and fault on lesser processors.
//
// A kernel is a format, a kind of x (common/codes.h), a main loop, and the one epilogue
// (common/epilogue.h). In all main loops a sum is made in an order that k gives, whatever the
// threads:
//   int8_dot.h    up to kDotRows rows of x, bound by memory
//   int8_x_dot.h, f32_dot.h   the same for int8 x, and for codes that stand for floats
//   bf16_dot.h    the same for bfloat16 x, on processors with products of bfloat16
//   f32_panel.h   more rows, and whatever others do not take, bound by multiplications
//   int8_panel.h  the same for int8 x
//   bf16_panel.h  the same for bfloat16 x, on processors with products of bfloat16 and no AMX
//   amx_int8.h, amx_bf16.h   from two rows on, where there is AMX
//   weights_panel.h   more rows of bfloat16 x, where there is AMX or products of bfloat16
//   transposed.h  the transposed product
// and, apart from these, attention.h: attention of one token.
//
// An instruction set's vectors are Floats and Ints of kLanes lanes, and
//   load_words(from), load_words(from, count): kLanes words, or zeros behind the first `count`;
//   transpose(square): of kLanes vectors; sum_of(value): of the lanes;
//   widen_bytes(from): lane j <- byte j;
//   gather_words(from, places): lane j <- the 32 bits at from + places[4 j], a place below 16. It
//     may read 16 bytes, and leave anything in those beyond them;
//   lookup(table, index): table[index % kLanes]; kLookupSize: kLanes, or 0 if that takes long;
//   lookup<size>(table, index): the same of a table in memory that is longer, or as long and repeats
//     itself: table[index % size];
//   dot(sum, codes, slices): sums of products, in lanes of 32 bits, of unsigned codes and signed
//     slices of kSliceBits; that is 0 where the processor has no such thing;
// with kConvertsF16 also load_f16(from): kLanes values, and widen_to_shorts(from): kLanes bytes with signs;
// with kCanSpread, for common/spread.h,
//   shuffle_bytes(v, places): byte i <- v[places[i]] of the same 16 bytes, or 0 for a place of 128;
//   multiply_low(a, b), multiply_high(a, b): half of the products of unsigned 16-bit words,
// or, with kCanMultishift, multishift<bits>(words): byte i <- the bits from i * bits on.
// kTileRows rows of x times kTileVectors vectors of weights are in registers at once, in panel.h.
#pragma once

#include "../attention.h"
#include "../f32_dot.h"
#include "../f32_panel.h"
#include "../int8_dot.h"
#include "../int8_panel.h"
#include "../int8_x_dot.h"
#include "../transposed.h"

namespace jaxgemv::cpu {
namespace {

// What all products share around their main loop: packing x, and NaN for an index out of range. `packed` holds the
// norm's factors of rows (X), then rounded rows of x, and then what the main loop reads.
template <typename Main>
struct Product {
  // Whether a norm comes before the main loop, which takes none itself: only if its result may be rounded to x's dtype.
  static constexpr bool kRoundsNorm =
      !Main::takes(Dtype::kI8) && !Main::kOperands.has(Operand::kNorm);
  static constexpr OperandSet kOperands =
      Main::kOperands | (kRoundsNorm ? OperandSet::of(Operand::kNorm) : OperandSet{});

  static bool supports(const Problem& p, const Operands& o) {
    return (!kRoundsNorm || o.norm.data == nullptr || p.round_norm) && Main::supports(p, o);
  }

  static Index x_size(const Problem& p, const Operands& o) {
    return before(p, o) + Main::x_size(p, o);
  }

  static void prepare(const Problem& p, const Operands& o, float* packed) {
    Main::prepare(p, o, packed + before(p, o));
  }

  static bool pack_x(const Problem& p, const Operands& o, Index slice, Index m0, Index m1,
                     float* packed) {
    const Index stack = stack_of(o, slice);
    if (!has_entry(p, stack)) return true;
    const X x = {p, o, slice, stack, packed};
    x.normalise(m0, m1);
    float* const to = packed + before(p, o);
    if (!kRoundsNorm || o.norm.data == nullptr) return Main::pack(x, m0, m1, to);
    Operands rounded = o;
    rounded.norm = {}, rounded.x = packed + X::size(p, o);
    x.round(m0, m1, packed + X::size(p, o));
    return Main::pack({p, rounded, 0, stack, nullptr}, m0, m1, to);
  }

  static Index scratch_size(const Problem& p, const Operands& o, Index) {
    return Main::scratch_size(p, o);
  }

  static void run(const Problem& p, const Operands& o, Index slice, float* packed, const Tile& tile,
                  float*, float* scratch) {
    const Index stack = stack_of(o, slice);
    float* x = packed + before(p, o);
    if (has_entry(p, stack)) return Main::run(p, o, slice, stack, x, tile.n0, tile.n1, scratch);
    const Index width = is_gated(p.activation) ? p.N / 2 : p.N;
    for (Index m = 0; m < p.M; ++m)
      for (Index n = tile.n0, at = (slice * p.M + m) * width + n; n < tile.n1; ++n, ++at)
        if (p.is_exact())
          store(o.y, at, INT32_MIN);
        else
          write_float(p.y, o.y, at, __builtin_nanf(""));
  }

 private:
  // Floats in front of what the main loop reads.
  static Index before(const Problem& p, const Operands& o) {
    const bool rounds = kRoundsNorm && o.norm.data != nullptr;
    return X::size(p, o) + (rounds ? X::rounded_size(p) : 0);
  }
};

// Collects the rows of an instruction set's table.
struct Rows {
  static constexpr int kMost = 12 * 8 * 3;
  Kernel rows[kMost] = {};
  int count = 0;

  // Adds the kernels of a main loop for these formats, for all widths and dtypes of x that it has.
  template <template <typename> typename Loop, XKind kX, Format... kFormats>
  constexpr void add() {
    (add_one<Loop, kX, kFormats>(), ...);
  }

  // is_ragged: also for groups that are not whole blocks.
  template <Format... kFormats>
  constexpr void add_transposed(bool is_ragged) {
    (add_one_transposed<kFormats>(is_ragged), ...);
  }

 private:
  template <template <typename> typename Loop, XKind kX, Format kFormat>
  constexpr void add_one() {
    for_each_width([&]<int kBits>() {
      if constexpr (Exists<Codes<kFormat, kBits, kX>>) {
        using Main = Loop<Codes<kFormat, kBits, kX>>;
        using Whole = Product<Main>;
        for (const Dtype x : {Dtype::kF16, Dtype::kBF16, Dtype::kF32, Dtype::kI8})
          if (Main::takes(x))
            rows[count++] = {.info = {Main::kName, kFormat, kBits, x, Main::kRows,
                                      with_format(Whole::kOperands, kFormat)},
                             .takes_any_x = Main::kTakesAnyX,
                             .supports = Whole::supports,
                             .x_size = Whole::x_size,
                             .prepare = Whole::prepare,
                             .pack_x = Whole::pack_x,
                             .scratch_size = Whole::scratch_size,
                             .run = Whole::run,
                             .finish = nullptr};
      }
    });
  }

  template <Format kFormat>
  constexpr void add_one_transposed(bool is_ragged) {
    for_each_width([&]<int kBits>() {
      if constexpr (Exists<Codes<kFormat, kBits, XKind::kFloats>>) {
        using Main = Transposed<Codes<kFormat, kBits, XKind::kFloats>>;
        for (const Dtype x : {Dtype::kF16, Dtype::kBF16, Dtype::kF32})
          rows[count++] = {.info = {Main::kName, kFormat, kBits, x, kSharedRows,
                                    with_format(Main::kOperands, kFormat), /*transposed=*/true},
                           .takes_any_x = true,
                           .supports = is_ragged ? Main::supports : Main::supports_whole,
                           .x_size = Main::x_size,
                           .prepare = Main::prepare,
                           .pack_x = Main::pack_x,
                           .scratch_size = Main::scratch_size,
                           .run = Main::run,
                           .finish = Main::finish};
      }
    });
  }

  template <typename F>
  static constexpr void for_each_width(F&& f) {
    f.template operator()<1>(), f.template operator()<2>(), f.template operator()<3>();
    f.template operator()<4>(), f.template operator()<5>(), f.template operator()<6>();
    f.template operator()<7>(), f.template operator()<8>();
  }
};

constexpr void add_transposed_rows(Rows& rows, bool is_ragged) {
  rows.add_transposed<Format::kAffine, Format::kCodebook, Format::kE4M3, Format::kE5M2>(is_ragged);
}

// The kernels that use `dot` or `multishift`. The order of rows is that of preference (choose.h).
constexpr void add_dots(Rows& rows) {
  rows.add<Int8Dot, XKind::kSlices, Format::kAffine>();
  rows.add<Int8XDot, XKind::kSlices, Format::kAffine>();
  rows.add<Int8Panel, XKind::kParts, Format::kAffine>();
}

template <typename Add>
constexpr Rows make_rows(Add&& add) {
  Rows rows;
  add(rows);
  return rows;
}

[[maybe_unused]] constexpr Rows kDots = make_rows(add_dots);
// The kernels that every width of vectors has.
[[maybe_unused]] constexpr Rows kVectorRows = make_rows([](Rows& rows) {
  add_dots(rows);
  rows.add<F32Dot, XKind::kBlocks, Format::kCodebook, Format::kE4M3, Format::kE5M2>();
  rows.add<F32Panel, XKind::kFloats, Format::kAffine, Format::kCodebook, Format::kE4M3,
           Format::kE5M2>();
  add_transposed_rows(rows, /*is_ragged=*/false);
});
[[maybe_unused]] constexpr Rows kRaggedRows =
    make_rows([](Rows& rows) { add_transposed_rows(rows, /*is_ragged=*/true); });

constexpr Isa make_isa(const char* name) {
  return {name,
          {kVectorRows.rows, kVectorRows.count},
          {kRaggedRows.rows, kRaggedRows.count},
          nullptr,
          &attend,
          &attention_scratch};
}

// An instruction set with the vectors of `base`, whose rows these replace or extend.
constexpr Isa make_isa(const char* name, const Isa& base, const Rows& rows) {
  return {name, {rows.rows, rows.count}, {}, &base};
}

}  // namespace
}  // namespace jaxgemv::cpu
