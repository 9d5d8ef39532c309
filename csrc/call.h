// From XLA's FFI buffers to a Problem and its Operands, or an ffi::Error. Both handlers use it.
//
// Python has checked shapes and dtypes already, with better messages; what is checked here is
// enough that a hand-made call cannot read foreign memory.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "decode.h"

namespace jaxgemv {

// The custom call, one for both products: arrays named by the attribute `operands`,
// "x,packed,scale" say, in that order, and a result y. Those that are absent are not passed.
//   x (B, M, K)   packed (S, N, words) uint32, (S, N, bytes) uint8, or weights (S, N, K) of a float8
//   scale, zero, offset (S | 1[, N[, G]])   global_scale (S | 1[, N])   codebook (S | 1, 2^bits)
//   norm (S | 1, K)
//   bias (S | 1, N)   residual (B, M, N)   index (B,)   -> y (B, M, N)
// x may be int8, then with x_scale (B, M, X), X a divisor of K; without scale y is int32, and so is zero.
// Attributes: bits, group (both int64), transposed (bool): then x is (B, M, N) and y (B, M, K);
// with norm eps (float32), and round_norm; activation (a name of kActivationNames): of a gated one y and residual
// are (B, M, N / 2); rounded (true): see Problem. On CUDA a transposed call may leave x out: it is the
// identity then, and y (B, N, K) the weights themselves; with k (int64), the K of these, rows of y may be
// wider, which gives zeros; entry (int64), in place of index: that of the stack which all of x meets. The
// other names in operands.h have no meaning yet: the call refuses them, as it refuses what it has never
// heard of, until a kernel takes them.
struct Call {
  Problem problem;
  Operands operands;
  OperandSet given;                 // besides kRequired
  std::optional<Operand> met_by_y;  // an operand in y's memory, that is not x or residual

  static ffi::ErrorOr<Call> from(ffi::RemainingArgs args, ffi::AnyBuffer y,
                                 const ffi::Dictionary& attributes, const char* backend,
                                 const Taken& taken);

