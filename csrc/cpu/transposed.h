// The transposed product, y = x @ w, which sums over the rows of the weight and not along them.
// Under the rule of isa/kernels.h: internal linkage.
//
// The weight is cut into tiles of codes and rows. In a tile, kDecoded rows are decoded a vector at a
// time, and each vector is added to the sums of all rows of x while it is in a register; the sums are in cache.
// They lie in the order in which blocks of codes are decoded, until `finish` reorders them. Each sum
// is made in the order of the rows, whatever else x has and however many threads there are.
#pragma once

#include "common/blocks.h"
#include "common/params.h"

namespace jaxgemv::cpu {
namespace {

// Stands for the codes of a row behind the last.
alignas(64) constexpr uint8_t kNoWeights[kMaxTileCodes + 128] = {};
// Rows of the weight whose parameters are converted together.
constexpr Index kParamRows = 32;

// Codes [k0, k0 + codes) of kDecoded rows, ready to be multiplied.
struct Columns {
  const uint8_t* body[kDecoded];
  const uint8_t* tail[kDecoded];  // copies of the ends of the rows, which may end where memory does
  Index body_blocks, blocks;      // blocks that can be read in place, and all
  Index first_blocks, group_blocks;    // blocks in the first group and in the others
  const float *zero, *scale, *offset;  // [kDecoded][row_size]: a value per group, or per code
  Index row_size;
  Index count;  // rows that are there; codes of others may stand for infinity
};

// sums[m][code] += the products of w_rows with `rows` rows of x, [row][kDecoded]. kWhole:
// groups are whole blocks. kOneRow: rows is 1. Not inline: it needs all registers.
template <typename C, bool kWhole, bool kOneRow>
[[gnu::noinline]] void add_products(const C& codes, const Columns& w_rows, const float* x,
                                    Index rows, float* sums, Index stride) {
  using B = Block<C::kBits>;
  const Index body_blocks = w_rows.body_blocks, blocks = w_rows.blocks;
  const uint8_t* at[kDecoded];
  Group<C> group[kDecoded];
  constexpr bool kMasks = C::kFormat == Format::kCodebook && !(kWhole && C::kLookup);
  Ints there[kDecoded];
  for (int r = 0; r < kDecoded; ++r) there[r] = Ints{} - (r < w_rows.count);
  for (int r = 0; r < kDecoded; ++r) at[r] = w_rows.body[r];
  Index block = 0, end = kWhole ? w_rows.first_blocks : blocks;
  for (Index g = 0; block < blocks; ++g, end += w_rows.group_blocks) {
    if constexpr (kWhole)
      for (int r = 0; r < kDecoded; ++r) {
        const Index i = r * w_rows.row_size + g;
        group[r].set(codes, w_rows.zero[i], w_rows.scale[i], w_rows.offset[i], r < w_rows.count);
      }
    for (const Index stop = min_of(end, blocks); block < stop; ++block) {
      if (block == body_blocks)
        for (int r = 0; r < kDecoded; ++r) at[r] = w_rows.tail[r];
      decltype(load_units<C>(at[0])) units[kDecoded];
      for (int r = 0; r < kDecoded; ++r) {
        units[r] = load_units<C>(at[r]);
        at[r] += B::kBytes;
      }
      const auto add = [&](int i) __attribute__((always_inline)) {
        const Index code = block * B::kCodes + i * kLanes;
        Floats w[kDecoded];
        for (int r = 0; r < kDecoded; ++r) {
          if constexpr (kWhole) {
            w[r] = group[r].weights(codes, units[r], i);
          } else {
            const Index at_code = r * w_rows.row_size + code;
            w[r] = (values_of(codes, units[r], i) - load_floats(w_rows.zero + at_code)) *
                       load_floats(w_rows.scale + at_code) +
                   load_floats(w_rows.offset + at_code);
          }
          if constexpr (kMasks) w[r] = (Floats)((Ints)w[r] & there[r]);
        }
        const float* xs = x;
        float* to = sums + code;
        const auto add_row = [&] {
          Floats sum = load_floats(to);
          for (int r = 0; r < kDecoded; ++r) sum += w[r] * xs[r];
          __builtin_memcpy(to, &sum, sizeof(sum));
        };
        add_row();
        if constexpr (!kOneRow)
          for (Index m = 1; m < rows; ++m) xs += kDecoded, to += stride, add_row();
      };
      add(0);
      if constexpr (B::kUnit == 2) add(1);
    }
  }
}

template <typename C>
struct Transposed {
  static constexpr const char* kName = "transposed";
  static constexpr OperandSet kOperands =
      kTransposedOperands | OperandSet::of(Operand::kOneByteScale);
  static constexpr int kBits = C::kBits;
  using B = Block<kBits>;
  static_assert(kTileUnit % B::kCodes == 0, "tiles start on whole blocks");

