// The Python module `jaxgemv._cuda`.
#include "../module.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>
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
  jaxgemv::define_backend(m, cuda::ffi_api_minor(), targets, kernels, [] {
    return jaxgemv::Crossovers{cuda::kMostRows,     cuda::kFusedRows,       cuda::kEpilogueRows,
                               cuda::kResidualRows, cuda::kGlobalScaleRows, cuda::kMostRows};
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
  const auto dtype_of = [](std::string_view x) {
    using jaxgemv::Dtype;
    if (x == name_of(Dtype::kI8)) return Dtype::kF16;  // which it becomes
    for (const Dtype dtype : {Dtype::kF16, Dtype::kBF16, Dtype::kF32})
      if (x == name_of(dtype)) return dtype;
    throw nanobind::value_error("x must be int8 or a float dtype of 16 or 32 bits");
  };
  const auto problem_of = [=](int64_t n, int64_t k, int64_t group, std::string_view format,
                              int bits, std::string_view x) {
    const auto& names = jaxgemv::kFormatNames;
    const auto at = std::find(std::begin(names), std::end(names), format) - names;
    if (at == std::ssize(names)) throw nanobind::value_error("format must be one of format.h's");
    jaxgemv::Problem problem{};
    problem.N = n, problem.K = k, problem.group = group, problem.bits = bits;
    problem.format = static_cast<jaxgemv::Format>(at), problem.x = dtype_of(x);
    return problem;
  };
  m.def(
      "loop_rows",
      [=](int64_t n, int64_t k, int64_t group, std::string_view format, int bits,
          std::string_view x) { return cuda::loop_rows(problem_of(n, k, group, format, bits, x)); },
      nanobind::arg("n"), nanobind::arg("k"), nanobind::arg("group"), nanobind::arg("format"),
      nanobind::arg("bits"), nanobind::arg("x"),
      "Rows of x up to which XLA's own loop over weights (n, k) is faster than any kernel.");
  m.def(
      "rounded_rows",
      [=](int major, bool one_byte_scale, int64_t n, int64_t k, int64_t group,
          std::string_view format, int bits, std::string_view x) {
        return cuda::most_rounded_rows(major, problem_of(n, k, group, format, bits, x),
                                       one_byte_scale);
      },
      nanobind::arg("major"), nanobind::arg("one_byte_scale"), nanobind::arg("n"),
      nanobind::arg("k"), nanobind::arg("group"), nanobind::arg("format"), nanobind::arg("bits"),
      nanobind::arg("x"),
      "most_rows of crossovers() where weights (n, k) may be rounded to x's dtype, on GPUs of "
      "compute capability `major`.x.");
  m.def(
      "epilogue_from",
      [=](int major, int64_t n, int64_t k, int64_t group, std::string_view format, int bits,
          std::string_view x) {
        return cuda::epilogue_from(major, problem_of(n, k, group, format, bits, x));
      },
      nanobind::arg("major"), nanobind::arg("n"), nanobind::arg("k"), nanobind::arg("group"),
      nanobind::arg("format"), nanobind::arg("bits"), nanobind::arg("x"),
      "Rows of x from which an activation and a residual are faster inside again, beside weights "
      "(n, k) and on GPUs of compute capability `major`.x.");
  m.def(
      "dequantizes",
      [=](int64_t codes, std::string_view x) {
        return cuda::is_for_dequantize(codes, dtype_of(x));
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
      [=](int64_t rows, int64_t k, std::string_view format, std::string_view x, bool has_norm) {
        jaxgemv::Problem problem = problem_of(1, k, k, format, 8, x);
        problem.M = rows;
        return cuda::image::image_row_bytes(problem, cuda::image::parts_of(problem.x, has_norm));
      },
      nanobind::arg("rows"), nanobind::arg("k"), nanobind::arg("format"), nanobind::arg("x"),
      nanobind::arg("has_norm"),
      "Bytes of a second result, uint8 (batch, rows, bytes), that a call of so many rows of x "
      "needs "
      "as scratch; 0 if none.");
}
