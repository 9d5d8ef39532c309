// Kernels as nodes of the CUDA graph that XLA records, instead of a graph that it captures of each call. Such a node
// may begin before the one in front of it has ended, as XLA's own do, and takes the host less time to update.
#pragma once

#include <cuda_runtime_api.h>

#include <span>

namespace jaxgemv::cuda {

// How a kernel is launched: dynamic shared memory in bytes, and clusters of `ranks` CTAs that are neighbours in x.
// `early`: it may begin before the kernel in front of it has ended, and waits for that itself. `keeps_shared`: asks for
// the split of shared memory and L1 with the most of the former, since another split would have to wait until all CTAs
// on the SM are gone. `leads`: the call has another kernel behind this one, which begins early.
struct LaunchShape {
  dim3 grid;
  int threads;
  int shared_bytes = 0;
  int ranks = 1;
  bool early = false;
  bool keeps_shared = false;
  bool leads = false;
};

// An argument of a kernel, passed by value.
struct Argument {
  const void* data;
  size_t size;
};

class Recorder {
 public:
  // kernel: its host function. A call becomes one node (add), or is captured (capture).
  virtual cudaError_t add(const void* kernel, const LaunchShape& shape,
                          std::span<const Argument> arguments) = 0;
  virtual cudaError_t capture() = 0;

 protected:
  ~Recorder() = default;
};

// Where launches of this thread go in place of a stream, or null. It is a state of the thread, as stream capture is.
inline Recorder*& recorder() {
  thread_local Recorder* of_thread = nullptr;
  return of_thread;
}

}  // namespace jaxgemv::cuda
