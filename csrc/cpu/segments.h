// Panels with several codes in each word of a lane: their products with as many elements of x are summed a
// group at a time, and then scaled. What bf16_panel.h and int8_panel.h share. Under the rule of
// isa/kernels.h: internal linkage.
#pragma once

#include "panel.h"

namespace jaxgemv::cpu {
namespace {

// The codes of a group in a panel, [begin, end), and the chunks of x that hold them.
struct Segment {
  Index group, begin, end;

  Index first() const { return begin / kChunkCodes; }
  Index chunks() const { return ceil_div(end, Index{kChunkCodes}) - first(); }
};

// Calls f(segment) for the segments of the panel that begins at k0: codes that share a scale, whose x does too.
template <typename F>
inline void for_each_segment(const Problem& p, Index k0, F&& f) {
  const Index size = min_of(kPanelCodes, p.K - k0);
  for (Index at = 0, end; at < size; at = end) {
    const Index k = k0 + at, group = k / p.group;
    end = min_of(size, (group + 1) * p.group - k0);
    if (p.x_group > 0) end = min_of(end, (k / p.x_group + 1) * p.x_group - k0);
    f(Segment{group, at, end});
  }
}

// acc[m][lane] += what Form makes of the sum of panel[word][lane] * x[m][word], over `chunks` of a panel, for
// kTileVectors vectors of lanes. x: a chunk's [row][word], `apart` floats from the next chunk's. of_rows: values of m.
template <typename Form, int kRows>
__attribute__((noinline)) void multiply_words(const float* panel, const float* x, Index chunks,
                                              Index apart, const float* of_rows, Index rows,
                                              const float* scale, const float* offset, float* acc) {
  typename Form::Sum sum[kRows][kTileVectors] = {};
  for (Index chunk = 0; chunk < chunks; ++chunk, x += apart) {
    // Prefetches the next tile's x.
    const float *at = x, *ahead = x + kRows * Form::kWords;
    for (int word = 0; word < Form::kWords; ++word, panel += kRowBlock, ++at, ahead += kRows) {
      __builtin_prefetch(ahead);
      Ints w[kTileVectors];
      JAXGEMV_UNROLL
      for (int v = 0; v < kTileVectors; ++v) w[v] = in_register(load_ints(panel + v * kLanes));
      JAXGEMV_UNROLL
      for (int m = 0; m < kRows; ++m) {
        const Ints words = Ints{} + load<int32_t>(at, m * Form::kWords);
        JAXGEMV_UNROLL
        for (int v = 0; v < kTileVectors; ++v) sum[m][v] = Form::dot(sum[m][v], w[v], words);
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
    store_floats(to,
                 Form::add(load_floats(to), sum[m][v], scales[v], offsets[v], of_rows + m, rows));
  }
}

// Form has, besides what Panel requires,
//   kWords, words of a row in a chunk; kOfRows, values that a segment has for each row of x;
//   Sum, and dot(sum, words of weights, words of x);
//   add(acc, sum, scale, offset, of_rows, rows), where of_rows[i * rows] is value i of the row;
//   pack_segment(x, k0, segment, m0, m1, packer, of_rows, words).
template <typename C, typename Form>
struct SegmentPanel : Panel<C, Form> {
  using Base = Panel<C, Form>;
  using typename Base::Scratch;

  static Index size_of_rows(const Problem& p) { return padded(p.M); }
  static Index size_of(const Problem& p, const Segment& segment) {
    return Form::kOfRows * size_of_rows(p) + segment.chunks() * p.M * Form::kWords;
  }
  static Index x_size(const Problem& p, const Operands&) {
    Index size = 0;
    for (Index k0 = 0; k0 < p.K; k0 += kPanelCodes)
      for_each_segment(p, k0, [&](const Segment& segment) { size += size_of(p, segment); });
    return size;
  }
  static void prepare(const Problem&, const Operands&, float*) {}

  template <typename Packer>
  static void pack_segments(const X& x, Index m0, Index m1, Packer& packer, float* out) {
    const Problem& p = x.p;
    for_each_stripe(m0, m1, [&](Index m0, Index m1) {
      float* to = out;
      for (Index k0 = 0; k0 < p.K; k0 += kPanelCodes)
        for_each_segment(p, k0, [&](const Segment& segment) {
          Form::pack_segment(x, k0, segment, m0, m1, packer, to,
                             to + Form::kOfRows * size_of_rows(p));
          to += size_of(p, segment);
        });
    });
  }

  static Index plan_size(const Problem&) { return 0; }
  static void make_plan(const Problem&, float*) {}

  static XRows rows_of(const Problem&, const Operands&, Index, const float* packed) {
    return {packed, 0, 0};
  }

  template <typename Adder = Form>
  static void multiply_segments(const Problem& p, const Scratch& s, Index k0, Index m0, Index m1,
                                XRows& rows) {
    const float*& x = rows.at;
    for_each_segment(p, k0, [&](const Segment& segment) {
      const float* words = x + Form::kOfRows * size_of_rows(p);
      const float* panel = s.panel + segment.first() * Form::kWords * kRowBlock;
      const float* scale = s.by_group + segment.group * 2 * kRowBlock;
      Base::for_each_tile(m0, m1, [&]<int kTall>(Index m, int lane) {
        multiply_words<Adder, kTall>(panel + lane, words + m * Form::kWords, segment.chunks(),
                                     p.M * Form::kWords, x + m, size_of_rows(p), scale + lane,
                                     scale + kRowBlock + lane, s.acc + (m - m0) * kRowBlock + lane);
      });
      x += size_of(p, segment);
    });
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
