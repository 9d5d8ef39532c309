// Vectors, and the parameters of rows of weights as the kernels want them. Part of kernel.h, and
// under its rule: internal linkage.
#pragma once

#include <type_traits>
#include <utility>

#include "convert.h"
#include "level.h"

// Loops over registers: what is left a loop would keep them in memory.
#if defined(__clang__)
#define JAXGEMV_UNROLL _Pragma("unroll")
#else
#define JAXGEMV_UNROLL _Pragma("GCC unroll 64")
#endif

namespace jaxgemv {
namespace {

inline Index min_of(Index a, Index b) { return a < b ? a : b; }
inline Index max_of(Index a, Index b) { return a > b ? a : b; }
// Values in whole vectors.
inline Index padded(Index count) { return ceil_div(count, Index{kLanes}) * kLanes; }

inline Ints load_ints(const void* from) {
  Ints value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

inline Floats load_floats(const float* from) {
  Floats value;
  __builtin_memcpy(&value, from, sizeof(value));
  return value;
}

inline void store_floats(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof(value)); }

inline Floats to_floats(Ints value) { return __builtin_convertvector(value, Floats); }

inline float sum_of(Floats vector) {
  float lane[kLanes];
  __builtin_memcpy(lane, &vector, sizeof(lane));
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int j = 0; j < half; ++j) lane[j] += lane[j + half];
  return lane[0];
}

inline Index groups_of(const Problem& p) { return ceil_div(p.K, p.group); }

inline float bias_of(const Operands& o, Index stack, Index n) {
  float bias = 0;
  if (o.bias.data != nullptr)
    read_floats(o.bias.dtype, o.bias.data, stack * o.bias.stack_stride + n * o.bias.n_stride, 1,
                &bias);
  return bias;
}

// weight = code * scale + offset, whatever the operands say: [row][group] for a few rows. One
// vector behind the last group may be read.
struct Params {
  float *scale, *offset;
  Index size;  // of a row

  static Index scratch_size(const Problem& p, Index rows) {
    return 2 * rows * (padded(groups_of(p)) + kLanes);
  }

  Params(const Problem& p, float* scratch, Index rows)
      : scale(scratch), offset(scratch + scratch_size(p, rows) / 2) {
    size = padded(groups_of(p)) + kLanes;
    for (Index i = 0; i < scratch_size(p, rows); ++i) scratch[i] = 0;
  }

  void load(const Problem& p, const Operands& o, Index stack, Index n, Index row) const {
    const Index groups = groups_of(p);
    float *s = scale + row * size, *z = offset + row * size;
    load_groups(o.scale, stack, n, groups, s);
    if (p.affine == Affine::kMid)
      for (Index g = 0; g < groups; ++g) z[g] = static_cast<float>(mid_code(p.bits));
    else
      load_groups(o.shift, stack, n, groups, z);
    if (p.affine != Affine::kOffset)
      for (Index g = 0; g < groups; ++g) z[g] *= -s[g];
  }

 private:
  static void load_groups(const Param& param, Index stack, Index n, Index groups, float* out) {
    const Index first = stack * param.stack_stride + n * param.n_stride;
    read_floats(param.dtype, param.data, first, param.g_stride == 0 ? 1 : groups, out);
    if (param.g_stride == 0)
      for (Index g = 1; g < groups; ++g) out[g] = out[0];
  }
};

}  // namespace
}  // namespace jaxgemv
