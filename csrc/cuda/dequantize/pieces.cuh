// Pieces, 16 bytes of the dequantised weights: what a lane requests and makes for one; used by kernel.cuh.
#pragma once

#include "../common/formats.cuh"
#include "../common/ptx.cuh"
#include "../common/weight_source.cuh"

namespace jaxgemv::cuda::dequantize {

constexpr int kPiece = 8;            // weights of 16 bits
constexpr int kTileK = 32 * kPiece;  // codes of a row of a tile

// Stores 16 bytes at once, each weight rounded once. The type is chosen at run time, because as a template parameter
// it would double the number of kernels.
__device__ __forceinline__ void store(char* to, Dtype dtype, const float (&v)[kPiece]) {
  const auto store_as = [&](auto type) {
    using T = decltype(type);
    *reinterpret_cast<uint4*>(to) = {rounded_pair<T>(v[0], v[1]), rounded_pair<T>(v[2], v[3]),
                                     rounded_pair<T>(v[4], v[5]), rounded_pair<T>(v[6], v[7])};
  };
  if (dtype == Dtype::kF16)
    store_as(__half{});
  else
    store_as(__nv_bfloat16{});
}

// The words that contain the codes of a piece.
template <int kBits>
struct Window {
  static constexpr int kBegin = kBits * kPiece & -(kBits * kPiece);  // multiples of it, in a word
  static constexpr int kWords = (kBits * kPiece + (kBegin < 32 ? 32 - kBegin : 0) + 31) / 32;
  uint32_t words[kWords];

  // Moves the codes to the lowest bits. shift: the bit of the first word at which they begin.
  __device__ __forceinline__ void align(int shift) {
    if constexpr (kBegin < 32)
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        words[i] = __funnelshift_r(words[i], i + 1 < kWords ? words[i + 1] : 0, shift);
  }
};

struct Params {
  WeightSource weights;
  Param scale, shift;  // for groups of any size
  Param codebook, global_scale;
  const int32_t* index;
  uint16_t* y;
  Dtype dtype;  // of y: float16 or bfloat16
  int stack, N, K, width, group;
  int tiles;          // of rows
  uint32_t exponent;  // CodesInWords::kExponent
};

// Makes weights of a lane's codes, in float32, and writes them.
template <Format kFormat, int kBits>
class Maker {
  using C = Codes<kFormat, kBits, float>;
  using W = Window<kBits>;
  static constexpr bool kHasTable = kFormat == Format::kCodebook;

 public:
  static constexpr bool kHasShift = kFormat == Format::kAffine;
  static constexpr float kMid = C::kMid;
  const int entry, s;  // of the stack, or less than zero

  __device__ __forceinline__ explicit Maker(const Params& p)
      : entry(stack_entry(p.index, p.stack, blockIdx.y)),
        s(max(entry, 0)),
        p_(p),
        codes_(p.codebook, s),
        k_(blockIdx.x * kTileK + threadIdx.x % 32 * kPiece),
        shift_(static_cast<int>(Index{k_} * kBits % 32)),
        y_(reinterpret_cast<char*>(kept(p.y + Index{blockIdx.y} * p.N * p.width + k_))) {
    const int word = static_cast<int>(Index{k_} * kBits / 32);
#pragma unroll
    for (int i = 0; i < W::kWords; ++i)
      words_[i] = reinterpret_cast<const char*>(
          kept(p.weights.row(s, 0) + min(word + i, p.weights.row_words - 1)));
  }

  // Called by all threads of a CTA, before any weight is made.
  __device__ __forceinline__ void fill_table() {
    if constexpr (kHasTable) {
      if (threadIdx.x < 1 << kBits) table()[threadIdx.x] = load(p_.codebook, s, threadIdx.x, 0);
      __syncthreads();
    }
  }

  __device__ __forceinline__ int k() const { return k_; }
  __device__ __forceinline__ void ask(W& window, int n) const {
#pragma unroll
    for (int i = 0; i < W::kWords; ++i)
      window.words[i] = __ldg(reinterpret_cast<const uint32_t*>(
          words_[i] + n * Index{p_.weights.row_words * int{sizeof(uint32_t)}}));
  }
  // Makes the weights of a piece of row n from their scales and shifts, and writes them.
  __device__ __forceinline__ void write(W window, int n, const float (&scales)[kPiece],
                                        const float (&shifts)[kPiece]) const {
    window.align(shift_);
    float v[kPiece];
    const auto make = [&](Affine affine) {
#pragma unroll
      for (int e = 0; e < kPiece; ++e) {
        float q;
        if constexpr (kHasTable)
          q = table()[code_in_words<kBits>(window.words, e)];
        else
          q = codes_.value(window.words, e, p_.exponent);
        v[e] = weight_of(affine, q, scales[e], shifts[e]);
      }
    };
    if (kHasShift && p_.weights.affine == Affine::kOffset)
      make(Affine::kOffset);
    else
      make(Affine::kZero);
    if (k_ + kPiece > p_.K)
#pragma unroll
      for (int e = 0; e < kPiece; ++e) v[e] = k_ + e < p_.K ? v[e] : 0;
    if (n < p_.N && k_ < p_.width)
      store(y_ + n * Index{p_.width * int{sizeof(uint16_t)}}, p_.dtype, v);
  }

 private:
  const Params& p_;
  const C codes_;
  const int k_, shift_;           // the first code; where it begins in its word
  const char* words_[W::kWords];  // of row 0
  char* const y_;

  static __device__ __forceinline__ float* table() {
    __shared__ float entries[kHasTable ? 1 << kBits : 1];
    return entries;
  }
};

// Reads the scales, or shifts, of one group in any row.
class Column {
 public:
  struct Bits {
    uint32_t word, shift;
  };
  __device__ __forceinline__ Column(const ScaleWords& from, int s, int group)
      : from_(from), first_(kept(from.row(s, 0) + group * Index{from.g_bytes})) {}

  __device__ __forceinline__ Bits ask(int n) const {
    const uintptr_t at = reinterpret_cast<uintptr_t>(first_ + n * Index{from_.n_bytes});
    return {__ldg(reinterpret_cast<const uint32_t*>(at & ~uintptr_t{3})),
            static_cast<uint32_t>(at) * 8};
  }
  __device__ __forceinline__ float value(Bits bits) const {
    const uint32_t all = __funnelshift_r(bits.word, 0, bits.shift & 24);
    return is_wide(from_.dtype) ? from_.value_of(all) : float_of_byte(all & 255, from_.dtype);
  }

 private:
  const ScaleWords& from_;
  const char* const first_;
};

}  // namespace jaxgemv::cuda::dequantize
