// Rows of weights, and their parameters as the kernels want them. Under the rule of isa/kernels.h:
// internal linkage.
#pragma once

#include "../table.h"
#include "convert.h"

namespace jaxgemv::cpu {
namespace {

inline Index groups_of(const Problem& p) { return ceil_div(p.K, p.group); }

inline Index stack_of(const Operands& o, Index slice) {
  return o.index == nullptr ? 0 : load<int32_t>(o.index, slice);
}

inline bool has_entry(const Problem& p, Index stack) { return stack >= 0 && stack < p.stack; }

inline const uint8_t* row_of(const Problem& p, const Operands& o, Index stack, Index n) {
  return o.packed + stack * o.packed_stack_stride + n * row_bytes(p.K, p.bits);
}

// A block of kRowBlock rows of the weight: those of y from n0 on, or with a gated activation half as many and
// their partners, N / 2 rows on. Where there are fewer, the last one is repeated.
struct RowBlock {
  Index n0, count;  // rows of y
  Index half, partner;

  RowBlock(const Problem& p, Index n0, Index end) : n0(n0) {
    half = rows(p), partner = is_gated(p.activation) ? p.N / 2 : 0;
    count = min_of(half, end - n0);
  }
  // Rows of y in a whole block.
  static Index rows(const Problem& p) { return is_gated(p.activation) ? kRowBlock / 2 : kRowBlock; }
  bool is_whole() const { return count == half; }

  Index row(Index r) const {
    return r < half ? n0 + min_of(r, count - 1) : n0 + partner + min_of(r - half, count - 1);
  }
  void point_at(const Problem& p, const Operands& o, Index stack,
                const uint8_t* (&to)[kRowBlock]) const {
    for (Index r = 0; r < kRowBlock; ++r) to[r] = row_of(p, o, stack, row(r));
  }
  // Where byte `at` of the next block lies, whose rows follow one another in memory: to be prefetched.
  const uint8_t* next(const uint8_t* const (&rows)[kRowBlock], Index at, Index bytes) const {
    const Index first = half * bytes;
    return at < first ? rows[0] + first + at : rows[kRowBlock - 1] + bytes + at - first;
  }
};

// to[row][group] <- a parameter of rows [n, n + rows), without gaps. Whole vectors are written for each row, so that
// something follows the last value, up to a vector more.
inline void read_groups(const Param& param, Index stack, Index n, Index rows, Index groups,
                        float* to) {
  if (rows > 1 && (param.n_stride != groups || (param.g_stride == 0 && groups > 1))) {
    for (Index r = 0; r < rows; ++r) read_groups(param, stack, n + r, 1, groups, to + r * groups);
    return;
  }
  const Index first = stack * param.stack_stride + n * param.n_stride;
  if (param.g_stride == 0 && rows == 1) {
    float value;
    read_floats(param.dtype, param.data, first, 1, &value);
    for (Index g = 0; g < groups; g += kLanes) store_floats(to + g, broadcast(value));
    return;
  }
  // One switch over the dtype for all: a switch for each vector took longer than the vector.
  with_dtype(param.dtype, [&]<Dtype kDtype>() {
    const char* from = static_cast<const char*>(param.data) + first * size_of(kDtype);
    const Index count = rows * groups;
    Index i = 0;
    for (; i + kLanes <= count; i += kLanes)
      store_floats(to + i, read_whole<kDtype>(from + i * size_of(kDtype)));
    if (i < count) store_floats(to + i, read_constants<kDtype>(param.data, first + i, count - i));
  });
}

// Scales and offsets of rows [n, n + rows), as read_groups writes them, with which weight = code * scale + offset,
// whether the call has a zero, an offset or neither.
template <typename C>
inline void read_params(const Problem& p, const Operands& o, Index stack, Index n, Index rows,
                        Index groups, float* scale, float* offset) {
  const Index count = rows * groups;
  read_groups(o.scale, stack, n, rows, groups, scale);
  if (!C::kShifted) {
    for (Index g = 0; g < count; g += kLanes) store_floats(offset + g, Floats{});
    return;
  }
  if (p.affine != Affine::kSymmetric) read_groups(o.shift, stack, n, rows, groups, offset);
  if (p.affine == Affine::kOffset) return;
  for (Index g = 0; g < count; g += kLanes) {
    const Floats zero = p.affine == Affine::kZero ? load_floats(offset + g) : broadcast(C::kMid);
    store_floats(offset + g, -zero * load_floats(scale + g));
  }
}

// The zero of a group of row n as an integer, which it is in exact products.
inline int32_t zero_of(const Problem& p, const Operands& o, Index stack, Index n, Index group) {
  if (o.shift.data == nullptr) return mid_code(p.bits);
  return load<int32_t>(
      o.shift.data, stack * o.shift.stack_stride + n * o.shift.n_stride + group * o.shift.g_stride);
}

// out[group][scale, offset][row] <- parameters of a block; in an exact product, integer zeros in place of the
// offsets. rows: scratch, 2 * kLanes * padded(groups).
template <typename C>
inline void load_params_by_group(const Problem& p, const Operands& o, Index stack,
                                 const RowBlock& block, float* rows, float* out) {
  const Index groups = groups_of(p), size = padded(groups);
  if (p.is_exact()) {
    for (Index g = 0; g < groups; ++g)
      for (Index r = 0; r < kRowBlock; ++r)
        store(out, (2 * g + 1) * kRowBlock + r, zero_of(p, o, stack, block.row(r), g));
    return;
  }
  for (int lane = 0; lane < kRowBlock; lane += kLanes) {
    for (int r = 0; r < kLanes; ++r)
      read_params<C>(p, o, stack, block.row(lane + r), 1, groups, rows + 2 * r * size,
                     rows + (2 * r + 1) * size);
    float* to = out + lane;
    for (Index g = 0; g < groups; g += kLanes) {
      Ints scale[kLanes], offset[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        scale[r] = load_ints(rows + 2 * r * size + g);
        offset[r] = load_ints(rows + (2 * r + 1) * size + g);
      }
      transpose(scale), transpose(offset);
      for (int i = 0; i < kLanes; ++i, to += 2 * kRowBlock)
        store_floats(to, (Floats)scale[i]), store_floats(to + kRowBlock, (Floats)offset[i]);
    }
  }
}

// scale, offset[row][group] <- parameters of a block, whose rows are `size` values apart.
template <typename C>
inline void load_params_by_row(const Problem& p, const Operands& o, Index stack,
                               const RowBlock& block, float* scale, float* offset, Index size) {
  for (Index r = 0; r < kRowBlock; ++r, scale += size, offset += size)
    read_params<C>(p, o, stack, block.row(r), 1, groups_of(p), scale, offset);
}

}  // namespace
}  // namespace jaxgemv::cpu
