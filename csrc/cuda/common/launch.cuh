// The one way to launch a kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <climits>
#include <map>
#include <mutex>
#include <type_traits>
#include <utility>

#include "../record.h"
#include "../table.h"

namespace jaxgemv::cuda {

// Calls use(config) with the launch's configuration, which is valid only during the call.
template <typename Use>
auto with_config(const LaunchShape& shape, cudaStream_t stream, Use&& use) {
  cudaLaunchAttribute attributes[3] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;  // resident_clusters needs it in any case
  attributes[0].val.clusterDim = {static_cast<unsigned>(shape.ranks), 1, 1};
  int count = shape.ranks > 1;
  if (shape.early) {
    cudaLaunchAttribute& early = attributes[count++] = {};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
#if CUDART_VERSION >= 12060  // older runtimes may not know the attribute
  if (shape.keeps_shared) {
    cudaLaunchAttribute& split = attributes[count++] = {};
    split.id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    split.val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
  }
#endif
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid, config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<size_t>(shape.shared_bytes), config.stream = stream;
  config.attrs = attributes, config.numAttrs = static_cast<unsigned>(count);
  return use(&config);
}

// Lets a kernel have `bytes` of dynamic shared memory. Its limit is only ever raised: one that followed the shape could
// be lowered by another thread before the launch. (The device's maximum for all kernels would be simpler, but leaves
// less for the L1: 4096 x 4096 was 0.3 us slower on an H200.)
template <typename... Arguments>
cudaError_t allow_shared_memory(void (*kernel)(Arguments...), const Device& device, int bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, int> limits;
  const std::scoped_lock lock(mutex);
  int& limit = limits[{device.id, reinterpret_cast<const void*>(kernel)}];
  if (bytes <= limit) return cudaSuccess;
  const cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (status == cudaSuccess) limit = bytes;
  return status;
}

// Shared memory of a graph node. Its CTAs may begin while the kernel in front still runs, and then crowd onto the SMs
// that are free: so each CTA asks for so much that an SM has room only for its even share of them. Decoding int4 on an
// H200, us a token: 8b 1526 instead of 1571, 0.5b 480 instead of 495. A kernel that uses none wants the L1, and keeps
// it.
inline int shared_bytes_of_node(const LaunchShape& shape, const Device& device) {
  constexpr int kOfSystem = 1024;  // bytes per CTA that the system reserves
  constexpr Index kMostShare = 8;  // with more, CTAs run in waves
  const Index ctas = Index{shape.grid.x} * shape.grid.y * shape.grid.z;
  const Index share = ceil_div(ctas, Index{device.sms});
  if (shape.shared_bytes == 0 || shape.ranks > 1 || share > kMostShare) return shape.shared_bytes;
  const int of_sm = device.shared_bytes + kOfSystem, too_many = static_cast<int>(share) + 1;
  return std::max(shape.shared_bytes, of_sm / too_many - kOfSystem + 16);
}

template <typename... Arguments>
cudaError_t launch_kernel(void (*kernel)(Arguments...), const LaunchShape& shape,
                          const Device& device, cudaStream_t stream,
                          const std::type_identity_t<Arguments>&... arguments) {
  if (recorder() != nullptr) {
    // A second node of the call would also depend on all before the call, and then does not begin early: 1 to 1.7 us.
    if (shape.leads) return recorder()->capture();
    const Argument each[] = {{&arguments, sizeof(arguments)}...};
    LaunchShape node = shape;
    node.early = device.major >= 9;
    if (node.early) node.shared_bytes = shared_bytes_of_node(shape, device);
    return recorder()->add(reinterpret_cast<const void*>(kernel), node, each);
  }
  if (shape.shared_bytes > 0) {
    const cudaError_t status = allow_shared_memory(kernel, device, shape.shared_bytes);
    if (status != cudaSuccess) return status;
  }
  return with_config(shape, stream, [&](const cudaLaunchConfig_t* config) {
    return cudaLaunchKernelEx(config, kernel, arguments...);
  });
}

// Rows of the kernel table (table.h) for one format and width: one for each dtype of x.
template <template <Format, int, typename> typename Type, Format kFormat, int kBits>
inline constexpr Kernel kRowsOf[] = {row<Type<kFormat, kBits, __half>>(),
                                     row<Type<kFormat, kBits, __nv_bfloat16>>(),
                                     row<Type<kFormat, kBits, float>>()};

// The rows for several widths; and for both float8 formats.
template <template <Format, int, typename> typename Type, Format kFormat, int... kBits>
Rows rows_of() {
  static constexpr auto kRows = join(kRowsOf<Type, kFormat, kBits>...);
  return kRows;
}
template <template <Format, int, typename> typename Type>
Rows float8_rows_of() {
  static constexpr auto kRows =
      join(kRowsOf<Type, Format::kE4M3, 8>, kRowsOf<Type, Format::kE5M2, 8>);
  return kRows;
}

// A grid of `tiles` x `batch` CTAs; false if a grid has no room for them.
inline bool make_grid(Index tiles, Index batch, dim3* grid) {
  *grid = dim3(static_cast<unsigned>(tiles), static_cast<unsigned>(batch));
  return tiles <= INT_MAX;
}

}  // namespace jaxgemv::cuda
