// The machine code that a kernel is part of, which XLA loads anew for nodes of its graphs.
#pragma once

#include <cstddef>

namespace jaxgemv::cuda {

struct Binary {
  const void* data = nullptr;  // a fat binary, as cuModuleLoadFatBinary takes it
  size_t size = 0;
  const char* name = nullptr;  // of the kernel in it
};

// kernel: its host function. `data` is null where the binary is not known.
Binary binary_of(const void* kernel);

}  // namespace jaxgemv::cuda
