// Hopper's own instructions (sm_90a), one function each: barriers in shared memory, copies into it, registers moved
// between warpgroups; wgmma.cuh has its products. Only for code that __CUDA_ARCH_FEAT_SM90_ALL guards.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "ptx.cuh"

namespace jaxgemv::cuda::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Waits for the end of a phase of this parity; the first phase is 0.
__device__ __forceinline__ void wait(uint32_t barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Whether that phase has ended, without waiting.
__device__ __forceinline__ bool has_ended(uint32_t barrier, int parity) {
  int done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.b32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done;
}
// Arrives, and lets the phase end only after `bytes` more bytes have been copied.
__device__ __forceinline__ void arrive_and_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}
// Copies from global into shared memory; addresses and `bytes` are multiples of 16. Signals the barrier.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::"
      "bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}
// Arrives at a barrier of another CTA, for a thread that has only read: relaxed, since a release would wait for all
// that the SM has in flight.
__device__ __forceinline__ void arrive_there(uint32_t barrier_there) {
  asm volatile("mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier_there)
               : "memory");
}
// Copies from this CTA's shared memory into another's; signals a barrier there.
__device__ __forceinline__ void copy_there(uint32_t to_there, uint32_t from, int bytes,
                                           uint32_t barrier_there) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes "
      "[%0], [%1], %2, [%3];" ::"r"(to_there),
      "r"(from), "r"(bytes), "r"(barrier_there)
      : "memory");
}
// Stores four numbers into another CTA's shared memory; signals a barrier there.
__device__ __forceinline__ void send(uint32_t to_there, const float4& v, uint32_t barrier_there) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(to_there),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier_there)
      : "memory");
}
// A cache hint for what is read once, as weights are: the L2 evicts it first, and code, scales and x stay there for the
// next kernel. Not for cp.async, whose hint ptxas 13.0 loses: docs/cuda-notes.md, "What the L2 keeps".
__device__ __forceinline__ uint64_t read_once() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// The opposite, for what many CTAs read: evicted last.
__device__ __forceinline__ uint64_t read_again() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Copies the box of a 3-D tensor map that begins at (x, y, z), the fastest dimension first; signals the barrier.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int x, int y, int z,
                                         uint32_t barrier, uint64_t policy = read_once()) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(barrier), "l"(policy)
      : "memory");
}
// A barrier of `threads` threads of the CTA, apart from __syncthreads(), whose number is 0.
template <int kNumber = 1>
__device__ __forceinline__ void sync_threads(int threads) {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "r"(threads) : "memory");
}
// The same without waiting for the others.
__device__ __forceinline__ void arrive_threads(int threads) {
  asm volatile("bar.arrive 1, %0;" ::"r"(threads) : "memory");
}

// Asynchronous copy (cp.async) of kBytes = 8 or 16.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t to, const void* from) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_pair(uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}
// kCount = 1, 2 or 4 words.
template <int kCount>
__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&to)[kCount]) {
  if constexpr (kCount == 4) {
    const uint4 v = load_shared16(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (kCount == 2) {
    const float2 v = load_shared_pair(from);
    to[0] = __float_as_uint(v.x), to[1] = __float_as_uint(v.y);
  } else {
    to[0] = *static_cast<const uint32_t*>(__cvta_shared_to_generic(from));
  }
}
__device__ __forceinline__ uint16_t load_shared2(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared16(uint32_t to, const uint4& v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z),
               "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}

// Registers a thread of this warpgroup has from here on: fewer, or more.
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Orders ordinary accesses to shared memory before those of the async proxy: what was stored is visible to wgmma, and
// what was loaded has been read before a copy overwrites it.
__device__ __forceinline__ void fence_proxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

#endif

}  // namespace jaxgemv::cuda::hopper
