// x as operand B of the gemm kernel, in the permutation of k that the weights' octets have: as it is, or rounded to
// TF32.
//
// A block has 32 k and all columns of a CTA, granule by granule; a column has 16 bytes in each. Lane t has an octet of
// codes in operand A, two of them in register p (of 16 bits): granule p is x at these codes of lanes t = 0 .. 3; for
// TF32 granules 2 p and 2 p + 1 are.
#pragma once

#include "../common/grid.cuh"
#include "products.cuh"

namespace jaxgemv::cuda::gemm {

constexpr int kRowsOfImage = 8, kBlocksOfImage = 8;  // rows and blocks of a CTA

// Makes the image: tiles of rows_m rows of x one after another, in each its `blocks` blocks in order.
template <Format kFormat, int kBits, typename X>
__global__ void make_image(const Params params, uint8_t* image, int blocks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  wait_for_earlier();
  let_next_begin();
  using C = Numbers<kFormat, kBits>;
  constexpr int kGranules = Shape<kFormat, kBits, X>::kGranules;
  const int t = threadIdx.x % 4, M = params.M;
  const int block =
      static_cast<int>(blockIdx.y) * kBlocksOfImage + threadIdx.x / (4 * kRowsOfImage);
  const int m = static_cast<int>(blockIdx.x) * kRowsOfImage + threadIdx.x / 4 % kRowsOfImage;
  if (block >= blocks || m >= M) return;
  const int m0 = m / params.rows_m * params.rows_m, columns = min(params.rows_m, M - m0);
  const int octet =
      runs_of<C>(params.groups.slots) ? 4 * t + block % kBlocks : block % kBlocks * 4 + t;
  const Index first_row = Index{blockIdx.z} * M;
  float v[8];
  load_octet_of_x(params.x, first_row + m, block / kBlocks * kQuadK + 8 * octet, v);
  uint32_t* const to = reinterpret_cast<uint32_t*>(
      image + ((first_row + m0) * blocks + Index{block} * columns) * (kGranules * 16));
#pragma unroll
  for (int p = 0; p < 4; ++p)
    if constexpr (kGranules == 8) {
#pragma unroll
      for (int e = 0; e < 2; ++e)
        to[((2 * p + e) * columns + m - m0) * 4 + t] = to_tf32(v[C::code(p, e)]);
    } else {
      const auto low = static_cast<X>(v[C::code(p, 0)]),  // as it was
          high = static_cast<X>(v[C::code(p, 1)]);
      to[(p * columns + m - m0) * 4 + t] =
          reinterpret_cast<const uint16_t&>(low) | reinterpret_cast<const uint16_t&>(high) << 16;
    }
#endif
}

}  // namespace jaxgemv::cuda::gemm
