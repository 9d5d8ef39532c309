// Kernels as nodes of the CUDA graph that XLA records, in place of a graph that it captures of each call. Such a node
// may begin before the one in front of it has ended, as XLA's own do, and takes the host less time to update.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

namespace jaxgemv::cuda {

// Dynamic shared memory, and clusters of `ranks` CTAs that are neighbours in x. `early`: it may begin before the
// kernel in front of it has ended, and waits itself. `keeps_shared`: leaves an SM split into shared memory and L1 as
// one needs it that has most of it, since splitting it anew waits until all CTAs there are gone. `leads`: the call
// has another kernel behind it, which begins early.
struct LaunchShape {
  dim3 grid;
  int threads;
  int shared_bytes = 0;
  int ranks = 1;
  bool early = false;
  bool keeps_shared = false;
  bool leads = false;
};

// By value: what a kernel is given.
struct Argument {
  const void* data;
  size_t size;
};

class Recorder {
 public:
  // kernel: its host function. A call is one node, or captured.
  virtual cudaError_t add(const void* kernel, const LaunchShape& shape,
                          std::span<const Argument> arguments) = 0;
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
