// The extension module jaxgemv._cpu.

#include "../module.h"

#include <nanobind/stl/string.h>

#include <string>

#include "handler.h"
#include "level.h"

namespace jaxgemv {
namespace {

namespace nb = nanobind;

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
  define_backend(m, kFfiApiMinor, reinterpret_cast<void*>(&jaxgemv_gemv_v1), &kernels,
                 [] { return Crossovers{current_level()->rows, 0}; });
  m.def("levels", &levels, "Instruction-set levels that this processor supports, best first.");
  m.def("set_level", &set_level, nb::arg("name"), "Use another level than the best: for tests.");
  m.def(
      "packed_offset",
      [](Index n, Index k, Index k_total, int bits) { return octet_offset(n, k, k_total, bits); },
      nb::arg("n"), nb::arg("k"), nb::arg("k_total"), nb::arg("bits"),
      "Bytes from the start of a packed matrix to the octet that holds code k of row n.");
}

}  // namespace jaxgemv
