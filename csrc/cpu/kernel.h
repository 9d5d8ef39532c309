// The CPU kernels. Each level_*.cc defines its vectors and includes this file, which then compiles
// for the level's instructions. Everything has internal linkage and nothing of the standard library
// is called: a shared inline function would be linked once, from any level, and fault on lesser
// processors.
//
// Up to kDigitRows rows of x go to digits.h, bound by memory; more of them, and what it does not
// take, to panel.h, bound by multiplications. Where there is AMX, tiles.h and tile_digits.h come
// before both. In all a sum is made in an order that k gives, whatever the threads.
//
// A level's vectors are Floats and Ints of kLanes lanes, and
//   load_words(from), load_words(from, count): kLanes words, or zeros behind the first `count`;
//   transpose(square): of kLanes vectors;
//   lookup(table, index): table[index % kLanes]; sum_of(value): of the lanes;
//   dot(sum, codes, digits): sums of products, in lanes of 32 bits, of unsigned codes and signed
//     digits of kDigitBits; that is 0 where the processor has no such thing.
// kTileRows rows of x times kTileVectors vectors of weights are in registers at once, in panel.h.
#pragma once

#include "digits.h"
#include "panel.h"
#include "transposed.h"

namespace jaxgemv {
namespace {

// A first line of what is arranged says which of two kernels it is for.
constexpr Index kHeader = 16;

// The first kernel for the calls and the values of x that it accepts, the second for the others.
template <typename First, typename Second>
struct Either {
  static Index arranged_size(const Problem& p) {
    return kHeader +
           max_of(First::accepts(p) ? First::arranged_size(p) : 0, Second::arranged_size(p));
  }

  static void prepare(const Problem& p, float* out) {
    out[0] = First::accepts(p);
    out[0] ? First::prepare(p, out + kHeader) : Second::prepare(p, out + kHeader);
  }

  static bool arrange(const Problem& p, const Operands& o, Index slice, Index m0, Index m1,
                      float* out) {
    return out[0] ? First::arrange(p, o, slice, m0, m1, out + kHeader)
                  : Second::arrange(p, o, slice, m0, m1, out + kHeader);
  }

  static void fall_back(const Problem& p, float* out) {
    if (!out[0]) return Second::fall_back(p, out + kHeader);
    out[0] = 0;
    Second::prepare(p, out + kHeader);
  }

  static Index scratch_size(const Problem& p) {
    return max_of(First::accepts(p) ? First::scratch_size(p) : 0, Second::scratch_size(p));
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, float* arranged,
                  Index begin, Index end, float* scratch) {
    if (arranged[0])
      First::run(p, o, slice, stack, arranged + kHeader, begin, end, scratch);
    else
      Second::run(p, o, slice, stack, arranged + kHeader, begin, end, scratch);
  }
};

template <int kBits>
using Gemv =
    std::conditional_t<Digits<kBits>::kExists, Either<Digits<kBits>, Panel<kBits>>, Panel<kBits>>;

template <typename Chosen>
struct Entry {
  static void run(const Problem& p, const Operands& o, Index slice, float* arranged, Index begin,
                  Index end, float* scratch) {
    const Index stack = o.index == nullptr ? 0 : load<int32_t>(o.index, slice);
    if (stack >= 0 && stack < p.stack)
      return Chosen::run(p, o, slice, stack, arranged, begin, end, scratch);
    for (Index m = 0; m < p.M; ++m)
      for (Index n = begin; n < end; ++n)
        write_float(p.y, o.y, (slice * p.M + m) * p.N + n, __builtin_nanf(""));
  }

  static constexpr Kernel kKernel = {Chosen::arranged_size, Chosen::prepare,      Chosen::arrange,
                                     Chosen::fall_back,     Chosen::scratch_size, run};
};

template <template <int> typename Chosen, int... kIndex>
constexpr Level make_level(const char* name, int rows, std::integer_sequence<int, kIndex...>) {
  return {
      name, rows, {Entry<Chosen<kIndex + 1>>::kKernel...}, {Transposed<kIndex + 1>::kKernel...}};
}

// The kernels of all widths.
template <template <int> typename Chosen>
constexpr Level make_level(const char* name, int rows) {
  return make_level<Chosen>(name, rows, std::make_integer_sequence<int, 8>());
}

}  // namespace
}  // namespace jaxgemv
