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
  constexpr Index kCodes = kPiece;
  const Index width = problem.y_width();
  if (!is_aligned(operands.packed, 4)) return cudaErrorMisalignedAddress;
  if (width % kCodes != 0 || !is_aligned(operands.y, 16) || width > INT_MAX / 2 ||
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
  const bool plain =
      problem.K < kGroupedK && (problem.group % kOctet == 0 || has_one_group(problem, operands));
  const Index columns = ceil_div(width, 32 * kCodes);
  // Of others, which are rare, a warp has one row: these kernels are large.
  constexpr bool kIsOften = kFormat != Format::kCodebook || kBits == 4;
  constexpr int kMany = kIsOften ? kMostRows : 1;
  const bool many =
      kIsOften && plain && ceil_div(problem.N, kWarps * kMany) * columns >= 2 * device.sms;
  const auto kernel = many    ? weights<kFormat, kBits, kMany, true>
                      : plain ? weights<kFormat, kBits, 1, true>
                              : weights<kFormat, kBits, 1, false>;
  dim3 grid;
  if (!make_grid(ceil_div(problem.N, kWarps * (many ? kMany : 1)) * columns, problem.batch, &grid))
    return cudaErrorInvalidConfiguration;
  return launch_kernel(kernel, {grid, kWarps * 32}, device, stream, p);
}

// By width.
template <Format kFormat, size_t... kWidths>
constexpr auto of_widths(std::index_sequence<kWidths...>) {
  return std::array<Run, sizeof...(kWidths)>{run_one<kFormat, kWidths + 1>...};
}

}  // namespace

cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                cudaStream_t stream) {
  // XLA's loop writes float32 as fast.
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
