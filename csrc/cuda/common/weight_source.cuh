// A stack of weight matrices for kernels whose lanes load it themselves: rows of words, and the group of an octet.
#pragma once

#include "affine.cuh"

namespace jaxgemv::cuda {

// Scales or shifts, loaded as the aligned words that contain them; of a wide dtype, except for any_value.
struct ScaleWords : ScaleSource {
  // ask() loads the aligned word that contains an element of a row; value() is the element, once the word is there.
  __device__ __forceinline__ uint32_t ask(const char* row, int group) const {
    const uintptr_t at = reinterpret_cast<uintptr_t>(row + group * Index{g_bytes});
    return __ldg(reinterpret_cast<const uint32_t*>(at & ~uintptr_t{3}));
  }
  __device__ __forceinline__ float value(uint32_t word, const char* row, int group) const {
    const uint32_t at = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(row)) +
                        static_cast<uint32_t>(group * g_bytes);
    return value_of(word >> (at % 4 * 8));
  }
  // The same for one-byte dtypes too.
  __device__ __forceinline__ float any_value(uint32_t word, const char* row, int group) const {
    if (is_wide(dtype)) return value(word, row, group);
    const uintptr_t at = reinterpret_cast<uintptr_t>(row) + group * g_bytes;
    return float_of_byte(word >> (at % 4 * 8) & 255, dtype);
  }
  // The element from its bits; bits above them may be anything.
  __device__ __forceinline__ float value_of(uint32_t bits) const {
    const float half = __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
    const float other = __uint_as_float(dtype == Dtype::kBF16 ? bits << 16 : bits);
    float v;  // without a branch, which is what the compiler makes of a conditional expression
    asm("{ .reg .pred p; setp.eq.u32 p, %3, 0; selp.f32 %0, %1, %2, p; }"
        : "=f"(v)
        : "f"(half), "f"(other), "r"(static_cast<uint32_t>(dtype)));
    return v;
  }
};
static_assert(static_cast<int>(Dtype::kF16) == 0);

struct WeightSource {
  const uint8_t* packed;
  Index stack_bytes;
  int row_words, octets;  // per row
  uint32_t group_magic;   // 2^31 over the octets of a group, rounded up; 0 for one group
  ScaleWords scale, shift;
  Affine affine;

  __device__ __forceinline__ const uint32_t* row(int s, Index n) const {
    return reinterpret_cast<const uint32_t*>(packed + s * stack_bytes) + n * row_words;
  }
  __device__ __forceinline__ int group_of(int octet) const {
    return static_cast<int>(__umulhi(static_cast<uint32_t>(octet) * 2, group_magic));
  }
};

// K below which group_of is exact.
inline constexpr Index kGroupedK = 1 << 18;

// Groups have to be whole octets.
inline WeightSource weight_source_of(const Problem& problem, const Operands& operands) {
  const Index group = has_one_group(problem, operands) ? 0 : problem.group / kOctet;
  return {operands.packed,
          operands.packed_stack_stride,
          static_cast<int>(row_bytes(problem.K, problem.bits) / 4),
          static_cast<int>(problem.K / kOctet),
          static_cast<uint32_t>(group == 0 ? 0 : ceil_div(Index{1} << 31, group)),
          {source_of(operands.scale)},
          {source_of(operands.shift)},
          problem.affine};
}

// Whether no group ends inside `block` codes of a row, and 32 bits are enough for m, n and k.
inline bool has_weight_source(const Problem& problem, const Operands& operands, int block) {
  if (problem.K >= kGroupedK || problem.N >= (1 << 30) || problem.M >= (1 << 18)) return false;
  if (problem.group % block != 0 && !has_one_group(problem, operands)) return false;
  return is_aligned(operands.packed, 4);
}

}  // namespace jaxgemv::cuda
