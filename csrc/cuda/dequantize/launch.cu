#include <algorithm>
#include <array>
#include <utility>

#include "../common/launch.cuh"
#include "kernel.cuh"
#include "launch.h"

namespace jaxgemv::cuda::dequantize {
namespace {

using Run = cudaError_t (*)(const Problem&, const Operands&, const Device&, cudaStream_t);

template <Format kFormat, int kBits>
cudaError_t run_one(const Problem& problem, const Operands& operands, const Device& device,
                    cudaStream_t stream) {
  const Index width = problem.y_width();
  if (!is_aligned(operands.packed, 4)) return cudaErrorMisalignedAddress;
  if (width % kPiece != 0 || !is_aligned(operands.y, 16) || width > INT_MAX / 2 ||
      problem.N > INT_MAX / 2)
    return cudaErrorNotSupported;
  Params p{};
  p.weights = weight_source_of(problem, operands), p.scale = operands.scale;
  p.shift = operands.shift, p.codebook = operands.codebook;
  p.global_scale = operands.global_scale;
  p.index = operands.index, p.y = static_cast<uint16_t*>(operands.y), p.dtype = problem.y;
  p.stack = static_cast<int>(problem.stack), p.N = static_cast<int>(problem.N);
  p.K = static_cast<int>(problem.K), p.width = static_cast<int>(width);
  p.exponent = CodesInWords<kBits>::kExponent;
  p.group = static_cast<int>(std::min(problem.group, problem.K));
  const bool by_units =
      problem.K < kGroupedK && (problem.group % kUnit == 0 || has_one_group(problem, operands));
  const Index columns = ceil_div(width, Index{kTileK});
  constexpr Index kMostCtas = 65535;  // limit of all grid dimensions but the first
  const auto launch = [&](auto kernel, Index ctas) {
    dim3 grid;
    if (!make_grid(columns, problem.batch, &grid)) return cudaErrorInvalidConfiguration;
    grid.z = static_cast<unsigned>(std::min(ctas, kMostCtas));
    return launch_kernel(kernel, {grid, kWarps * 32}, device, stream, p);
  };
  if (!by_units)
    return launch(weights_in_any_groups<kFormat, kBits>, ceil_div(problem.N, Index{kWarps}));
  const auto launch_rows = [&]<int kRows>(std::integral_constant<int, kRows>) {
    const Index tiles = ceil_div(problem.N, Index{kWarps * kRows});
    p.tiles = static_cast<int>(tiles);
    // No more CTAs than can be resident at once.
    const Index most =
        std::max(Index{device.sms} * kCtas<kBits> / (columns * problem.batch), Index{1});
    return launch(weights<kFormat, kBits, kRows>, std::min(tiles, most));
  };
  // Codebooks of other widths are rare, and these kernels large.
  if constexpr (kFormat != Format::kCodebook || kBits == 4)
    if (ceil_div(problem.N, Index{kWarps * kMostRows}) * columns >= 2 * device.sms)
      return launch_rows(std::integral_constant<int, kMostRows>());
  return launch_rows(std::integral_constant<int, 1>());
}

// The functions for widths of 1 bit and on.
template <Format kFormat, size_t... kWidths>
constexpr auto of_widths(std::index_sequence<kWidths...>) {
  return std::array<Run, sizeof...(kWidths)>{run_one<kFormat, kWidths + 1>...};
}

}  // namespace

cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                cudaStream_t stream) {
  // XLA's own loop writes float32 as fast.
  if (problem.y != Dtype::kF16 && problem.y != Dtype::kBF16) return cudaErrorNotSupported;
  constexpr std::make_index_sequence<8> kWidths;
  static constexpr auto kAffine = of_widths<Format::kAffine>(kWidths),
                        kCodebook = of_widths<Format::kCodebook>(kWidths);
  const Run of_format = problem.format == Format::kAffine     ? kAffine[problem.bits - 1]
                        : problem.format == Format::kCodebook ? kCodebook[problem.bits - 1]
                        : problem.format == Format::kE4M3     ? run_one<Format::kE4M3, 8>
                                                              : run_one<Format::kE5M2, 8>;
  return of_format(problem, operands, device, stream);
}

}  // namespace jaxgemv::cuda::dequantize
