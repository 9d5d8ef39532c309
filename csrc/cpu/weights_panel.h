// Many rows of bfloat16 x, any width and any group: finished weights as bfloat16 (row_weights.h).
// Under the rule of isa/kernels.h: internal linkage.
//
// A weight is rounded to bfloat16 where the call allows it. Else, with AMX, what this loses is kept as a second
// bfloat16, and the two are within 2^-18 of the weight. So nothing is left to be done once a group, unlike in
// amx_bf16.h and amx_int8.h, which scale sums. Only where groups of integers are a panel or more are sums scaled here
// too: the weights are then the codes, which are exact in bfloat16.
#pragma once

#include "common/epilogue.h"
#include "common/params.h"
#include "common/x.h"
#include "row_weights.h"

namespace jaxgemv::cpu {
namespace {

// Product: multiplies a panel by tiles of x, for an instruction set (isa/amx_weights.h, isa/avx512bf16_weights.h).
template <typename C, typename Product>
struct WeightsPanel {
  static constexpr const char* kName = Product::kName;
  static constexpr int kRows = kSharingRows;
  static constexpr bool kTakesAnyX = false;
  static constexpr OperandSet kOperands = kAllParts.without(OperandSet::of(Operand::kNorm));
  static constexpr bool takes(Dtype x) { return x == Dtype::kBF16; }
  static constexpr int kBits = C::kBits;
  template <bool kKeepsRest>
  using Weights = RowWeights<C, kKeepsRest>;
  static constexpr int kStep = Weights<false>::kStep;  // codes
  static constexpr Index kTile = kTileHeight * kTileWords, kSums = kRowBlock * kLanes;
  // kDepth: weights of a row in a panel, over all parts, a third of the first-level cache. kBlocks: row blocks whose
  // sums stay in the second-level cache, with a panel's x ("Finished weights on AMX").
  static constexpr Index kDepth = 256, kBlocks = 8, kFewValues = 512 << 10, kFewGroups = 1024;
  // Limits on magnitudes of scales and shifts other than zero: weights, and what these lose, are then normal numbers.
  static constexpr float kLeast = 0x1p-50f, kMost = 0x1p100f;
  // Codes in a row from which on 2^-18 of a weight is less than what float32 sums may lose.
  static constexpr Index kLeastCodes = 192;

  using Book = BookPairs<kBits, kBits <= 5 ? 5 : kBits>;  // of a codebook

  static bool supports(const Problem& p, const Operands& o) {
    if constexpr (C::kFormat == Format::kCodebook) {
      if (!Book::all(p, o, Book::is_fine)) return false;
    }
    return p.rounded || is_exact(p, o) || (Product::kHasTwoParts && p.K >= kLeastCodes);
  }

  // Whether weights are exact in bfloat16: it holds the significands of a code and a one-byte scale together.
  static bool is_exact(const Problem& p, const Operands& o) {
    if (o.scale.dtype != Dtype::kE4M3 && o.scale.dtype != Dtype::kE8M0) return false;
    if constexpr (C::kFormat == Format::kCodebook) {
      const uint32_t behind = o.scale.dtype == Dtype::kE8M0 ? 0xffff : 0xfffff;
      return Book::all(p, o, [=](float entry) { return (bits_of_f32(entry) & behind) == 0; });
    }
    return C::kFormat != Format::kAffine;
  }

  static bool scales_sums(const Problem& p) {
    return C::kFormat == Format::kAffine && !p.rounded && fills_panels(p);
  }

  struct Shape {
    bool scales_sums;
    Index group;   // codes that share a finished weight's scale
    Index parts;   // bfloat16 numbers of a weight
    Index depth;   // codes of a row in a panel
    Index groups;  // groups in a row, padded
    Index steps;   // in a row
    Index tiles;   // tiles of rows of x, which are columns
    int columns;   // columns of each tile
    Index shared;  // tiles that share a panel
    Index blocks;  // row blocks that are multiplied with x of a panel
    Index plan;    // size of the plan of Weights

