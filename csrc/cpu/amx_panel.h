// Many rows of bfloat16 x by AMX, any width and any group: finished weights as bfloat16 (panel.h).
// Under the rule of isa/kernels.h: internal linkage.
//
// A weight is rounded to bfloat16 where the call allows it; else what that loses is a second bfloat16, and
// both are 2^-18 of it near. So nothing is left to be done for a group, as amx_bf16.h and amx_int8.h have
// it, whose sums are scaled. Both codes of a pair lie in a lane, that of a row of the weight.
#pragma once

#include "float_weights.h"
#include "isa/amx.h"

namespace jaxgemv::cpu {
namespace {

template <typename C>
struct AmxPanel {
  static constexpr const char* kName = "amx_panel";
  static constexpr int kRows = kSharingRows;
  static constexpr bool kTakesAnyX = false;
  static constexpr OperandSet kOperands = kAllParts.without(OperandSet::of(Operand::kNorm));
  static constexpr bool takes(Dtype x) { return x == Dtype::kBF16; }
  static constexpr int kBits = C::kBits;
  static constexpr int kStep = kTileWords;  // codes
  static constexpr Index kTile = kTileHeight * kLanes;
  // Weights of a row in a panel, in both parts, a third of the nearest cache; and row blocks whose sums stay in
  // the next one, with x of a panel ("Finished weights on AMX").
  static constexpr Index kDepth = 256, kBlocks = 8, kFewValues = 512 << 10, kFewGroups = 1024;
  // Magnitudes of scales and shifts, or zero: weights and what they lose then are normal numbers.
  static constexpr float kLeast = 0x1p-50f, kMost = 0x1p100f;
  // Codes in a row from which on 2^-18 of a weight is less than what float32 sums may lose.
  static constexpr Index kLeastCodes = 192;

  using Book = BookPairs<kBits, kBits <= 5 ? 5 : kBits>;  // of a codebook

  static bool supports(const Problem& p, const Operands& o) {
    if constexpr (C::kFormat == Format::kCodebook) {
      if (!Book::all(p, o, Book::is_fine)) return false;
    }
    return p.rounded || is_exact(p, o) || p.K >= kLeastCodes;
  }

  // Whether weights are bfloat16 as they are: the significands of a code and of a scale of one byte, together.
  static bool is_exact(const Problem& p, const Operands& o) {
    if (o.scale.dtype != Dtype::kE4M3 && o.scale.dtype != Dtype::kE8M0) return false;
    if constexpr (C::kFormat == Format::kCodebook) {
      const uint32_t behind = o.scale.dtype == Dtype::kE8M0 ? 0xffff : 0xfffff;
      return Book::all(p, o, [=](float entry) { return (bits_of_f32(entry) & behind) == 0; });
    }
    return C::kFormat != Format::kAffine;
  }

  struct Shape {
    Index parts;   // of a weight
    Index depth;   // codes of a row in a panel
    Index groups;  // in a row
    Index steps;   // in a row
    Index tiles;   // of rows of x
    Index height;  // of each
    Index shared;  // tiles that share a panel
    Index blocks;  // of rows that are multiplied with x of a panel

    Shape(const Problem& p, const Operands& o) {
      parts = p.rounded || is_exact(p, o) ? 1 : 2, depth = kDepth / parts;
      groups = padded(groups_of(p));
      steps = ceil_div(p.K, Index{kStep});
      tiles = ceil_div(p.M, Index{kTileHeight}), height = ceil_div(p.M, tiles);
      shared = min_of(tiles, kSharingRows / kTileHeight);
      blocks =
          shared * height * p.K <= kFewValues ? 1 : max_of(1, min_of(kBlocks, kFewGroups / groups));
    }
    Index tile_size() const { return height * kLanes; }  // of a step, in floats
    // x: [panel][tile][step in it][row][word]
    Index place(Index step, Index tile) const {
      const Index each = depth / kStep, first = step / each * each;
      return (first * tiles + tile * min_of(each, steps - first) + step - first) * tile_size();
    }
  };

