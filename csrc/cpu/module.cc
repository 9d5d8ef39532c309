// The extension module jaxgemv._cpu.

#include "../module.h"

#include <nanobind/stl/string.h>

#include <string>
#include <vector>

#include "choose.h"
#include "detect.h"
#include "handler.h"

namespace jaxgemv::cpu {
namespace {

namespace nb = nanobind;

// Of the instruction set in use.
std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> rows;
  const Table& table = current_table();
  for (const Kernel& kernel : std::span(table.kernels).first(table.of_isa))
    rows.push_back(kernel.info);
  return rows;
}

nb::list isas() {
  nb::list names;
  for (const Table& table : supported_tables()) names.append(table.isa->name);
  return names;
}

}  // namespace

NB_MODULE(_cpu, m) {
  const Targets targets = {{kTarget, reinterpret_cast<void*>(&jaxgemv_gemv_v1)},
                           {kAttend, reinterpret_cast<void*>(&jaxgemv_attend_v1)}};
  define_backend(m, kFfiApiMinor, targets, &kernels,
                 [] { return crossovers_of(current_table().isa->name); });
  m.def("isa", [] { return current_table().isa->name; }, "The instruction set in use.");
  m.def("isas", &isas, "Instruction sets that this processor supports, best first.");
  m.def(
      "set_isa",
      [](const std::string& name) {
        if (!set_isa(name))
          throw nb::value_error(("this processor has no instruction set " + name).c_str());
      },
      nb::arg("name"), "Use another instruction set than the best: for tests.");
  m.def(
      "rounded_rows",
      [](int, bool, int64_t, int64_t, int64_t, std::string_view, int, std::string_view x) {
        return most_rounded_rows(current_table().isa->name, x == name_of(Dtype::kBF16));
      },
      nb::arg("major"), nb::arg("one_byte_scale"), nb::arg("n"), nb::arg("k"), nb::arg("group"),
      nb::arg("format"), nb::arg("bits"), nb::arg("x"),
      "most_rows of crossovers() where weights may be rounded to x's dtype; all but x are for "
      "other "
      "backends.");
  m.def(
      "packed_offset",
      [](Index n, Index k, Index k_total, int bits) { return octet_offset(n, k, k_total, bits); },
      nb::arg("n"), nb::arg("k"), nb::arg("k_total"), nb::arg("bits"),
      "Bytes from the start of a packed matrix to the octet that holds code k of row n.");
}

}  // namespace jaxgemv::cpu
