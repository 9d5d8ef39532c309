// Decodes the parts of a call (call.h): dtypes, parameters with strides, arrays by name, attributes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "kernel.h"
#include "xla/ffi/api/ffi.h"

namespace jaxgemv {

namespace ffi = xla::ffi;

namespace detail {

inline ffi::Error invalid(std::string_view what) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, "jaxgemv: " + std::string(what));
}

constexpr ffi::DataType type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF16: return ffi::DataType::F16;
    case Dtype::kBF16: return ffi::DataType::BF16;
    case Dtype::kF32: return ffi::DataType::F32;
    case Dtype::kE4M3: return ffi::DataType::F8E4M3FN;
    case Dtype::kE8M0: return ffi::DataType::F8E8M0FNU;
    case Dtype::kI8: return ffi::DataType::S8;
    case Dtype::kI32: return ffi::DataType::S32;
  }
  __builtin_unreachable();
}

inline bool to_dtype(ffi::DataType type, Dtype* dtype) {
  const auto found = std::find_if(std::begin(kDtypes), std::end(kDtypes),
                                  [&](Dtype each) { return type_of(each) == type; });
  if (found == std::end(kDtypes)) return false;
  *dtype = *found;
  return true;
}

// An array (S | 1, width), one contiguous vector for each stack entry. False if dtype or shape do not fit.
inline bool to_vector(ffi::AnyBuffer buffer, const Problem& problem, Index width, Param* param) {
  const auto dims = buffer.dimensions();
  if (!to_dtype(buffer.element_type(), &param->dtype) || !is_wide(param->dtype)) return false;
  if (dims.size() != 2 || dims[1] != width) return false;
  if (dims[0] != 1 && dims[0] != problem.stack) return false;
  param->data = buffer.untyped_data();
  param->n_stride = 1;
  param->stack_stride = dims[0] > 1 ? width : 0;
  return true;
}

// An array (S | 1[, N[, G]]) as a Param with strides. False if dtype or shape do not fit.
inline bool to_param(ffi::AnyBuffer buffer, const Problem& problem, Param* param) {
  constexpr size_t rank = 3;
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

// Makes the call one with a single stack entry: all arrays with a stack dimension then point to that entry.
inline void keep_entry(Index entry, Problem* problem, Operands* operands) {
  operands->packed += entry * std::exchange(operands->packed_stack_stride, 0);
  for (Param Operands::* each : {&Operands::scale, &Operands::shift, &Operands::global_scale,
                                 &Operands::codebook, &Operands::norm, &Operands::bias}) {
    Param& param = operands->*each;
    const Index values = entry * std::exchange(param.stack_stride, 0);
    if (param.data != nullptr)
      param.data = static_cast<const char*>(param.data) + values * size_of(param.dtype);
  }
  problem->stack = 1;
}

// The arrays of a call, indexed by Operand; empty where the call has none.
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

// Reads the known attributes, and refuses a call with any other.
struct Attributes {
  std::string_view operands;
  int64_t bits = 0, group = 0;
  bool transposed = false;
  Activation activation = Activation::kNone;
  std::optional<float> eps;
  bool rounded = false, round_norm = false;
  std::optional<int64_t> k, entry;

  static ffi::ErrorOr<Attributes> from(const ffi::Dictionary& given) {
    Attributes a;
    const auto operands = given.get<std::string_view>("operands");
    const auto bits = given.get<int64_t>("bits"), group = given.get<int64_t>("group");
    const auto transposed = given.get<bool>("transposed");
    if (operands.has_error() || bits.has_error() || group.has_error() || transposed.has_error())
      return ffi::Unexpected(invalid("needs operands, bits, group and transposed"));
    a.operands = *operands, a.bits = *bits, a.group = *group, a.transposed = *transposed;
    size_t known = 4;
    if (given.contains("activation")) {
      const auto name = given.get<std::string_view>("activation");
      if (name.has_error()) return ffi::Unexpected(invalid("activation must be a name"));
      const auto found =
          std::find(std::begin(kActivationNames) + 1, std::end(kActivationNames), *name);
      if (found == std::end(kActivationNames))
        return ffi::Unexpected(invalid("no activation is called " + std::string(*name)));
      a.activation = static_cast<Activation>(found - kActivationNames), ++known;
    }
    for (const auto& [name, value] :
         {std::pair{"rounded", &a.rounded}, std::pair{"round_norm", &a.round_norm}}) {
      if (!given.contains(name)) continue;
      const auto of = given.get<bool>(name);
      if (of.has_error() || !*of)
        return ffi::Unexpected(invalid(std::string(name) + " must be true, or not given"));
      *value = true, ++known;
    }
    // True if the attribute is absent, or present with the right type (then `value` is set).
    const auto take = [&]<typename T>(const char* name, std::optional<T>* value) {
      if (!given.contains(name)) return true;
      const auto of = given.get<T>(name);
      if (of.has_error()) return false;
      *value = *of, ++known;
      return true;
    };
    if (!take("eps", &a.eps)) return ffi::Unexpected(invalid("eps must be a float32"));
    if (!take("k", &a.k)) return ffi::Unexpected(invalid("k must be an int64"));
    if (!take("entry", &a.entry)) return ffi::Unexpected(invalid("entry must be an int64"));
    if (given.size() != known)
      return ffi::Unexpected(invalid("has an attribute that this version does not know"));
    return a;
  }
};

inline std::string names_of(OperandSet set) {
  std::string text;
  for_each_name(set,
                [&](std::string_view name) { text.append(text.empty() ? "" : ", ").append(name); });
  return text;
}

}  // namespace detail

}  // namespace jaxgemv