    Shape(const Problem& p, const Operands& o) {
      scales_sums = WeightsPanel::scales_sums(p), group = scales_sums ? p.K : min_of(p.group, p.K);
      parts = p.rounded || scales_sums || is_exact(p, o) ? 1 : 2, depth = kDepth / parts;
      if (scales_sums && p.group < p.K && p.group % kDepth != 0) depth = kSumGroup;
      groups = padded(groups_of(p));
      steps = ceil_div(p.K, Index{kStep});
      plan = Weights<false>::plan_size(p, group);
      tiles = ceil_div(p.M, Index{kLanes}), columns = static_cast<int>(ceil_div(p.M, tiles));
      shared = min_of(tiles, kSharingRows / kLanes);
      blocks = shared * columns * p.K <= kFewValues
                   ? 1
                   : max_of(1, min_of(kBlocks, kFewGroups / groups));
    }
    Index tile_size() const { return kTileHeight * columns; }  // of a step, in floats
    Index x_size() const { return steps * tiles * tile_size(); }
    // x: [panel][tile][step in it][pair of codes][column]
    Index place(Index step, Index tile) const {
      const Index each = depth / kStep, first = step / each * each;
      return (first * tiles + tile * min_of(each, steps - first) + step - first) * tile_size();
    }
  };

  static Index x_size(const Problem& p, const Operands& o) {
    const Shape shape(p, o);
    const Index panels = ceil_div(p.K, shape.depth);
    return shape.x_size() + (shape.scales_sums ? panels * shape.tiles * kLanes : 0);
  }
  // Behind the packed x lie its sums over each panel: [panel][tile][column]
  template <typename Float>
  static Float* x_sums(const Shape& shape, Float* x, Index panel, Index tile) {
    return x + shape.x_size() + (panel * shape.tiles + tile) * kLanes;
  }
  static void prepare(const Problem&, const Operands&, float*) {}

  // False if an element of x, or a parameter of this call's share of the weight's rows, is out of range. Columns
  // without a row of x are left as they are.
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    const Shape shape(p, x.o);
    XPairs pairs(Weights<false>::kCodes);
    const char* all = static_cast<const char*>(x.o.x) + x.slice * p.M * p.K * size_of(Dtype::kBF16);
    for (Index m = m0, next; m < m1; m = next) {
      const Index tile = m / shape.columns;
      next = min_of((tile + 1) * shape.columns, m1);
      Floats sum[kLanes] = {};  // of one row of x each
      for (Index step = 0; step < shape.steps; ++step) {
        Ints square[kLanes] = {};  // a row of x each, then a pair of codes each
        const Index k = step * kStep, count = next - m;
        Floats of_rows[kLanes];
        for (Index i = 0; i < count; ++i)
          of_rows[i] = pairs.pack(all + ((m + i) * p.K + k) * size_of(Dtype::kBF16), 0,
                                  min_of(kStep, p.K - k), reinterpret_cast<float*>(square + i));
        transpose(square);
        float* to = out + shape.place(step, tile) + m % shape.columns;
        for (int pair = 0; pair < kTileHeight; ++pair, to += shape.columns)
          __builtin_memcpy(to, &square[pair], static_cast<size_t>(count) * sizeof(float));
        if (!shape.scales_sums) continue;
        const bool is_last = (step + 1) * kStep % shape.depth == 0 || step + 1 == shape.steps;
        float* sums = x_sums(shape, out, k / shape.depth, tile) + m % shape.columns;
        for (Index i = 0; i < count; ++i) {
          sum[i] += of_rows[i];
          if (is_last) sums[i] = sum_of(sum[i]), sum[i] = Floats{};
        }
      }
    }
    const Index n0 = p.N * m0 / p.M, n1 = p.N * m1 / p.M;
    return pairs.in_range() && in_range(p, x.o.scale, x.stack, n0, n1) &&
           in_range(p, x.o.shift, x.stack, n0, n1);
  }

