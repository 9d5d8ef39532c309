// From XLA's FFI buffers to a Problem and its Operands, or an ffi::Error. Both handlers use it.
//
// Python has checked shapes and dtypes already, with better messages; what is checked here is
// enough that a hand-made call cannot read foreign memory.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "gemv.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgemv {

namespace ffi = xla::ffi;

// The custom call, one for both products: arrays named by the attribute `operands`,
// "x,packed,scale" say, in that order, and a result y. Those that are absent are not passed.
//   x (B, M, K)   packed (S, N, words) uint32 or (S, N, bytes) uint8
//   scale, zero, offset (S | 1[, N[, G]])   bias (S | 1, N)   index (B,)   -> y (B, M, N)
// Attributes: bits, group (both int64), transposed (bool): then x is (B, M, N) and y (B, M, K).
// The other names in operands.h have no meaning yet: the call refuses them, as it refuses what it
// has never heard of, until a kernel takes them.
struct Call {
  Problem problem;
  Operands operands;
  OperandSet given;  // besides kRequired

  static ffi::ErrorOr<Call> from(ffi::RemainingArgs args, ffi::AnyBuffer y,
                                 const ffi::Dictionary& attributes, const char* backend,
                                 const Taken& taken);

  // XLA may hand over one slice of memory as x and as y of an in-place update. A kernel that reads
  // x while it writes y would race.
  bool x_overlaps_y() const;
};

// The binding that both handlers share, to which each adds its own context.
inline auto bind_call() { return ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>().Attrs(); }

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

// The arrays of a call, by operand; empty where there is none.
using Arrays = std::array<std::optional<ffi::AnyBuffer>, kArrayCount>;

inline ffi::ErrorOr<Arrays> to_arrays(ffi::RemainingArgs args, std::string_view names) {
  Arrays arrays;
  size_t count = 0;
  for (size_t at = 0; at < names.size(); ++count) {
    const std::string_view name = names.substr(at, names.find(',', at) - at);
    at += name.size() + 1;
    const auto found = std::find(kOperandNames, kOperandNames + kArrayCount, name);
    if (found == kOperandNames + kArrayCount)
      return ffi::Unexpected(invalid("no operand is called " + std::string(name)));
    const auto array = args.get<ffi::AnyBuffer>(count);
    if (array.has_error()) return ffi::Unexpected(invalid("operands names more than there are"));
    auto& place = arrays[found - kOperandNames];
    if (place) return ffi::Unexpected(invalid(std::string(name) + " is named twice"));
    place = *array;
  }
  if (count != args.size()) return ffi::Unexpected(invalid("operands must name every array"));
  return arrays;
}

// Reads the attributes that are known, and refuses others.
struct Attributes {
  std::string_view operands;
  int64_t bits = 0, group = 0;
  bool transposed = false, has_activation = false;

  static ffi::ErrorOr<Attributes> from(const ffi::Dictionary& given) {
    Attributes a;
    const auto operands = given.get<std::string_view>("operands");
    const auto bits = given.get<int64_t>("bits"), group = given.get<int64_t>("group");
    const auto transposed = given.get<bool>("transposed");
    if (operands.has_error() || bits.has_error() || group.has_error() || transposed.has_error())
      return ffi::Unexpected(invalid("needs operands, bits, group and transposed"));
    a.operands = *operands, a.bits = *bits, a.group = *group, a.transposed = *transposed;
    a.has_activation = given.contains("activation");
    if (given.size() != 4u + a.has_activation)
      return ffi::Unexpected(invalid("has an attribute that this version does not know"));
    return a;
  }
};

inline std::string names_of(OperandSet set) {
  std::string text;
  for (int i = 0; i < kOperandCount; ++i)
    if (set.has(static_cast<Operand>(i)))
      text.append(text.empty() ? "" : ", ").append(kOperandNames[i]);
  return text;
}

}  // namespace detail

