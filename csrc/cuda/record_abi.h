// XLA's record stage as jaxlib 0.11.2 and 0.12.0 have it, the extension `Record` of its FFI. We are built with the
// headers of the oldest jaxlib, so as to load on every one since, and these do not know it; tests/test_record.py
// compares with those that do. Its authors say that it may change: it is used where jaxlib's headers have a version
// that is known.
#pragma once

#include <cstddef>
#include <cstdint>

namespace jaxgemv::cuda::record_abi {

// Versions of the FFI (minor) and of its record stage, in jaxlib 0.11.2 and in 0.12.0, which adds a third kind of
// machine code.
struct Version {
  int ffi_minor, major, minor;
};
constexpr Version kVersions[] = {{4, 0, 1}, {5, 0, 2}};
constexpr int64_t kType = 128;
constexpr int kStage = 4, kCreate = 0;  // of XLA_FFI_ExecutionStage, of actions
constexpr int kCubin = 1, kHostValue = 1;
constexpr size_t kFindExtensionAt = 192;  // in XLA_FFI_Api

struct Context;  // XLA's
struct Command;
struct Error;

struct Extension {
  size_t struct_size;
  int64_t type;
  int32_t major, minor;
  const Extension* next;
};

struct Span {
  const char* data;
  size_t size;
};
struct Bundle {
  void *instantiate, *prepare, *initialize, *execute, *record;
};
struct Register {
  size_t struct_size;
  void* extension_start;
  Span name, platform;
  Bundle bundle;
  uint32_t traits;
};

struct FindExtension {
  size_t struct_size;
  void* extension_start;
  void* context;
  int64_t type;
  const Extension* found;
};
using Find = Error*(FindExtension*);

struct Dim3 {
  int32_t x, y, z;
};
struct LaunchDims {
  Dim3 grid, block, cluster;  // all of cluster zero: none
};
struct KernelArg {
  const void* data;
  int64_t size;
  int32_t type;
};
struct KernelArgs {
  const KernelArg* args;
  int64_t count;
};

// A command waits for all that came before the call, and for `dependencies` besides.
struct Api {
  Error* (*create_launch)(Context*, const char* name, const void* binary, int64_t size, int format,
                          LaunchDims, uint32_t shared_bytes, int32_t uses_pdl, const KernelArgs*,
                          const Command* const* dependencies, uint32_t count, const Command** made);
  Error* (*update_launch)(Context*, const Command*, const KernelArgs*);
  void *create_copy, *update_copy;
  Error* (*request_capture)(Context*);
  void* create_empty;
};

struct Frame {
  Context* context;
  const Api* api;
  int32_t action;
  const Command** commands;  // of this call: those that it has, or makes
  int64_t* count;
  int64_t most;
};

struct RecordExtension {
  Extension base;
  const Frame* frame;
};

// As these versions have them; others do not tell.
static_assert(sizeof(Extension) == 32 && sizeof(Register) == 96 && sizeof(FindExtension) == 40);
static_assert(sizeof(LaunchDims) == 36 && sizeof(KernelArg) == 24 && sizeof(KernelArgs) == 16);
static_assert(sizeof(Api) == 48 && sizeof(Frame) == 48 && sizeof(RecordExtension) == 40);

}  // namespace jaxgemv::cuda::record_abi
