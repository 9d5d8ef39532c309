// The kernel that only reads: the read floor, and what empties the L2 before a measurement.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

// Random memory, larger than any cache.
struct Scratch {
  const void* data;
  int64_t bytes;
};

// Reads `bytes` of `data` once, with so many CTAs per SM (0: each CTA has one round of work) and
// threads per CTA.
cudaError_t launch_read(const void* data, int64_t bytes, int64_t ctas_per_sm, int64_t threads,
                        cudaStream_t stream);

// Leaves nothing of use in the L2.
inline cudaError_t launch_flush(const Scratch& scratch, cudaStream_t stream) {
  return launch_read(scratch.data, std::min<int64_t>(scratch.bytes, 512 << 20), 0, 1024, stream);
}