inline ffi::ErrorOr<Call> Call::from(ffi::RemainingArgs args, ffi::AnyBuffer y,
                                     const ffi::Dictionary& attributes, const char* backend,
                                     const Taken& taken) {
  using detail::invalid;
  const auto attrs = detail::Attributes::from(attributes);
  if (attrs.has_error()) return ffi::Unexpected(attrs.error());
  const auto arrays = detail::to_arrays(args, attrs->operands);
  if (arrays.has_error()) return ffi::Unexpected(arrays.error());
  const auto array = [&](Operand operand) { return (*arrays)[static_cast<int>(operand)]; };
  for (const Operand each : {Operand::kX, Operand::kPacked, Operand::kScale})
    if (!array(each))
      return ffi::Unexpected(
          invalid("needs " + std::string(kOperandNames[static_cast<int>(each)])));

  Call call;
  Problem& p = call.problem;
  Operands& o = call.operands;
  OperandSet& given = call.given;
  for (int i = 0; i < kArrayCount; ++i)
    if ((*arrays)[i] && !kRequired.has(static_cast<Operand>(i))) given.add(static_cast<Operand>(i));
  if (attrs->has_activation) given.add(Operand::kActivation);
  const ffi::AnyBuffer x = *array(Operand::kX), packed = *array(Operand::kPacked),
                       scale = *array(Operand::kScale);
  if (ffi::ByteWidth(scale.element_type()) == 1) given.add(Operand::kOneByteScale);
  const OperandSet missing = given.without(taken.by[attrs->transposed]);
  if (!missing.empty())
    return ffi::Unexpected(invalid(std::string("no ") + backend + " kernel " +
                                   (attrs->transposed ? "for gradients " : "") + "takes " +
                                   detail::names_of(missing)));

  const auto x_dims = x.dimensions(), w_dims = packed.dimensions(), y_dims = y.dimensions();
  if (x_dims.size() != 3 || w_dims.size() != 3 || y_dims.size() != 3)
    return ffi::Unexpected(invalid("x, Wq and y must have rank 3"));
  if (attrs->bits < 1 || attrs->bits > 8) return ffi::Unexpected(invalid("bits must be 1..8"));
  if (!detail::to_dtype(x.element_type(), &p.x) || !detail::to_dtype(y.element_type(), &p.y))
    return ffi::Unexpected(invalid("x and y must be float16, bfloat16 or float32"));

  p.bits = static_cast<int>(attrs->bits);
  p.batch = x_dims[0];
  p.M = x_dims[1];
  p.transposed = attrs->transposed;
  p.K = p.transposed ? y_dims[2] : x_dims[2];
  p.N = w_dims[1];
  p.group = attrs->group > 0 ? attrs->group : p.K;
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

  const auto zero = array(Operand::kZero), offset = array(Operand::kOffset),
             bias = array(Operand::kBias), index = array(Operand::kIndex);
  p.stack = w_dims[0];
  for (const auto& each : {array(Operand::kScale), zero, offset, bias})
    if (p.stack == 1 && each && each->dimensions().size() > 0 && each->dimensions()[0] > 1)
      p.stack = each->dimensions()[0];
  o.packed_stack_stride = w_dims[0] > 1 ? p.N * bytes : 0;

  if (zero && offset) return ffi::Unexpected(invalid("both zero and offset given"));
  p.affine = zero ? Affine::kZero : offset ? Affine::kOffset : Affine::kMid;
  if (!detail::to_param(scale, p, 3, &o.scale))
    return ffi::Unexpected(invalid("scale has the wrong shape or dtype"));
  if ((zero && !detail::to_param(*zero, p, 3, &o.shift)) ||
      (offset && !detail::to_param(*offset, p, 3, &o.shift)))
    return ffi::Unexpected(invalid("zero or offset has the wrong shape or dtype"));
  if (bias && (bias->dimensions().size() != 2 || !detail::to_param(*bias, p, 2, &o.bias)))
    return ffi::Unexpected(invalid("bias has the wrong shape or dtype"));
  if (index) {
    if (index->element_type() != ffi::DataType::S32 ||
        index->element_count() != static_cast<size_t>(p.batch))
      return ffi::Unexpected(invalid("index must hold one int32 for each slice of x"));
    o.index = static_cast<const int32_t*>(index->untyped_data());
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
