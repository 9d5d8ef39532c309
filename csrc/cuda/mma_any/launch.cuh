// Chooses the variant of the mma_any kernel, and lays out its work.
#pragma once

#include <algorithm>

#include "../common/launch.cuh"
#include "kernel.cuh"

namespace jaxgemv::cuda {

namespace mma_any {

// How the image lies: rows_m rows of x after another, quad by quad.
template <int kBits>
__global__ void make_image(const Params params, uint8_t* image, int quads) {
  let_second_begin();
  const int s = stack_entry(params.index, params.stack, blockIdx.y), M = params.M;
  const int last = quads * M - 1;
  const int i = min(static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 16, last);
  const int m = i / quads, quad = i % quads, m0 = m / params.rows_m * params.rows_m;
  const int columns = min(params.rows_m, M - m0) * params.parts;
  const int k = quad * kQuadK + static_cast<int>(threadIdx.x) % 16 * 8;
  const Index first_row = Index{blockIdx.y} * M;
  float v[8];
  load_octet_of_x(params.x, first_row + m, k, v);
  uint8_t* const record = image + (first_row + m0) * params.parts * quads * Index{kRecordBytes} +
                          quad * Index{kRecordBytes} * columns;
  put_quad<kBits>(v, record, (m - m0) * params.parts, columns, params.parts, params.groups.slots,
                  NormValues(params.x.norm, max(s, 0), 0), k, params.x.K);
}

}  // namespace mma_any

template <int kBits>
class MmaAnyOfWidth {
 public:
  // No group boundary inside 16 codes, and 32-bit m, n and k.
  static bool supports(const Problem& problem, const Operands& operands, const Device& device) {
    if (problem.K >= (1 << 19) || problem.N >= (1 << 30) || problem.M >= (1 << 20)) return false;
    if (slots_of(problem, operands) == 0 || !is_aligned(operands.packed, 4)) return false;
    const bool has_image = operands.image != nullptr && is_aligned(operands.image, 16);
    if (columns_of(problem, operands) > mma_any::kInsideColumns && !has_image) return false;
    return with_variant(problem, operands, [&](auto variant) {
      return variant.layout(problem, operands, device).across > 0;
    });
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    return with_variant(problem, operands, [&](auto variant) {
      return variant.launch(problem, operands, device, stream);
    });
  }

 private:
  static int parts_of(const Problem& problem, const Operands& operands) {
    return mma_any::parts_of(problem.x, operands.norm.data != nullptr);
  }
  static Index columns_of(const Problem& problem, const Operands& operands) {
    return problem.M * parts_of(problem, operands);
  }

  // Slots of 128 codes that have terms of their own; 0 if groups end inside of them.
  static int slots_of(const Problem& problem, const Operands& operands) {
    const bool one = operands.scale.g_stride == 0 && operands.shift.g_stride == 0;
    const Index group = one || problem.group >= problem.K ? 128 : problem.group;
    return group % 128 == 0 ? 1 : group % 32 == 0 ? 4 : group % 16 == 0 ? 8 : 0;
  }

  struct Layout {
    int across = 0, deep = 0, ranks = 0, slice_units = 0, bytes = 0;
    Index tiles = 0;
  };

  template <int kColumnTiles>
  struct Variant {
    using S = mma_any::Shape<kBits, kColumnTiles>;

    // Nanoseconds on an H200, roughly (docs/cuda-notes.md): of a unit in a warp, where instructions
    // bound it, and where a warp waits for its own; of a CTA, and of one in a cluster.
    static constexpr int kIssueNs = kColumnTiles == 1 ? 110 : kColumnTiles == 8 ? 270 : 160;
    static constexpr int kUnitNs = 700, kStartNs = 4000, kClusterNs = 3000, kXBytesANs = 50;

