// The Python module `jaxgemv._cuda`.
#include "../module.h"

#include <cuda_runtime_api.h>

#include <vector>

#include "device.h"
#include "handler.h"
#include "image/image.h"
#include "limits.h"
#include "record_abi.h"
#include "table.h"

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jaxgemv behind XLA's FFI.";
  namespace cuda = jaxgemv::cuda;
  const auto kernels = [] {
    std::vector<jaxgemv::KernelInfo> rows;
    for (const cuda::Kernel& kernel : cuda::table()) rows.push_back(kernel.info);
    return rows;
  };
  const jaxgemv::Targets targets = {{jaxgemv::kTarget, cuda::gemv_handler()}};
  jaxgemv::define_backend(
      m, cuda::ffi_api_minor(), targets, kernels,
      [] {
        return jaxgemv::RowLimits{cuda::kMostRows,     cuda::kFusedRows,       cuda::kEpilogueRows,
                                  cuda::kResidualRows, cuda::kGlobalScaleRows, cuda::kMostRows};
      },
      [](int major, bool one_byte_scale, const jaxgemv::Problem& problem) {
        return jaxgemv::WeightLimits{cuda::loop_rows(problem),
                                     cuda::most_rounded_rows(major, problem, one_byte_scale),
                                     cuda::epilogue_from(major, problem)};
      });
  nanobind::list versions;
  for (const auto& known : cuda::record_abi::kVersions)
    versions.append(nanobind::make_tuple(known.ffi_minor, known.major, known.minor));
  m.attr("RECORDS") = versions;
  m.def(
      "recording",
      [] {
        return jaxgemv::capsules_of(
            {{jaxgemv::kRecord, cuda::recording_handler(jaxgemv::kTarget)}});
      },
      "In place of registrations(), for jaxlib of the versions RECORDS: calls may be nodes of "
      "XLA's graphs.");
  m.def("recorded", cuda::recorded, "How many kernels have become nodes of XLA's graphs.");
  m.def(
      "dequantizes",
      [](int64_t codes, std::string_view x) {
        return cuda::is_for_dequantize(codes, jaxgemv::dtype_of(x));
      },
      nanobind::arg("codes"), nanobind::arg("x"),
      "Whether a call without x is the faster way to so many weights of x's dtype.");
  m.def(
      "versions",
      [] {
        int driver = 0, runtime = 0;
        cudaDriverGetVersion(&driver), cudaRuntimeGetVersion(&runtime);
        return nanobind::make_tuple(driver, runtime);
      },
      "Of CUDA: (the newest that the driver knows, the one that this was built with); 12040 is "
      "12.4, and 0 no "
      "driver.");
  m.def(
      "code_for", cuda::code_for, nanobind::arg("capability"),
      nanobind::arg("compiled") = cuda::kCompiled,
      "The compute capability, 80 for 8.0, whose code of those that `compiled` lists runs on a GPU "
      "of that one; 0 for none.");
  m.def(
      "image_bytes",
      [](int64_t rows, int64_t k, std::string_view format, std::string_view x, bool has_norm) {
        jaxgemv::Problem problem = jaxgemv::problem_of(1, k, k, format, 8, x);
        problem.M = rows;
        return cuda::image::image_row_bytes(problem, cuda::image::parts_of(problem.x, has_norm));
      },
      nanobind::arg("rows"), nanobind::arg("k"), nanobind::arg("format"), nanobind::arg("x"),
      nanobind::arg("has_norm"),
      "Bytes of a second result, uint8 (batch, rows, bytes), that a call of so many rows of x "
      "needs "
      "as scratch; 0 if none.");
}
