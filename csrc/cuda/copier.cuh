// The parts of the streaming kernel (stream.cuh) that bring weights and scales: what a CTA knows of
// its work, the copies into a warp's ring, the terms that are made of scales.
#pragma once

#include "dtype.cuh"
#include "ptx.cuh"

namespace jaxgemv::cuda::stream {

constexpr int kTileN = 16;
// Tiles in a warp's ring. More than two are no faster, and make whatever is not yet asked for wait
// longer (H200, int4, M = 1; 2, 3 and 4 tried, docs/cuda-notes.md).
constexpr int kStages = 2;

// How scale and shift lie: one for each row of the weights; or 16-bit ones for each group of a
// power of two of blocks, in pairs aligned to 4 bytes.
enum class Scales { kByRow, kByBlock };

// All that a CTA needs to know; what is needed first, first.
struct Job {
  const uint8_t* packed;
  const void* x;
  const int32_t* index;
  int rows_a_cta, more;  // the first `more` CTAs have one row more
  int m_tiles;           // CTAs next to each other that read the same weights
  int tiles;             // of each CTA
  int block_tiles;       // tiles whose strips fit into shared memory together
  int slices;
  int M, N, K, row_bytes;
  int group_log;  // kByBlock: a group is 2^this blocks
  int scale_row;  // kByBlock: bytes from row to row
  Affine affine;
  Dtype y_dtype;
  uint32_t stack;
  Param scale, shift;
  Index packed_stack_stride;
  void* y;
  Param bias;
};

// Copies a warp's spans of the weights, and the scales that go with them, tile after tile and slice
// after slice of a block of tiles. The halves of each 128 bytes of odd rows change places, so that
// the lanes that later read two rows at once find them in different banks.
template <Scales kScales, int kSpanBytes, int kBlocks>
struct Copier {
  static constexpr int kWeightBytes = kTileN * kSpanBytes;
  static constexpr int kScaleBytes = kScales == Scales::kByBlock ? kTileN * 4 * kBlocks : 0;
  static constexpr int kBytes = kWeightBytes + kScaleBytes;            // of a stage
  static constexpr int kLanes = kSpanBytes / 16, kRows = 32 / kLanes;  // of a copy of weights
  const Job& job;
  uint8_t* const ring;
  const int tiles, last_step;  // rows to the last tile
  const uint8_t* from;
  uint8_t* to;
  const char* scale_from;
  int left, slice = 0, offset, stage = 0;

  __device__ __forceinline__ Copier(const Job& job, uint32_t s, int first_row, int last_row,
                                    int tiles, uint8_t* ring)
      : job(job),
        ring(ring),
        tiles(tiles),
        last_step(last_row - first_row - (tiles - 2) * kTileN),
        left(tiles) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int row = lane / kLanes, piece = lane % kLanes;
    to = ring + row * kSpanBytes + (piece ^ (row % 2 * 4)) * 16;
    offset = warp * kSpanBytes + piece * 16;
    from = job.packed + ((first_row + row) * Index{job.row_bytes} + offset);
    from += s * job.packed_stack_stride;
    if constexpr (kScales == Scales::kByBlock) {
      // In a span of a row, first the words of its scales, then those of its shifts.
      const int words_log = scale_words_log();
      const Param& param = lane >> words_log & 1 ? job.shift : job.scale;
      scale_from = static_cast<const char*>(param.data) + 2 * param.stack_stride * s;
      scale_from += (first_row + (lane >> (words_log + 1))) * job.scale_row + scale_word() * 4;
    }
  }

  // Starts the copy of the next tile. When kStages have been started, `stage` is the oldest.
  __device__ __forceinline__ void next() {
    if (slice < job.slices) {
      const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
      // Past the end of a row lies what was there before: codes, which meet x = 0.
      if (offset < job.row_bytes)
#pragma unroll
        for (int i = 0; i < kTileN / kRows; ++i)
          copy16(to + stage + i * kRows * kSpanBytes, from + i * (kRows * Index{job.row_bytes}));
      const int rows = left == 2 ? last_step : kTileN;
      from += rows * job.row_bytes;
      if constexpr (kScales == Scales::kByBlock) {
        // Past the last group a scale must be finite, because 0 times NaN is NaN.
        const bool inside = scale_word() * 4 < job.scale_row;
        const int words_log = scale_words_log();
#pragma unroll
        for (int i = 0; i < kBlocks / 2; ++i)
          if (i < 1 << words_log)
            copy_or_zeros<4>(ring + stage + kWeightBytes + (lane + 32 * i) * 4,
                             scale_from + i * (kTileN >> words_log) * job.scale_row, inside);
        scale_from += rows * job.scale_row;
      }
      if (--left == 0) {  // back to the first tile, one slice further
        const int rows = last_step + (tiles - 1) * kTileN;
        ++slice, left = tiles, offset += warps * kSpanBytes;
        from += warps * kSpanBytes - rows * Index{job.row_bytes};
        scale_from += (warps << scale_words_log()) * 4 - rows * job.scale_row;
      }
    }
    stage = stage == (kStages - 1) * kBytes ? 0 : stage + kBytes;
    commit_copies();
  }

 private:
  // log2 of the words of scales in a row's span.
  __device__ __forceinline__ int scale_words_log() const {
    return (kBlocks == 16 ? 3 : kBlocks / 4) - job.group_log;
  }

  // The word that this lane copies of each row of scales.
  __device__ __forceinline__ int scale_word() const {
    const int log = scale_words_log(), span = slice * (blockDim.x / 32) + threadIdx.x / 32;
    return (span << log) + (threadIdx.x & ((1 << log) - 1));
  }
};

// The terms of a group.
template <int kBits>
__device__ __forceinline__ float2 term_of(Affine affine, float scale, float shift) {
  const float zero = affine == Affine::kZero ? shift : mid_code(kBits);
  return {scale, affine == Affine::kOffset ? shift : -scale * zero};
}

// Shared memory of a warp: its ring, the terms of a tile. Behind those of all warps lies what is
// staged of x, and then the strips.
template <int kBits, Scales kScales, int kSpanBytes, int kBlocks>
struct Layout {
  static constexpr int kTerms = kStages * Copier<kScales, kSpanBytes, kBlocks>::kBytes;
  static constexpr int kBytes = kTerms + (kScales == Scales::kByBlock ? kTileN * kBlocks * 8 : 0);
};

// The terms of a tile from its copied scales: lane l makes those of the (row, block) pairs l, l +
// 32 and so on.
template <int kBits, int kBlocks>
__device__ __forceinline__ void make_terms(const Job& job, const uint8_t* scales, float2* terms) {
  const int lane = threadIdx.x % 32;
  const int row_bytes = kBlocks * 4 >> job.group_log;  // of scales and shifts together
#pragma unroll
  for (int i = 0; i < kTileN * kBlocks / 32; ++i) {
    const int row = lane / kBlocks + 32 / kBlocks * i, group = lane % kBlocks >> job.group_log;
    const auto at = reinterpret_cast<const unsigned short*>(scales + row * row_bytes) + group;
    terms[lane + 32 * i] = term_of<kBits>(job.affine, float_of_bits(at[0], job.scale.dtype),
                                          float_of_bits(at[row_bytes / 4], job.shift.dtype));
  }
}

}  // namespace jaxgemv::cuda::stream