    // Warps with rows of their own, warps and CTAs that share K: whatever takes the least time.
    static Layout layout(const Problem& problem, const Operands& operands, const Device& device) {
      const int parts = parts_of(problem, operands), slots = slots_of(problem, operands);
      const Index rows_m = std::min<Index>(problem.M, mma_any::kMostColumns / parts);
      const Index columns = rows_m * parts, units = ceil_div(problem.K, S::kUnitK);
      const Index record = S::kQuads * mma_any::kRecordBytes * columns;
      const Index rows = S::kRows / (is_gated(problem.activation) ? 2 : 1);
      const Index groups = ceil_div(problem.M, rows_m) * problem.batch;  // that share no weights
      const bool copies = columns > mma_any::kInsideColumns;
      constexpr int kReserved = 2048;  // by the system, the norm's factors, a read past the end
      Layout best;
      Index least = 0;
      const auto consider = [&](int ranks, int across, int deep) {
        const Index own = across * deep * S::warp_bytes(slots);
        const Index room = device.shared_bytes - kReserved - own;
        const Index tiles = ceil_div(problem.y_width(), across * rows);
        const Index most = ceil_div(units, ranks);  // units of a CTA
        const Index sms = ranks > 2 ? device.sms * 15 / 16 : device.sms;
        const Index waves = ceil_div(tiles * groups * ranks, sms);
        const bool once = most * record <= room && !(copies && (S::kMany || waves == 1));
        const int buffers = once || !copies ? 1 : 2;
        Index slice = most;
        if (!once) {  // in turns
          slice = std::min(room / (record * buffers), ceil_div(most, 4) + deep - 1);
          slice -= slice % deep;
          if (slice < deep) return;
        }
        const Index steps = ceil_div(most, deep);
        const Index cost = waves * (kStartNs + (ranks > 1 ? kClusterNs : 0) +
                                    steps * std::max(kUnitNs, across * deep * kIssueNs) +
                                    most * record / kXBytesANs);
        if (best.across > 0 && cost >= least) return;
        least = cost;
        const Index bytes = own + slice * record * (slice < most ? buffers : 1) + 64;
        const Index sums = S::kMany ? across * deep * S::kSumsBytes : 0;
        best = {
            across, deep, ranks, static_cast<int>(slice), static_cast<int>(std::max(bytes, sums)),
            tiles};
      };
      for (int ranks = 1; ranks <= (device.major >= 9 ? 8 : 1); ranks *= 2)
        for (int across = 1; across <= S::kMaxWarps; ++across)
          // Fewer than there could be where shared memory is small.
          for (Index deep = std::min<Index>(S::kMaxWarps / across, units / ranks); deep > 0;
               deep /= 2)
            consider(ranks, across, static_cast<int>(deep));
      return best;
    }

