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

// The kernels of the instruction set in use, without those of lesser sets.
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
  define_backend(
      m, kFfiApiMinor, targets, &kernels, [] { return row_limits_of(current_table().isa->name); },
      [](int, bool, const Problem& problem) {
        return WeightLimits{.rounded_rows = most_rounded_rows(current_table().isa->name,
                                                              problem.x == Dtype::kBF16)};
      });
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
      "packed_offset",
      [](Index n, Index k, Index k_total, int bits) { return octet_offset(n, k, k_total, bits); },
      nb::arg("n"), nb::arg("k"), nb::arg("k_total"), nb::arg("bits"),
      "Bytes from the start of a packed matrix to the octet that holds code k of row n.");
}

}  // namespace jaxgemv::cpu
