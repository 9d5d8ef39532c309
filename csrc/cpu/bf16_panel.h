// Many rows of bfloat16 x by dot products of pairs of bfloat16, which are twice as many in a vector as
// float32 (panel.h). Under the rule of isa/kernels.h: internal linkage.
//
// Codes are bfloat16 as they are. Products of a group are summed in float32, at most those of a
// panel, and then scaled, so that no product is rounded; x behind the ends of a group is zero. The
// instruction takes subnormal numbers for zero: x that has some, or sums that might be no float32, is
// left to f32_panel.h.
#pragma once

#include "isa/avx512bf16.h"
#include "panel.h"

namespace jaxgemv::cpu {
namespace {

constexpr int kChunkPairs = kChunkCodes / 2;  // as many as lanes
// How far ahead x is asked for when it is packed, whose rows are several streams.
constexpr Index kAheadBytes = 1024;

// acc[m][lane] += scale[lane] * dot(panel[..][lane], x[m]) + offset[lane] * x_sums[m], for kTileVectors
// vectors of lanes and `chunks` of a panel. x: [row][pair] of each, so many apart.
template <int kRows>
__attribute__((noinline)) void multiply_pairs(const float* panel, const float* x, Index chunks,
                                              Index apart, const float* x_sums, const float* scale,
                                              const float* offset, float* acc) {
  Floats sum[kRows][kTileVectors] = {};
  for (Index chunk = 0; chunk < chunks; ++chunk, x += apart) {
    // The next tile's x.
    const float *at = x, *ahead = x + kRows * kChunkPairs;
    for (int pair = 0; pair < kChunkPairs; ++pair, panel += kRowBlock, ++at, ahead += kRows) {
      __builtin_prefetch(ahead);
      Ints w[kTileVectors];
      JAXGEMV_UNROLL
      for (int v = 0; v < kTileVectors; ++v) w[v] = in_register(load_ints(panel + v * kLanes));
      JAXGEMV_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const Ints pairs = Ints{} + load<int32_t>(at, m * kChunkPairs);
        JAXGEMV_UNROLL
        for (int v = 0; v < kTileVectors; ++v) sum[m][v] = dot_pairs(sum[m][v], w[v], pairs);
      }
    }
  }
  Floats scales[kTileVectors], offsets[kTileVectors];
  JAXGEMV_UNROLL
  for (int v = 0; v < kTileVectors; ++v)
    scales[v] = load_floats(scale + v * kLanes), offsets[v] = load_floats(offset + v * kLanes);
  JAXGEMV_UNROLL
  for (int m = 0; m < kRows; ++m) JAXGEMV_UNROLL
  for (int v = 0; v < kTileVectors; ++v) {
    float* to = acc + m * kRowBlock + v * kLanes;
    // Not one after the other to `to`, which is the larger sum.
    store_floats(to, load_floats(to) + (sum[m][v] * scales[v] + offsets[v] * x_sums[m]));
  }
}

template <typename C>
struct Bf16Panel : Panel<C, Bf16Panel<C>> {
  using Base = Panel<C, Bf16Panel<C>>;
  using typename Base::Scratch;
  static constexpr const char* kName = "bf16_panel";
  static constexpr bool kTakesAnyX = false;
  static constexpr OperandSet kOperands = kAllParts.without(OperandSet::of(Operand::kNorm));
  static constexpr bool takes(Dtype x) { return x == Dtype::kBF16; }
  static constexpr int kBits = C::kBits, kPanelSteps = kPanelCodes / 2;

  // Chunks are multiplied once for each group in them.
  static bool supports(const Problem& p, const Operands&) {
    return p.group >= min_of(kChunkCodes, p.K);
  }

  // The codes of a group in a panel, [begin, end), and the chunks of x that hold them.
  struct Segment {
    Index group, begin, end;

    Index first() const { return begin / kChunkCodes; }
    Index chunks() const { return ceil_div(end, Index{kChunkCodes}) - first(); }
    // The sums of rows, and their chunks: [chunk][row][pair].
    static Index sums_size(const Problem& p) { return padded(p.M); }
    Index x_size(const Problem& p) const { return sums_size(p) + chunks() * p.M * kChunkPairs; }
  };

  // f(segment), for those of the panel that begins with k0.
  template <typename F>
  static void for_each_segment(const Problem& p, Index k0, F&& f) {
    const Index size = min_of(kPanelCodes, p.K - k0);
    Index group = k0 / p.group;
    for (Index at = 0, end; at < size; at = end, ++group) {
      end = min_of(size, (group + 1) * p.group - k0);
      f(Segment{group, at, end});
    }
  }