    static cudaError_t launch(const Problem& problem, const Operands& operands,
                              const Device& device, cudaStream_t stream) {
      const Layout layout = Variant::layout(problem, operands, device);
      const int parts = parts_of(problem, operands);
      const bool copies = columns_of(problem, operands) > mma_any::kInsideColumns;
      mma_any::Params p{};
      p.packed = operands.packed, p.packed_stack_stride = operands.packed_stack_stride;
      p.image = copies ? static_cast<const uint8_t*>(operands.image) : nullptr;
      p.index = operands.index;
      p.x = {operands.x, problem.x, static_cast<int>(problem.K),
             is_aligned(operands.x, 16) && problem.K * size_of(problem.x) % 16 == 0, operands.norm};
      p.groups = groups_of(problem, operands);
      p.scales[0] = source_of(operands.scale), p.scales[1] = source_of(operands.shift);
      p.affine = problem.affine;
      p.stack = static_cast<int>(problem.stack), p.M = static_cast<int>(problem.M);
      const bool gated = is_gated(problem.activation);
      p.width = static_cast<int>(problem.y_width()), p.log_rows = gated ? 3 : 4;
      p.plain = problem.activation == Activation::kNone && operands.residual.data == nullptr;
      const Index results = (Index{layout.across} * S::kRowTiles) << p.log_rows;
      p.results_magic = static_cast<uint32_t>(ceil_div(Index{1} << 32, results));
      p.row_bytes = static_cast<int>(row_bytes(problem.K, kBits));
      p.parts = parts, p.rows_m = std::min(p.M, mma_any::kMostColumns / parts);
      p.m_tiles = (p.M + p.rows_m - 1) / p.rows_m;
      p.tiles = static_cast<int>(layout.tiles), p.across = layout.across, p.deep = layout.deep;
      p.units = static_cast<int>(ceil_div(problem.K, S::kUnitK));
      p.slice_units = layout.slice_units;
      p.output = output_of(problem, operands), p.eps = problem.eps;

      const auto batch = static_cast<unsigned>(problem.batch);
      if (copies) {
        const int quads = p.units * S::kQuads;
        constexpr int kThreads = 256;
        const Index halves = Index{quads} * p.M;
        const dim3 grid(static_cast<unsigned>(ceil_div(halves, kThreads / 16)), batch);
        const cudaError_t status =
            launch_kernel(mma_any::make_image<kBits>, {grid, kThreads}, device, stream, p,
                          static_cast<uint8_t*>(operands.image), quads);
        if (status != cudaSuccess) return status;
      }
      p.stage_bytes = S::stage_bytes(p.groups.slots), p.slot_k = mma_any::kQuadK / p.groups.slots;
      // CTAs go on to further tiles, but for those with many columns, which need all of x anew.
      const bool one = S::kMany || layout.ranks > 1;
      const int ctas = one ? p.tiles : std::min(p.tiles, std::max(device.sms / p.m_tiles, 1));
      p.ranks = layout.ranks;
      p.tile_stride = ctas;
      LaunchShape shape{{static_cast<unsigned>(ctas * p.m_tiles * p.ranks), batch},
                        32 * (S::kMany ? S::kMaxWarps : layout.across * layout.deep),
                        layout.bytes,
                        p.ranks};
      shape.early = copies && device.major >= 9;
      return launch_kernel(mma_any::gemv_mma_any<kBits, kColumnTiles>, shape, device, stream, p);
    }
  };

  static mma_any::ScaleSource source_of(const Param& param) {
    const int size = size_of(param.dtype);
    return {static_cast<const char*>(param.data), param.stack_stride * size,
            static_cast<int>(param.n_stride * size), static_cast<int>(param.g_stride * size),
            param.dtype};
  }

  static mma_any::Groups groups_of(const Problem& problem, const Operands& operands) {
    const Index groups = ceil_div(problem.K, problem.group), sixteens = problem.group / 16;
    // One scale a row may stand for groups of any length.
    const bool one = groups == 1 || problem.group % 16 != 0;
    const auto magic = static_cast<uint32_t>(one ? 0 : ceil_div(Index{1} << 31, sixteens));
    return {slots_of(problem, operands), magic, one ? 0 : static_cast<int>(groups) - 1};
  }

  template <typename Use>
  static auto with_variant(const Problem& problem, const Operands& operands, Use&& use) {
    const Index columns = columns_of(problem, operands);
    if (columns <= 8) return use(Variant<1>{});
    if (columns <= 16) return use(Variant<2>{});
    if (columns <= 32) return use(Variant<4>{});
    return use(Variant<8>{});
  }
};

template <int kBits, typename X>
struct MmaAny : MmaAnyOfWidth<kBits> {
  static constexpr KernelInfo kInfo{
      "mma_any",
      Format::kAffine,
      kBits,
      kDtypeOf<X>,
      mma_any::kMostColumns / mma_any::parts_of(kDtypeOf<X>, false),
      kEpilogueOperands | OperandSet::of(Operand::kNorm, Operand::kOneByteScale)};
};

template <int kBits>
inline constexpr Kernel kMmaAnyRows[] = {
    row<MmaAny<kBits, __half>>(), row<MmaAny<kBits, __nv_bfloat16>>(), row<MmaAny<kBits, float>>()};

}  // namespace jaxgemv::cuda
