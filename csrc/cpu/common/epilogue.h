// From the sums of a product to y: bias, activation and residual in float32, and one rounding.
// Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "activation.h"

namespace jaxgemv::cpu {
namespace {

struct Epilogue {
  const Problem& p;
  const Operands& o;
  Index slice, stack;

  // y[slice, m, n : n + count] of sums[i] of rows n + i of the weight and, of a gated activation,
  // partners[i] of rows n + i + N / 2. Both can be read in whole vectors. An element is finished
  // once: what residual has for it may lie where y is written. Not inline: main loops need their
  // registers.
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
      Floats y = load_floats(sums + i) + bias(n + i, left);
      if (p.activation != Activation::kNone) y = activate(p.activation, y);
      if (is_gated(p.activation)) y *= load_floats(partners + i) + bias(width + n + i, left);
      if (o.residual.data != nullptr)
        y += read_vector(o.residual.dtype, o.residual.data, at + i, left);
      float values[kLanes];
      store_floats(values, y);
      write_floats(p.y, o.y, at + i, left, values);
    }
  }

  Floats bias(Index n, Index count) const {
    if (o.bias.data == nullptr) return Floats{};
    return read_vector(o.bias.dtype, o.bias.data, stack * o.bias.stack_stride + n, count);
  }
};

}  // namespace
}  // namespace jaxgemv::cpu
