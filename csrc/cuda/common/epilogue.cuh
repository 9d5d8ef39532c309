// The epilogue, from the sum for a row of x and a row of the weights to y: global scale, bias, activation, residual,
// and the store in y's dtype. All in float32, rounded once; every NaN gets through.
#pragma once

#include <cmath>

#include "params.cuh"

namespace jaxgemv::cuda {

// What a kernel is compiled with besides the product and the bias: nothing, the epilogue, or the norm and the epilogue.
// Which of these parts a call has is looked up at run time; kernels with kNone have no code for any.
enum class Parts { kNone, kEpilogue, kNormAndEpilogue };

struct Output {
  void* y;
  Dtype dtype;
  Activation activation;
  Param bias, residual, global_scale;
};

JAXGEMV_HD Output output_of(const Problem& problem, const Operands& operands) {
  return {operands.y,    problem.y,         problem.activation,
          operands.bias, operands.residual, operands.global_scale};
}

// Whether the next kernel may begin while this one ends: with one row of x, or if the next is a product too, as it
// mostly is behind an activation or a residual. CTAs of other kernels are not spread over the SMs (shared_bytes_of_node
// does that for products), so many would begin on few SMs: attention of 16 sequences, behind a plain product, took 10.5
// us instead of 7 on an H200. For one sequence, with contexts of 128 and 4096, 0.5b took 0.97 and 0.99 of the time
// before, 8b 0.99 and 1.00 (python -m bench.decode).
__device__ __forceinline__ bool next_may_begin(const Output& output, int M) {
  return M == 1 || output.residual.data != nullptr || output.activation != Activation::kNone;
}

// Reads parameters early: they arrive by cache line, and the epilogue should not have to wait for its own.
__device__ __forceinline__ void touch(const Output& output) {
  asm volatile("" ::"r"(static_cast<int>(output.activation)), "l"(output.residual.data),
               "l"(output.global_scale.data));
}

// Bias and residual of a sum, as raw bits, so that nothing waits for them before they are needed. Zeros where there is
// none.
__device__ __forceinline__ uint32_t bias_bits(const Output& output, Index s, Index n) {
  const Param& bias = output.bias;
  return bias.data != nullptr ? load_bits(bias.data, bias.dtype, offset_of(bias, s, n, 0)) : 0;
}
__device__ __forceinline__ uint32_t residual_bits(const Output& output, Index at) {
  const Param& residual = output.residual;
  return residual.data != nullptr ? load_bits(residual.data, residual.dtype, at) : 0;
}

// The bias of row n of the weights; NaN if the stack index is out of range (`exists` is false).
__device__ __forceinline__ float bias_of(const Output& output, bool exists, Index s, Index n) {
  return exists ? float_of_bits(bias_bits(output, s, n), output.bias.dtype) : NAN;
}

// The factor of row n's sum, applied before the bias.
__device__ __forceinline__ uint32_t global_scale_bits(const Output& output, Index s, Index n) {
  const Param& scale = output.global_scale;
  return scale.data != nullptr ? load_bits(scale.data, scale.dtype, offset_of(scale, s, n, 0)) : 0;
}
__device__ __forceinline__ float global_scale_value(const Output& output, uint32_t bits) {
  const Param& scale = output.global_scale;
  return scale.data != nullptr ? float_of_bits(bits, scale.dtype) : 1;
}
__device__ __forceinline__ float global_scale_of(const Output& output, bool exists, Index s,
                                                 Index n) {
  const Param& scale = output.global_scale;
  return exists && scale.data != nullptr ? load(scale, s, n, 0) : 1;
}

// The activation; for a gated one, the function applied to its first half.
__device__ __forceinline__ float activate(Activation activation, float v) {
  // The case of most models, ahead of all branches. (Below v = -87 it is 0.)
  if (activation == Activation::kSilu || activation == Activation::kSwiglu)
    return __fdividef(v, 1 + expf(-v));
  switch (activation) {
    case Activation::kNone:
    case Activation::kSilu:
    case Activation::kSwiglu: return v;
    case Activation::kRelu: return v < 0 ? 0 : v;
    case Activation::kGelu:
    case Activation::kGeglu:
      return v * 0.5f * (1 + tanhf(0.7978845608028654f * (v + 0.044715f * (v * v * v))));
    case Activation::kGeluExact: return v * 0.5f * erfcf(v * -0.7071067811865475f);
  }
  __builtin_unreachable();
}

__device__ __forceinline__ float residual_of(const Output& output, Index at) {
  return float_of_bits(residual_bits(output, at), output.residual.dtype);
}

// A result from its sum. `up`: the sum of the second half, for gated activations.
__device__ __forceinline__ float finished(const Output& output, float sum, float up,
                                          float residual) {
  sum = activate(output.activation, sum);
  if (is_gated(output.activation)) sum *= up;
  return sum + residual;
}

// Stores y[at], made from the sum.
template <Parts kParts>
__device__ __forceinline__ void finish(const Output& output, Index at, float sum, float up,
                                       float residual) {
  if constexpr (kParts != Parts::kNone) sum = finished(output, sum, up, residual);
  store(output.y, output.dtype, at, sum);
}

// The same, but loads the residual itself.
template <Parts kParts>
__device__ __forceinline__ void finish(const Output& output, Index at, float sum, float up = 1) {
  finish<kParts>(output, at, sum, up, kParts != Parts::kNone ? residual_of(output, at) : 0);
}

}  // namespace jaxgemv::cuda
