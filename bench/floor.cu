// The read floor: a kernel that reads a buffer once with 16-byte loads and does nothing else. No
// kernel that needs those bytes can be much faster, launched the same way; see floor.py.

#include "graph.h"

namespace {

constexpr int kUnroll = 4;  // loads of each thread that are in flight together

__device__ uint32_t sink;

__device__ uint4 load(const uint4* address) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address));
  return v;
}

__global__ void __launch_bounds__(1024) read_kernel(const uint4* data, uint32_t count) {
  const uint32_t tile = blockDim.x * kUnroll;
  uint4 all{};
  for (uint32_t i = blockIdx.x * tile + threadIdx.x; i < count; i += gridDim.x * tile) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      v[u] = i + u * blockDim.x < count ? load(data + i + u * blockDim.x) : uint4{};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      all.x ^= v[u].x;
      all.y ^= v[u].y;
      all.z ^= v[u].z;
      all.w ^= v[u].w;
    }
  }
  // Never true of random data, but the compiler cannot know and has to load.
  if (all.x == 0x01234567 && all.y == 0x89abcdef && all.z == 0x76543210 && all.w == 0xfedcba98)
    sink = all.x;
}

}  // namespace

cudaError_t launch_read(const void* data, int64_t bytes, int64_t ctas_per_sm, int64_t threads,
                        cudaStream_t stream) {
  const int64_t count = bytes / 16, tile = threads * kUnroll;
  if (threads < 1 || threads > 1024 || count >= int64_t{1} << 31) return cudaErrorInvalidValue;
  int64_t ctas = (count + tile - 1) / tile;
  if (ctas_per_sm > 0) {
    int device = 0, sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    ctas = std::min(ctas, ctas_per_sm * sms);
  }
  read_kernel<<<static_cast<unsigned>(ctas), static_cast<unsigned>(threads), 0, stream>>>(
      static_cast<const uint4*>(data), static_cast<uint32_t>(count));
  return cudaGetLastError();
}

extern "C" const char* jaxgemv_bench_error(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

// Each call reads the next part of scratch, and begins again where that ends.
extern "C" float jaxgemv_bench_reads(Scratch scratch, int64_t bytes, int calls, int replays,
                                     int64_t ctas_per_sm, int64_t threads) {
  const int64_t stride = (bytes + 255) / 256 * 256;
  const int64_t parts = std::max<int64_t>(1, scratch.bytes / stride);
  return time_graph(calls, replays, scratch, [&](cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < calls && status == cudaSuccess; ++i)
      status = launch_read(static_cast<const char*>(scratch.data) + i % parts * stride, bytes,
                           ctas_per_sm, threads, stream);
    return status;
  });
}
