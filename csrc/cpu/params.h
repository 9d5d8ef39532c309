// Vectors, and the parameters of rows of weights as the kernels want them. Part of kernel.h, and
// under its rule: internal linkage.
#pragma once

#include <type_traits>
#include <utility>

#include "convert.h"
#include "level.h"
#include "unroll.h"
#include "weights.h"

namespace jaxgemv {
namespace {

inline Index max_of(Index a, Index b) { return a > b ? a : b; }
// Values in whole vectors.
inline Index padded(Index count) { return ceil_div(count, Index{kLanes}) * kLanes; }

inline Ints load_ints(const void* from) {
  Ints value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

inline void store_floats(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof(value)); }

inline Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

inline Floats to_floats(Dtype dtype, Halves value) {
  const Ints wide = __builtin_convertvector(value, Ints);
  if (dtype == Dtype::kBF16) return (Floats)(wide << 16);
  // As in f32_of_f16.
  constexpr int32_t kRebias = (127 - 15) << 23, kExponent = 0x7c00 << 13;
  const Ints magnitude = (wide & 0x7fff) << 13, normal = magnitude + kRebias;
  const Ints subnormal = (Ints)((Floats)(normal + (1 << 23)) - f32_of_bits(kRebias + (1u << 23)));
  const Ints exponent = magnitude & kExponent;
  const Ints is_special = exponent == kExponent, is_subnormal = exponent == 0;
  const Ints finite = (normal & ~is_subnormal) | (subnormal & is_subnormal);
  return (Floats)((finite + (is_special & kRebias)) | (wide & 0x8000) << 16);
}

// Lane i <- data[first + i], or zero from `count` on.
inline Floats read_vector(Dtype dtype, const void* data, Index first, Index count) {
  const char* from = static_cast<const char*>(data) + first * size_of(dtype);
  char whole[sizeof(Floats)] = {};
  if (count < kLanes) {
    __builtin_memcpy(whole, from, static_cast<size_t>(count * size_of(dtype)));
    from = whole;
  }
  if (dtype == Dtype::kF32) return (Floats)load_ints(from);
  Halves halves;
  __builtin_memcpy(&halves, from, sizeof(halves));
  return to_floats(dtype, halves);
}

inline Index groups_of(const Problem& p) { return ceil_div(p.K, p.group); }

inline __attribute__((always_inline)) float bias_of(const Operands& o, Index stack, Index n) {
  float bias = 0;
  if (o.bias.data != nullptr)
    read_floats(o.bias.dtype, o.bias.data, stack * o.bias.stack_stride + n * o.bias.n_stride, 1,
                &bias);
  return bias;
}

// weight = code * scale + offset, whatever the operands say.
struct GroupParams {
  Floats scale, offset;
};

// Of kLanes of `groups` groups of row n, from group g on.
inline GroupParams group_params(const Problem& p, const Operands& o, Index stack, Index n, Index g,
                                Index groups) {
  const auto read = [&](const Param& param) {
    const Index first = stack * param.stack_stride + n * param.n_stride;
    float value;
    if (param.g_stride == 0) {
      read_floats(param.dtype, param.data, first, 1, &value);
      return Floats{} + value;
    }
    return read_vector(param.dtype, param.data, first + g, min_of(kLanes, groups - g));
  };
  const Floats scale = read(o.scale);
  if (p.affine == Affine::kSymmetric) return {scale, scale * -static_cast<float>(mid_code(p.bits))};
  const Floats shift = read(o.shift);
  return {scale, p.affine == Affine::kOffset ? shift : -shift * scale};
}

// to[group][scale, offset][lane] <- parameters of the rows from n on, of which the last may be
// repeated. `lanes`: how many there are in `to`.
inline void load_params(const Problem& p, const Operands& o, Index stack, Index n, Index last,
                        float* to, Index lanes) {
  const Index groups = groups_of(p);
  for (Index g = 0; g < groups; g += kLanes) {
    Ints scale[kLanes], offset[kLanes];
    for (int r = 0; r < kLanes; ++r) {
      const GroupParams params = group_params(p, o, stack, min_of(n + r, last), g, groups);
      scale[r] = (Ints)params.scale, offset[r] = (Ints)params.offset;
    }
    transpose(scale), transpose(offset);
    for (int i = 0; i < kLanes; ++i, to += 2 * lanes)
      store_floats(to, (Floats)scale[i]), store_floats(to + lanes, (Floats)offset[i]);
  }
}

// scale, offset[row][group] <- parameters of kStrip rows from n on, of which the last may be
// repeated; rows are `size` values apart.
inline void load_strip_params(const Problem& p, const Operands& o, Index stack, Index n, Index last,
                              float* scale, float* offset, Index size) {
  const Index groups = groups_of(p);
  for (Index r = 0; r < kStrip; ++r, scale += size, offset += size)
    for (Index g = 0; g < groups; g += kLanes) {
      const GroupParams params = group_params(p, o, stack, min_of(n + r, last), g, groups);
      store_floats(scale + g, params.scale), store_floats(offset + g, params.offset);
    }
}

}  // namespace
}  // namespace jaxgemv