  static bool supports(const Problem&, const Operands&) { return true; }
  static bool supports_whole(const Problem& p, const Operands&) { return is_whole(p); }
  static bool is_whole(const Problem& p) { return p.group % B::kCodes == 0 || p.group >= p.K; }

  static Index x_size(const Problem& p, const Operands&) {
    return ceil_div(p.N, kDecoded) * kDecoded * p.M;
  }
  static void prepare(const Problem&, const Operands&, float*) {}

  // out[n / kDecoded][row of x][n % kDecoded] <- x[m, n], for rows n of the weight.
  static bool pack_x(const Problem& p, const Operands& o, Index slice, Index m0, Index m1,
                     float* out) {
    for (Index n = 0; n < p.N; n += kParamRows)
      for (Index m = m0; m < m1; ++m) {
        float natural[kParamRows] = {};
        const Index count = min_of(kParamRows, p.N - n);
        read_floats(p.x, o.x, (slice * p.M + m) * p.N + n, count, natural);
        for (Index i = 0; i < count; i += kDecoded)
          __builtin_memcpy(out + (n + i) * p.M + m * kDecoded, natural + i,
                           kDecoded * sizeof(float));
      }
    return true;
  }

  // How many values a parameter has for a row of a tile.
  static Index row_size(const Problem& p, Index codes) {
    return is_whole(p) ? codes / p.group + 2 : codes;
  }

  // Floats that run() needs: the parameters of kParamRows rows as in Columns, and when groups are not
  // whole blocks, the group of each code and room for one value per group.
  static Index scratch_size(const Problem& p, const Operands&, Index codes) {
    return 3 * kParamRows * row_size(p, codes) + (is_whole(p) ? 0 : 2 * codes);
  }

  // The parameters of a tile's rows, a block of them at a time.
  struct Parameters {
    Parameters(const Problem& p, const Operands& o, Index stack, const Tile& tile, float* scratch)
        : p(p), o(o), stack(stack), size(row_size(p, tile.codes)), whole(is_whole(p)) {
      const Index last = min_of(tile.k0 + tile.codes, p.K) - 1;
      first_group = tile.k0 / p.group, groups = last / p.group - first_group + 1;
      zero = scratch;
      scale = zero + kParamRows * size, offset = scale + kParamRows * size;
      group_of = reinterpret_cast<int32_t*>(offset + kParamRows * size);
      per_group = reinterpret_cast<float*>(group_of + tile.codes);
      for (Index i = 0; i < tile.codes && !whole; ++i) {
        const Index k = min_of(tile.k0 + i, last), code = i % B::kCodes;
        group_of[i - code + code % B::kUnit * kLanes + code / B::kUnit] =
            static_cast<int32_t>(k / p.group - first_group);
      }
    }

    // Loads those of rows [n0, n0 + count), and of zero weights up to a multiple of kDecoded rows.
    void load(Index n0, Index count) {
      const float mid = p.affine == Affine::kOffset ? 0 : C::kMid;
      for (Index i = 0, at = 0; i < ceil_div(count, kDecoded) * kDecoded; ++i, at += size) {
        fill(mid, size, zero + at), fill(0, size, offset + at);
        if (i >= count) {
          fill(0, size, scale + at);
          continue;
        }
        load_row(o.scale, n0 + i, scale + at);
        if (p.affine == Affine::kZero) load_row(o.shift, n0 + i, zero + at);
        if (p.affine == Affine::kOffset) load_row(o.shift, n0 + i, offset + at);
      }
    }

    void load_row(const Param& param, Index n, float* out) const {
      float* values = whole ? out : per_group;
      const bool one = param.g_stride == 0;
      read_floats(param.dtype, param.data,
                  stack * param.stack_stride + n * param.n_stride + first_group * param.g_stride,
                  one ? 1 : groups, values);
      if (one) fill(values[0], groups, values);
      for (Index i = 0; i < size && !whole; ++i) out[i] = values[group_of[i]];
    }

