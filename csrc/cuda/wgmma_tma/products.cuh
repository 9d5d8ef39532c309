// What a warp of the wgmma_tma kernel does with a box: codes to operand A, products, sums.
#pragma once

#include "../common/wgmma.cuh"
#include "image.cuh"
#include "scales.cuh"

namespace jaxgemv::cuda::wgmma_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Bytes from a warp's first row in a box to this lane's words, in its first row and the box's first quad: those of a
// run of four octets, or of the first of four. The swizzle exchanges pieces of 16 bytes.
template <typename S>
__device__ __forceinline__ uint32_t first_word() {
  const int t = threadIdx.x % 4, row = row_of_lane<S>(), at = t * S::kBits * (S::kRuns ? 4 : 1);
  const int piece = S::kSwizzles ? at / 16 ^ row : at / 16;
  return static_cast<uint32_t>(row * S::kRowBytes + piece * 16 + at % 16);
}

// The low half of the descriptor of operand B: a record of x, 8 columns of 16 bytes side by side and 8 k further on the
// next register. The bits of an address above 18 are the number of a CTA in its cluster.
template <typename S>
__device__ __forceinline__ uint32_t operand_of(uint32_t record) {
  return static_cast<uint32_t>(S::kColumns) << 16 | (record & 0x3ffff) >> 4;
}

// A lane's words of kOctets octets in one row. load() takes those of quad q from octet `first` on; `from`: where the
// words of the first quad are.
template <typename S, int kOctets>
struct LaneWords {
  static constexpr int kBits = S::kBits;
  // Words per octet; a run's four octets together are whole words, and otherwise some may begin in the middle of one.
  static constexpr int kEach = S::kSwizzles ? kBits / 4 : 2;
  uint32_t words[S::kRuns && kOctets == 4 ? kBits : kOctets * kEach];

  __device__ __forceinline__ void load(uint32_t from, int q, int first) {
    if constexpr (S::kSwizzles) {
      const uint32_t quad = from ^ static_cast<uint32_t>(q * 64);
      if constexpr (S::kRuns && kOctets == 4)
        load_shared(quad, words);
      else if constexpr (S::kRuns)
        load_at<kOctets * kEach>(quad + first * kBits, 0);
      else
#pragma unroll
        for (int i = 0; i < kOctets; ++i)
          load_at<kEach>(quad ^ static_cast<uint32_t>((first + i) * (4 * kBits)), i * kEach);
    } else if constexpr (S::kRuns) {
      constexpr int kAtOnce = kBits % 2 ? 1 : 2;
#pragma unroll
      for (int w = 0; w < kBits; w += kAtOnce) load_at<kAtOnce>(from + 4 * w, w);
    } else {
#pragma unroll
      for (int i = 0; i < kOctets; ++i) {
        const uint32_t at = from + (first + i) * (4 * kBits);
        constexpr int kMost = (3 + kBits + 3) / 4;  // words that an octet lies in
        uint32_t w[3] = {};
#pragma unroll
        for (int j = 0; j < kMost; ++j) {
          uint32_t word[1];
          load_shared((at & ~3u) + 4 * j, word);
          w[j] = word[0];
        }
        words[2 * i] = __funnelshift_r(w[0], w[1], 8 * (at % 4));
        words[2 * i + 1] = __funnelshift_r(w[1], w[2], 8 * (at % 4));
      }
    }
  }

  __device__ __forceinline__ void octet(int j, uint32_t& low, uint32_t& high) const {
    if constexpr (!S::kSwizzles && S::kRuns)
      Octet<kBits>::of_run(words, j, low, high);
    else
      low = words[j * kEach], high = words[j * kEach + kEach - 1];
  }

 private:
  template <int kCount>
  __device__ __forceinline__ void load_at(uint32_t from, int to) {
    uint32_t some[kCount];
    load_shared(from, some);
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[to + i] = some[i];
  }
};

// The sums of a warp: y[4 p + 2 r + e] is that of row r of the lane's two, column 8 p + 2 t + e.
template <typename S>
class Sums {
  using C = typename S::C;
  static constexpr int kCount = S::kColumns / 2, kBits = S::kBits;

 public:
  float y[kCount] = {};

