// The weights of a lane of the direct kernel as operand A: octets of rows g and g + 8 of a tile of 16,
// and the rows' scales.
#pragma once

#include "../common/codes.cuh"
#include "../common/ptx.cuh"
#include "../common/weight_source.cuh"

namespace jaxgemv::cuda::direct {

constexpr int kTileN = 16, kBlockK = 32;  // rows of the weights, and codes of a row at a time

// How lanes share the octets of a row. Side by side, four lanes have an octet each of every block
// of 32 codes, of up to two blocks; or of one, whose halves are groups. Whole, a lane has the 32
// codes of a block to itself, which are words: fewer and larger loads, and shifts that the compiler
// knows; but the group has to have the 128 codes of four lanes.
enum class Sharing { kBeside, kHalves, kWhole };

template <int kBits, Sharing kSharing>
struct Lanes {
  static constexpr bool kWhole = kSharing == Sharing::kWhole,
                        kHalves = kSharing == Sharing::kHalves;
  static constexpr int kGroups = kHalves ? 2 : 1;  // in a unit
  static constexpr int kOctets = kWhole ? 4 : kHalves ? 1 : 2, kStep = kWhole ? 1 : 4;
  // An octet side by side has so many words, where it may begin at any byte.
  static constexpr int kUneven = kBits % 4 == 0 ? 0 : kBits % 2 == 0 ? 2 : 3;
  static constexpr int kOctetWords = (kUneven + kBits + 3) / 4;
  static constexpr int kWords = kWhole ? kBits : kOctets * kOctetWords;

  // Of unit u of `count` octets a lane.
  static __device__ __forceinline__ int first_octet(int u, int count) {
    const int t = threadIdx.x % 4;
    return kWhole ? (u * 4 + t) * 4 : u * 4 * count + t;
  }
};

// Rows g and g + 8 of a tile: what this lane asks for at once, octets of a group, or of two, and
// the words around the scales.
template <Format kFormat, int kBits, Sharing kSharing>
class Rows {
  using L = Lanes<kBits, kSharing>;
  static constexpr bool kWhole = L::kWhole, kHasShift = kFormat == Format::kAffine;

 public:
  __device__ __forceinline__ Rows(const WeightSource& from, int s, const int (&rows)[2])
      : from_(from) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      rows_[r] = from.row(s, rows[r]);
      scales_[r] = from.scale.row(s, rows[r]), shifts_[r] = from.shift.row(s, rows[r]);
    }
  }

  // first: this lane's first octet, of `count`.
  __device__ __forceinline__ void ask(int first, int count) {
    first_ = first;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if constexpr (kWhole) {
        load_words<L::kWords, false>(rows_[r] + octet(0) / 4 * kBits, words_[r]);
      } else {
#pragma unroll
        for (int i = 0; i < L::kOctets; ++i)
#pragma unroll
          for (int w = 0; w < L::kOctetWords; ++w)
            if (i < count)
              words_[r][i * L::kOctetWords + w] =
                  __ldg(rows_[r] + min(octet(i) * kBits / 4 + w, from_.row_words - 1));
      }
    }
#pragma unroll
    for (int i = 0; i < L::kGroups; ++i) {
      group_[i] = from_.group_of(L::kHalves ? octet_of_half(i) : octet(0));
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        scale_words_[i][r] = from_.scale.ask(scales_[r], group_[i]);
        if (kHasShift) shift_words_[i][r] = from_.shift.ask(shifts_[r], group_[i]);
      }
    }
  }

  // Octet i of row r, with anything above.
  __device__ __forceinline__ void bits(int i, int r, uint32_t& low, uint32_t& high) const {
    // Whole, an octet begins at byte kBits * i of the words.
    const int from = kWhole ? kBits * i / 4 : L::kOctetWords * i;
    const int last = kWhole ? L::kWords : from + L::kOctetWords;
    const int shift = (kWhole ? kBits * i : L::kUneven == 0 ? 0 : octet(i) * kBits) % 4 * 8;
    const auto word = [&](int w) { return from + w < last ? words_[r][from + w] : 0u; };
    low = __funnelshift_r(word(0), word(1), shift);
    high = __funnelshift_r(word(1), word(2), shift);
  }

  // Of row r, in group i: y += x * dot(pairs, x) + y * sum(x).
  __device__ __forceinline__ float2 terms(int i, int r) const {
    if constexpr (kHasShift)
      return terms_of(from_.affine, from_.scale.value(scale_words_[i][r], scales_[r], group_[i]),
                      from_.shift.value(shift_words_[i][r], shifts_[r], group_[i]),
                      static_cast<float>(mid_code(kBits)));
    return {from_.scale.any_value(scale_words_[i][r], scales_[r], group_[i]), 0};
  }

 private:
  const WeightSource& from_;
  const uint32_t* rows_[2];
  const char *scales_[2], *shifts_[2];
  uint32_t words_[2][L::kWords], scale_words_[L::kGroups][2], shift_words_[L::kGroups][2];
  int first_, group_[L::kGroups];

  __device__ __forceinline__ int octet(int i) const {
    return min(first_ + L::kStep * i, from_.octets - L::kOctets * kWhole - !kWhole);
  }
  // The first of it, the same for all lanes.
  __device__ __forceinline__ int octet_of_half(int half) const {
    return min((first_ & ~3) + 2 * half, from_.octets - 1);
  }
};

}  // namespace jaxgemv::cuda::direct
