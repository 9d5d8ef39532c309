// Scale and zero or offset of a group, as the main loops use them.
#pragma once

#include "params.cuh"

namespace jaxgemv::cuda {

// The two factors of a group: it adds result.x * dot(q, x) + result.y * sum(x) to y.
__device__ __forceinline__ float2 terms_of(Affine affine, float scale, float shift, float mid) {
  // Without branches: with them, kernels for many rows spill registers.
  const float zero = affine == Affine::kZero ? shift : affine == Affine::kSymmetric ? mid : 0.f;
  return {scale, fmaf(-zero, scale, affine == Affine::kOffset ? shift : 0.f)};
}

// One dequantized weight. For symmetric weights `shift` is the mid code.
__device__ __forceinline__ float weight_of(Affine affine, float q, float scale, float shift) {
  return affine == Affine::kOffset ? q * scale + shift : (q - shift) * scale;
}

}  // namespace jaxgemv::cuda