  static Index x_size(const Problem& p, const Operands& o) {
    const Shape shape(p, o);
    return shape.steps * shape.tiles * shape.tile_size();
  }
  static void prepare(const Problem&, const Operands&, float*) {}

  // False where an element, or a parameter of this share of the weight's rows, is out of range. What belongs to
  // no row is left as it is.
  static bool pack(const X& x, Index m0, Index m1, float* out) {
    const Problem& p = x.p;
    const Shape shape(p, x.o);
    XPairs pairs(kInOrder.code);
    const char* all = static_cast<const char*>(x.o.x);
    for_each_stripe(m0, m1, [&](Index m0, Index m1) {
      for (Index step = 0; step < shape.steps; ++step)
        for (Index m = m0; m < m1; ++m) {
          const Index k = step * kStep, place = shape.place(step, m / shape.height);
          pairs.pack(all + ((x.slice * p.M + m) * p.K + k) * size_of(Dtype::kBF16), 0,
                     min_of(kStep, p.K - k), out + place + m % shape.height * kLanes);
        }
    });
    const Index n0 = p.N * m0 / p.M, n1 = p.N * m1 / p.M;
    return pairs.in_range() && in_range(p, x.o.scale, x.stack, n0, n1) &&
           in_range(p, x.o.shift, x.stack, n0, n1);
  }

