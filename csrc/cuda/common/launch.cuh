// The one way to launch a kernel.
#pragma once

#include <climits>

#include "../table.h"

namespace jaxgemv::cuda {

// Dynamic shared memory, and clusters of `ranks` CTAs that are neighbours in x.
struct LaunchShape {
  dim3 grid;
  int threads;
  int shared_bytes = 0;
  int ranks = 1;
};

// Calls use(config) with the launch's configuration, which lives no longer.
template <typename Use>
auto with_config(const LaunchShape& shape, cudaStream_t stream, Use&& use) {
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(shape.ranks), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid, config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes), config.stream = stream;
  config.attrs = &cluster, config.numAttrs = shape.ranks > 1;
  return use(&config);
}

// Lets a kernel have all the shared memory that the device gives to a CTA, once. (A limit that
// followed the shape could be lowered by another thread, before the launch.)
template <typename... Arguments>
cudaError_t allow_shared_memory(void (*kernel)(Arguments...), const Device& device) {
  static PerDevice<bool> allowed;
  bool done;
  return allowed.get(device.id, reinterpret_cast<const void*>(kernel), &done, [&](bool* answer) {
    cudaFuncAttributes attributes{};
    const cudaError_t status = cudaFuncGetAttributes(&attributes, kernel);
    if (status != cudaSuccess) return status;
    *answer = true;
    const int most = device.shared_bytes - static_cast<int>(attributes.sharedSizeBytes);
    return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most);
  });
}

template <typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Arguments...), const LaunchShape& shape,
                          const Device& device, cudaStream_t stream,
                          const std::type_identity_t<Arguments>&... arguments) {
  if (shape.shared_bytes > 0) {
    const cudaError_t status = allow_shared_memory(kernel, device);
    if (status != cudaSuccess) return status;
  }
  return with_config(shape, stream, [&](const cudaLaunchConfig_t* config) {
    return cudaLaunchKernelEx(config, kernel, arguments...);
  });
}

// `tiles` x `batch` CTAs, if a grid has room for them.
inline bool make_grid(Index tiles, Index batch, dim3* grid) {
  *grid = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(batch));
  return tiles <= INT_MAX;
}

}  // namespace jaxgemv::cuda
