#pragma once

namespace jaxgemv::cuda {

void* gemv_handler();  // an XLA_FFI_Handler
int ffi_api_minor();   // the FFI version it was built for

}  // namespace jaxgemv::cuda
