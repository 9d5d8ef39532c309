// What a launch has to know about a GPU, queried once.
#pragma once

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <string_view>
#include <utility>

namespace jaxgemv::cuda {

struct Device {
  int id = 0;
  int sms = 0;
  int major = 0;         // of the compute capability whose code the GPU runs
  int shared_bytes = 0;  // the most that a CTA can have
};

// Architectures that the kernels are compiled for, as CMake writes them: "80-real,90a-real,120".
extern const std::string_view kCompiled;

// Which of the architectures in `compiled` a GPU of this capability (80 for 8.0) runs: one with machine code for it, or
// else the newest PTX that is no newer, of which the driver makes code. 0 if there is none.
int code_for(int capability, std::string_view compiled);

// The device that is current in this thread.
cudaError_t current_device(Device* device);

// Answers that depend on the device, and on a key (a kernel, say). Each is asked for once; failures
// are not kept, so that the next call asks again.
template <typename T>
class PerDevice {
 public:
  // ask(T*) -> cudaError_t
  template <typename Ask>
  cudaError_t get(int device, const void* key, T* answer, Ask&& ask) {
    const std::scoped_lock lock(mutex_);
    const auto found = answers_.find({device, key});
    if (found != answers_.end()) return *answer = found->second, cudaSuccess;
    const cudaError_t status = ask(answer);
    if (status == cudaSuccess) answers_[{device, key}] = *answer;
    return status;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<int, const void*>, T> answers_;
};

}  // namespace jaxgemv::cuda
