// The Python interface that both extension modules (CPU, CUDA) share.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "row_limits.h"

namespace jaxgemv {

// The names of the custom calls: products (call.h), and attention of one token. The version is part of the name, so
// that an exported program finds the handler that it was made for.
inline constexpr const char *kTarget = "jaxgemv_gemv_v1", *kAttend = "jaxgemv_attend_v1";
// Not a call of its own: registers kTarget with one more stage (csrc/cuda/handler.h).
inline constexpr const char* kRecord = "jaxgemv_record_v1";

// A target's name and its handler.
using Targets = std::vector<std::pair<const char*, void*>>;

inline nanobind::dict capsules_of(const Targets& targets) {
  nanobind::dict capsules;
  for (const auto& [name, handler] : targets) capsules[name] = nanobind::capsule(handler);
  return capsules;
}

inline nanobind::object to_python(std::string_view text) {
  return nanobind::str(text.data(), text.size());
}

// The Dtype of x from its JAX name.
inline Dtype dtype_of(std::string_view x) {
  if (x == name_of(Dtype::kI8)) return Dtype::kF16;  // to which _dispatch.float_x converts it
  for (const Dtype dtype : {Dtype::kF16, Dtype::kBF16, Dtype::kF32})
    if (x == name_of(dtype)) return dtype;
  throw nanobind::value_error("x must be int8 or a float dtype of 16 or 32 bits");
}

// A Problem with nothing but a weight (n, k) and the dtype of the x that multiplies it.
inline Problem problem_of(int64_t n, int64_t k, int64_t group, std::string_view format, int bits,
                          std::string_view x) {
  const auto at = std::find(std::begin(kFormatNames), std::end(kFormatNames), format);
  if (at == std::end(kFormatNames)) throw nanobind::value_error("format must be one of format.h's");
  Problem problem{};
  problem.N = n, problem.K = k, problem.group = group, problem.bits = bits;
  problem.format = static_cast<Format>(at - std::begin(kFormatNames)), problem.x = dtype_of(x);
  return problem;
}

// Defines everything that `_ffi.py` reads from either module. weight_limits(major, one_byte_scale, problem) returns
// WeightLimits; major is the GPU's major compute capability.
template <typename Kernels, typename GetLimits, typename GetWeightLimits>
void define_backend(nanobind::module_& m, int ffi_api_minor, const Targets& targets,
                    Kernels kernels, GetLimits row_limits, GetWeightLimits weight_limits) {
  namespace nb = nanobind;
  m.attr("FFI_API_MINOR") = ffi_api_minor;
  m.def(
      "registrations", [targets] { return capsules_of(targets); },
      "Target name -> capsule of its handler.");
  m.def(
      "kernels",
      [kernels] {
        nb::list rows;
        for (const KernelInfo& kernel : kernels()) {
          nb::list operands;
          for_each_name(kernel.operands,
                        [&](std::string_view name) { operands.append(to_python(name)); });
          rows.append(nb::make_tuple(kernel.name, kFormatNames[static_cast<int>(kernel.format)],
                                     kernel.bits, to_python(name_of(kernel.x)), kernel.rows,
                                     operands, kernel.transposed));
        }
        return rows;
      },
      "The table: rows (name, format, bits, dtype of x, rows of x that share a read of the "
      "weights, "
      "operands that it takes besides x, packed and scale, transposed).");
  m.def(
      "row_limits",
      [row_limits] {
        const RowLimits c = row_limits();
        nb::dict rows;
        rows["most_rows"] = c.most_rows, rows["fused_rows"] = c.fused_rows;
        rows["epilogue_rows"] = c.epilogue_rows, rows["residual_rows"] = c.residual_rows;
        rows["global_scale_rows"] = c.global_scale_rows, rows["gradient_rows"] = c.gradient_rows;
        return rows;
      },
      "RowLimits of row_limits.h, by their names.");
  m.def(
      "weight_limits",
      [weight_limits](int major, bool one_byte_scale, int64_t n, int64_t k, int64_t group,
                      std::string_view format, int bits, std::string_view x) {
        const WeightLimits of =
            weight_limits(major, one_byte_scale, problem_of(n, k, group, format, bits, x));
        return nb::make_tuple(of.loop_rows, of.rounded_rows, of.epilogue_from);
      },
      nb::arg("major"), nb::arg("one_byte_scale"), nb::arg("n"), nb::arg("k"), nb::arg("group"),
      nb::arg("format"), nb::arg("bits"), nb::arg("x"),
      "WeightLimits of row_limits.h, in their order, of weights (n, k) on GPUs of compute "
      "capability "
      "`major`.x.");
  m.def(
      "operands",
      [] {
        nb::list names;
        for (const std::string_view name : kOperandNames) names.append(to_python(name));
        return names;
      },
      "Names of all operands, whether or not a kernel takes them.");
  m.def("last_kernel", [] { return trace().last.load(); }, "Name of the kernel that ran last.");
  m.def(
      "use_only",
      [kernels](std::string_view name) {
        const char* only = nullptr;
        for (const KernelInfo& kernel : kernels())
          if (kernel.name == name) only = kernel.name;
        if (only == nullptr && !name.empty())
          throw nb::value_error(("no kernel is called " + std::string(name)).c_str());
        trace().only = only;
      },
      nb::arg("name"),
      "Lets no kernel run but those of this name, or again all for an empty one: "
      "for tests and benchmarks. Calls that none of them can run fail.");
}

}  // namespace jaxgemv