  static bool in_range(const Problem& p, const Param& param, Index stack, Index n0, Index n1) {
    if (param.data == nullptr) return true;
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

  // Of a task.
  struct Scratch {
    float* acc;       // [row block][tile][row][lane]
    float* panel;     // [step][part][half of kRowBlock][pair][lane]
    float* by_group;  // [row block][group][scale, offset][lane]
    float* by_row;    // [row of kLanes][scale, offset][group]
    float* plan;      // of FloatWeights, and up to a whole panel
    Index size;

    Scratch(const Shape& shape, float* at) {
      acc = at;
      panel = acc + shape.blocks * shape.shared * shape.height * kRowBlock;
      by_group = panel + kDepth / kStep * 2 * kTile;
      by_row = by_group + shape.blocks * shape.groups * 2 * kRowBlock;
      plan = by_row + shape.groups * 2 * kLanes;
      size = plan + plan_size(shape) - at;
    }
  };
  static Index plan_size(const Shape& shape) { return padded(shape.steps * kStep + kPanelCodes); }

  static Index scratch_size(const Problem& p, const Operands& o) {
    return Scratch(Shape(p, o), nullptr).size;
  }

  static void run(const Problem& p, const Operands& o, Index slice, Index stack, const float* x,
                  Index begin, Index end, float* scratch) {
    const Shape shape(p, o);
    const Scratch s(shape, scratch);
    const C codes(p, o, stack);
    const Epilogue epilogue = {p, o, slice, stack};
    const Index width = shape.blocks * RowBlock::rows(p);
    FloatWeights<C>::make_plan(p, plan_size(shape), s.plan);
    start_tiles(static_cast<int>(shape.height), kTileBytes);
    for (Index tile = 0; tile < shape.tiles; tile += shape.shared)
      for (Index n0 = begin; n0 < end; n0 += width)
        run_rows(codes, epilogue, shape, s, x, tile, min_of(tile + shape.shared, shape.tiles), n0,
                 min_of(n0 + width, end));
    _tile_release();
  }

  // Rows [n0, n1) of y, of tiles [tile0, tile1) of x. A panel's x is read for one row block after another.
  static void run_rows(const C& codes, const Epilogue& epilogue, const Shape& shape,
                       const Scratch& s, const float* x, Index tile0, Index tile1, Index n0,
                       Index n1) {
    const auto& [p, o, slice, stack] = epilogue;
    const Index each = RowBlock::rows(p), blocks = ceil_div(n1 - n0, each);
    const Index size = (tile1 - tile0) * shape.height * kRowBlock;
    const Index size_of_params = shape.groups * 2 * kRowBlock;
    for (Index i = 0; i < blocks * size; ++i) s.acc[i] = 0;
    for (Index i = 0; i < blocks; ++i)
      load_params_by_group<C>(p, o, stack, RowBlock(p, n0 + i * each, n1), s.by_row,
                              s.by_group + i * size_of_params);
    for (Index k0 = 0; k0 < p.K; k0 += shape.depth)
      for (Index i = 0; i < blocks; ++i) {
        const RowBlock block(p, n0 + i * each, n1);
        const uint8_t* rows[kRowBlock];
        block.point_at(p, o, stack, rows);
        const Index k1 = min_of(k0 + shape.depth, p.K);
        unpack(codes, p, shape, block, rows, k0, k1, s.by_group + i * size_of_params, s);
        multiply(shape, s.panel, k0 / kStep, ceil_div(k1, Index{kStep}), x, tile0, tile1,
                 s.acc + i * size);
      }
    for (Index i = 0; i < blocks; ++i)
      for (Index m = tile0 * shape.height; m < min_of(tile1 * shape.height, p.M); ++m) {
        const float* sums = s.acc + i * size + (m - tile0 * shape.height) * kRowBlock;
        const Index n = n0 + i * each;
        epilogue.store(m, n, min_of(each, n1 - n), sums, sums + kRowBlock / 2);
      }
  }

  // s.panel <- codes [k0, k1) of a row block.
  static void unpack(const C& codes, const Problem& p, const Shape& shape, const RowBlock& block,
                     const uint8_t* const* rows, Index k0, Index k1, const float* by_group,
                     const Scratch& s) {
    const Index parts = shape.parts, bytes = row_bytes(p.K, kBits);
    constexpr Index kStepSize = 2 * kTile;
    float* to = s.panel;
    for (Index k = k0; k < k1; k += kPanelCodes, to += kPanelCodes / kStep * parts * kStepSize) {
      constexpr Index kPanelBytes = kPanelCodes * kBits / 8;
      for (int r = 0; r < kRowBlock; ++r)  // the next row block's
        for (Index line = 0; line < kPanelBytes; line += 64)
          __builtin_prefetch(rows[r] + block.half * bytes + k * kBits / 8 + line, 0, 2);
      unpack_panel<kBits>(p, rows, k, [&](const Ints* words, int chunk, int lane) {
        float* tile = to + chunk * parts * kStepSize + lane / kLanes * kTile;
        FloatWeights<C>::unpack(codes, words, by_group + lane, s.plan + k + chunk * kChunkCodes,
                                [=](int pair, Floats first, Floats second) {
                                  store_pairs<C::kFormat == Format::kE5M2>(
                                      first, second, parts > 1, tile + pair * kLanes, kStepSize);
                                });
      });
    }
    const Index count = k1 % kStep;
    if (count > 0) clear(s.panel + (k1 - k0) / kStep * parts * kStepSize, parts, count);
  }

  // Weights of a step's codes from `count` on, which may be anything, and infinite.
  static void clear(float* step, Index parts, Index count) {
    for (Index tile = 0; tile < 2 * parts; ++tile, step += kTile)
      for (Index pair = count / 2; pair < kTileHeight; ++pair) {
        const int32_t kept = 2 * pair < count ? 0xffff : 0;
        store_floats(step + pair * kLanes, (Floats)(load_ints(step + pair * kLanes) & kept));
      }
  }

  // acc += steps [step, end) of x, which are a panel, times weights.
  static void multiply(const Shape& shape, const float* weights, Index step, Index end,
                       const float* x, Index tile0, Index tile1, float* acc) {
    const int height = static_cast<int>(shape.height), parts = static_cast<int>(shape.parts);
    for (Index tile = tile0; tile < tile1; tile += 2, acc += 2 * height * kRowBlock) {
      const float* at = x + shape.place(step, tile);
      add_tiles(weights, end - step, parts, at, at + (end - step) * shape.tile_size(), height,
                tile + 1 < tile1, acc);
    }
  }

 private:
  struct Order {
    uint16_t code[kStep];
    constexpr Order() : code() {
      for (int i = 0; i < kStep; ++i) code[i] = static_cast<uint16_t>(i);
    }
  };
  static constexpr Order kInOrder{};
};

}  // namespace
}  // namespace jaxgemv::cpu
