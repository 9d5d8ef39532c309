// The extension module jaxgemv._cpu.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <string>

#include "handler.h"
#include "level.h"

namespace jaxgemv {
namespace {

namespace nb = nanobind;

nb::dict registrations() {
  nb::dict targets;
  targets["jaxgemv_gemv_v1"] = nb::capsule(reinterpret_cast<void*>(&jaxgemv_gemv_v1));
  targets["jaxgemv_gemv_transposed_v1"] =
      nb::capsule(reinterpret_cast<void*>(&jaxgemv_gemv_transposed_v1));
  return targets;
}

// Rows (name, bits, x dtype, rows of x, transposed) of what runs on this processor.
nb::list kernels() {
  nb::list rows;
  for (int bits = 1; bits <= 8; ++bits)
    for (Dtype x : {Dtype::kF16, Dtype::kBF16, Dtype::kF32}) {
      rows.append(
          nb::make_tuple(current_level()->name, bits, name_of(x), current_level()->rows, false));
      rows.append(nb::make_tuple(current_level()->name, bits, name_of(x), kSharedRows, true));
    }
  return rows;
}

nb::list levels() {
  nb::list names;
  for (const Level* level : supported_levels()) names.append(level->name);
  return names;
}

void set_level(const std::string& name) {
  for (const Level* level : supported_levels())
    if (level->name == name) {
      current_level() = level;
      return;
    }
  throw nb::value_error(("this processor has no level " + name).c_str());
}

}  // namespace

NB_MODULE(_cpu, m) {
  m.attr("FFI_API_MINOR") = kFfiApiMinor;
  m.def("registrations", &registrations, "Target name -> capsule of its handler.");
  m.def("kernels", &kernels,
        "Rows (name, bits, dtype of x, rows of x that share a read, transposed).");
  m.def("levels", &levels, "Instruction-set levels that this processor supports, best first.");
  m.def("set_level", &set_level, nb::arg("name"), "Use another level than the best: for tests.");
  m.def(
      "packed_offset",
      [](Index n, Index k, Index k_total, int bits) { return octet_offset(n, k, k_total, bits); },
      nb::arg("n"), nb::arg("k"), nb::arg("k_total"), nb::arg("bits"),
      "Bytes from the start of a packed matrix to the octet that holds code k of row n.");
}

}  // namespace jaxgemv
