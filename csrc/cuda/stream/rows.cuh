// A warp's span of a tile's rows: where it lies in shared memory, and which part a lane takes.
#pragma once

#include "../common/codes.cuh"
#include "../common/ptx.cuh"

namespace jaxgemv::cuda::stream {

constexpr int kTileN = 16;

// Widths for which there are few kernels: for one and two rows of x alone.
JAXGEMV_HD constexpr bool is_rare(int bits) { return bits == 1 || 8 % bits != 0; }

// A lane takes whole units of a row: words, or octets of rare widths; four octets (a run) are taken as words.
template <int kBits, int kUnits>
struct Unit {
  static constexpr bool kIsOctet = is_rare(kBits), kIsRun = kIsOctet && kUnits == 4;
  static constexpr int kBytes = kIsOctet ? kBits : 4;
  using Share =
      std::conditional_t<kIsOctet && !kIsRun, uint64_t[kUnits], uint32_t[kIsRun ? kBits : kUnits]>;
};

// A span is a number of blocks; in each, lane t of four has kUnits units.
template <int kBits, int kSpanBytes, int kUnits>
struct SpanRows {
  static constexpr int kLaneUnits = kUnits, kBytes = kSpanBytes, kPieces = kSpanBytes / 16;
  static constexpr int kBlocks = kSpanBytes / (4 * kUnits * Unit<kBits, kUnits>::kBytes);
  // To keep lanes that read together on different banks, odd rows swap the halves of each 128 bytes, or rows
  // are padded to an odd number of 16-byte pieces, or of pairs of pieces where lanes read two words.
  static constexpr bool kSwaps = !is_rare(kBits);
  static constexpr int kRowBytes =
      kSwaps ? kSpanBytes : 16 * (kBits % 2 ? kPieces | 1 : kPieces / 4 * 4 + 2);

  // Where byte `at` of row `row + more` lies; `more` is even.
  static __device__ __forceinline__ int place(int row, int at, int more = 0) {
    return (row + more) * kRowBytes + (kSwaps ? at ^ row % 2 * 64 : at);
  }

  // Loads lane (g, t)'s units of block i in rows g and g + 8 of a tile.
  static __device__ __forceinline__ void load(typename Unit<kBits, kUnits>::Share (&to)[2],
                                              const uint8_t* tile, int i) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (!is_rare(kBits))
        load_shared<kUnits>(to[r], tile + place(g, (i * 4 + t) * 4 * kUnits, 8 * r));
      else
        load_octets(to[r], tile + place(g, i * 4 * kUnits * kBits, 8 * r));
    }
  }

 private:
  static __device__ __forceinline__ void load_octets(uint32_t (&to)[kBits], const uint8_t* block) {
    constexpr int kAtOnce = kBits % 2 ? 1 : 2;
#pragma unroll
    for (int w = 0; w < kBits; w += kAtOnce)
      load_shared<kAtOnce>(to + w, block + threadIdx.x % 4 * 4 * kBits + 4 * w);
  }
  static __device__ __forceinline__ void load_octets(uint64_t (&to)[1], const uint8_t* block) {
    uint32_t low, high;
    Octet<kBits>::load(reinterpret_cast<const uint32_t*>(block), threadIdx.x % 4, low, high);
    to[0] = low | uint64_t{high} << 32;
  }
};

}  // namespace jaxgemv::cuda::stream
