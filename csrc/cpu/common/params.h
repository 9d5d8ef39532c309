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

// kRowBlock rows of the weight: those of y from n0 on; of a gated activation half as many, and
// their partners N / 2 rows on. The last stands for those that are not there.
struct RowBlock {
  Index n0, count;  // rows of y
  Index half, partner;

  RowBlock(const Problem& p, Index n0, Index end) : n0(n0) {
    half = rows(p), partner = is_gated(p.activation) ? p.N / 2 : 0;
    count = min_of(half, end - n0);
  }
  // Of y, in a whole block.
  static Index rows(const Problem& p) { return is_gated(p.activation) ? kRowBlock / 2 : kRowBlock; }
  bool is_whole() const { return count == half; }

  Index row(Index r) const {
    return r < half ? n0 + min_of(r, count - 1) : n0 + partner + min_of(r - half, count - 1);
  }
  void point_at(const Problem& p, const Operands& o, Index stack,
                const uint8_t* (&to)[kRowBlock]) const {
    for (Index r = 0; r < kRowBlock; ++r) to[r] = row_of(p, o, stack, row(r));
  }
  // The byte that is `at` bytes into the next block, whose rows lie one behind the other.
  const uint8_t* next(const uint8_t* const (&rows)[kRowBlock], Index at, Index bytes) const {
    const Index first = half * bytes;
    return at < first ? rows[0] + first + at : rows[kRowBlock - 1] + bytes + at - first;
  }
};

// weight = code * scale + offset, whatever the operands say.
struct GroupParams {
  Floats scale, offset;
};

// Of kLanes of `groups` groups of row n, from group g on.
template <typename C>
inline GroupParams group_params(const Problem& p, const Operands& o, Index stack, Index n, Index g,
                                Index groups) {
  const auto read = [&](const Param& param) {
    const Index first = stack * param.stack_stride + n * param.n_stride;
    float value;
    if (param.g_stride == 0) {
      read_floats(param.dtype, param.data, first, 1, &value);
      return broadcast(value);
    }
    return read_vector(param.dtype, param.data, first + g, min_of(kLanes, groups - g));
  };
  const Floats scale = read(o.scale);
  if (p.affine == Affine::kSymmetric) return {scale, scale * -C::kMid};
  const Floats shift = read(o.shift);
  return {scale, p.affine == Affine::kOffset ? shift : -shift * scale};
}

// to[group][scale, offset][row] <- parameters of a block.
template <typename C>
inline void load_params_by_group(const Problem& p, const Operands& o, Index stack,
                                 const RowBlock& block, float* out) {
  const Index groups = groups_of(p);
  for (int lane = 0; lane < kRowBlock; lane += kLanes) {
    float* to = out + lane;
    for (Index g = 0; g < groups; g += kLanes) {
      Ints scale[kLanes], offset[kLanes];
      for (int r = 0; r < kLanes; ++r) {
        const GroupParams params = group_params<C>(p, o, stack, block.row(lane + r), g, groups);
        scale[r] = (Ints)params.scale, offset[r] = (Ints)params.offset;
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
  const Index groups = groups_of(p);
  for (Index r = 0; r < kRowBlock; ++r, scale += size, offset += size)
    for (Index g = 0; g < groups; g += kLanes) {
      const GroupParams params = group_params<C>(p, o, stack, block.row(r), g, groups);
      store_floats(scale + g, params.scale), store_floats(offset + g, params.offset);
    }
}

}  // namespace
}  // namespace jaxgemv::cpu
