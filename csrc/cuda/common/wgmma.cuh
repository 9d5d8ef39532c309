// Hopper's matrix products: registers or shared memory times shared memory, by four warps.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "hopper.cuh"

namespace jaxgemv::cuda::hopper {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// After a wait: keeps the compiler from reading d before it.
template <int kCount>
__device__ __forceinline__ void wgmma_done(float (&d)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) asm volatile("" : "+f"(d[e])::"memory");
}

// Accumulators by operand number, and as constraints, for the instructions below.
#define JAXGEMV_NUMBERS_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define JAXGEMV_NUMBERS_16 JAXGEMV_NUMBERS_8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define JAXGEMV_NUMBERS_32 \
  JAXGEMV_NUMBERS_16       \
  ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAXGEMV_NUMBERS_64                                                 \
  JAXGEMV_NUMBERS_32                                                       \
  ", "                                                                     \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "           \
  "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, " \
  "%58, %59, %60, %61, %62, %63"
#define JAXGEMV_NUMBERS_128                                                  \
  JAXGEMV_NUMBERS_64                                                         \
  ", "                                                                       \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, "   \
  "%78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, "   \
  "%92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "   \
  "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, " \
  "%117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAXGEMV_SUMS_8 \
  "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
#define JAXGEMV_SUMS_16                                                                       \
  JAXGEMV_SUMS_8, "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), \
      "+f"(d[14]), "+f"(d[15])
#define JAXGEMV_SUMS_32                                                                          \
  JAXGEMV_SUMS_16, "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), \
      "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), \
      "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
#define JAXGEMV_SUMS_64                                                                          \
  JAXGEMV_SUMS_32, "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), \
      "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), \
      "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), \
      "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), \
      "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
#define JAXGEMV_SUMS_128                                                                         \
  JAXGEMV_SUMS_64, "+f"(d[64]), "+f"(d[65]), "+f"(d[66]), "+f"(d[67]), "+f"(d[68]), "+f"(d[69]), \
      "+f"(d[70]), "+f"(d[71]), "+f"(d[72]), "+f"(d[73]), "+f"(d[74]), "+f"(d[75]), "+f"(d[76]), \
      "+f"(d[77]), "+f"(d[78]), "+f"(d[79]), "+f"(d[80]), "+f"(d[81]), "+f"(d[82]), "+f"(d[83]), \
      "+f"(d[84]), "+f"(d[85]), "+f"(d[86]), "+f"(d[87]), "+f"(d[88]), "+f"(d[89]), "+f"(d[90]), \
      "+f"(d[91]), "+f"(d[92]), "+f"(d[93]), "+f"(d[94]), "+f"(d[95]), "+f"(d[96]), "+f"(d[97]), \
      "+f"(d[98]), "+f"(d[99]), "+f"(d[100]), "+f"(d[101]), "+f"(d[102]), "+f"(d[103]),          \
      "+f"(d[104]), "+f"(d[105]), "+f"(d[106]), "+f"(d[107]), "+f"(d[108]), "+f"(d[109]),        \
      "+f"(d[110]), "+f"(d[111]), "+f"(d[112]), "+f"(d[113]), "+f"(d[114]), "+f"(d[115]),        \
      "+f"(d[116]), "+f"(d[117]), "+f"(d[118]), "+f"(d[119]), "+f"(d[120]), "+f"(d[121]),        \
      "+f"(d[122]), "+f"(d[123]), "+f"(d[124]), "+f"(d[125]), "+f"(d[126]), "+f"(d[127])
// name: what follows m64 in the instruction's; operands, add_at: a and b, and `add`, by number; the accumulators are
// last.
#define JAXGEMV_WGMMA(name, numbers, operands, add_at, last, ...)                        \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_at                                \
               ", 0;\nwgmma.mma_async.sync.aligned.m64" name " {" numbers "}, " operands \
               ", p, 1, 1" last ";\n}"                                                   \
               : __VA_ARGS__                                                             \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add))
#define JAXGEMV_WGMMA_N16(types, last)                                                  \
  JAXGEMV_WGMMA("n16" types, JAXGEMV_NUMBERS_8, "{%8, %9, %10, %11}, %12", "%13", last, \
                JAXGEMV_SUMS_8)
#define JAXGEMV_WGMMA_N32(types, last)                                                     \
  JAXGEMV_WGMMA("n32" types, JAXGEMV_NUMBERS_16, "{%16, %17, %18, %19}, %20", "%21", last, \
                JAXGEMV_SUMS_16)