  static bool in_range(const Problem& p, const Param& param, Index stack, Index n0, Index n1) {
    if (param.data == nullptr || param.dtype == Dtype::kE4M3) return true;
    const Index count = param.g_stride == 0 ? 1 : groups_of(p);
    return with_dtype(param.dtype, [&]<Dtype kDtype>() {
      Ints is_bad = {};
      for (Index n = n0; n < n1; ++n)
        for (Index g = 0; g < count; g += kLanes) {
          const Index at = stack * param.stack_stride + n * param.n_stride + g;
          const Floats value = read_vector<kDtype>(param.data, at, min_of(kLanes, count - g));
          const Floats magnitude = (Floats)((Ints)value & INT32_MAX);
          is_bad |= (magnitude != 0) & ~((magnitude >= kLeast) & (magnitude <= kMost));
        }
      return sum_of(to_floats(is_bad)) == 0;
    });
  }

  // The scratch memory of a task.
  struct Scratch {
    float* acc;       // [row block][tile][row][column]
    float* sums;      // of one panel, laid out as acc
    uint16_t* panel;  // [step][part][row][word]
    float* scale;     // [row block][row][group]
    float* offset;
    int32_t* plan;  // of Weights
    Index size;     // in floats

    Scratch(const Shape& shape, float* at) {
      const Index size_of_params = shape.blocks * kRowBlock * shape.groups;
      acc = at;
      sums = acc + shape.blocks * shape.shared * kSums;
      panel = reinterpret_cast<uint16_t*>(sums + shape.shared * kSums);
      scale = reinterpret_cast<float*>(panel + kDepth / kStep * 2 * kTile);
      offset = scale + size_of_params;
      plan = reinterpret_cast<int32_t*>(offset + size_of_params);
      size = reinterpret_cast<float*>(plan + shape.plan) - at + kLanes;  // a group behind the last
    }
  };
  static Index scratch_size(const Problem& p, const Operands& o) {
    return Scratch(Shape(p, o), nullptr).size;
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, const float* x,
                  Index begin, Index end, float* scratch) {
    const Shape shape(p, o);
    const Scratch s(shape, scratch);
    const C codes(p, o, stack);
    const Product product(shape.columns);
    const Epilogue epilogue = {p, o, slice, stack};
    const Index width = shape.blocks * RowBlock::rows(p);
    const auto run = [&](const auto& weights) {
      for (Index tile = 0; tile < shape.tiles; tile += shape.shared)
        for (Index n0 = begin; n0 < end; n0 += width)
          run_rows(weights, product, epilogue, shape, s, x, tile,
                   min_of(tile + shape.shared, shape.tiles), n0, min_of(n0 + width, end));
    };
    if constexpr (Product::kHasTwoParts)
      if (shape.parts > 1) return run(Weights<true>(p, codes, shape.group, s.plan));
    run(Weights<false>(p, codes, shape.group, s.plan));
  }

