// What a gemv is, for every backend: shapes, pointers, and the parts around the product.
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
// x of int8 stands for x[b, m, k] * x_scale[b, m, k / x_group]; without a scale of the weights y is the
// int32 sum of x * (q - zero), and zero an int32 too.
//
// With norm, x * rsqrt(mean(x^2) + eps) * norm takes the place of x. An activation is applied to y
// behind the bias, then residual is added. A gated one makes act(y[n]) * y[n + N / 2] of the N rows
// of the weight, so that a row of the result is half as wide.
//
// An index outside [0, stack) fills its rows of y with NaN, of int32 with INT32_MIN.
#pragma once

#include <cstdint>

#include "dtype.h"
#include "format.h"
#include "operands.h"

namespace jaxgemv {

// How codes become weights; says what `shift` holds.
enum class Affine : uint8_t {
  kSymmetric,  // no shift array: (q - 2^(bits - 1)) * scale, or value of q * scale in other formats
  kZero,       // (q - shift) * scale
  kOffset,     // q * scale + shift
};

enum class Activation : uint8_t { kNone, kRelu, kSilu, kGelu, kGeluExact, kSwiglu, kGeglu };

// As Python calls them; the first is for none.
inline constexpr std::string_view kActivationNames[] = {"",           "relu",   "silu", "gelu",
                                                        "gelu_exact", "swiglu", "geglu"};

// Of pairs of rows of the weight, n and n + N / 2.
JAXGEMV_HD constexpr bool is_gated(Activation activation) {
  return activation == Activation::kSwiglu || activation == Activation::kGeglu;
}

// A parameter of the weights, (), (N,) or (N, G), each behind an optional stack dimension. A stride
// of 0 repeats the value along that dimension, so no shape needs a kernel of its own. Of norm (K,)
// and a codebook (2^bits,) the values are neighbours, and only data, dtype and stack_stride count.
struct Param {
  const void* data = nullptr;
  Dtype dtype = Dtype::kF32;
  Index stack_stride = 0;
  Index n_stride = 0;
  Index g_stride = 0;
};

// Rows of x that meet weights as they are; those of more may be rounded.
inline constexpr Index kExactRows = 64;

struct Problem {
  Index batch = 1;  // slices of x, each with a stack entry of its own
  Index stack = 1;  // matrices in `packed`
  Index M = 0;      // rows of x in a slice
  Index N = 0;
  Index K = 0;
  Index padding = 0;  // without x: behind each row of y, zeros
  Index group = 0;    // codes that share a scale; K when they all do
  Index x_group = 0;  // with x_scale, codes whose x share one of it
  int bits = 0;
  Dtype x = Dtype::kF32;
  Dtype y = Dtype::kF32;
  Affine affine = Affine::kSymmetric;
  Format format = Format::kAffine;
  Activation activation = Activation::kNone;
  bool transposed = false;
  bool rounded = false;     // weights may be rounded once to x's dtype; with float32 both, to TF32
  float eps = 0;            // of norm
  bool round_norm = false;  // x with a norm may be rounded once to x's dtype

  // Values in a row of x and of y.
  Index x_width() const { return transposed ? N : K; }
  Index y_width() const { return transposed ? K + padding : is_gated(activation) ? N / 2 : N; }
  // The sum of integers.
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

  // The operands of a call whose batch starts at slice b.
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

// Whether so many bytes have memory in common with y.
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
