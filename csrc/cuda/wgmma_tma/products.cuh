// What a warp of the wgmma_tma kernel does with a box: scales to terms, codes to operand A, products, sums.
#pragma once

#include "image.cuh"

namespace jaxgemv::cuda::wgmma_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Row of the warp's 16 that lanes 4 g .. 4 g + 3 have, with the one 8 further on. In this order the lanes that
// load from shared memory together find their rows in different banks.
template <int kBits>
__device__ __forceinline__ int row_of_lane() {
  const int g = threadIdx.x % 32 / 4;
  return kBits == 4 ? g / 2 | g % 2 * 4 : g % 4 * 2 | g / 4;
}

// Scale and shift of a warp's rows, four quads at a time. Lane t of four brings a scale (t < 2) or a shift, of its
// first row (t even) or its second. `wide`: those of four quads are 8 bytes, copied four quads ahead.
template <typename S>
class Scales {
 public:
  // Of tile `tile` of 16 rows. shared: kScaleBytes of this warp's own.
  __device__ __forceinline__ Scales(const Params& params, int s, int tile, int unit, bool wide,
                                    uint32_t shared)
      : params_(params), wide_(wide), s_(s), tile_(tile), terms_(shared + threadIdx.x % 32 * 4) {
    if (wide) ask(unit);
    make(unit);
  }

  // From the last box asked of terms() to this one, params.deep further on.
  __device__ __forceinline__ void step(int unit) const {
    if (unit / kUnits == (unit - params_.deep) / kUnits) return;
    __syncwarp();  // all have read the terms
    make(unit);
  }

  // Of quad q of a box, y += f * dot(q, x) + c * sum(x): f and c of both rows.
  __device__ __forceinline__ Terms terms(int unit, int q) const {
    const uint4 v = load_shared16((terms_ & ~15u) + (unit % kUnits * S::kQuads + q) * (32 * 4));
    return {{__uint_as_float(v.x), __uint_as_float(v.y)},
            {__uint_as_float(v.z), __uint_as_float(v.w)}};
  }

 private:
  static constexpr int kUnits = 4 / S::kQuads;  // boxes of four quads
  const Params& params_;
  const bool wide_;
  const int s_, tile_;
  const uint32_t terms_;

  // What this lane brings.
  __device__ __forceinline__ ScaleSource source() const {
    const ScaleSource &a = params_.scales[0], &b = params_.scales[1];
    // An index would make these slow loads; and nothing of them is kept through the loop.
    const bool first = kept(threadIdx.x % 4) < 2;
    return {first ? a.data : b.data, first ? a.stack_bytes : b.stack_bytes,
            first ? a.n_bytes : b.n_bytes, first ? a.g_bytes : b.g_bytes,
            first ? a.dtype : b.dtype};
  }
  __device__ __forceinline__ const char* row() const {
    return source().row(s_, params_.row_of(tile_, row_of_lane<S::kBits>() + threadIdx.x % 2 * 8));
  }
  // Boxes to the next one that has other terms.
  __device__ __forceinline__ int stride() const { return max(params_.deep, kUnits); }
  __device__ __forceinline__ uint32_t raw(int unit) const {
    const int place = unit >> (stride() > 2 ? 2 : 1) & 1;  // deep is a power of two up to four
    return terms_ + S::kTermBytes + threadIdx.x % 32 * 4 + place * S::kRawBytes;
  }

  // Past the end those of the last four.
  __device__ __forceinline__ void ask(int unit) const {
    const int four = min(unit / kUnits, params_.groups.last / 4);
    copy_async<8>(raw(unit), row() + four * 8);
    commit_copies();
  }

  // The terms of the four quads that a box is one of.
  __device__ __forceinline__ void make(int unit) const {
    const Dtype dtype = source().dtype;
    uint32_t bits[4];
    if (wide_) {
      wait_copies<0>();
      const float2 two = load_shared_pair(raw(unit));
      bits[0] = __float_as_uint(two.x), bits[2] = __float_as_uint(two.y);
      bits[1] = bits[0] >> 16, bits[3] = bits[2] >> 16;
      ask(unit + stride());
    } else {
      const char* const from = row();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int group = params_.groups.of((unit / kUnits * 4 + i) * kQuadK);
        bits[i] = load_bits(from + group * source().g_bytes, dtype, 0);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float mine = float_of_bits(bits[i], dtype),
                  scale = __shfl_sync(~0u, mine, threadIdx.x % 2, 4);
      const float c = params_.shift.of(scale, mine);
      store_shared(terms_ + i * (32 * 4), threadIdx.x % 4 < 2 ? mine : c);
    }
    __syncwarp();
  }
};

