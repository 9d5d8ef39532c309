// Defines a gemv for every backend: its shapes, its pointers, and what is applied before and after the product.
// Nothing here knows CUDA, XLA or nanobind.
//
//   y[b, m, n] = bias[n] + sum_k x[b, m, k] * w[s, n, k],   s = index ? index[b] : 0
//   or transposed: y[b, m, k] = sum_n x[b, m, n] * w[s, n, k]
//   w[s, n, k] = (q[s, n, k] - zero[s, n, k / group]) * scale[s, n, k / group]
//              or q[s, n, k] * scale[...] + offset[...]
//              or codebook[s, q[s, n, k]] * scale[...]
//              or float8(q[s, n, k]) * scale[...]
//              each times global_scale[s, n], which multiplies the sum
//
// int8 x stands for x[b, m, k] * x_scale[b, m, k / x_group]. If the weights have no scale either, y is the
// int32 sum of x * (q - zero), and zero is int32 too.
//
// With norm, x * rsqrt(mean(x^2) + eps) * norm takes the place of x. After the product come bias, activation and
// residual, in this order. A gated activation computes act(y[n]) * y[n + N / 2] from the N rows of the weight,
// so that a row of the result has N / 2 values.
//
// An index outside [0, stack) fills its rows of y with NaN, or with INT32_MIN where y is int32.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "format.h"
#include "operands.h"

namespace jaxgemv {

// The affine map from codes to weights, and so what `Operands::shift` holds.
enum class Affine : uint8_t {
  kSymmetric,  // no shift array: (q - 2^(bits - 1)) * scale, or value of q * scale in other formats
  kZero,       // (q - shift) * scale
  kOffset,     // q * scale + shift
};

enum class Activation : uint8_t { kNone, kRelu, kSilu, kGelu, kGeluExact, kSwiglu, kGeglu };

// The names that Python uses, by Activation; the empty one is kNone.
inline constexpr std::string_view kActivationNames[] = {"",           "relu",   "silu", "gelu",
                                                        "gelu_exact", "swiglu", "geglu"};

// Whether the activation combines pairs of rows of the weight, n and n + N / 2.
JAXGEMV_HD constexpr bool is_gated(Activation activation) {
  return activation == Activation::kSwiglu || activation == Activation::kGeglu;
}

// A parameter of the weights of shape (), (N,) or (N, G), with an optional stack dimension in front. Strides are in
// elements; a stride of 0 repeats the value along that dimension, so no shape needs a kernel of its own. The values
// of norm (K,) and of a codebook (2^bits,) are contiguous: there only data, dtype and stack_stride count.
struct Param {
  const void* data = nullptr;
  Dtype dtype = Dtype::kF32;
  Index stack_stride = 0;
  Index n_stride = 0;
  Index g_stride = 0;
};

// Up to so many rows of x (M), weights are never rounded; above, `Problem::rounded` allows it.
inline constexpr Index kExactRows = 64;

struct Problem {
  Index batch = 1;  // slices of x, each with a stack entry of its own
  Index stack = 1;  // matrices in `packed`
  Index M = 0;      // rows of x in a slice
  Index N = 0;
  Index K = 0;
  Index padding = 0;  // without x: zeros at the end of each row of y
  Index group = 0;    // codes along K that share a scale; K if there is one group
  Index x_group = 0;  // with x_scale: elements of x that share a scale
  int bits = 0;
  Dtype x = Dtype::kF32;
  Dtype y = Dtype::kF32;
  Affine affine = Affine::kSymmetric;
  Format format = Format::kAffine;
  Activation activation = Activation::kNone;
  bool transposed = false;
  bool rounded = false;     // weights may be rounded once to x's dtype; with float32 both, to TF32
  float eps = 0;            // of norm
  bool round_norm = false;  // x * norm may be rounded once to x's dtype

  // The number of values in a row of x and in a row of y.
  Index x_width() const { return transposed ? N : K; }
  Index y_width() const { return transposed ? K + padding : is_gated(activation) ? N / 2 : N; }
  // Whether y is the exact int32 sum of int8 x and integer codes.
  bool is_exact() const { return y == Dtype::kI32; }
};

struct Operands {
  const void* x = nullptr;  // (batch, M, K); transposed, (batch, M, N) or null: the identity
  const uint8_t* packed = nullptr;  // (stack or 1, N, row_bytes)
  Index packed_stack_stride = 0;    // in bytes; 0 when one matrix serves every index
  Param scale;                      // (N, G)
  Param shift;                      // (N, G) zero or offset, as Problem::affine says
  Param global_scale;               // (N,), data is null without one
  Param bias;                       // (N,), data is null without one
  const int32_t* index = nullptr;   // (batch,) or null
  const float* x_scale = nullptr;   // (batch, M, K / x_group) or null
  void* y = nullptr;                // (batch, M, N); transposed, (batch, M, K); gated, N / 2
  Param codebook;                   // (2^bits,), data is null without one
  Param norm;                       // (K,), data is null without one
  Param residual;                   // of y's shape, or data is null; may be y itself
  void* image = nullptr;            // room for x as a kernel wants it, (batch, M, image_row_bytes)
  Index image_row_bytes = 0;        // as the backend's image_bytes says

  // The operands as seen by a call whose batch starts at slice b of this one.
  Operands from_slice(const Problem& problem, Index b) const {
    const Index rows = b * problem.M;
    const auto at = [](auto* data, Index bytes) {
      return data == nullptr ? data : (decltype(data))((const char*)data + bytes);
    };
    Operands part = *this;
    part.x = at(x, rows * problem.x_width() * size_of(problem.x));
    part.y = at(y, rows * problem.y_width() * size_of(problem.y));
    part.residual.data = at(residual.data, rows * problem.y_width() * size_of(residual.dtype));
    part.index = at(index, b * Index{sizeof(int32_t)});
    if (x_scale != nullptr)
      part.x_scale = at(x_scale, rows * (problem.K / problem.x_group) * Index{sizeof(float)});
    part.image = at(image, rows * image_row_bytes);
    return part;
  }
};

// Whether the `bytes` bytes at `data` overlap y.
inline bool meets_y(const Problem& p, const Operands& o, const void* data, Index bytes) {
  const auto at = reinterpret_cast<uintptr_t>(data), y = reinterpret_cast<uintptr_t>(o.y);
  const auto end = y + static_cast<uintptr_t>(p.batch * p.M * p.y_width() * size_of(p.y));
  return data != nullptr && bytes > 0 && at < end && y < at + static_cast<uintptr_t>(bytes);
}
inline bool x_meets_y(const Problem& p, const Operands& o) {
  return meets_y(p, o, o.x, p.batch * p.M * p.x_width() * size_of(p.x));
}

inline bool is_aligned(const void* pointer, Index bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace jaxgemv
