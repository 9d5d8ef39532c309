// What Hopper has: kernels in its own dialect, and clusters of CTAs, as many as a device has room for.
#pragma once

#include <array>

#include "launch.cuh"

namespace jaxgemv::cuda {

// Whether kernels in Hopper's own dialect, sm_90a, run on a device. They are empty where the build is for others only.
inline bool has_hopper_code(const Device& device) {
#ifdef JAXGEMV_HAS_HOPPER_CODE  // cmake/cuda.cmake
  return device.major == 9;
#else
  return false;
#endif
}

// How many clusters of each size (the index, in CTAs) a device runs at once: SMs come in groups of different sizes, so
// fewer large ones fit than the number of SMs suggests. All zeros where the query fails: another kernel will do.
template <int kMostRanks>
using Clusters = std::array<int, kMostRanks + 1>;

template <int kMostRanks, typename Function>
Clusters<kMostRanks> resident_clusters(Function* kernel, const LaunchShape& shape,
                                       const Device& device) {
  static PerDevice<Clusters<kMostRanks>> answers;
  const void* key = reinterpret_cast<const void*>(kernel);
  Clusters<kMostRanks> clusters{};
  const cudaError_t status = answers.get(device.id, key, &clusters, [&](auto* result) {
    *result = {};
    cudaError_t status = allow_shared_memory(kernel, device, shape.shared_bytes);
    for (int ranks = 1; status == cudaSuccess && ranks <= kMostRanks; ++ranks) {
      LaunchShape one = shape;
      one.grid = dim3(static_cast<unsigned>(ranks)), one.ranks = ranks;
      status = with_config(one, nullptr, [&](cudaLaunchConfig_t* config) {
        config->numAttrs = 1;  // the cluster dimension, even for a cluster of one
        return cudaOccupancyMaxActiveClusters(&(*result)[ranks], kernel, config);
      });
      if (status == cudaErrorInvalidClusterSize) (*result)[ranks] = 0, status = cudaSuccess;
    }
    return status;
  });
  if (status == cudaSuccess) return clusters;
  cudaGetLastError();
  return {};
}

}  // namespace jaxgemv::cuda
