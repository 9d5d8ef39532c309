// Chooses the variant of the FMA kernel, and lays out its work.
#include <algorithm>

#include "../common/launch.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {
namespace fma {

// rows_n: rows of the weights that a lane has.
struct Layout {
  int rows_n, log_lanes, log_split, warps;
};

// rows_n is `many` where that leaves enough work for all SMs, else `few`. As many lanes share a row as
// make 15 warps an SM, but no more than a row has blocks; and fewer, where then fewer of them are idle at the end of a
// row and at least half of those warps remain. (Fitted to all layouts of twenty products on an H200:
// docs/cuda-notes.md, "One and two rows of any format".)
Layout layout_of(const Problem& problem, int few, int many, const Device& device) {
  constexpr Index kLanes = 32 * 15, kMost = 32 * kMostWarps;  // of an SM; of a row
  const Index blocks = ceil_div(problem.K, kBlock), most = std::min(blocks, kMost);
  // float32 x is as many bytes to read as several rows of the weights.
  const Index least = problem.x == Dtype::kF32 ? 200 : 250;  // lanes of an SM with a block each
  const bool enough = problem.N >= many && problem.N / many * most >= least * device.sms;
  Layout layout{enough ? many : few, 0, 0, 4};
  const Index sets = ceil_div(problem.N, layout.rows_n) * problem.batch;
  const Index wanted = kLanes * device.sms;
  int log = 3;
  while (Index{1} << log < std::min({ceil_div(wanted, sets), most})) ++log;
  const auto rounded_up = [&](int lanes) { return ceil_div(blocks, Index{1} << lanes) << lanes; };
  while (log > 3 && rounded_up(log - 1) * 10 <= rounded_up(log) * 9 && sets << log >= wanted) --log;
  layout.log_lanes = std::min(log, log > 7 ? 5 : 4), layout.log_split = log - layout.log_lanes;
  layout.warps = std::max(4, 1 << layout.log_split);
  return layout;
}

Params params_of(const Problem& problem, const Operands& operands, const Layout& layout) {
  Params p{};
  p.weights = weight_source_of(problem, operands);
  p.x = operands.x, p.index = operands.index, p.stack = static_cast<int>(problem.stack);
  p.M = static_cast<int>(problem.M), p.N = static_cast<int>(problem.N);
  p.K = static_cast<int>(problem.K);
  p.log_lanes = layout.log_lanes, p.log_split = layout.log_split;
  p.exponent = CodesInWords<1>::kExponent;
  p.output = output_of(problem, operands);
  return p;
}

// Rows of the weights in a lane, for which work on x is shared, where there are enough of them: as many as
// registers allow.
template <int kBits, int kRowsM>
inline constexpr int kManyRowsN = kBits > 6 || kRowsM* kBits > 8 ? 2 : 4;

}  // namespace fma

template <Format kFormat, int kBits, typename X>
struct Fma {
  // float32 x is as much to read as the weights.
  static constexpr int kRowsM = std::is_same_v<X, float> ? 1 : 2;
  static constexpr KernelInfo kInfo{"fma", kFormat, kBits, kDtypeOf<X>, kRowsM, kProductOperands};

  // A grid has 2^16 - 1 pairs of rows of x at most.
  static bool supports(const Problem& problem, const Operands& operands, const Device&) {
    return problem.M < (1 << 16) && has_weight_source(problem, operands, fma::kBlock);
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    return problem.M == 1 ? run_rows<1>(problem, operands, device, stream)
                          : run_rows<kRowsM>(problem, operands, device, stream);
  }

 private:
  template <int kM>
  static cudaError_t run_rows(const Problem& problem, const Operands& operands,
                              const Device& device, cudaStream_t stream) {
    constexpr int kMany = fma::kManyRowsN<kBits, kM>, kRagged = 2;
    const bool whole = problem.K % fma::kBlock == 0 && is_aligned(operands.packed, 16) &&
                       is_aligned(operands.x, 16);
    const fma::Layout layout =
        fma::layout_of(problem, whole ? 1 : kRagged, whole ? kMany : kRagged, device);
    const auto kernel = !whole               ? fma::gemv_fma<kBits, kRagged, kM, false, X>
                        : layout.rows_n == 1 ? fma::gemv_fma<kBits, 1, kM, true, X>
                                             : fma::gemv_fma<kBits, kMany, kM, true, X>;
    const Index sets = layout.warps * 32 >> (layout.log_lanes + layout.log_split);
    const LaunchShape shape{
        {static_cast<unsigned>(ceil_div(problem.N, sets * layout.rows_n)),
         static_cast<unsigned>(problem.batch), static_cast<unsigned>(ceil_div(problem.M, kM))},
        layout.warps * 32};
    return launch_kernel(kernel, shape, device, stream, fma::params_of(problem, operands, layout));
  }
};

Rows fma_rows() { return rows_of<Fma, Format::kAffine, 1, 2, 3, 4, 5, 6, 7, 8>(); }

}  // namespace jaxgemv::cuda
