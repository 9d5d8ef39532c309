#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

// Reads `count` 16-byte words; see floor.cu. ctas_per_sm = 0: as many CTAs as let every thread go
// round its loop once. cudaErrorInvalidValue for a grid that it does not have.
cudaError_t launch_read(const void* data, int64_t count, void* out, int64_t ctas_per_sm,
                        int64_t threads, int64_t unroll, cudaStream_t stream);
