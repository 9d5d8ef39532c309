// Chooses the variant of the mma kernel, and how many warps share K.
#include "../common/launch.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

namespace mma {
namespace {

// Warps of a CTA: 8 finish a tile sooner, 4 let more tiles run at once. Each wave of CTAs costs its
// rounds and about one more for its start and end. (On an H200, int4 M = 1, this picks the better
// of the two for each shape of `python -m bench`; other counts were slower: docs/cuda-notes.md.)
int choose_warps(const Device& device, Index tiles, Index rounds, int resident_warps) {
  const auto cost = [&](int warps) {
    const Index waves = ceil_div(tiles, Index{device.sms} * (resident_warps / warps));
    return waves * (1 + ceil_div(rounds, warps));
  };
  return cost(4) < cost(8) ? 4 : 8;
}

Groups groups_of(const Problem& problem, const Operands& operands, Index chunk_k) {
  const Param &scale = operands.scale, &shift = operands.shift;
  if (problem.K % (kUnroll * chunk_k) != 0 || !is_wide(scale.dtype)) return Groups::kAny;
  if (scale.g_stride == 0 && shift.g_stride == 0) return Groups::kOne;
  const bool alike = scale.dtype == shift.dtype && scale.g_stride == shift.g_stride &&
                     scale.n_stride == shift.n_stride && scale.stack_stride == shift.stack_stride;
  if (!alike || size_of(scale.dtype) != 2) return Groups::kAny;
  for (const Groups groups : {Groups::kChunks, Groups::kPairs}) {
    const Index width = groups_in_round(groups);
    if (problem.group * width == kUnroll * chunk_k &&
        (scale.n_stride | scale.stack_stride) % width == 0 && is_aligned(scale.data, 2 * width) &&
        is_aligned(shift.data, 2 * width))
      return groups;
  }
  return Groups::kAny;
}

}  // namespace
}  // namespace mma

template <int kBits, typename X>
struct Mma {
  static constexpr KernelInfo kInfo{
      "mma",       Format::kAffine, kBits,
      kDtypeOf<X>, mma::kRowsM,     kProductOperands | OperandSet::of(Operand::kOneByteScale)};

  // 16-byte loads of the weights and of x, no group boundary inside a chunk, 32-bit m, n and k.
  static bool supports(const Problem& problem, const Operands& operands, const Device&) {
    return problem.M <= mma::kRowsM && problem.K % (kChunkK / 4) == 0 &&
           is_aligned(operands.packed, 16) && is_aligned(operands.x, 16) &&
           (problem.group >= problem.K || problem.group % kChunkK == 0) &&
           problem.M * problem.batch < (1 << 30) && problem.N < (1 << 30) && problem.K < (1 << 25);
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    const Index tiles = ceil_div(problem.N, mma::kTileN);
    const Index rounds = ceil_div(problem.K, mma::kUnroll * kChunkK);
    constexpr int kResidentWarps = 16;  // of an SM, by their registers
    const int warps = mma::choose_warps(device, tiles * problem.batch, rounds, kResidentWarps);
    dim3 grid;
    if (!make_grid(tiles, problem.batch, &grid)) return cudaErrorInvalidConfiguration;
    const auto kernel = kernel_for(mma::groups_of(problem, operands, kChunkK));
    return launch_kernel(kernel, {grid, warps * 32}, device, stream, problem, operands);
  }

 private:
  static constexpr Index kChunkK = 512 / kBits;

  static auto kernel_for(mma::Groups groups) {
    using mma::Groups;
    switch (groups) {
      case Groups::kAny: return mma::gemv_mma<kBits, X, Groups::kAny>;
      case Groups::kChunks: return mma::gemv_mma<kBits, X, Groups::kChunks>;
      case Groups::kPairs: return mma::gemv_mma<kBits, X, Groups::kPairs>;
      case Groups::kOne: return mma::gemv_mma<kBits, X, Groups::kOne>;
    }
    __builtin_unreachable();
  }
};

Rows mma_rows() {
  // int8 is `direct`'s: in 33 of 37 products it is faster (docs/cuda-notes.md, "Which kernel").
  static constexpr Kernel kRows[] = {row<Mma<4, __half>>(), row<Mma<4, __nv_bfloat16>>()};
  return kRows;
}

}  // namespace jaxgemv::cuda
