#include <utility>

#include "../common/launch.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits, typename X>
struct Simt {
  static constexpr KernelInfo kInfo{
      "simt",
      kFormat,
      kBits,
      kDtypeOf<X>,
      simt::kRows,
      with_format(kEpilogueOperands | OperandSet::of(Operand::kNorm, Operand::kOneByteScale),
                  kFormat)};

  static bool supports(const Problem&, const Operands&, const Device&) { return true; }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    const Index tiles =
        ceil_div(problem.y_width(), simt::kWarps) * ceil_div(problem.M, simt::kRows);
    dim3 grid;
    if (!make_grid(tiles, problem.batch, &grid)) return cudaErrorInvalidConfiguration;
    return launch_kernel(simt::gemv_simt<kFormat, kBits>, {grid, simt::kWarps * 32}, device, stream,
                         problem, operands);
  }
};

Rows simt_rows() {
  static constexpr auto kRows = []<int... kLess>(std::integer_sequence<int, kLess...>) {
    return join(kRowsOf<Simt, Format::kAffine, kLess + 1>...,
                kRowsOf<Simt, Format::kCodebook, kLess + 1>..., kRowsOf<Simt, Format::kE4M3, 8>,
                kRowsOf<Simt, Format::kE5M2, 8>);
  }(std::make_integer_sequence<int, 8>());
  return kRows;
}

}  // namespace jaxgemv::cuda
