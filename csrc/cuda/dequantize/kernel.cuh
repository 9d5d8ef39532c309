// The weights themselves: (batch, N, width) of 16 bits, each made in float32 exactly as the format says and
// rounded once, with zeros from K to width. For products of so many rows that XLA's matmul is the
// faster way.
//
// A lane makes pieces of 16 bytes of several rows, and 32 lanes neighbours, so that whole lines are
// written. Memory bounds it: a lane asks for all that it needs before it makes a weight.
#pragma once

#include "../common/formats.cuh"
#include "../common/ptx.cuh"
#include "../common/weight_source.cuh"

namespace jaxgemv::cuda::dequantize {

constexpr int kWarps = 8;
// Of a lane, where there are many. Those of a CTA are neighbours.
constexpr int kMostRows = 4;

constexpr int kPiece = 8;  // weights of 16 bits in 16 bytes

// 16 bytes at once, each weight rounded once. The type is a choice and no parameter of kernels, of which there are many.
__device__ __forceinline__ void store(uint16_t* to, Dtype dtype, const float (&v)[kPiece]) {
  const auto pair = [&](int i) {
    const uint32_t half = rounded_pair<__half>(v[i], v[i + 1]);
    return dtype == Dtype::kF16 ? half : rounded_pair<__nv_bfloat16>(v[i], v[i + 1]);
  };
  *reinterpret_cast<uint4*>(to) = {pair(0), pair(2), pair(4), pair(6)};
}

// kCodes consecutive codes of a row, from a multiple of kCodes on.
template <int kBits, int kCodes>
struct Window {
  static constexpr int kBegin = kBits * kCodes & -(kBits * kCodes);  // multiples of it, in a word
  static constexpr int kWords = (kBits * kCodes + (kBegin < 32 ? 32 - kBegin : 0) + 31) / 32;
  uint32_t words[kWords];

  __device__ __forceinline__ void load(const uint32_t* row, int word, int row_words) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = __ldg(row + min(word + i, row_words - 1));
  }

  // shift: where they begin in the first word.
  __device__ __forceinline__ void align(int shift) {
    if constexpr (kBegin < 32)
#pragma unroll
      for (int i = 0; i < kWords; ++i)
        words[i] = __funnelshift_r(words[i], i + 1 < kWords ? words[i + 1] : 0, shift);
  }
};

struct Params {
  WeightSource weights;
  Param scale, shift;  // of any dtype, in any groups
  Param codebook, global_scale;
  const int32_t* index;
  uint16_t* y;
  Dtype dtype;  // of y: float16 or bfloat16
  int stack, N, K, width, group;
  uint32_t exponent;  // CodesInWords::kExponent
};

// Of kRows rows, kWarps apart, each lane the same piece. kPlain: groups of whole pieces.
template <Format kFormat, int kBits, int kRows, bool kPlain>
__global__ void __launch_bounds__(kWarps * 32, kFormat == Format::kAffine ? 4 : 3)
    weights(const __grid_constant__ Params p) {
  wait_for_earlier();
  using C = Codes<kFormat, kBits, float>;
  constexpr int kCodes = kPiece;
  const WeightSource& w = p.weights;
  const unsigned columns = (p.width / kCodes + 31u) / 32;
  const int n = static_cast<int>(blockIdx.x / columns) * (kWarps * kRows) + threadIdx.x / 32;
  const int k = static_cast<int>(blockIdx.x % columns * 32 + threadIdx.x % 32) * kCodes;
  const int entry = stack_entry(p.index, p.stack, blockIdx.y), s = max(entry, 0);
  __shared__ float table[kFormat == Format::kCodebook ? 1 << kBits : 1];
  if constexpr (kFormat == Format::kCodebook) {
    if (threadIdx.x < 1 << kBits) table[threadIdx.x] = load(p.codebook, s, threadIdx.x, 0);
    __syncthreads();
  }
  if (n >= p.N || k >= p.width) return;
  const C codes(p.codebook, s);
  const auto value_of = [&](const auto& window, int e) {
    if constexpr (kFormat == Format::kCodebook)
      return table[code_in_words<kBits>(window.words, e)];
    else
      return codes.value(window.words, e, p.exponent);
  };
  const Index bit = Index{k} * kBits;
  const int word = static_cast<int>(bit / 32), shift_in_word = static_cast<int>(bit % 32);
  const int group = w.group_of(min(k, p.K - 1) / kOctet);
  const uint32_t* row = w.row(s, n);
  const char *scales = w.scale.row(s, n), *shifts = w.shift.row(s, n);
  uint16_t* to = p.y + (Index{blockIdx.y} * p.N + n) * p.width + k;

  Window<kBits, kCodes> windows[kRows];
  uint32_t scale_words[kRows], shift_words[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const Index below = n + i * kWarps < p.N ? i * kWarps : 0;
    windows[i].load(row + below * w.row_words, word, w.row_words);
    if (!kPlain) continue;
    scale_words[i] = w.scale.ask(scales + below * w.scale.n_bytes, group);
    shift_words[i] = w.shift.ask(shifts + below * w.shift.n_bytes, group);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (n + i * kWarps >= p.N) break;
    windows[i].align(shift_in_word);
    const float global =
        p.global_scale.data == nullptr ? 1 : load(p.global_scale, s, n + i * kWarps, 0);
    const float of_shift = w.affine == Affine::kOffset ? global : 1;
    float scale, shift;
    if (kPlain) {
      scale =
          w.scale.any_value(scale_words[i], scales + Index{i * kWarps} * w.scale.n_bytes, group) *
          global;
      shift = w.shift.value(shift_words[i], shifts + Index{i * kWarps} * w.shift.n_bytes, group) *
              of_shift;
    }
    if (entry < 0) scale = __int_as_float(0x7fc00000);  // NaN
    if (w.affine == Affine::kSymmetric) shift = C::kMid;
    float v[kCodes];
    const auto make = [&](Affine affine) {
#pragma unroll
      for (int e = 0; e < kCodes; ++e) {
        if (!kPlain && k + e < p.K && (e == 0 || (k + e) % p.group == 0)) {
          scale = entry < 0 ? scale
                            : load_scale(p.scale, s, n + i * kWarps, (k + e) / p.group) * global;
          if (w.affine != Affine::kSymmetric)
            shift = load(p.shift, s, n + i * kWarps, (k + e) / p.group) * of_shift;
        }
        v[e] = weight_of(affine, value_of(windows[i], e), scale, shift);
      }
    };
    if (w.affine == Affine::kOffset)
      make(Affine::kOffset);
    else
      make(Affine::kZero);
    if (k + kCodes > p.K)
#pragma unroll
      for (int e = 0; e < kCodes; ++e) v[e] = k + e < p.K ? v[e] : 0;
    store(to + Index{i * kWarps} * p.width, p.dtype, v);
  }
}

}  // namespace jaxgemv::cuda::dequantize
