#include "device.h"

namespace jaxgemv::cuda {

cudaError_t current_device(Device* device) {
  static PerDevice<Device> devices;
  int id = 0;
  if (const cudaError_t status = cudaGetDevice(&id); status != cudaSuccess) return status;
  return devices.get(id, nullptr, device, [&](Device* asked) {
    asked->id = id;
    cudaError_t status = cudaSuccess;
    const auto ask = [&](int* value, cudaDeviceAttr attribute) {
      if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, attribute, id);
    };
    ask(&asked->sms, cudaDevAttrMultiProcessorCount);
    ask(&asked->major, cudaDevAttrComputeCapabilityMajor);
    ask(&asked->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    return status;
  });
}

}  // namespace jaxgemv::cuda