  static Index x_size(const Problem& p, const Operands&) {
    Index size = 0;
    for (Index k0 = 0; k0 < p.K; k0 += kPanelCodes)
      for_each_segment(p, k0, [&](const Segment& segment) { size += segment.x_size(p); });
    return size;
  }
  static void prepare(const Problem&, const Operands&, float*) {}

  // False where an element is out of range.
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    XPairs pairs(C::kOrder.code);
    for_each_stripe(m0, m1, [&](Index m0, Index m1) {
      float* to = out;
      for (Index k0 = 0; k0 < x.p.K; k0 += kPanelCodes)
        for_each_segment(x.p, k0, [&](const Segment& segment) {
          pack_segment(x, k0, segment, m0, m1, pairs, to);
          to += segment.x_size(x.p);
        });
    });
    return pairs.in_range();
  }

  static void pack_segment(const X& x, Index k0, const Segment& segment, Index m0, Index m1,
                           XPairs& pairs, float* out) {
    const Problem& p = x.p;
    const Index chunks = segment.chunks(), first = segment.first() * kChunkCodes;
    const char* all = static_cast<const char*>(x.o.x);
    float* to = out + Segment::sums_size(p);
    for (Index m = m0; m < m1; ++m) {
      const Index row = (x.slice * p.M + m) * p.K + k0;
      Floats sum = {};
      for (Index i = 0, at = first; i < chunks; ++i, at += kChunkCodes) {
        const char* from = all + (row + at) * size_of(Dtype::kBF16);
        __builtin_prefetch(from + kAheadBytes);
        sum += pairs.pack(from, segment.begin - at, segment.end - at,
                          to + (i * p.M + m) * kChunkPairs);
      }
      out[m] = sum_of(sum);
    }
  }

  static Index plan_size(const Problem&) { return 0; }
  static void make_plan(const Problem&, float*) {}

  // panel[pair][lane], codes.
  static void unpack_chunk(const C& codes, const Ints* words, const Scratch& s, Index, int chunk,
                           int lane) {
    unpack_pairs(codes, words, s.panel + chunk * kChunkPairs * kRowBlock + lane,
                 std::make_integer_sequence<int, kChunkPairs>());
  }

  template <int... kPair>
  static void unpack_pairs(const C& codes, const Ints* words, float* panel,
                           std::integer_sequence<int, kPair...>) {
    Ints word[kBits];  // in registers, as in f32_panel.h
    JAXGEMV_UNROLL
    for (int i = 0; i < kBits; ++i) word[i] = words[i];
    (store_floats(panel + kPair * kRowBlock, (Floats)value(codes, halves<kPair>(word))), ...);
  }

  static Ints value(const C& codes, Ints halves) {
    if constexpr (kBits <= C::kTableBits) {
      return lookup_halves(halves, codes.table);
    } else {
      constexpr int32_t kMask = (1 << kBits) - 1;
      const Floats low = to_floats(halves & kMask), high = to_floats(halves >> 16 & kMask);
      return (Ints)low >> 16 | (Ints)high;
    }
  }

  // Both codes of a pair, each in the lowest bits of half a lane with anything above it.
  template <int kPair>
  static Ints halves(const Ints (&word)[kBits]) {
    constexpr int kLow = C::kOrder.first(kPair) * kBits, kHigh = kLow + C::kOrder.kApart * kBits;
    if constexpr (kHigh == kLow + 16 && kLow % 32 < 16)
      return code_at<kBits, kLow>(word);
    else
      return join_halves(code_at<kBits, kLow>(word), code_at<kBits, kHigh, 16>(word));
  }

  static XRows rows_of(const Problem&, const Operands&, Index, const float* packed) {
    return {packed, 0, 0};
  }

  static void multiply(const Problem& p, const Scratch& s, Index k0, Index m0, Index m1,
                       XRows& rows) {
    const float*& x = rows.at;
    for_each_segment(p, k0, [&](const Segment& segment) {
      const float* pairs = x + Segment::sums_size(p);
      const float* panel = s.panel + segment.first() * kChunkPairs * kRowBlock;
      const float* scale = s.by_group + segment.group * 2 * kRowBlock;
      Base::for_each_tile(m0, m1, [&]<int kTall>(Index m, int lane) {
        multiply_pairs<kTall>(panel + lane, pairs + m * kChunkPairs, segment.chunks(),
                              p.M * kChunkPairs, x + m, scale + lane, scale + kRowBlock + lane,
                              s.acc + (m - m0) * kRowBlock + lane);
      });
      x += segment.x_size(p);
    });
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
