// The Python module `jaxgemv._cuda`.
#include "../module.h"

#include "handler.h"
#include "launch.h"

NB_MODULE(_cuda, m) {
  m.doc() = "CUDA kernels of jaxgemv behind XLA's FFI.";
  jaxgemv::define_backend(m, jaxgemv::cuda::ffi_api_minor(), jaxgemv::cuda::gemv_handler(),
                          &jaxgemv::cuda::kernels);
}