// Where this lane's words of a box's first quad begin, behind those of its first row: of 4 bits 16 bytes, of 8
// bits the first of four times 8. The swizzle exchanges pieces of 16 bytes.
template <int kBits>
__device__ __forceinline__ uint32_t first_word() {
  const int t = threadIdx.x % 4, row = row_of_lane<kBits>();
  const int piece = kBits == 4 ? t : t / 2, inside = kBits == 4 ? 0 : t % 2 * 8;
  return static_cast<uint32_t>(row * 128 + (piece ^ row) * 16 + inside);
}

// Its words of quad q, from where the first quad's are: octet j is words[j], or words[2 j] and the next.
template <int kBits>
__device__ __forceinline__ void load_words(uint32_t from, int q, uint32_t (&words)[kBits]) {
  if constexpr (kBits == 4) {
    const uint4 v = load_shared16(from ^ static_cast<uint32_t>(q * 64));
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 v = load_shared_pair(from ^ static_cast<uint32_t>(j * 32));
      words[2 * j] = __float_as_uint(v.x), words[2 * j + 1] = __float_as_uint(v.y);
    }
  }
}

// The sums of a warp: y[4 p + 2 r + e] of its lane's first or second row r, column 8 p + 2 t + e.
template <typename S, Format kFormat, int kBits>
class Sums {
  using C = Decoder<kFormat, kBits>;
  static constexpr int kCount = S::kColumns / 2;

 public:
  static constexpr bool kHasShift = C::kHasShift;
  float y[kCount] = {};

  // Begins the products of quad q of a box with a record of x; `adds`: to what there is. from: this lane's first
  // words; second: bytes to those of its second row. The products of a quad before may go on; when_done() is
  // called when they have ended.
  template <bool kBefore, typename WhenDone>
  __device__ __forceinline__ void begin(float (&dot)[kCount], bool adds, uint32_t from, int second,
                                        int q, uint32_t record, WhenDone&& when_done) const {
    uint32_t words[2][kBits];
#pragma unroll
    for (int h = 0; h < 2; ++h) load_words<kBits>(from + h * second, q, words[h]);
    // Operand B without a swizzle: 8 columns of 16 bytes are 128, and 8 k on are the next register.
    // Above 18 bits of an address is the number of a cluster's CTA.
    const uint64_t b = uint64_t{8} << 32 | uint64_t{S::kColumns} << 16 | (record & 0x3ffff) >> 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      uint32_t a[2][4];
#pragma unroll
      for (int h = 0; h < 2; ++h)
        C::decode(words[h][j * kBits / 4], words[h][(j * kBits + kBits - 1) / 4], 0, a[h]);
      if (kBefore || j >= 2) wgmma_wait<1>();
      if (kBefore && j == 1) when_done();
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 2; ++step)
        wgmma_m64k16<__half>(
            dot, {a[0][2 * step], a[1][2 * step], a[0][2 * step + 1], a[1][2 * step + 1]},
            b + (4 * j + 2 * step) * S::kColumns, adds || j + step > 0);
      wgmma_commit();
    }
  }

  // Adds what a quad's products came to.
  __device__ __forceinline__ void add(const float (&dot)[kCount], const float (&f)[2]) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) y[e] = fmaf(f[e / 2 % 2], dot[e], y[e]);
  }
  // Adds the shifts times the sums of x in a record.
  __device__ __forceinline__ void add_shifts(uint32_t record, const Terms& terms) {
    if constexpr (kHasShift)
#pragma unroll
      for (int p = 0; p < S::kColumns / 8; ++p) {
        const float2 sum =
            load_shared_pair(record + sums_at(S::kColumns) + (8 * p + threadIdx.x % 4 * 2) * 4);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          y[4 * p + 2 * r] = fmaf(terms.c[r], sum.x, y[4 * p + 2 * r]);
          y[4 * p + 2 * r + 1] = fmaf(terms.c[r], sum.y, y[4 * p + 2 * r + 1]);
        }
      }
  }
};

#endif

}  // namespace jaxgemv::cuda::wgmma_tma
