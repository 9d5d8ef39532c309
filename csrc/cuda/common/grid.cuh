// How CTAs synchronize with others: with kernels before and behind this one, and in clusters. One function per
// instruction.
#pragma once

#include <cstdint>

namespace jaxgemv::cuda {

// Programmatic dependent launch (sm_90 and newer), in a call or a graph that XLA records (record.h): a kernel may begin
// before the one in front of it has ended. After wait_for_earlier() what earlier kernels wrote is visible, and what
// they read may be overwritten. Every kernel must call it: the next one takes this one's end for that of all before.
__device__ __forceinline__ void wait_for_earlier() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// The index of this CTA's cluster in its row of the grid, and the CTA's rank in it. A CTA without a cluster is a
// cluster of one. Both are read anew at each call, so that they occupy no register in between.
__device__ __forceinline__ int cluster_of_cta() {
  int cluster = blockIdx.x;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(cluster));
#endif
  return cluster;
}
__device__ __forceinline__ int rank_of_cta() {
  int rank = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

// Clusters (sm_90 and newer). sync_cluster: a barrier for all threads. arrive_at_cluster, wait_for_cluster: its halves,
// where others only have to know that this CTA has read; it does not wait for its results to be in memory.
// leave_cluster: both, at the end. address_of_rank: where something of this CTA's shared memory lies in another's;
// load_of_rank: a float there.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void leave_cluster() { arrive_at_cluster(), wait_for_cluster(); }
__device__ __forceinline__ uint32_t address_of_rank(uint32_t at, int rank) {
  uint32_t there = at;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(rank));
#endif
  return there;
}
__device__ __forceinline__ uint32_t address_of_rank(const float* at, int rank) {
  return address_of_rank(static_cast<uint32_t>(__cvta_generic_to_shared(at)), rank);
}
__device__ __forceinline__ float load_of_rank(const float* at, int rank) {
  float v = *at;
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(address_of_rank(at, rank)));
#endif
  return v;
}

__device__ __forceinline__ float4 load4_of_rank(const float* at, int rank) {
  float4 v = *reinterpret_cast<const float4*>(at);
#if __CUDA_ARCH__ >= 900
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address_of_rank(at, rank)));
#endif
  return v;
}

}  // namespace jaxgemv::cuda
