// The handlers that the extension module registers, declared without XLA's headers.
#pragma once

struct XLA_FFI_Error;
struct XLA_FFI_CallFrame;

extern "C" XLA_FFI_Error* jaxgemv_gemv_v1(XLA_FFI_CallFrame* call_frame);
extern "C" XLA_FFI_Error* jaxgemv_attend_v1(XLA_FFI_CallFrame* call_frame);

namespace jaxgemv::cpu {

// The version of XLA's FFI that the handlers are built for.
extern const int kFfiApiMinor;

}  // namespace jaxgemv::cpu