  // Computes rows [n0, n1) of y for tiles [tile0, tile1) of x. A panel's x is read for one row block after another.
  template <bool kKeepsRest>
  static void run_rows(const Weights<kKeepsRest>& weights, const Product& product,
                       const Epilogue& epilogue, const Shape& shape, const Scratch& s,
                       const float* x, Index tile0, Index tile1, Index n0, Index n1) {
    const auto& [p, o, slice, stack] = epilogue;
    const Index each = RowBlock::rows(p), blocks = ceil_div(n1 - n0, each);
    const Index size = (tile1 - tile0) * kSums, size_of_params = kRowBlock * shape.groups;
    for (Index i = 0; i < blocks * size; ++i) s.acc[i] = 0;
    for (Index i = 0; i < blocks; ++i)
      load_params_by_row<C>(p, o, stack, RowBlock(p, n0 + i * each, n1),
                            s.scale + i * size_of_params, s.offset + i * size_of_params,
                            shape.groups);
    const Index deep = shape.depth / kStep;
    for (Index step = 0; step < shape.steps; step += deep) {
      const Index end = min_of(step + deep, shape.steps);
      for (Index i = 0; i < blocks; ++i) {
        const RowBlock block(p, n0 + i * each, n1);
        const uint8_t* rows[kRowBlock];
        block.point_at(p, o, stack, rows);
        const float *scale = s.scale + i * size_of_params, *offset = s.offset + i * size_of_params;
        float* acc = s.acc + i * size;
        if (shape.scales_sums) {
          constexpr float kOne = 1, kZero = 0;
          unpack(weights, p, block, rows, step, end, &kOne, &kZero, 0, s.panel);
          for (Index j = 0; j < size; ++j) s.sums[j] = 0;
          multiply(product, shape, s.panel, step, end, x, tile0, tile1, s.sums);
          const Index group = step * kStep / p.group;
          add_scaled(shape, s.sums, x_sums(shape, x, step / deep, tile0), scale + group,
                     offset + group, tile1 - tile0, acc);
        } else {
          unpack(weights, p, block, rows, step, end, scale, offset, shape.groups, s.panel);
          multiply(product, shape, s.panel, step, end, x, tile0, tile1, acc);
        }
      }
    }
    for (Index i = 0; i < blocks; ++i)
      for (Index tile = tile0; tile < tile1; ++tile)
        store_tile(epilogue, shape, n0 + i * each, min_of(each, n1 - n0 - i * each), tile,
                   s.acc + i * size + (tile - tile0) * kSums);
  }

  // panel <- steps [step, end) of a row block.
  template <bool kKeepsRest>
  static void unpack(const Weights<kKeepsRest>& weights, const Problem& p, const RowBlock& block,
                     const uint8_t* const (&rows)[kRowBlock], Index step, Index end,
                     const float* scale, const float* offset, Index groups, uint16_t* panel) {
    constexpr Index kStepBytes = Weights<kKeepsRest>::kStepBytes;
    // The next row block is prefetched, in the order of memory.
    const uint8_t* ahead = block.next(rows, step * kStepBytes * kRowBlock, row_bytes(p.K, kBits));
    weights.unpack(rows, step, end, scale, offset, groups, ahead, panel);
  }

  // acc += steps [step, end) of x, which are a panel, times weights.
  static void multiply(const Product& product, const Shape& shape, const uint16_t* weights,
                       Index step, Index end, const float* x, Index tile0, Index tile1,
                       float* acc) {
    for (Index tile = tile0; tile < tile1; tile += 2, acc += 2 * kSums) {
      const float* at = x + shape.place(step, tile);
      product.add(weights, end - step, static_cast<int>(shape.parts), at,
                  at + (end - step) * shape.tile_size(), tile + 1 < tile1, acc);
    }
  }

  // acc += the sums of a panel, which is in one group, times its scales, and sums of x times its offsets.
  static void add_scaled(const Shape& shape, const float* sums, const float* x_sums,
                         const float* scale, const float* offset, Index tiles, float* acc) {
    for (Index tile = 0; tile < tiles; ++tile, x_sums += kLanes) {
      const Floats of_x = load_floats(x_sums);
      for (Index r = 0; r < kRowBlock; ++r, sums += kLanes, acc += kLanes)
        store_floats(acc, load_floats(acc) + load_floats(sums) * scale[r * shape.groups] +
                              of_x * offset[r * shape.groups]);
    }
  }

  // Writes rows [n0, n0 + count) of y for a tile of x.
  static void store_tile(const Epilogue& epilogue, const Shape& shape, Index n0, Index count,
                         Index tile, const float* acc) {
    Ints square[2][kLanes];  // a row of y each, then a column
    for (int half = 0; half < 2; ++half) {
      for (int i = 0; i < kLanes; ++i)
        square[half][i] = load_ints(acc + (half * kLanes + i) * kLanes);
      transpose(square[half]);
    }
    const Index m0 = tile * shape.columns;
    for (Index i = 0; i < min_of(shape.columns, epilogue.p.M - m0); ++i) {
      float y[kRowBlock];
      for (int half = 0; half < 2; ++half) store_floats(y + half * kLanes, (Floats)square[half][i]);
      epilogue.store(m0 + i, n0, count, y, y + kLanes);
    }
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
