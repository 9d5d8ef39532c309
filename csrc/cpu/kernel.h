// The CPU kernels. Each level_*.cc defines its vectors and includes this file, which then compiles
// for the level's instructions. Everything has internal linkage and nothing of the standard library
// is called: a shared inline function would be linked once, from any level, and fault on lesser
// processors.
//
// Up to kDigitRows rows of x go to digits.h, bound by memory; more of them, and what it does not
// take, to panel.h, bound by multiplications. In both a sum is made in the order of k, whatever the
// threads.
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

// Everything for one width.
template <int kBits>
struct Gemv {
  using D = Digits<kBits>;
  using P = Panel<kBits>;

  // A first line that says which kernel x is arranged for.
  static constexpr Index kHeader = 16;

  static Index arranged_size(const Problem& p) {
    Index size = P::arranged_size(p);
    if (D::accepts(p)) size = max_of(size, typename D::Arranged(p, nullptr).size);
    return kHeader + size;
  }

  static void arrange(const Problem& p, const Operands& o, Index slice, float* out) {
    out[0] = 0;
    if constexpr (D::kExists) out[0] = D::accepts(p) && D::arrange(p, o, slice, out + kHeader);
    if (!out[0]) P::arrange(p, o, slice, out + kHeader);
  }

  static Index scratch_size(const Problem& p) {
    return max_of(P::scratch_size(p), D::scratch_size(p));
  }

  static void run(const Problem& p, const Operands& o, Index slice, float* arranged, Index begin,
                  Index end, float* scratch) {
    const Index stack = o.index == nullptr ? 0 : load<int32_t>(o.index, slice);
    if (stack < 0 || stack >= p.stack) {
      for (Index m = 0; m < p.M; ++m)
        for (Index n = begin; n < end; ++n)
          write_float(p.y, o.y, (slice * p.M + m) * p.N + n, __builtin_nanf(""));
      return;
    }
    if constexpr (D::kExists)
      if (arranged[0]) return D::run(p, o, slice, stack, arranged + kHeader, begin, end, scratch);
    P::run(p, o, slice, stack, arranged + kHeader, begin, end, scratch);
  }

  static constexpr Kernel kKernel = {arranged_size, arrange, scratch_size, run};
};

constexpr Level make_level(const char* name) {
  return {name,
          {Gemv<1>::kKernel, Gemv<2>::kKernel, Gemv<3>::kKernel, Gemv<4>::kKernel, Gemv<5>::kKernel,
           Gemv<6>::kKernel, Gemv<7>::kKernel, Gemv<8>::kKernel},
          {Transposed<1>::kKernel, Transposed<2>::kKernel, Transposed<3>::kKernel,
           Transposed<4>::kKernel, Transposed<5>::kKernel, Transposed<6>::kKernel,
           Transposed<7>::kKernel, Transposed<8>::kKernel}};
}

}  // namespace
}  // namespace jaxgemv
