#include <utility>

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

Rows transposed_simt_rows() {
  static constexpr auto kRows = []<int... kLess>(std::integer_sequence<int, kLess...>) {
    return join(kRowsOf<TransposedSimt, Format::kAffine, kLess + 1>...,
                kRowsOf<TransposedSimt, Format::kCodebook, kLess + 1>...,
                kRowsOf<TransposedSimt, Format::kE4M3, 8>,
                kRowsOf<TransposedSimt, Format::kE5M2, 8>);
  }(std::make_integer_sequence<int, 8>());
  return kRows;
}

}  // namespace jaxgemv::cuda
