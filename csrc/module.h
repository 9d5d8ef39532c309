// What both extension modules show to Python.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string_view.h>

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kernel.h"

namespace jaxgemv {

// The custom calls: products (call.h), and attention of one token. The version is part of a name: an exported
// program finds the handler that it was made for.
inline constexpr const char *kTarget = "jaxgemv_gemv_v1", *kAttend = "jaxgemv_attend_v1";
// No call, but what registers kTarget with a stage more (csrc/cuda/handler.h).
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

// All that both modules have for Python, which `_ffi.py` reads.
template <typename Kernels, typename GetCrossovers>
void define_backend(nanobind::module_& m, int ffi_api_minor, const Targets& targets,
                    Kernels kernels, GetCrossovers crossovers) {
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
      "crossovers",
      [crossovers] {
        const Crossovers c = crossovers();
        nb::dict rows;
        rows["most_rows"] = c.most_rows, rows["fused_rows"] = c.fused_rows;
        rows["epilogue_rows"] = c.epilogue_rows, rows["residual_rows"] = c.residual_rows;
        rows["global_scale_rows"] = c.global_scale_rows, rows["gradient_rows"] = c.gradient_rows;
        return rows;
      },
      "Rows of x: most_rows and gradient_rows, above which XLA is faster; fused_rows, "
      "epilogue_rows, residual_rows and global_scale_rows, above which the parts around a product, "
      "with a norm, without, a residual alone, and beside a global scale, are faster outside of "
      "it.");
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
      "for tests. Calls that none of them can run fail.");
}

}  // namespace jaxgemv