  __device__ __forceinline__ explicit Sums(const uint8_t* table) : decoder(table) {}
  const C decoder;

  // Begins the products of piece `piece` of quad q of a box with a record of x (operand_of); `adds`: whether to what
  // dot has. from: this lane's first words; second: bytes to those of its second row. kParts: of the decoder. kBefore:
  // the products of the piece before may still run; when_done() is called when they have ended. decode(low, high, row,
  // octet of the piece, part, to): as the decoder does.
  template <bool kBefore, int kParts, typename Decode, typename WhenDone>
  __device__ __forceinline__ void begin(float (&dot)[kCount], bool adds, uint32_t from, int second,
                                        int q, int piece, uint32_t operand, Decode&& decode,
                                        WhenDone&& when_done) const {
    constexpr int kBlocks = 4 / S::kQuadPieces, kAll = kBlocks * kParts;
    constexpr int kOperands =
        kCount > 16 && (kParts > 1 || (kBits == 8 && S::kEnds == 2)) ? 1 : 2;  // as registers allow
    // Blocks loaded at a time, as registers allow.
    constexpr int kLoaded = kCount > 16 && (S::kHasTable || S::kScalesNumbers) ? 1 : kBlocks;
    LaneWords<S, kLoaded> words[2];
    const auto load = [&](int block) {
#pragma unroll
      for (int h = 0; h < 2; ++h) words[h].load(from + h * second, q, piece * kBlocks + block);
    };
    load(0);
    const uint64_t b = uint64_t{8} << 32 | operand + piece * (4 * kBlocks * S::kColumns);
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      const int j = i / kParts;
      uint32_t a[2][4];
      if (j > 0 && j % kLoaded == 0 && i % kParts == 0) load(j);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t low, high;
        words[h].octet(j % kLoaded, low, high);
        decode(low, high, h, j, i % kParts, a[h]);
      }
      if (kBefore || i >= kOperands) wgmma_wait<kOperands - 1>();
      if (kBefore && i == 1) when_done();
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step)
        wgmma_m64k16<__half>(
            dot, {a[0][2 * step], a[1][2 * step], a[0][2 * step + 1], a[1][2 * step + 1]},
            b + (4 * j + 2 * step) * S::kColumns, adds || i + step > 0);
      wgmma_commit();
    }
    if (kBefore && kAll == 1) wgmma_wait<1>(), when_done();
  }

  // Adds a piece's products, times f of each row.
  __device__ __forceinline__ void add(const float (&dot)[kCount], const float (&f)[2]) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) y[e] = fmaf(f[e / 2 % 2], dot[e], y[e]);
  }
  // Adds the shifts times the sums of x in a record. The result is known only when all these loads have arrived, and
  // never ~0: no sum is the NaN that has all bits.
  __device__ __forceinline__ uint32_t add_shifts(uint32_t record, int piece, const Terms& terms) {
    uint32_t read = ~0u;
#pragma unroll
    for (int p = 0; p < S::kColumns / 8; ++p) {
      const float2 sum = load_shared_pair(record + sums_at(S::kColumns, piece, false) +
                                          (8 * p + threadIdx.x % 4 * 2) * 4);
      read &= __float_as_uint(sum.x);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        y[4 * p + 2 * r] = fmaf(terms.c[r], sum.x, y[4 * p + 2 * r]);
        y[4 * p + 2 * r + 1] = fmaf(terms.c[r], sum.y, y[4 * p + 2 * r + 1]);
      }
    }
    return read;
  }
  // Begins the same for two pieces with split sums, by tensor cores; shifts: operand A, from Scales::shifts. Where a
  // quad is one piece, the second is that of the next record.
  __device__ __forceinline__ void begin_shifts(uint32_t record, int piece,
                                               const uint32_t (&shifts)[4]) {
    const uint32_t at = record + sums_at(S::kColumns, piece, true);
    constexpr uint32_t kNext = S::kQuadPieces == 1 && S::kPieces > 1 ? S::kRecordBytes : 0;
    const uint64_t b = uint64_t{8} << 32 | uint64_t{kNext / 16} << 16 | (at & 0x3ffff) >> 4;
    wgmma_m64k16<float>(y, shifts, b, true);
  }
};

#endif

}  // namespace jaxgemv::cuda::wgmma_tma
