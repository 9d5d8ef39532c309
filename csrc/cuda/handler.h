#pragma once

#include <cstdint>

namespace jaxgemv::cuda {

void* gemv_handler();  // an XLA_FFI_Handler
int ffi_api_minor();   // the FFI version it was built for

// An XLA_FFI_Handler too, which only has to be registered: when XLA asks for its metadata, it registers `target` by
// itself, with the stage `record` that jax.ffi does not pass on. There is one target for all.
void* recording_handler(const char* target);
int64_t recorded();  // kernels that have become nodes of XLA's graphs

}  // namespace jaxgemv::cuda
