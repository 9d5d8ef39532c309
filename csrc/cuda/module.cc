// The Python module `jaxgemv._cuda`.
#include <nanobind/nanobind.h>

#include "handler.h"
#include "launch.h"

namespace nb = nanobind;

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jaxgemv behind XLA's FFI.";
  m.attr("FFI_API_MINOR") = jaxgemv::cuda::ffi_api_minor();
  m.def(
      "registrations",
      [] {
        nb::dict targets;
        targets["jaxgemv_gemv_v1"] = nb::capsule(jaxgemv::cuda::gemv_handler());
        targets["jaxgemv_gemv_transposed_v1"] = nb::capsule(jaxgemv::cuda::transposed_handler());
        return targets;
      },
      "FFI target name -> capsule of its handler.");
  m.def(
      "kernels",
      [] {
        nb::list rows;
        for (const jaxgemv::KernelInfo& kernel : jaxgemv::cuda::kernels())
          rows.append(nb::make_tuple(kernel.name, kernel.bits, jaxgemv::name_of(kernel.x),
                                     kernel.rows, kernel.transposed));
        return rows;
      },
      "The kernel table, fastest first: (name, bits, dtype of x, rows of x per read of the "
      "weights, transposed).");
}
