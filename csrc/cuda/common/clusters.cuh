// How many clusters of CTAs a device has room for.
#pragma once

#include <array>

#include "launch.cuh"

namespace jaxgemv::cuda {

// Clusters of each size that a device runs at once: SMs come in groups of different sizes, so there
// are fewer large ones than one would think. None of any size where the kernel has no code.
template <int kMostRanks>
using Clusters = std::array<int, kMostRanks + 1>;

template <typename Function, size_t kCount>
cudaError_t resident_clusters(Function* kernel, const LaunchShape& shape, const Device& device,
                              std::array<int, kCount>* clusters) {
  static PerDevice<std::array<int, kCount>> answers;
  const void* key = reinterpret_cast<const void*>(kernel);
  return answers.get(device.id, key, clusters, [&](std::array<int, kCount>* result) {
    *result = {};
    if (!has_hopper_code(kernel, device)) return cudaSuccess;
    cudaError_t status = allow_shared_memory(kernel, device, shape.shared_bytes);
    for (int ranks = 1; status == cudaSuccess && ranks < static_cast<int>(kCount); ++ranks) {
      LaunchShape one = shape;
      one.grid = dim3(static_cast<unsigned>(ranks)), one.ranks = ranks;
      status = with_config(one, nullptr, [&](cudaLaunchConfig_t* config) {
        config->numAttrs = 1;  // also a cluster of one
        return cudaOccupancyMaxActiveClusters(&(*result)[ranks], kernel, config);
      });
      if (status == cudaErrorInvalidClusterSize) (*result)[ranks] = 0, status = cudaSuccess;
    }
    return status;
  });
}

}  // namespace jaxgemv::cuda
