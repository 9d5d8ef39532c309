// One function per instruction.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace jaxgemv::cuda {

// Volatile keeps the order of the source: weights, then scales, then x. (It is not needed against
// spills: without it nothing spills either.)

// 16 bytes that will not be used again: not kept in the L1.
__device__ __forceinline__ uint4 load_stream(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint4 load16(const void* p) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

__device__ __forceinline__ uint2 load8(const void* p) {
  uint2 v;
  asm volatile("ld.global.nc.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// 16 bytes, or 4, or zeros unless `inside`: by a predicate, since the compiler would make a branch of it, and move
// other loads ahead.
__device__ __forceinline__ uint4 load16(const void* p, bool inside) {
  uint4 v{};
  asm volatile(
      "{ .reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4]; }"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"(static_cast<uint32_t>(inside)));
  return v;
}
__device__ __forceinline__ uint32_t load4(const void* p, bool inside) {
  uint32_t v = 0;
  asm volatile("{ .reg .pred p; setp.ne.u32 p, %2, 0; @p ld.global.nc.u32 %0, [%1]; }"
               : "+r"(v)
               : "l"(p), "r"(static_cast<uint32_t>(inside)));
  return v;
}

// Returns its argument, which the compiler then keeps in a register and does not compute again at every use.
template <typename T>
__device__ __forceinline__ T* kept(T* p) {
  asm("" : "+l"(p));
  return p;
}
__device__ __forceinline__ int kept(int v) {
  asm volatile("" : "+r"(v));
  return v;
}

// A value that is the same in all lanes: kept in a register, and known to be warp-uniform, as some instructions need
// it.
template <typename T>
__device__ __forceinline__ T uniform(T v) {
  return __shfl_sync(~0u, v, 0);
}

// v if `has`, else 0: without a branch, into which the compiler would move the computation of v.
__device__ __forceinline__ float kept_if(bool has, float v) {
  float kept;
  asm("{ .reg .pred p; setp.ne.u32 p, %2, 0; selp.f32 %0, %1, 0f00000000, p; }"
      : "=f"(kept)
      : "f"(v), "r"(static_cast<uint32_t>(has)));
  return kept;
}

// Loads kCount words in pieces of 16, 8 or 4 bytes, the largest that divide them, which must be aligned; kStream:
// pieces of 16 bytes by load_stream.
template <int kCount, bool kStream>
__device__ __forceinline__ void load_words(const uint32_t* from, uint32_t (&to)[kCount]) {
  constexpr int kPiece = kCount % 4 == 0 ? 4 : kCount % 2 == 0 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kCount; i += kPiece) {
    if constexpr (kPiece == 4) {
      const uint4 v = kStream ? load_stream(from + i) : load16(from + i);
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    } else if constexpr (kPiece == 2) {
      const uint2 v = load8(from + i);
      to[i] = v.x, to[i + 1] = v.y;
    } else {
      to[i] = __ldg(from + i);
    }
  }
}

// Two numbers rounded to X, the first in the low half.
template <typename X>
__device__ __forceinline__ uint32_t rounded_pair(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<X, __half>)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// v as TF32: rounded to 11 significant bits.
__device__ __forceinline__ uint32_t to_tf32(float v) {
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(v));
  return bits;
}

// Copies 16 bytes to shared memory, past the registers and the L1, without waiting.
__device__ __forceinline__ void copy16(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(
                   static_cast<uint32_t>(__cvta_generic_to_shared(to))),
               "l"(from)
               : "memory");
}

// The same for 16 bytes, or for 4 (through the L1): only the first `bytes` are read, and zeros follow.
template <int kBytes>
__device__ __forceinline__ void copy_first(void* to, const void* from, int bytes) {
  const uint32_t at = static_cast<uint32_t>(__cvta_generic_to_shared(to));
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(at), "l"(from),
                 "r"(bytes)
                 : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(bytes)
                 : "memory");
}

// 16 bytes; zeros where not `inside`.
__device__ __forceinline__ void copy_or_zeros(void* to, const void* from, bool inside) {
  copy_first<16>(to, from, inside ? 16 : 0);
}

// The first `left` bytes of 16, if any; zeros for the others.
__device__ __forceinline__ void copy_some(void* to, const void* from, int left) {
  copy_first<16>(to, from, min(max(left, 0), 16));
}

// Ends a group of copies; groups end in order.
__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until no more than kPending groups of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// The same for a `pending` that is known only at run time; more than kMost count as kMost.
template <int kMost>
__device__ __forceinline__ void wait_copies_but(int pending) {
  if constexpr (kMost > 0) {
    if (pending < kMost) return wait_copies_but<kMost - 1>(pending);
  }
  wait_copies<kMost>();
}

// kWords words from shared memory, in the widest loads.
template <int kWords>
__device__ __forceinline__ void load_shared(uint32_t* to, const void* from) {
  if constexpr (kWords >= 4) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(static_cast<const uint32_t*>(from) + i);
      to[i] = v.x, to[i + 1] = v.y, to[i + 2] = v.z, to[i + 3] = v.w;
    }
  } else if constexpr (kWords == 2) {
    const uint2 v = *static_cast<const uint2*>(from);
    to[0] = v.x, to[1] = v.y;
  } else {
    to[0] = *static_cast<const uint32_t*>(from);
  }
}

// Four matrices of 8 rows of 16 bytes, of which lane l has row l % 8 of matrix l / 8: lane (g, t) gets
// word t of row g of each.
__device__ __forceinline__ void load_matrices(uint32_t (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row))));
}

__device__ __forceinline__ void store_shared16(void* to, const uint32_t* from) {
  *static_cast<uint4*>(to) = {from[0], from[1], from[2], from[3]};
}

// d (16 x 8, float32) += a (16 x 16) b (16 x 8) for X = __half or __nv_bfloat16. Lane (g, t) =
// (lane / 4, lane % 4) holds rows g and g + 8 of a, column g of b, and rows g, g + 8, columns 2t,
// 2t + 1 of d.
template <typename X>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<X, __half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b[0]), "r"(b[1]));
  }
}

// d (16 x 8, int32) += a (16 x 32, bytes, kSigned or not) b (32 x 8, signed bytes). Lane (g, t) holds bytes k = 4 t ..
// 4 t + 3 and k = 4 t + 16 .. 4 t + 19 of rows g and g + 8 of a, and of column g of b.
template <bool kSigned>
__device__ __forceinline__ void mma_bytes(int (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                          uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kSigned) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

}  // namespace jaxgemv::cuda
