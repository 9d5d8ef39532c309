#include "device.h"

#include <algorithm>
#include <charconv>

namespace jaxgemv::cuda {

const std::string_view kCompiled = JAXGEMV_CUDA_COMPILED;

int code_for(int capability, std::string_view compiled) {
  int machine = 0, ptx = 0;
  while (!compiled.empty()) {
    const std::string_view each = compiled.substr(0, compiled.find(','));
    compiled.remove_prefix(std::min(each.size() + 1, compiled.size()));
    int is_for = 0;
    const char* const end = std::from_chars(each.data(), each.data() + each.size(), is_for).ptr;
    const std::string_view rest(end, static_cast<size_t>(each.data() + each.size() - end));
    if (is_for == 0) return capability;        // "native", "all"
    const bool alone = rest.starts_with('a');  // for these GPUs and no newer ones
    const bool runs =
        alone ? is_for == capability : is_for / 10 == capability / 10 && is_for <= capability;
    if (runs && !rest.ends_with("-virtual")) machine = std::max(machine, is_for);
    if (!alone && is_for <= capability && !rest.ends_with("-real")) ptx = std::max(ptx, is_for);
  }
  return machine > 0 ? machine : ptx;
}

cudaError_t current_device(Device* device) {
  static PerDevice<Device> devices;
  int id = 0;
  if (const cudaError_t status = cudaGetDevice(&id); status != cudaSuccess) return status;
  return devices.get(id, nullptr, device, [&](Device* asked) {
    asked->id = id;
    cudaError_t status = cudaSuccess;
    const auto ask = [&](cudaDeviceAttr attribute) {
      int value = 0;
      if (status == cudaSuccess) status = cudaDeviceGetAttribute(&value, attribute, id);
      return value;
    };
    const int capability =
        10 * ask(cudaDevAttrComputeCapabilityMajor) + ask(cudaDevAttrComputeCapabilityMinor);
    asked->major = code_for(capability, kCompiled) / 10;
    asked->sms = ask(cudaDevAttrMultiProcessorCount);
    asked->shared_bytes = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return status;
  });
}

}  // namespace jaxgemv::cuda
