// Makes y from the sums of a product: global scale, bias, activation and residual in float32, and one rounding.
// Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "activation.h"

namespace jaxgemv::cpu {
namespace {

struct Epilogue {
  const Problem& p;
  const Operands& o;
  Index slice, stack;

  // Writes y[slice, m, n : n + count] from sums[i] of rows n + i of the weight and, with a gated activation,
  // partners[i] of rows n + i + N / 2. Both can be read in whole vectors. Each element is to be finished only once:
  // its residual may lie where y is written. Not inline: main loops need their registers.
  __attribute__((noinline)) void store(Index m, Index n, Index count, const float* sums,
                                       const float* partners) const {
    const Index width = is_gated(p.activation) ? p.N / 2 : p.N;
    const Index at = (slice * p.M + m) * width + n;
    if (p.is_exact()) {  // sums are integers
      for (Index i = 0; i < count; ++i) jaxgemv::cpu::store(o.y, at + i, sums[i]);
      return;
    }
    for (Index i = 0; i < count; i += kLanes) {
      const Index left = min_of(kLanes, count - i);
      Floats y = of_row(sums + i, n + i, left);
      if (p.activation != Activation::kNone) y = activate(p.activation, y);
      if (is_gated(p.activation)) y *= of_row(partners + i, width + n + i, left);
      if (o.residual.data != nullptr)
        y += read_vector(o.residual.dtype, o.residual.data, at + i, left);
      float values[kLanes];
      store_floats(values, y);
      write_floats(p.y, o.y, at + i, left, values);
    }
  }

  // The sums of `count` rows of the weight from n on, with global scale and bias applied.
  Floats of_row(const float* sums, Index n, Index count) const {
    Floats y = load_floats(sums);
    if (const Param& scale = o.global_scale; scale.data != nullptr) {
      const Index at = stack * scale.stack_stride;
      y *= scale.n_stride == 0 ? broadcast(read_vector(scale.dtype, scale.data, at, 1)[0])
                               : read_vector(scale.dtype, scale.data, at + n, count);
    }
    if (const Param& bias = o.bias; bias.data != nullptr)
      y += read_vector(bias.dtype, bias.data, stack * bias.stack_stride + n, count);
    return y;
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