    const Problem& p;
    const Operands& o;
    const Index stack, size;
    const bool whole;
    Index first_group, groups;
    float *zero, *scale, *offset, *per_group;
    int32_t*
        group_of;  // [i]: the group of the i-th code in the tile's blocks, counted from first_group
  };

  static void fill(float value, Index count, float* out) {
    for (Index i = 0; i < count; ++i) out[i] = value;
  }

  static void run(const Problem& p, const Operands& o, Index slice, float* packed, const Tile& tile,
                  float* sums, float* scratch) {
    const Index stack = stack_of(o, slice);
    if (!has_entry(p, stack)) return;
    const C codes(p, o, stack);
    fill(0, p.M * tile.codes, sums);
    Parameters params(p, o, stack, tile, scratch);
    const Index bytes = row_bytes(p.K, kBits), start = tile.k0 / B::kCodes * B::kBytes;
    const Index readable =
        bytes - start < B::kReach ? 0 : (bytes - start - B::kReach) / B::kBytes + 1;
    uint8_t tail[kDecoded][B::kTail];

    Columns w_rows;
    w_rows.row_size = params.size;
    w_rows.blocks = ceil_div(min_of(tile.codes, p.K - tile.k0), B::kCodes);
    w_rows.body_blocks = min_of(readable, w_rows.blocks);
    const bool one_group = p.group >= p.K;
    w_rows.group_blocks = one_group ? w_rows.blocks : p.group / B::kCodes;
    w_rows.first_blocks = one_group ? w_rows.blocks : (p.group - tile.k0 % p.group) / B::kCodes;
    const auto add = !params.whole ? add_products<C, false, false>
                     : p.M == 1    ? add_products<C, true, true>
                                   : add_products<C, true, false>;

    const uint8_t* matrix = row_of(p, o, stack, 0) + start;
    const auto point_at_row = [&](int r, Index n) {
      const uint8_t* row = n < p.N ? matrix + n * bytes : kNoWeights;
      w_rows.body[r] = row, w_rows.tail[r] = tail[r];
      if (w_rows.body_blocks == w_rows.blocks) return;
      const Index done = w_rows.body_blocks * B::kBytes;
      __builtin_memset(tail[r], 0, B::kTail);
      if (done < bytes - start) __builtin_memcpy(tail[r], row + done, bytes - start - done);
    };
    for (Index n0 = tile.n0; n0 < tile.n1; n0 += kParamRows) {
      const Index count = min_of(kParamRows, tile.n1 - n0);
      params.load(n0, count);
      for (Index m0 = 0; m0 < p.M; m0 += kSharedRows)
        for (Index i = 0; i < count; i += kDecoded) {
          for (int r = 0; r < kDecoded; ++r) point_at_row(r, n0 + i + r);
          w_rows.zero = params.zero + i * params.size,
          w_rows.scale = params.scale + i * params.size;
          w_rows.offset = params.offset + i * params.size;
          w_rows.count = count - i;
          add(codes, w_rows, packed + (n0 + i) * p.M + m0 * kDecoded, min_of(kSharedRows, p.M - m0),
              sums + m0 * tile.codes, tile.codes);
        }
    }
  }

  static void finish(const Problem& p, const Operands& o, Index slice, const Tile& tile,
                     const float* sums, Index parts) {
    const Index stack = stack_of(o, slice);
    const bool valid = has_entry(p, stack);
    const Index codes = min_of(tile.codes, p.K - tile.k0);
    for (Index m = 0; m < p.M; ++m)
      for (Index first = 0; first < codes; first += B::kCodes) {
        float natural[B::kCodes];
        fill(__builtin_nanf(""), B::kCodes, natural);
        for (int i = 0; i < B::kUnit && valid; ++i) {
          Floats sum = {};
          for (Index part = 0; part < parts; ++part)
            sum += load_floats(sums + (part * p.M + m) * tile.codes + first + i * kLanes);
          for (int lane = 0; lane < kLanes; ++lane) natural[lane * B::kUnit + i] = sum[lane];
        }
        const Index at = (slice * p.M + m) * p.K + tile.k0 + first;
        for (Index i = 0; i < min_of(B::kCodes, codes - first); ++i)
          write_float(p.y, o.y, at + i, natural[i]);
      }
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
