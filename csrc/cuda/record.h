// Kernels as nodes of the CUDA graph that XLA records, in place of a graph that it captures of each call. Such a node
// may begin before the one in front of it has ended, as XLA's own do, and takes the host less time to update.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

namespace jaxgemv::cuda {

// By value: what a kernel is given.
struct Argument {
  const void* data;
  size_t size;
};

// As launch_kernel has it.
struct Launch {
  const void* kernel;  // its host function
  dim3 grid;
  int threads, shared_bytes, ranks;
  bool early;  // its code waits for those in front of it
  std::span<const Argument> arguments;
};

class Recorder {
 public:
  virtual cudaError_t add(const Launch& launch) = 0;
  // Has XLA capture the call after all.
  virtual cudaError_t capture() = 0;

 protected:
  ~Recorder() = default;
};

// Where launches of this thread go in place of a stream, or null. A state of the thread, as the capture of a stream is.
inline Recorder*& recorder() {
  thread_local Recorder* of_thread = nullptr;
  return of_thread;
}

}  // namespace jaxgemv::cuda
