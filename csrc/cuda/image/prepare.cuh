// What the kernels with an image of x have in common before they are launched: their parameters, and the kernel that
// makes the image.
#pragma once

#include <algorithm>

#include "../common/launch.cuh"
#include "weights.cuh"

namespace jaxgemv::cuda::image {

// Slots of a quad of 128 codes, each with terms of its own; 0 if groups end inside 16 codes.
inline int slots_of(const Problem& problem, const Operands& operands) {
  const Index group = has_one_group(problem, operands) ? 128 : problem.group;
  return group % 128 == 0 ? 1 : group % 32 == 0 ? 4 : group % 16 == 0 ? 8 : 0;
}

// Whether a call fits: 32-bit sizes, no group boundary inside 16 codes, aligned weights.
inline bool takes(const Problem& problem, const Operands& operands) {
  return has_sizes(problem) && slots_of(problem, operands) > 0 && is_aligned(operands.packed, 4);
}

inline Groups groups_of(const Problem& problem, const Operands& operands) {
  const Index groups = ceil_div(problem.K, problem.group), sixteens = problem.group / 16;
  // One scale a row may stand for groups of any length.
  const bool one = groups == 1 || problem.group % 16 != 0;
  const auto magic = static_cast<uint32_t>(one ? 0 : ceil_div(Index{1} << 31, sixteens));
  return {slots_of(problem, operands), magic, one ? 0 : static_cast<int>(groups) - 1};
}

// The longest windows (most units) whose scales take 16 bytes at most; a single unit may take more.
inline Windows windows_of(const Problem& problem, const Operands& operands, Index unit_k) {
  const Groups groups = groups_of(problem, operands);
  if (groups.last == 0) return {30, 1};
  Windows windows{};
  for (int log_units = 8; log_units >= 0; --log_units) {
    const Index codes = unit_k << log_units, group = problem.group;
    const bool whole = codes % group == 0 || group % codes == 0;
    const Index touched = whole ? std::max<Index>(codes / group, 1) : codes / group + 2;
    windows = {log_units, 0};
    bool fits = true;
    for (const Param* param : {&operands.scale, &operands.shift}) {
      const Index size = size_of(param->dtype), bytes = touched * size;
      const Index row = (groups.last + 1) * size, power = bytes & -bytes;
      const bool inside = whole && power == bytes && is_aligned(param->data, 16) && row % 16 == 0;
      const Index pieces = inside ? ceil_div(bytes, Index{16}) : ceil_div(bytes + 15, Index{16});
      windows.pieces = std::max(windows.pieces, static_cast<int>(pieces));
      fits = fits && bytes <= 16;
    }
    if (fits) break;
  }
  return windows;
}

// How a kernel's work is laid out.
struct Layout {
  int across = 0, deep = 0, ranks = 0, slice_units = 0, bytes = 0;
  bool makes = false;  // CTAs make the image of x
  Index tiles = 0;
};

// All parameters but tile_stride. S: the kernel's Ring; most: columns of a CTA, at most; parts: columns of a row of x.
template <typename S>
Params params_of(const Problem& problem, const Operands& operands, const Layout& layout, int bits,
                 int most, int parts) {
  Params p{};
  p.packed = operands.packed, p.packed_stack_stride = operands.packed_stack_stride;
  p.index = operands.index, p.codebook = operands.codebook;
  p.x = {operands.x, problem.x, static_cast<int>(problem.K),
         is_aligned(operands.x, 16) && problem.K * size_of(problem.x) % 16 == 0, operands.norm};
  p.groups = groups_of(problem, operands);
  p.scales[0] = source_of(operands.scale), p.scales[1] = source_of(operands.shift);
  p.shift = problem.affine == Affine::kZero ? ShiftTerm{-1, 0, 0}
            : problem.affine == Affine::kOffset
                ? ShiftTerm{0, 0, 1}
                : ShiftTerm{0, -static_cast<float>(mid_code(bits)), 0};
  p.stack = static_cast<int>(problem.stack), p.M = static_cast<int>(problem.M);
  p.width = static_cast<int>(problem.y_width()), p.log_rows = is_gated(problem.activation) ? 3 : 4;
  p.plain = problem.activation == Activation::kNone && operands.residual.data == nullptr;
  p.row_bytes = static_cast<int>(row_bytes(problem.K, bits));
  p.parts = parts, p.rows_m = std::min(p.M, most / p.parts);
  p.m_tiles = (p.M + p.rows_m - 1) / p.rows_m;
  p.tiles = static_cast<int>(layout.tiles), p.across = layout.across, p.deep = layout.deep;
  p.ranks = layout.ranks, p.slice_units = layout.slice_units;
  p.units = static_cast<int>(ceil_div(problem.K, S::kUnitK));
  p.share_units = p.units / p.ranks, p.longer = p.units % p.ranks;
  p.windows = windows_of(problem, operands, S::kUnitK);
  p.aligned = is_aligned(operands.packed, 16) && p.row_bytes % 16 == 0 &&
              operands.packed_stack_stride % 16 == 0;
  p.output = output_of(problem, operands), p.eps = problem.eps;
  return p;
}

// Evens out the rows of x over CTAs: the last one may have fewer.
inline void make_even(Params* p) {
  p->rows_m = (p->M + p->m_tiles - 1) / p->m_tiles;
  p->m_tiles = (p->M + p->rows_m - 1) / p->rows_m;
}

// Operands of the kernels that round weights, gemm and gemm_tma: for tables and float8 a global scale too, though they
// have no epilogue.
constexpr OperandSet rounded_operands(Format format) {
  const OperandSet set =
      with_format(kProductOperands | OperandSet::of(Operand::kOneByteScale), format);
  return format == Format::kAffine ? set : set | OperandSet::of(Operand::kGlobalScale);
}

// Whether rows of y are whole fours of results, as put_fours has them.
inline bool packs(const Params& p) {
  return p.width % 4 == 0 &&
         is_aligned(p.output.y, 4 * static_cast<Index>(size_of(p.output.dtype)));
}

// Makes the image: tiles of rows_m rows of x one after another, and in each its records quad by quad.
template <typename C>
__global__ void make_image(const Params params, uint8_t* image, int quads) {
  wait_for_earlier();
  let_next_begin();
  const int s = stack_entry(params.index, params.stack, blockIdx.y), M = params.M;
  // `last` is below 2^32, since `takes` limits M and K.
  const unsigned of_row = quads, last = of_row * M - 1;
  const unsigned i = min(blockIdx.x * (blockDim.x / 16) + threadIdx.x / 16, last);
  const int m = i / of_row, quad = i % of_row, m0 = m / params.rows_m * params.rows_m;
  const int columns = min(params.rows_m, M - m0) * params.parts;
  const int k = quad * kQuadK + static_cast<int>(threadIdx.x) % 16 * 8;
  const Index first_row = Index{blockIdx.y} * M;
  float v[8];
  load_octet_of_x(params.x, first_row + m, k, v);
  uint8_t* const record = image + (first_row + m0) * params.parts * quads * Index{kRecordBytes} +
                          quad * Index{kRecordBytes} * columns;
  put_quad<C>(v, record, (m - m0) * params.parts, columns, params.parts, params.groups.slots,
              NormValues(params.x.norm, max(s, 0), 0), k, params.x.K);
}

// Makes the image in the call's second result; the kernel that reads it is launched `early`.
template <typename C>
cudaError_t launch_image(const Problem& problem, const Operands& operands, int quads,
                         const Device& device, cudaStream_t stream, Params* params) {
  constexpr int kThreads = 256;
  const Index halves = Index{quads} * problem.M;
  const dim3 grid(static_cast<unsigned>(ceil_div(halves, kThreads / 16)),
                  static_cast<unsigned>(problem.batch));
  params->image = static_cast<const uint8_t*>(operands.image);
  LaunchShape shape{grid, kThreads};
  shape.leads = true;
  return launch_kernel(make_image<C>, shape, device, stream, *params,
                       static_cast<uint8_t*>(operands.image), quads);
}

}  // namespace jaxgemv::cuda::image
