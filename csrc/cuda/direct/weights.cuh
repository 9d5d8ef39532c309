// The weights of a lane of the direct kernel as operand A: octets of rows g and g + 8 of a tile of 16,
// and the rows' scales.
#pragma once

#include "../common/codes.cuh"
#include "../common/ptx.cuh"
#include "../common/weight_source.cuh"

namespace jaxgemv::cuda::direct {

constexpr int kTileN = 16, kBlockK = 32;  // rows of the weights, and codes of a row at a time

// Codes p and p + 4 of an octet as a pair of Element: q / kWorth - kCentre.
template <int kBits, typename Element>
struct Pairs {
  static constexpr bool kIsHalf = std::is_same_v<Element, __half>;
  static constexpr float kWorth = kIsHalf ? 0x1p24f : 1.f;
  static constexpr float kCentre = !kIsHalf && kBits == 8 ? 128.f : 0.f;

  static __device__ __forceinline__ void of(uint32_t low, uint32_t high, uint32_t (&a)[4]) {
    const uint32_t second = kBits > 4 ? __funnelshift_rc(low, high, 4 * kBits) : low >> (4 * kBits);
    constexpr uint32_t kMask = ((1u << kBits) - 1) * 0x00010001u;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      // Two bytes of each half of the octet, from that on in which the code begins.
      const int byte = kBits > 4 ? kBits * p / 8 : 0, at = kBits * p - 8 * byte;
      const int bytes = byte | (byte + 1) << 4 | (byte + 4) << 8 | (byte + 5) % 8 << 12;
      const uint32_t both = (kBits == 4 ? low : __byte_perm(low, second, bytes)) >> at;
      if constexpr (kIsHalf)
        a[p] = both & kMask;  // subnormals
      else if constexpr (kBits == 8)
        a[p] = Codes<Format::kAffine, 8, __nv_bfloat16>::pair(both);
      else
        a[p] = subtract((both & kMask) | 0x43004300u, 0x43004300u);  // 128 + q
    }
  }
};

// How lanes share the octets of a row. Side by side, four lanes have an octet each of every block of
// 32 codes, of up to two blocks. Whole, a lane has the 32 codes of a block to itself, which are words:
// fewer and larger loads, and shifts that the compiler knows; but the group has to have the 128 codes
// of four lanes.
template <int kBits, bool kWhole>
struct Lanes {
  static constexpr int kOctets = kWhole ? 4 : 2, kStep = kWhole ? 1 : 4;
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

// Rows g and g + 8 of a tile: what this lane asks for at once, octets of a group and the words around
// that group's scales.
template <int kBits, bool kWhole>
class Rows {
  using L = Lanes<kBits, kWhole>;

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
    group_ = from_.group_of(octet(0));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      scale_words_[r] = from_.scale.ask(scales_[r], group_);
      shift_words_[r] = from_.shift.ask(shifts_[r], group_);
    }
  }

  template <typename Element>
  __device__ __forceinline__ void pairs(int i, int r, uint32_t (&a)[4]) const {
    // Whole, an octet begins at byte kBits * i of the words.
    const int from = kWhole ? kBits * i / 4 : L::kOctetWords * i;
    const int last = kWhole ? L::kWords : from + L::kOctetWords;
    const int shift = (kWhole ? kBits * i : L::kUneven == 0 ? 0 : octet(i) * kBits) % 4 * 8;
    const auto word = [&](int w) { return from + w < last ? words_[r][from + w] : 0u; };
    Pairs<kBits, Element>::of(__funnelshift_r(word(0), word(1), shift),
                              __funnelshift_r(word(1), word(2), shift), a);
  }

  // Of row r: y += x * dot(pairs, x) + y * sum(x).
  __device__ __forceinline__ float2 terms(int r, float centre) const {
    return terms_of(from_.affine, from_.scale.value(scale_words_[r], scales_[r], group_),
                    from_.shift.value(shift_words_[r], shifts_[r], group_),
                    static_cast<float>(mid_code(kBits)), centre);
  }

 private:
  const WeightSource& from_;
  const uint32_t* rows_[2];
  const char *scales_[2], *shifts_[2];
  uint32_t words_[2][L::kWords], scale_words_[2], shift_words_[2];
  int first_, group_;

  __device__ __forceinline__ int octet(int i) const {
    return min(first_ + L::kStep * i, from_.octets - L::kOctets * kWhole - !kWhole);
  }
};

}  // namespace jaxgemv::cuda::direct
