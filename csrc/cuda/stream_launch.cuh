// Chooses the variant of the streaming kernel and lays out its work.
#pragma once

#include <algorithm>

#include "stream.cuh"

namespace jaxgemv::cuda {

template <int kBits, typename X>
struct Stream {
  static constexpr int kMaxRows = kBits == 2 ? 8 : 16;  // that share a read of the weights
  static constexpr KernelInfo kInfo{"stream", kBits, kDtypeOf<X>, kMaxRows, kProductOperands};

  // A row is whole 16-byte pieces, on aligned memory, and all numbers fit into 32 bits.
  static bool accepts(const Problem& problem, const Operands& operands) {
    return problem.M <= kMostRows && problem.N >= stream::kTileN && problem.N < (1 << 30) &&
           problem.K < (1 << 25) && problem.K * kBits % 128 == 0 &&
           is_aligned(operands.packed, 16) && is_aligned(operands.x, 16) &&
           find_scales(problem, operands).found && device().found;
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, cudaStream_t stream) {
    const Found found = find_scales(problem, operands);
    const auto run_blocks = [&]<int kLaneWords>(std::integral_constant<int, kLaneWords>) {
      return run_rows<Scales::kByBlock, kLaneWords>(problem, operands, found, stream);
    };
    if (found.lane_words == 0) return run_rows<Scales::kByRow, 4>(problem, operands, found, stream);
    if constexpr (kBits < 8)
      if (found.lane_words == 1) return run_blocks(std::integral_constant<int, 1>{});
    if (found.lane_words == 2) return run_blocks(std::integral_constant<int, 2>{});
    return run_blocks(std::integral_constant<int, 4>{});
  }

 private:
  using Scales = stream::Scales;
  // Above this there are other kernels, but for 2 bits. Each kMaxRows rows have CTAs of their own,
  // next to each other, so that memory is read once.
  static constexpr int kMostRows = kBits == 2 ? 64 : kMaxRows;
  static constexpr int kReserved = 1024;  // of a CTA's shared memory, by the system

  // Blocks of one word a lane are too many for more rows.
  static constexpr int max_rows(int lane_words) { return lane_words == 1 ? 8 : kMaxRows; }

  struct Device {
    bool found;
    int sms, shared_bytes;
  };

