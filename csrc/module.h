// What both extension modules show to Python.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

#include "gemv.h"

namespace jaxgemv {

// The custom call (call.h). The version is part of its name: an exported program finds the handler
// that it was made for.
inline constexpr const char* kTarget = "jaxgemv_gemv_v1";

inline nanobind::object to_python(std::string_view text) {
  return nanobind::str(text.data(), text.size());
}

// `registrations()`, `kernels()` and `operands()` of a backend.
template <typename Kernels>
void define_backend(nanobind::module_& m, int ffi_api_minor, void* handler, Kernels kernels) {
  namespace nb = nanobind;
  m.attr("FFI_API_MINOR") = ffi_api_minor;
  m.def(
      "registrations",
      [handler] {
        nb::dict targets;
        targets[kTarget] = nb::capsule(handler);
        return targets;
      },
      "Target name -> capsule of its handler.");
  m.def(
      "kernels",
      [kernels] {
        nb::list rows;
        for (const KernelInfo& kernel : kernels()) {
          nb::list operands;
          for (int i = 0; i < kOperandCount; ++i)
            if (kernel.operands.has(static_cast<Operand>(i)))
              operands.append(to_python(kOperandNames[i]));
          rows.append(nb::make_tuple(kernel.name, kernel.bits, name_of(kernel.x), kernel.rows,
                                     operands, kernel.transposed));
        }
        return rows;
      },
      "The table, fastest first: rows (name, bits, dtype of x, rows of x that share a read of the "
      "weights, operands that it takes besides x, packed and scale, transposed).");
  m.def(
      "operands",
      [] {
        nb::list names;
        for (const std::string_view name : kOperandNames) names.append(to_python(name));
        return names;
      },
      "Names of all operands, whether or not a kernel takes them.");
}

}  // namespace jaxgemv
