// The weights of a lane of the direct kernel as operand A: octets of rows g and g + 8 of a tile of 16,
// and the rows' scales.
#pragma once

#include "../common/codes.cuh"
#include "../common/ptx.cuh"
#include "../common/weight_source.cuh"

namespace jaxgemv::cuda::direct {

constexpr int kTileN = 16, kBlockK = 32;  // rows of the weights, and codes of a row at a time
constexpr int kMostBlocks = 4;            // of a unit

// How lanes share the octets of a row. kBeside: four lanes have an octet each of every block of
// 32 codes. kHalves: the same, where the halves of a block are groups. kWhole: a lane has the 32 codes of a block to
// itself, which are whole words, so that loads are fewer and larger, and shifts are known to the compiler; but
// a group has to have the 128 codes of four lanes.
enum class Sharing { kBeside, kHalves, kWhole };

// A unit is what a warp requests at once: kBlocks blocks, each of which may have a group of its own unless
// it is kWhole.
template <int kBits, Sharing kSharing, int kBlocks>
struct Lanes {
  static constexpr bool kWhole = kSharing == Sharing::kWhole,
                        kHalves = kSharing == Sharing::kHalves;
  static_assert(!kWhole || kBlocks == kMostBlocks);
  static constexpr int kGroups = kHalves ? 2 : 1;  // of a block
  static constexpr int kOctets = kBlocks, kStep = kWhole ? 1 : 4;
  // For how many blocks of a unit a lane requests scales; products are scaled where a group ends. If that is only at
  // the end of the unit it is no branch: the compiler would move the requests of scales into it.
  static constexpr int kScales = kWhole ? 1 : kBlocks;
  static constexpr bool kEndsOnce = kScales == 1;
  // Words that contain an octet which may begin at any byte.
  static constexpr int kUneven = kBits % 4 == 0 ? 0 : kBits % 2 == 0 ? 2 : 3;
  static constexpr int kOctetWords = (kUneven + kBits + 3) / 4;
  static constexpr int kWords = kWhole ? kBits : kOctets * kOctetWords;

  // This lane's first octet of unit u.
  static __device__ __forceinline__ int first_octet(int u) {
    const int t = threadIdx.x % 4;
    return kWhole ? (u * 4 + t) * 4 : u * 4 * kBlocks + t;
  }
};

// The blocks of a unit after which a group ends, a bit each; none for a group that begins past the row.
template <typename L>
struct Ends {
  unsigned bits;

  // blocks: of a group, 1, 2 or 4; inside: of the row, from the unit's first block on.
  __device__ __forceinline__ Ends(int blocks, int inside) {
    const unsigned all = blocks == 1 ? 0b1111 : blocks == 2 ? 0b1010 : 0b1000;
    bits = inside > 0 ? all & ((1u << min(inside + blocks - 1, L::kOctets)) - 1) : 0;
  }
  __device__ __forceinline__ bool has(int block) const { return bits >> block & 1; }
};

// Rows g and g + 8 of a tile: what this lane requests at once, which is the octets of a unit and the words
// around the scales of its groups.
template <Format kFormat, int kBits, typename L>
class Rows {
  static constexpr bool kWhole = L::kWhole, kHasShift = kFormat == Format::kAffine;

 public:
  __device__ __forceinline__ Rows(const WeightSource& from, int s, const int (&rows)[2])
      : from_(from) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows_[r] = kept(from.row(s, rows[r]));
      scales_[r] = kept(from.scale.row(s, rows[r]));
      shifts_[r] = kept(from.shift.row(s, rows[r]));
    }
  }

  // first: this lane's first octet.
  __device__ __forceinline__ void ask(int first, Ends<L> ends) {
    first_ = first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kWhole) {
        load_words<L::kWords, false>(rows_[r] + last(first, L::kOctets) / 4 * kBits, words_[r]);
      } else {
        const int from = first * kBits / 4;
#pragma unroll
        for (int i = 0; i < L::kOctets; ++i)
#pragma unroll
          for (int w = 0; w < L::kOctetWords; ++w) {
            const int at = from + L::kStep * kBits / 4 * i + w;
            words_[r][i * L::kOctetWords + w] = load4(rows_[r] + at, at < from_.row_words);
          }
      }
    }
#pragma unroll
    for (int i = 0; i < L::kScales; ++i)
#pragma unroll
      for (int half = 0; half < L::kGroups; ++half) {
        if (!L::kEndsOnce && !ends.has(i)) continue;
        const int of = group(i, half);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          scale_words_[i][half][r] = from_.scale.ask(scales_[r], of);
          if (kHasShift) shift_words_[i][half][r] = from_.shift.ask(shifts_[r], of);
        }
      }
  }

  // Octet i of row r, with anything in the bits above it.
  __device__ __forceinline__ void bits(int i, int r, uint32_t& low, uint32_t& high) const {
    // Whole, an octet begins at byte kBits * i of the words.
    const int from = kWhole ? kBits * i / 4 : L::kOctetWords * i;
    const int last = kWhole ? L::kWords : from + L::kOctetWords;
    const int shift = (kWhole ? kBits * i : L::kUneven == 0 ? 0 : first_ * kBits) % 4 * 8;
    const auto word = [&](int w) { return from + w < last ? words_[r][from + w] : 0u; };
    low = __funnelshift_r(word(0), word(1), shift);
    high = __funnelshift_r(word(1), word(2), shift);
  }

  // The terms of row r in the group that ends with block i: y += terms.x * dot(pairs, x) + terms.y * sum(x).
  __device__ __forceinline__ float2 terms(int i, int half, int r) const {
    i = kWhole ? 0 : i;
    const int of = group(i, half);
    const uint32_t scale = scale_words_[i][half][r];
    if constexpr (kHasShift)
      return terms_of(from_.affine, from_.scale.value(scale, scales_[r], of),
                      from_.shift.value(shift_words_[i][half][r], shifts_[r], of),
                      static_cast<float>(mid_code(kBits)));
    return {from_.scale.any_value(scale, scales_[r], of), 0};
  }

 private:
  const WeightSource& from_;
  const uint32_t* rows_[2];
  const char *scales_[2], *shifts_[2];
  uint32_t words_[2][L::kWords];
  uint32_t scale_words_[L::kScales][L::kGroups][2], shift_words_[L::kScales][L::kGroups][2];
  int first_;

  __device__ __forceinline__ int octet(int i) const { return first_ + L::kStep * i; }
  // `octet`, or where the last `count` of the row begin.
  __device__ __forceinline__ int last(int octet, int count) const {
    return min(octet, from_.octets - count);
  }
  // The group of block i, or of a half of it, the same for all lanes; with kWhole, that of this lane's block.
  __device__ __forceinline__ int group(int i, int half) const {
    return from_.group_of(last(L::kHalves ? (octet(i) & ~3) + 2 * half : octet(i), 1));
  }
};

}  // namespace jaxgemv::cuda::direct
