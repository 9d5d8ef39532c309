// From XLA's FFI buffers to a Problem and its Operands, or an ffi::Error. Both handlers use it.
//
// Python has checked shapes and dtypes already, with better messages; what is checked here is
// enough that a hand-made call cannot read foreign memory.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "gemv.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgemv {

namespace ffi = xla::ffi;

// The operands of the custom call, in order; those after scale are empty arrays when absent.
//   x (B, M, K)   packed (S, N, words) uint32 or (S, N, bytes) uint8
//   scale, zero, offset (S | 1[, N[, G]])   bias (S | 1, N)   index (B,)   -> y (B, M, N)
// Of the transposed product x is (B, M, N) and y (B, M, K), without a bias.
struct Call {
  Problem problem;
  Operands operands;

  static ffi::ErrorOr<Call> from(ffi::AnyBuffer x, ffi::AnyBuffer packed, ffi::AnyBuffer scale,
                                 ffi::AnyBuffer zero, ffi::AnyBuffer offset, ffi::AnyBuffer bias,
                                 ffi::AnyBuffer index, ffi::AnyBuffer y, int64_t bits,
                                 int64_t group, bool transposed = false);

  // XLA may hand over one slice of memory as x and as y of an in-place update. A kernel that reads
  // x while it writes y would race.
  bool x_overlaps_y() const;
};

// The binding that both handlers share, to which each adds its own context.
inline auto bind_call() {
  return ffi::Ffi::Bind()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // packed
      .Arg<ffi::AnyBuffer>()  // scale
      .Arg<ffi::AnyBuffer>()  // zero
      .Arg<ffi::AnyBuffer>()  // offset
      .Arg<ffi::AnyBuffer>()  // bias
      .Arg<ffi::AnyBuffer>()  // index
      .Ret<ffi::AnyBuffer>()  // y
      .Attr<int64_t>("bits")
      .Attr<int64_t>("group");
}

namespace detail {

inline ffi::Error invalid(std::string_view what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jaxgemv: " + std::string(what));
}

inline bool to_dtype(ffi::DataType type, Dtype* dtype) {
  if (type == ffi::DataType::F16) return *dtype = Dtype::kF16, true;
  if (type == ffi::DataType::BF16) return *dtype = Dtype::kBF16, true;
  if (type == ffi::DataType::F32) return *dtype = Dtype::kF32, true;
  return false;
}

// (S | 1[, N[, G]]) -> strides. `rank` is the largest rank allowed.
inline bool to_param(ffi::AnyBuffer buffer, const Problem& problem, size_t rank, Param* param) {
  const auto dims = buffer.dimensions();
  if (!to_dtype(buffer.element_type(), &param->dtype)) return false;
  if (dims.size() < 1 || dims.size() > rank) return false;
  if (dims[0] != 1 && dims[0] != problem.stack) return false;
  if (dims.size() > 1 && dims[1] != problem.N) return false;
  const Index groups = dims.size() > 2 ? dims[2] : 1;
  if (groups != 1 && groups != ceil_div(problem.K, problem.group)) return false;
  param->data = buffer.untyped_data();
  param->g_stride = groups > 1 ? 1 : 0;
  param->n_stride = dims.size() > 1 ? groups : 0;
  param->stack_stride = dims[0] > 1 ? groups * (dims.size() > 1 ? problem.N : 1) : 0;
  return true;
}

}  // namespace detail