  // XLA may hand over one slice of memory as an operand and as y of an in-place update. A kernel
  // that reads it while it writes y would race, unless it copies x before. Residual may be y itself,
  // but no other part of it, and so may the bias of one row.
  std::optional<ffi::Error> overlap(bool copies_x) const;
};

// The binding that both handlers share, to which each adds its own context. Scratch: nothing, or
// ffi::RemainingRets.
template <typename... Scratch>
auto bind_call() {
  auto results = ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>();
  if constexpr (sizeof...(Scratch) > 0)
    return std::move(results).RemainingRets().Attrs();
  else
    return std::move(results).Attrs();
}

inline ffi::ErrorOr<Call> Call::from(ffi::RemainingArgs args, ffi::AnyBuffer y,
                                     const ffi::Dictionary& attributes, const char* backend,
                                     const Taken& taken) {
  using detail::invalid;
  const auto attrs = detail::Attributes::from(attributes);
  if (attrs.has_error()) return ffi::Unexpected(attrs.error());
  const auto arrays = detail::to_arrays(args, attrs->operands);
  if (arrays.has_error()) return ffi::Unexpected(arrays.error());
  const auto array = [&](Operand operand) { return (*arrays)[static_cast<int>(operand)]; };
  const bool has_x = array(Operand::kX).has_value() || !attrs->transposed || !taken.without_x;
  const bool is_exact = y.element_type() == ffi::DataType::S32;
  for (const Operand each : {Operand::kX, Operand::kPacked, Operand::kScale})
    if (!array(each) && (each != Operand::kX || has_x) && (each != Operand::kScale || !is_exact))
      return ffi::Unexpected(
          invalid("needs " + std::string(kOperandNames[static_cast<int>(each)])));

  Call call;
  Problem& p = call.problem;
  Operands& o = call.operands;
  OperandSet& given = call.given;
  for (int i = 0; i < kArrayCount; ++i)
    if ((*arrays)[i] && !kRequired.has(static_cast<Operand>(i))) given.add(static_cast<Operand>(i));
  if (attrs->activation != Activation::kNone) given.add(Operand::kActivation);
  const ffi::AnyBuffer packed = *array(Operand::kPacked);
  const auto scale = array(Operand::kScale), x_scale = array(Operand::kXScale);
  if (scale && ffi::ByteWidth(scale->element_type()) == 1) given.add(Operand::kOneByteScale);
  const OperandSet missing = given.without(has_x ? taken.by[attrs->transposed] : *taken.without_x);
  if (!missing.empty())
    return ffi::Unexpected(invalid(std::string("no ") + backend + " kernel " +
                                   (attrs->transposed ? "for gradients " : "") + "takes " +
                                   detail::names_of(missing)));

  const auto w_dims = packed.dimensions(), y_dims = y.dimensions();
  const ffi::AnyBuffer x = has_x ? *array(Operand::kX) : y;  // which has its batch, rows and dtype
  const auto x_dims = x.dimensions();
  if (x_dims.size() != 3 || w_dims.size() != 3 || y_dims.size() != 3)
    return ffi::Unexpected(invalid("x, Wq and y must have rank 3"));
  if (attrs->bits < 1 || attrs->bits > 8) return ffi::Unexpected(invalid("bits must be 1..8"));
  if (!detail::to_dtype(x.element_type(), &p.x) || (!is_wide(p.x) && p.x != Dtype::kI8) ||
      !detail::to_dtype(y.element_type(), &p.y) || (!is_wide(p.y) && !p.is_exact()))
    return ffi::Unexpected(
        invalid("x and y must be float16, bfloat16 or float32, or x int8 and y int32"));
  const bool is_int8 = p.x == Dtype::kI8;
  if (is_int8 ? attrs->transposed || given.has(Operand::kNorm) : given.has(Operand::kXScale))
    return ffi::Unexpected(
        invalid("int8 x has no norm and no transposed product, and other x no x_scale"));
  if (is_exact && (!is_int8 || scale || !given.without(kExactOperands).empty()))
    return ffi::Unexpected(invalid("y of int32 is of int8 x, packed, zero and index alone"));

  p.bits = static_cast<int>(attrs->bits);
  p.batch = x_dims[0];
  p.M = x_dims[1];
  p.transposed = attrs->transposed;
  p.activation = attrs->activation;
  p.rounded = attrs->rounded && p.M > kExactRows;  // of a program for any number of rows
  p.K = p.transposed ? y_dims[2] : x_dims[2];
  if (attrs->k) {
    if (has_x || *attrs->k > p.K)
      return ffi::Unexpected(invalid("k must be that of wider weights"));
    p.padding = p.K - *attrs->k, p.K = *attrs->k;
  }
  p.N = w_dims[1];
  p.group = attrs->group > 0 ? attrs->group : p.K;
  if (p.K < 1 || p.N < 1) return ffi::Unexpected(invalid("N and K must be at least 1"));
  if (is_gated(p.activation) && p.N % 2 != 0)
    return ffi::Unexpected(invalid("N must be even for a gated activation"));
  if (has_x ? x_dims[2] != p.x_width() : p.M != p.N)
    return ffi::Unexpected(invalid("x must have the N of Wq in the transposed product"));
  if (y_dims[0] != p.batch || y_dims[1] != p.M || y_dims[2] != p.y_width())
    return ffi::Unexpected(
        invalid("y must have shape (batch, M, N), (batch, M, N / 2) for a gated activation, or "
                "(batch, M, K) transposed"));

  const ffi::DataType word = packed.element_type();
  const bool is_e4m3 = word == ffi::DataType::F8E4M3FN, is_e5m2 = word == ffi::DataType::F8E5M2;
  if (word != ffi::DataType::U32 && word != ffi::DataType::U8 && !is_e4m3 && !is_e5m2)
    return ffi::Unexpected(invalid("Wq must be uint32, uint8, float8_e4m3fn or float8_e5m2"));
  if ((is_e4m3 || is_e5m2) && p.bits != 8)
    return ffi::Unexpected(invalid("bits must be 8 for a float8 Wq"));
  const Index bytes = w_dims[2] * (word == ffi::DataType::U32 ? 4 : 1);
  if (bytes != row_bytes(p.K, p.bits))
    return ffi::Unexpected(invalid("the rows of Wq do not hold K codes"));

  const auto zero = array(Operand::kZero), offset = array(Operand::kOffset),
             global_scale = array(Operand::kGlobalScale), codebook = array(Operand::kCodebook),
             norm = array(Operand::kNorm), bias = array(Operand::kBias),
             residual = array(Operand::kResidual), index = array(Operand::kIndex);
  p.stack = w_dims[0];
  for (const auto& each :
       {array(Operand::kScale), zero, offset, global_scale, codebook, norm, bias})
    if (p.stack == 1 && each && each->dimensions().size() > 0 && each->dimensions()[0] > 1)
      p.stack = each->dimensions()[0];
  if (w_dims[0] < 1 && !index)
    return ffi::Unexpected(invalid("Wq must have an entry unless there is an index"));
  o.packed_stack_stride = w_dims[0] > 1 ? p.N * bytes : 0;

  if (!!zero + !!offset + !!codebook + is_e4m3 + is_e5m2 > 1)
    return ffi::Unexpected(
        invalid("only one of zero, offset, codebook and a float8 Wq can be given"));
  p.format = codebook  ? Format::kCodebook
             : is_e4m3 ? Format::kE4M3
             : is_e5m2 ? Format::kE5M2
                       : Format::kAffine;
  p.affine = zero ? Affine::kZero : offset ? Affine::kOffset : Affine::kSymmetric;
  if (scale && (!detail::to_param(*scale, p, &o.scale) ||
                (!is_wide(o.scale.dtype) && !is_one_byte_scale(o.scale.dtype))))
    return ffi::Unexpected(invalid("scale has the wrong shape or dtype"));
  for (const auto& shift : {zero, offset})
    if (shift && (!detail::to_param(*shift, p, &o.shift) ||
                  (is_exact ? o.shift.dtype != Dtype::kI32 : !is_wide(o.shift.dtype))))
      return ffi::Unexpected(invalid("zero or offset has the wrong shape or dtype"));
  if (global_scale &&
      (global_scale->dimensions().size() > 2 ||
       !detail::to_param(*global_scale, p, &o.global_scale) || !is_wide(o.global_scale.dtype)))
    return ffi::Unexpected(invalid("global_scale has the wrong shape or dtype"));
  if (codebook && !detail::to_vector(*codebook, p, Index{1} << p.bits, &o.codebook))
    return ffi::Unexpected(invalid("codebook has the wrong shape or dtype"));
  if (norm && !detail::to_vector(*norm, p, p.K, &o.norm))
    return ffi::Unexpected(invalid("norm has the wrong shape or dtype"));
  if (!!norm != attrs->eps.has_value())
    return ffi::Unexpected(invalid("eps must be given with norm, and only with it"));
  if (attrs->round_norm && !norm)
    return ffi::Unexpected(invalid("round_norm must be given with norm"));
  p.eps = attrs->eps.value_or(0), p.round_norm = attrs->round_norm;
  if (bias && !detail::to_vector(*bias, p, p.N, &o.bias))
    return ffi::Unexpected(invalid("bias has the wrong shape or dtype"));
  if (residual) {
    if (residual->dimensions() != y_dims ||
        !detail::to_dtype(residual->element_type(), &o.residual.dtype) ||
        !is_wide(o.residual.dtype))
      return ffi::Unexpected(invalid("residual must have the shape of y and a float dtype"));
    o.residual.data = residual->untyped_data();
  }
  if (x_scale) {
    const auto dims = x_scale->dimensions();
    if (x_scale->element_type() != ffi::DataType::F32 || dims.size() != 3 || dims[0] != p.batch ||
        dims[1] != p.M || dims[2] < 1 || p.K % dims[2] != 0)
      return ffi::Unexpected(invalid("x_scale has the wrong shape or dtype"));
    o.x_scale = static_cast<const float*>(x_scale->untyped_data());
    p.x_group = p.K / dims[2];
  }
  if (index) {
    if (index->element_type() != ffi::DataType::S32 ||
        index->element_count() != static_cast<size_t>(p.batch))
      return ffi::Unexpected(invalid("index must hold one int32 for each slice of x"));
    o.index = static_cast<const int32_t*>(index->untyped_data());
  } else if (p.batch > 1) {
    return ffi::Unexpected(invalid("a batch of x needs an index"));
  }

  o.x = has_x ? x.untyped_data() : nullptr;
  o.packed = static_cast<const uint8_t*>(packed.untyped_data());
  o.y = y.untyped_data();
  if (attrs->entry) {
    if (index || *attrs->entry < 0 || *attrs->entry >= p.stack)
      return ffi::Unexpected(invalid("entry must be one of the stack, and without index"));
    detail::keep_entry(*attrs->entry, &p, &o);
  }
  const bool is_row_of_bias = p.batch * p.M == 1 && o.bias.data == o.y && o.bias.dtype == p.y;
  for (int i = 0; i < kArrayCount; ++i) {
    const Operand each = static_cast<Operand>(i);
    if (!(*arrays)[i] || each == Operand::kX || each == Operand::kResidual) continue;
    if (each == Operand::kBias && is_row_of_bias && !is_gated(p.activation)) continue;
    const Index bytes = static_cast<Index>((*arrays)[i]->size_bytes());
    if (meets_y(p, o, (*arrays)[i]->untyped_data(), bytes)) call.met_by_y = each;
  }
  return call;
}

inline std::optional<ffi::Error> Call::overlap(bool copies_x) const {
  const Problem& p = problem;
  if (!copies_x && x_meets_y(p, operands))
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "jaxgemv: x and the result share memory (an in-place update of a donated x "
                      "that the call reads); copy x, or do not donate it");
  if (met_by_y) {
    const std::string name(kOperandNames[static_cast<int>(*met_by_y)]);
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "jaxgemv: " + name +
                          " and the result share memory (an in-place update of a "
                          "donated array that the call reads); copy " +
                          name + ", or do not donate it");
  }
  const Param& residual = operands.residual;
  const bool is_y = residual.data == operands.y && residual.dtype == p.y;
  const Index values = p.batch * p.M * p.y_width();
  if (!is_y && meets_y(p, operands, residual.data, values * size_of(residual.dtype)))
    return ffi::Error(ffi::ErrorCode::kInvalidArgument,
                      "jaxgemv: residual and the result share memory, but not exactly (in-place "
                      "updates of different parts); copy residual, or do not donate it");
  return std::nullopt;
}

}  // namespace jaxgemv
