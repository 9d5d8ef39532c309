#include "simt.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits, typename X>
struct TransposedSimt {
  static constexpr KernelInfo kInfo{
      "transposed_simt",
      kFormat,
      kBits,
      kDtypeOf<X>,
      transposed::kSimtRows,
      with_format(kTransposedOperands | OperandSet::of(Operand::kOneByteScale), kFormat),
      true};

  static bool supports(const Problem&, const Operands&, const Device&) { return true; }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    const bool whole = problem.group >= problem.K || problem.group % kOctet == 0;
    const auto kernel = whole ? transposed::gemv_transposed_simt<kFormat, kBits, true>
                              : transposed::gemv_transposed_simt<kFormat, kBits, false>;
    const Index tiles =
        ceil_div(problem.K, 32 * kOctet) * ceil_div(problem.M, transposed::kSimtRows);
    return transposed::launch(kernel, tiles, 2, transposed::kWarps * 4, problem, operands, device,
                              stream);
  }
};

template <Format kFormat, int kBits>
inline constexpr Kernel kTransposedSimtRows[] = {
    row<TransposedSimt<kFormat, kBits, __half>>(),
    row<TransposedSimt<kFormat, kBits, __nv_bfloat16>>(),
    row<TransposedSimt<kFormat, kBits, float>>()};

Rows transposed_simt_rows() {
  constexpr Format kAffine = Format::kAffine;
  static constexpr auto kRows =
      join(kTransposedSimtRows<kAffine, 1>, kTransposedSimtRows<kAffine, 2>,
           kTransposedSimtRows<kAffine, 3>, kTransposedSimtRows<kAffine, 4>,
           kTransposedSimtRows<kAffine, 5>, kTransposedSimtRows<kAffine, 6>,
           kTransposedSimtRows<kAffine, 7>, kTransposedSimtRows<kAffine, 8>);
  return kRows;
}

}  // namespace jaxgemv::cuda
