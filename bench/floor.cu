// The read floor: a kernel that reads a buffer once with 16-byte loads and does nothing else. No
// kernel that needs those bytes can be faster, launched the same way; see floor.py.

#include <cuda_runtime.h>

#include <cstdint>

#include "floor.h"
#include "xla/ffi/api/ffi.h"

namespace {

namespace ffi = xla::ffi;

__device__ uint4 load(const uint4* address) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(address));
  return v;
}

// kUnroll loads of each thread are in flight together. No more than 4: there are 7 predicate
// registers.
template <int kUnroll>
__global__ void __launch_bounds__(1024)
    read_kernel(const uint4* data, uint32_t count, uint32_t* out) {
  const uint32_t step = gridDim.x * blockDim.x;
  uint4 all{};
  for (uint32_t i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += kUnroll * step) {
    uint4 v[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u)
      v[u] = i + u * step < count ? load(data + i + u * step) : uint4{};
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
    *out = all.x;
}

using Kernel = void (*)(const uint4*, uint32_t, uint32_t*);

Kernel kernel_of(int64_t unroll) {
  switch (unroll) {
    case 1:
      return read_kernel<1>;
    case 2:
      return read_kernel<2>;
    case 4:
      return read_kernel<4>;
  }
  return nullptr;
}

// `after` is not read: it is what ties one call to the one before it, as x does for a product.
ffi::Error read_impl(cudaStream_t stream, ffi::AnyBuffer /*after*/, ffi::Buffer<ffi::U32> data,
                     ffi::Result<ffi::Buffer<ffi::U32>> out, int64_t ctas_per_sm, int64_t threads,
                     int64_t unroll) {
  const cudaError_t status = launch_read(data.typed_data(), data.element_count() / 4,
                                         out->typed_data(), ctas_per_sm, threads, unroll, stream);
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kInternal, cudaGetErrorString(status));
}

}  // namespace

cudaError_t launch_read(const void* data, int64_t count, void* out, int64_t ctas_per_sm,
                        int64_t threads, int64_t unroll, cudaStream_t stream) {
  const Kernel kernel = kernel_of(unroll);
  if (kernel == nullptr || threads < 1 || threads > 1024 || count >= int64_t{1} << 31)
    return cudaErrorInvalidValue;
  int64_t ctas = (count + threads * unroll - 1) / (threads * unroll);
  if (ctas_per_sm > 0) {
    int device = 0, sms = 0;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    ctas = ctas_per_sm * sms;
  }
  kernel<<<static_cast<unsigned>(ctas), static_cast<unsigned>(threads), 0, stream>>>(
      static_cast<const uint4*>(data), static_cast<uint32_t>(count), static_cast<uint32_t*>(out));
  return cudaGetLastError();
}

// The trait lets XLA put the call into a CUDA graph, as it does with jaxgemv's.
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgemv_bench_read, read_impl,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<ffi::AnyBuffer>()         // after
                                  .Arg<ffi::Buffer<ffi::U32>>()  // data
                                  .Ret<ffi::Buffer<ffi::U32>>()  // out
                                  .Attr<int64_t>("ctas_per_sm")
                                  .Attr<int64_t>("threads")
                                  .Attr<int64_t>("unroll"),
                              {ffi::Traits::kCmdBufferCompatible});
