// x as operand B of mma.m16n8k16, for the mma kernel: straight from memory, in the order of k in
// which Codes<..>::product has the weights.
#pragma once

#include "../common/codes.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::mma {

// b[product]: the registers that meet a word of 4-bit codes, from the x of its codes on; zeros where not `inside`.
template <typename X>
__device__ __forceinline__ void load_word_of_x(const X* x, bool inside, uint32_t (&b)[2][2]) {
  constexpr uint32_t kLow = 0x5410, kHigh = 0x7632;  // the halves of two registers
  const uint4 v = inside ? load16(x) : uint4{};
  b[0][0] = __byte_perm(v.x, v.z, kLow), b[0][1] = __byte_perm(v.y, v.w, kLow);
  b[1][0] = __byte_perm(v.x, v.z, kHigh), b[1][1] = __byte_perm(v.y, v.w, kHigh);
}

}  // namespace jaxgemv::cuda::mma
