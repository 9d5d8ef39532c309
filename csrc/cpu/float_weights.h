// Finished weights of a panel, in float32: what f32_panel.h and amx_panel.h share. Under the rule of
// isa/kernels.h: internal linkage.
#pragma once

#include "panel.h"

namespace jaxgemv::cpu {
namespace {

template <typename C>
struct FloatWeights {
  static constexpr int kBits = C::kBits;

  // plan[k] <- where the parameters of code k's group are in by_group; behind K, of the last one's.
  static void make_plan(const Problem& p, Index count, float* plan) {
    int32_t at = 0;
    for (Index k = 0, left = p.group; k < count; ++k) {
      store(plan, k, at);
      if (--left == 0 && k + 1 < p.K) at += 2 * kRowBlock, left = p.group;
    }
  }

  // put(pair, weights, weights), of codes 2 * pair and the next, for all of a chunk.
  template <typename Put>
  static void unpack(const C& codes, const Ints* words, const float* by_group, const float* plan,
                     Put put) {
    const int32_t* places = reinterpret_cast<const int32_t*>(plan);
    constexpr std::make_integer_sequence<int, kChunkCodes / 2> kAll;
    if (places[0] == places[kChunkCodes - 1])
      unpack_pairs<true>(codes, words, by_group, places, put, kAll);
    else
      unpack_pairs<false>(codes, words, by_group, places, put, kAll);
  }

 private:
  // Not inlined: gcc would work out the codes once for both forms, and keep them in memory.
  template <bool kOneGroup, typename Put, int... kPair>
  __attribute__((noinline)) static void unpack_pairs(const C& codes, const Ints* words,
                                                     const float* params, const int32_t* places,
                                                     Put put,
                                                     std::integer_sequence<int, kPair...>) {
    Ints word[kBits];  // in registers: what is put might be `words`, for all compilers know
    JAXGEMV_UNROLL
    for (int i = 0; i < kBits; ++i) word[i] = words[i];
    Floats scale = load_floats(params + places[0]),
           offset = load_floats(params + places[0] + kRowBlock);
    const auto weight = [&]<int kCode>() {
      if (!kOneGroup)
        scale = load_floats(params + places[kCode]),
        offset = load_floats(params + places[kCode] + kRowBlock);
      const Floats code = value(codes, code_at<kBits, kCode * kBits>(word));
      return C::kShifted ? code * scale + offset : code * scale;
    };
    const auto put_pair = [&]<int kFirst>() {
      const Floats first = weight.template operator()<2 * kFirst>();
      put(kFirst, first, weight.template operator()<2 * kFirst + 1>());
    };
    (put_pair.template operator()<kPair>(), ...);
  }

  static Floats value(const C& codes, Ints code) {
    if constexpr (C::kLookup)
      return lookup(codes.all(), code);
    else
      return codes.convert(code);
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