  static Device device() {
    int id = 0, sms = 0, bytes = 0;
    const bool found =
        cudaGetDevice(&id) == cudaSuccess &&
        cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, id) == cudaSuccess &&
        cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, id) == cudaSuccess;
    return {found, sms, bytes};
  }

  // lane_words: 0 for one scale a row, else a lane's share of a block; a group is 2^group_log
  // blocks.
  struct Found {
    bool found = false;
    int lane_words = 0, group_log = 0;
  };

  static Found find_scales(const Problem& problem, const Operands& operands) {
    const Param &scale = operands.scale, &shift = operands.shift;
    if (scale.g_stride == 0 && shift.g_stride == 0) return {true};
    const auto suits = [](const Param& p) {
      return size_of(p.dtype) == 2 && p.g_stride == 1 && p.n_stride % 2 == 0 &&
             p.stack_stride % 2 == 0 && is_aligned(p.data, 4);
    };
    if (!suits(scale) || !suits(shift) || scale.n_stride != shift.n_stride ||
        problem.N * scale.n_stride >= (1 << 30))
      return {};
    for (const int lane_words : {4, 2, 1}) {
      if (lane_words * 32 / kBits < 8) break;  // a lane has 16 bytes of x or more
      const Index block = lane_words * 128 / kBits;
      const Index blocks = stream::Shape<kBits, 8, 4>::kSpanBytes / (16 * lane_words);
      // A span has two groups or more.
      for (int log = 0; blocks >> log >= 2; ++log)
        if (problem.group == block << log)
          return {kMostRows > kMaxRows || problem.M <= max_rows(lane_words), lane_words, log};
    }
    return {};
  }

  template <Scales kScales, int kLaneWords>
  static cudaError_t run_rows(const Problem& problem, const Operands& operands, const Found& found,
                              cudaStream_t stream) {
    // Only with 4 bits does one row have a kernel of its own.
    if (kBits == 4 && problem.M == 1)
      return launch<kBits == 4 ? 1 : 2, kScales, kLaneWords>(problem, operands, found, stream);
    if (problem.M <= 2) return launch<2, kScales, kLaneWords>(problem, operands, found, stream);
    if (problem.M <= 8 || max_rows(kLaneWords) == 8)
      return launch<8, kScales, kLaneWords>(problem, operands, found, stream);
    return launch<max_rows(kLaneWords), kScales, kLaneWords>(problem, operands, found, stream);
  }

  template <int kRows, Scales kScales, int kLaneWords>
  static cudaError_t launch(const Problem& problem, const Operands& operands, const Found& found,
                            cudaStream_t stream) {
    using Shape = stream::Shape<kBits, kRows, kLaneWords>;
    constexpr int kSpanBytes = Shape::kSpanBytes, kBlocks = kSpanBytes / (16 * kLaneWords);
    constexpr int kRingBytes = stream::Layout<kBits, kScales, kSpanBytes, kBlocks>::kBytes;
    using Span = stream::Span<kBits, X, kRows, kSpanBytes, kLaneWords>;
    const auto kernel = stream::gemv_stream<kBits, X, kRows, (kRows == 8 && kMostRows > kMaxRows),
                                            kScales, kLaneWords>;
    const auto [_, sms, shared_bytes] = device();

    stream::Job job{};
    job.packed = operands.packed, job.x = operands.x, job.index = operands.index;
    job.M = static_cast<int>(problem.M), job.N = static_cast<int>(problem.N);
    job.K = static_cast<int>(problem.K), job.row_bytes = job.K / 8 * kBits;
    job.group_log = found.group_log, job.scale_row = 2 * static_cast<int>(operands.scale.n_stride);
    job.affine = problem.affine, job.y_dtype = problem.y;
    job.stack = static_cast<uint32_t>(problem.stack);
    job.scale = operands.scale, job.shift = operands.shift, job.bias = operands.bias;
    job.packed_stack_stride = operands.packed_stack_stride, job.y = operands.y;

    // As many warps as share K evenly, and CTAs with the same number of rows each. What the warps
    // leave of the shared memory is for strips, 8 bytes for a row of the weights and a column.
    const int rows = std::min(job.M, kRows), columns = ceil_div(rows, Span::kRowsAColumn);
    const int column_bytes = columns * 8, warp_bytes = kRingBytes + rows * Span::kRowBytes;
    // At the least, a strip holds a tile and the sums of x.
    const int least_bytes = warp_bytes + (stream::kTileN + 4) * column_bytes;
    const int most_warps = std::min(Shape::kMaxWarps, (shared_bytes - kReserved) / least_bytes);
    const int spans = (job.row_bytes + kSpanBytes - 1) / kSpanBytes;
    job.slices = (spans + most_warps - 1) / most_warps;
    const int warps = (spans + job.slices - 1) / job.slices;
    // A CTA prepares x anew, so where 8 warps an SM are reached, more CTAs must have 96 rows each
    // (H200, int2, M = 1, the shapes of docs/cuda-notes.md: 72 rows are slower, 108 faster).
    const int ctas_an_sm =
        std::min({std::max({job.N / (sms * 96), 8 / warps, 1}), most_warps / warps,
                  shared_bytes / (kReserved + warps * least_bytes)});
    job.m_tiles = (job.M + kRows - 1) / kRows;
    const int ctas = std::min(job.N / stream::kTileN, std::max(sms * ctas_an_sm / job.m_tiles, 1));
    job.rows_a_cta = job.N / ctas, job.more = job.N % ctas;
    job.tiles = (job.rows_a_cta + (job.more > 0) + stream::kTileN - 1) / stream::kTileN;
    const int room = shared_bytes / ctas_an_sm - kReserved - warps * warp_bytes;
    job.block_tiles = std::min((room / (warps * column_bytes) - 4) / stream::kTileN, job.tiles);
    const int bytes = warps * (warp_bytes + (job.block_tiles * stream::kTileN + 4) * column_bytes);
    const cudaError_t status =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (status != cudaSuccess) return status;
    const dim3 grid(static_cast<unsigned>(ctas * job.m_tiles),
                    static_cast<unsigned>(problem.batch));
    kernel<<<grid, warps * 32, bytes, stream>>>(job);
    return cudaGetLastError();
  }
};

}  // namespace jaxgemv::cuda