inline ffi::ErrorOr<Call> Call::from(ffi::AnyBuffer x, ffi::AnyBuffer packed, ffi::AnyBuffer scale,
                                     ffi::AnyBuffer zero, ffi::AnyBuffer offset,
                                     ffi::AnyBuffer bias, ffi::AnyBuffer index, ffi::AnyBuffer y,
                                     int64_t bits, int64_t group, bool transposed) {
  using detail::invalid;
  Call call;
  Problem& p = call.problem;
  Operands& o = call.operands;
  const auto x_dims = x.dimensions(), w_dims = packed.dimensions(), y_dims = y.dimensions();
  if (x_dims.size() != 3 || w_dims.size() != 3 || y_dims.size() != 3)
    return ffi::Unexpected(invalid("x, Wq and y must have rank 3"));
  if (bits < 1 || bits > 8) return ffi::Unexpected(invalid("bits must be 1..8"));
  if (!detail::to_dtype(x.element_type(), &p.x) || !detail::to_dtype(y.element_type(), &p.y))
    return ffi::Unexpected(invalid("x and y must be float16, bfloat16 or float32"));

  p.bits = static_cast<int>(bits);
  p.batch = x_dims[0];
  p.M = x_dims[1];
  p.transposed = transposed;
  p.K = transposed ? y_dims[2] : x_dims[2];
  p.N = w_dims[1];
  p.group = group > 0 ? group : p.K;
  if (p.K < 1 || p.N < 1) return ffi::Unexpected(invalid("N and K must be at least 1"));
  if (x_dims[2] != p.x_width())
    return ffi::Unexpected(invalid("x must have the N of Wq in the transposed product"));
  if (y_dims[0] != p.batch || y_dims[1] != p.M || y_dims[2] != p.y_width())
    return ffi::Unexpected(invalid("y must have shape (batch, M, N), or (batch, M, K) transposed"));

  const ffi::DataType word = packed.element_type();
  if (word != ffi::DataType::U32 && word != ffi::DataType::U8)
    return ffi::Unexpected(invalid("Wq must be uint32 or uint8"));
  const Index bytes = w_dims[2] * (word == ffi::DataType::U32 ? 4 : 1);
  if (bytes != row_bytes(p.K, p.bits))
    return ffi::Unexpected(invalid("the rows of Wq do not hold K codes"));

  p.stack = w_dims[0];
  const bool has_zero = zero.element_count() > 0, has_offset = offset.element_count() > 0;
  for (const ffi::AnyBuffer& each : {scale, zero, offset, bias})
    if (p.stack == 1 && each.element_count() > 0 && each.dimensions().size() > 0)
      p.stack = each.dimensions()[0];
  o.packed_stack_stride = w_dims[0] > 1 ? p.N * bytes : 0;

  if (has_zero && has_offset) return ffi::Unexpected(invalid("both zero and offset given"));
  p.affine = has_zero ? Affine::kZero : has_offset ? Affine::kOffset : Affine::kMid;
  if (!detail::to_param(scale, p, 3, &o.scale))
    return ffi::Unexpected(invalid("scale has the wrong shape or dtype"));
  if ((has_zero && !detail::to_param(zero, p, 3, &o.shift)) ||
      (has_offset && !detail::to_param(offset, p, 3, &o.shift)))
    return ffi::Unexpected(invalid("zero or offset has the wrong shape or dtype"));
  if (bias.element_count() > 0 &&
      (transposed || bias.dimensions().size() != 2 || !detail::to_param(bias, p, 2, &o.bias)))
    return ffi::Unexpected(invalid("bias has the wrong shape or dtype"));
  if (index.element_count() > 0) {
    if (index.element_type() != ffi::DataType::S32 ||
        index.element_count() != static_cast<size_t>(p.batch))
      return ffi::Unexpected(invalid("index must hold one int32 for each slice of x"));
    o.index = static_cast<const int32_t*>(index.untyped_data());
  } else if (p.batch > 1) {
    return ffi::Unexpected(invalid("a batch of x needs an index"));
  }

  o.x = x.untyped_data();
  o.packed = static_cast<const uint8_t*>(packed.untyped_data());
  o.y = y.untyped_data();
  return call;
}

inline bool Call::x_overlaps_y() const {
  const Problem& p = problem;
  const auto x = reinterpret_cast<uintptr_t>(operands.x),
             y = reinterpret_cast<uintptr_t>(operands.y);
  const Index rows = p.batch * p.M;
  return x < y + rows * p.y_width() * size_of(p.y) && y < x + rows * p.x_width() * size_of(p.x);
}

}  // namespace jaxgemv
