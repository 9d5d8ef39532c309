// x as kernels read it before they pack it. Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "convert.h"

namespace jaxgemv::cpu {
namespace {

// Whether x, as it is multiplied, has the 24 bits of float32: float32 itself, or x with a norm.
inline bool is_float_x(const Problem& p, const Operands& o) {
  return p.x == Dtype::kF32 || o.norm.data != nullptr;
}

// A slice of x in float32, normalised where the call has a norm.
struct X {
  const Problem& p;
  const Operands& o;
  Index slice, stack;
  float* factors;  // of rows, with a norm

  static constexpr Index kLine = 16;  // what follows begins with a line of the cache
  static Index size(const Problem& p, const Operands& o) {
    return o.norm.data == nullptr ? 0 : ceil_div(p.M, kLine) * kLine;
  }

  // out[0, count) <- row m from code k on.
  void read(Index m, Index k, Index count, float* out) const {
    read_plain(m, k, count, out);
    if (o.norm.data == nullptr) return;
    constexpr Index kPart = 64;
    for (Index i = 0; i < count; i += kPart) {
      const Index end = min_of(count, i + kPart);
      float norm[kPart];
      read_floats(o.norm.dtype, o.norm.data, stack * o.norm.stack_stride + k + i, end - i, norm);
      for (Index j = i; j < end; ++j) out[j] = out[j] * factors[m] * norm[j - i];
    }
  }

  // Row m of int8 x, and the scale of its element k.
  const int8_t* int8_row(Index m) const {
    return static_cast<const int8_t*>(o.x) + (slice * p.M + m) * p.K;
  }
  float int8_scale(Index m, Index k) const {
    if (o.x_scale == nullptr) return 1;
    return o.x_scale[(slice * p.M + m) * (p.K / p.x_group) + k / p.x_group];
  }

  // Computes the norm's factors of rows [m0, m1). Has to come before these are read.
  void normalise(Index m0, Index m1) const {
    if (o.norm.data == nullptr) return;
    constexpr Index kPart = 256;
    for (Index m = m0; m < m1; ++m) {
      float squares = 0;
      for (Index k = 0; k < p.K; k += kPart) {
        float values[kPart] = {};
        read_plain(m, k, min_of(kPart, p.K - k), values);
        Floats sum = {};
        for (Index i = 0; i < kPart; i += kLanes)
          sum += load_floats(values + i) * load_floats(values + i);
        squares += sum_of(sum);
      }
      factors[m] = 1 / __builtin_sqrtf(squares / static_cast<float>(p.K) + p.eps);
    }
  }

  // Writes rows [m0, m1) of x, normalised and rounded to its dtype, to an array that begins with row 0; its size is
  // rounded_size floats.
  void round(Index m0, Index m1, void* to) const {
    constexpr Index kPart = 256;
    for (Index m = m0; m < m1; ++m)
      for (Index k = 0; k < p.K; k += kPart) {
        float values[kPart];
        const Index count = min_of(kPart, p.K - k);
        read(m, k, count, values);
        write_floats(p.x, to, m * p.K + k, count, values);
      }
  }
  static Index rounded_size(const Problem& p) {
    return ceil_div(p.M * p.K * size_of(p.x), 4 * kLine) * kLine;
  }

 private:
  void read_plain(Index m, Index k, Index count, float* out) const {
    read_floats(p.x, o.x, (slice * p.M + m) * p.K + k, count, out);
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
