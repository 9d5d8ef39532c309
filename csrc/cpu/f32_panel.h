// Any number of rows of x and any of its values, any width and any group: weights become float32
// (panel.h). Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "panel.h"

namespace jaxgemv::cpu {
namespace {

// Rows of the weight, N, up to which x is not packed ("Any number of rows"; an AMD EPYC, two cores).
constexpr Index kFewRows = 512;

// acc[m][lane] += sum over k of x[m][k] * panel[k][lane], for kTileVectors vectors of lanes. A panel is
// summed by itself: one sum of all K would lose more than 2^-20 where nothing in it cancels. kStride: floats
// from a row of x to the next if known at compile time, so that one register addresses them all; else 0, and
// `stride` says it.
template <int kRows, Index kStride>
__attribute__((noinline)) void multiply_floats(const float* panel, const float* x, Index stride,
                                               Index count, float* acc) {
  if (kStride > 0) stride = kStride;
  Floats sum[kRows][kTileVectors] = {};
  // Prefetches the next tile's x, which is in the second-level cache if there are many rows.
  const float* ahead = x + kRows * stride;
  for (Index k = 0; k < count; ++k, panel += kRowBlock, ++x) {
    if (kStride > 0)
      __builtin_prefetch(ahead + k * kRows);
    else
      __builtin_prefetch(ahead + k % kRows * stride + k / kRows * kRows);
    Floats w[kTileVectors];
    JAXGEMV_UNROLL
    for (int v = 0; v < kTileVectors; ++v) w[v] = load_floats(panel + v * kLanes);
    JAXGEMV_UNROLL
    for (int m = 0; m < kRows; ++m) JAXGEMV_UNROLL
    for (int v = 0; v < kTileVectors; ++v) sum[m][v] += w[v] * x[m * stride];
  }
  JAXGEMV_UNROLL
  for (int m = 0; m < kRows; ++m) JAXGEMV_UNROLL
  for (int v = 0; v < kTileVectors; ++v) {
    float* to = acc + m * kRowBlock + v * kLanes;
    store_floats(to, load_floats(to) + sum[m][v]);
  }
}

template <typename C>
struct F32Panel : Panel<C, F32Panel<C>> {
  using Base = Panel<C, F32Panel<C>>;
  using typename Base::Scratch;
  static constexpr const char* kName = "f32_panel";
  static constexpr bool kTakesAnyX = true;
  static constexpr OperandSet kOperands = kAllParts;
  static constexpr bool takes(Dtype x) { return is_wide(x); }
  static constexpr int kBits = C::kBits, kPanelSteps = kPanelCodes;

  static bool supports(const Problem&, const Operands&) { return true; }

  // Whether x is read where it lies: for few rows of weights packing takes as long as multiplying.
  static bool reads_in_place(const Problem& p, const Operands& o) {
    return p.N <= kFewRows && p.x == Dtype::kF32 && o.norm.data == nullptr && !x_meets_y(p, o);
  }

  // [panel][row][code]
  static Index x_size(const Problem& p, const Operands& o) {
    return reads_in_place(p, o) ? 0 : Base::panels_of(p) * p.M * kPanelCodes;
  }
  static void prepare(const Problem&, const Operands&, float*) {}
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    if (reads_in_place(p, x.o)) return true;
    for_each_stripe(m0, m1, [&](Index m0, Index m1) {
      float* to = out;
      for (Index k = 0; k < p.K; k += kPanelCodes, to += p.M * kPanelCodes)
        for (Index m = m0; m < m1; ++m)
          x.read(m, k, min_of(kPanelCodes, p.K - k), to + m * kPanelCodes);
    });
    return true;
  }

  // The plan: where in by_group the parameters of each code's group begin.
  static Index plan_size(const Problem& p) { return Base::panels_of(p) * kPanelCodes; }
  static int32_t* places_of(float* plan) { return reinterpret_cast<int32_t*>(plan); }
  static void make_plan(const Problem& p, float* plan) {
    int32_t at = 0;
    for (Index k = 0, left = p.group; k < plan_size(p); ++k) {
      places_of(plan)[k] = at;
      if (--left == 0 && k + 1 < p.K) at += 2 * kRowBlock, left = p.group;
    }
  }

  // panel[k][lane] <- the finished weights of a chunk.
  static void unpack_chunk(const C& codes, const Ints* words, const Scratch& s, Index k0, int chunk,
                           int lane) {
    const int32_t* places = places_of(s.plan) + k0 + chunk * kChunkCodes;
    float* to = s.panel + chunk * kChunkCodes * kRowBlock + lane;
    constexpr std::make_integer_sequence<int, kChunkCodes> kAll;
    if (places[0] == places[kChunkCodes - 1])
      unpack_codes<true>(codes, words, s.by_group + lane, places, to, kAll);
    else
      unpack_codes<false>(codes, words, s.by_group + lane, places, to, kAll);
  }

  // Not inlined: gcc would work out the codes once for both forms, and keep them in memory.
  template <bool kOneGroup, int... kCode>
  __attribute__((noinline)) static void unpack_codes(const C& codes, const Ints* words,
                                                     const float* params, const int32_t* places,
                                                     float* panel,
                                                     std::integer_sequence<int, kCode...>) {
    Ints word[kBits];  // in registers: the stores below might be to `words`, for all compilers know
    JAXGEMV_UNROLL
    for (int i = 0; i < kBits; ++i) word[i] = words[i];
    Floats scale = load_floats(params + places[0]),
           offset = load_floats(params + places[0] + kRowBlock);
    const auto weight = [&](Floats code, int i) {
      if (!kOneGroup)
        scale = load_floats(params + places[i]),
        offset = load_floats(params + places[i] + kRowBlock);
      return C::kShifted ? code * scale + offset : code * scale;
    };
    (store_floats(panel + kCode * kRowBlock,
                  weight(value(codes, code_at<kBits, kCode * kBits>(word)), kCode)),
     ...);
  }

  static Floats value(const C& codes, Ints code) {
    if constexpr (C::kLookup)
      return lookup(codes.all(), code);
    else
      return codes.convert(code);
  }

  static XRows rows_of(const Problem& p, const Operands& o, Index slice, const float* packed) {
    if (!reads_in_place(p, o)) return {packed, kPanelCodes, p.M * kPanelCodes};
    return {static_cast<const float*>(o.x) + slice * p.M * p.K, p.K, kPanelCodes};
  }

  static void multiply(const Problem& p, const Scratch& s, Index k0, Index m0, Index m1, XRows& x) {
    const Index count = min_of(kPanelCodes, p.K - k0);
    Base::for_each_tile(m0, m1, [&]<int kTall>(Index m, int lane) {
      const auto run =
          x.row == kPanelCodes ? multiply_floats<kTall, kPanelCodes> : multiply_floats<kTall, 0>;
      run(s.panel + lane, x.at + m * x.row, x.row, count, s.acc + (m - m0) * kRowBlock + lane);
    });
    x.at += x.panel;
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
