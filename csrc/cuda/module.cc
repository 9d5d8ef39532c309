// The Python module `jaxgemv._cuda`.
#include "../module.h"

#include <vector>

#include "choose.h"
#include "handler.h"
#include "table.h"

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jaxgemv behind XLA's FFI.";
  namespace cuda = jaxgemv::cuda;
  const auto kernels = [] {
    std::vector<jaxgemv::KernelInfo> rows;
    for (const cuda::Kernel& kernel : cuda::table()) rows.push_back(kernel.info);
    return rows;
  };
  jaxgemv::define_backend(m, cuda::ffi_api_minor(), cuda::gemv_handler(), kernels, [] {
    return jaxgemv::Crossovers{cuda::kMostRows, cuda::kFusedRows, cuda::kEpilogueRows};
  });
}