#define JAXGEMV_WGMMA_N64(types, last)                                                     \
  JAXGEMV_WGMMA("n64" types, JAXGEMV_NUMBERS_32, "{%32, %33, %34, %35}, %36", "%37", last, \
                JAXGEMV_SUMS_32)
#define JAXGEMV_WGMMA_N128(types, last)                                                     \
  JAXGEMV_WGMMA("n128" types, JAXGEMV_NUMBERS_64, "{%64, %65, %66, %67}, %68", "%69", last, \
                JAXGEMV_SUMS_64)
// The instruction for X, whose type is in its name; last: the transpose flags, which only 16-bit types have.
#define JAXGEMV_WGMMA_OF(X, wgmma, last)               \
  if constexpr (std::is_same_v<X, __half>)             \
    wgmma("k16.f32.f16.f16", last);                    \
  else if constexpr (std::is_same_v<X, __nv_bfloat16>) \
    wgmma("k16.f32.bf16.bf16", last);                  \
  else                                                 \
    wgmma("k8.f32.tf32.tf32", "")
// d (64 x 16 to 64 x 128, float32) = a (64 x 16, registers) b (shared memory) + (add ? d : 0), for 16-bit X, or of TF32
// for X = float: then a and b have 8 k. Warp w of the warpgroup has rows 16 w .. 16 w + 15 of a and d, laid out over
// its lanes as for mma.m16n8k16.
template <typename X>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[8], const uint32_t (&a)[4], uint64_t b,
                                             int add) {
  JAXGEMV_WGMMA_OF(X, JAXGEMV_WGMMA_N16, ", 0");
}
template <typename X>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[16], const uint32_t (&a)[4], uint64_t b,
                                             int add) {
  JAXGEMV_WGMMA_OF(X, JAXGEMV_WGMMA_N32, ", 0");
}
template <typename X>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[32], const uint32_t (&a)[4], uint64_t b,
                                             int add) {
  JAXGEMV_WGMMA_OF(X, JAXGEMV_WGMMA_N64, ", 0");
}
template <typename X>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[64], const uint32_t (&a)[4], uint64_t b,
                                             int add) {
  JAXGEMV_WGMMA_OF(X, JAXGEMV_WGMMA_N128, ", 0");
}
#undef JAXGEMV_WGMMA_N16
#undef JAXGEMV_WGMMA_N32
#undef JAXGEMV_WGMMA_N64
#undef JAXGEMV_WGMMA_N128
#undef JAXGEMV_WGMMA

// The same with a in shared memory too: d (64 x 128 or 64 x 256).
#define JAXGEMV_WGMMA_SHARED_N128(types, last)                             \
  asm volatile(                                                            \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                         \
      "wgmma.mma_async.sync.aligned.m64n128" types " {" JAXGEMV_NUMBERS_64 \
      "}, %64, %65, p, 1, 1" last ";\n}"                                   \
      : JAXGEMV_SUMS_64                                                    \
      : "l"(a), "l"(b), "r"(add))
#define JAXGEMV_WGMMA_SHARED_N256(types, last)                              \
  asm volatile(                                                             \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %130, 0;\n"                         \
      "wgmma.mma_async.sync.aligned.m64n256" types " {" JAXGEMV_NUMBERS_128 \
      "}, %128, %129, p, 1, 1" last ";\n}"                                  \
      : JAXGEMV_SUMS_128                                                    \
      : "l"(a), "l"(b), "r"(add))
template <typename X>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[64], uint64_t a, uint64_t b, int add) {
  JAXGEMV_WGMMA_OF(X, JAXGEMV_WGMMA_SHARED_N128, ", 0, 0");
}
template <typename X>
__device__ __forceinline__ void wgmma_m64k16(float (&d)[128], uint64_t a, uint64_t b, int add) {
  JAXGEMV_WGMMA_OF(X, JAXGEMV_WGMMA_SHARED_N256, ", 0, 0");
}
#undef JAXGEMV_WGMMA_OF
#undef JAXGEMV_WGMMA_SHARED_N128
#undef JAXGEMV_WGMMA_SHARED_N256
#undef JAXGEMV_NUMBERS_8
#undef JAXGEMV_NUMBERS_16
#undef JAXGEMV_NUMBERS_32
#undef JAXGEMV_NUMBERS_64
#undef JAXGEMV_NUMBERS_128
#undef JAXGEMV_SUMS_8
#undef JAXGEMV_SUMS_16
#undef JAXGEMV_SUMS_32
#undef JAXGEMV_SUMS_64
#undef JAXGEMV_SUMS_128

#endif

}  // namespace jaxgemv::cuda::hopper
