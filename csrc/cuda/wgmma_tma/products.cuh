// What a warp of the wgmma_tma kernel does with a box: scales to terms, codes to operand A, products, sums.
#pragma once

#include "image.cuh"

namespace jaxgemv::cuda::wgmma_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Row of the warp's 16 that lanes 4 g .. 4 g + 3 have, with the one 8 further on. In this order the lanes that
// load from shared memory together find their rows in different banks.
template <typename S>
__device__ __forceinline__ int row_of_lane() {
  const int g = threadIdx.x % 32 / 4;
  return S::kRuns ? g / 2 | g % 2 * 4 : g % 4 * 2 | g / 4;
}

template <int kCount>
__device__ __forceinline__ void load_shared(uint32_t from, uint32_t (&to)[kCount]) {
  if constexpr (kCount == 4) {
    const uint4 v = load_shared16(from);
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
  } else if constexpr (kCount == 2) {
    const float2 v = load_shared_pair(from);
    to[0] = __float_as_uint(v.x), to[1] = __float_as_uint(v.y);
  } else {
    to[0] = *static_cast<const uint32_t*>(__cvta_shared_to_generic(from));
  }
}

// A scale or a shift of any dtype.
__device__ __forceinline__ float number_at(const char* at, Dtype dtype) {
  if (is_wide(dtype)) return float_of_bits(load_bits(at, dtype, 0), dtype);
  return float_of_byte(__ldg(reinterpret_cast<const uint8_t*>(at)), dtype);
}

// Scale and shift of a warp's rows, those of four pieces at a time. Of four lanes, t even are for their first row and
// odd for their second; they bring scales (t < 2) and shifts, or where there is no shift two scales each. `ahead`: where
// those of four pieces follow one another, in whole words, they are copied four pieces before they are used.
template <typename S>
class Scales {
 public:
  // Of tile `tile` of 16 rows. shared: kScaleBytes of this warp's own.
  __device__ __forceinline__ Scales(const Params& params, int s, int tile, int unit, bool ahead,
                                    uint32_t shared)
      : params_(params), s_(s), tile_(tile), terms_(shared + threadIdx.x % 32 * 4), from_(nullptr) {
    if (ahead) {
      const int size = source().g_bytes;
      from_ = row() + ((unit * S::kPieces / 4 * 4 + first()) * size & ~3);
      with_size(size, [&]<int kSize>() { ask<kSize>(); });
    }
    step(unit, true);
  }

  // To a box, the first one or params.deep further on.
  __device__ __forceinline__ void step(int unit, bool is_first = false) {
    if (kUnits > 1 && (is_first || unit / kUnits != (unit - params_.deep) / kUnits)) make(unit, 0);
  }

  // To the four that piece p of the box begins.
  __device__ __forceinline__ void reach(int unit, int p) {
    if (kUnits == 1) make(unit, p);
  }

  // Of piece p of the box, y += f * dot(q, x) + c * sum(x): f and c of both rows.
  __device__ __forceinline__ Terms terms(int unit, int p) const {
    const int piece = kUnits > 1 ? unit % kUnits * S::kPieces + p : p % 4;
    const uint32_t at = (terms_ & ~15u) + piece * (32 * 4);
    if constexpr (!S::C::kHasShift) {
      const float2 f = load_shared_pair(at);
      return {{f.x, f.y}, {}};
    }
    const uint4 v = load_shared16(at);
    return {{__uint_as_float(v.x), __uint_as_float(v.y)},
            {__uint_as_float(v.z), __uint_as_float(v.w)}};
  }

 private:
  static constexpr int kUnits = std::max(4 / S::kPieces, 1);  // boxes of four pieces
  static constexpr int kNumbers = S::kNumbers;
  const Params& params_;
  const int s_, tile_;
  uint32_t place_ = 0;  // of what comes next
  const uint32_t terms_;
  const char* from_;  // what was asked for last; null if not ahead

  // The number of a four that a lane's begin with.
  static __device__ __forceinline__ int first() {
    return S::C::kHasShift ? 0 : threadIdx.x % 4 / 2 * 2;
  }
  __device__ __forceinline__ ScaleSource source() const {
    const ScaleSource &a = params_.scales[0], &b = params_.scales[1];
    if constexpr (!S::C::kHasShift) return a;
    // An index would make these slow loads; and nothing of them is kept through the loop.
    const bool first = kept(threadIdx.x % 4) < 2;
    return {first ? a.data : b.data, first ? a.stack_bytes : b.stack_bytes,
            first ? a.n_bytes : b.n_bytes, first ? a.g_bytes : b.g_bytes,
            first ? a.dtype : b.dtype};
  }
  __device__ __forceinline__ const char* row() const {
    return source().row(s_, params_.row_of(tile_, row_of_lane<S>() + threadIdx.x % 2 * 8));
  }
  __device__ __forceinline__ uint32_t raw() const {
    return (terms_ & ~127u) + S::kTermBytes + place_ + threadIdx.x % 32 * 16;
  }

  // What a lane brings of four pieces, of numbers of so many bytes: asked for, and as it has come.
  template <int kSize>
  __device__ __forceinline__ void ask() const {
    if constexpr (kSize * kNumbers <= 4)
      copy_first<4>(reinterpret_cast<void*>(__cvta_shared_to_generic(raw())), from_, 4);
    else
      copy_async<kSize * kNumbers>(raw(), from_);
    commit_copies();
  }
  template <int kSize>
  __device__ __forceinline__ void read(Dtype dtype, float (&to)[kNumbers]) const {
    constexpr int kWords = (kSize * kNumbers + 3) / 4;
    uint32_t words[kWords];
    load_shared(raw(), words);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if constexpr (kSize == 4)
        to[i] = __uint_as_float(words[i]);
      else if constexpr (kSize == 2)
        to[i] = float_of_bits(words[i / 2] >> (i % 2 * 16), dtype);
      else
        to[i] = float_of_byte(words[0] >> ((first() + i) * 8) & 0xffu, dtype);
    }
  }
  // By the bytes of a number.
  template <typename Use>
  __device__ __forceinline__ static void with_size(int size, Use&& use) {
    if (size == 2)
      use.template operator()<2>();
    else if (size == 4)
      use.template operator()<4>();
    else
      use.template operator()<1>();
  }

  // The terms of the four pieces that piece p of a box is the first of, or is in the same box.
  __device__ __forceinline__ void make(int unit, int p) {
    const Dtype dtype = source().dtype;
    float mine[kNumbers];
    const int number = (unit * S::kPieces + p) / 4 * 4;
    if (from_ != nullptr) {
      const int boxes = max(params_.deep, kUnits) * S::kPieces;  // to the first four of another one
      const int further = p + 4 < S::kPieces ? 4 : boxes - (kUnits > 1 ? 0 : S::kPieces - 4);
      const int size = source().g_bytes;
      if (number + further <= params_.groups.last) from_ += further * size;  // or the same again
      wait_copies<0>();
      with_size(size, [&]<int kSize>() {
        read<kSize>(dtype, mine);
        place_ ^= S::kRawBytes;
        ask<kSize>();
      });
    } else {
      const char* at[kNumbers];
#pragma unroll
      for (int i = 0; i < kNumbers; ++i) {
        const int k = (number + first() + i) * (kQuadK / S::kQuadPieces);
        at[i] = row() + params_.groups.of(k) * source().g_bytes;
      }
      if (is_wide(dtype)) {
        uint32_t bits[kNumbers];  // all are asked for before the first is there
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) bits[i] = load_bits(at[i], dtype, 0);
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) mine[i] = float_of_bits(bits[i], dtype);
      } else {
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) mine[i] = number_at(at[i], dtype);
      }
    }
    __syncwarp();  // all have read the terms before
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) {
      if constexpr (S::C::kHasShift) {
        const float scale = __shfl_sync(~0u, mine[i], threadIdx.x % 2, 4);
        if (threadIdx.x % 4 >= 2) mine[i] = params_.shift.of(scale, mine[i]);
        store_shared(terms_ + i * (32 * 4), mine[i]);
      } else {
        const uint32_t of_row = threadIdx.x % 4 / 2 * 8;  // lanes t and t + 2 have one place
        store_shared(terms_ - of_row + (first() + i) * (32 * 4), mine[i]);
      }
    }
    __syncwarp();
  }
};

// Where this lane's words of a box's first quad begin, behind those of its first row: 16 bytes, or the first of four
// times an octet. The swizzle exchanges pieces of 16 bytes.
template <typename S>
__device__ __forceinline__ uint32_t first_word() {
  const int t = threadIdx.x % 4, row = row_of_lane<S>(), at = t * (S::kRuns ? 16 : S::kBits);
  return static_cast<uint32_t>(row * 128 + (at / 16 ^ row) * 16 + at % 16);
}

// Its words of quad q from block `first` on, from where the first quad's are: octet j is words[j], or words[2 j] and
// the next.
template <typename S, int kWords>
__device__ __forceinline__ void load_words(uint32_t from, int q, int first,
                                           uint32_t (&words)[kWords]) {
  const uint32_t quad = from ^ static_cast<uint32_t>(q * 64);
  if constexpr (S::kRuns) {
    load_shared(quad, words);
  } else {
    constexpr int kOctetWords = S::kBits / 4;
#pragma unroll
    for (int i = 0; i < kWords; i += kOctetWords) {
      uint32_t octet[kOctetWords];
      load_shared(quad ^ static_cast<uint32_t>((first + i / kOctetWords) * (4 * S::kBits)), octet);
#pragma unroll
      for (int j = 0; j < kOctetWords; ++j) words[i + j] = octet[j];
    }
  }
}

// The sums of a warp: y[4 p + 2 r + e] of its lane's first or second row r, column 8 p + 2 t + e.
template <typename S>
class Sums {
  using C = typename S::C;
  static constexpr int kCount = S::kColumns / 2, kBits = S::kBits;

 public:
  float y[kCount] = {};

  __device__ __forceinline__ explicit Sums(const uint8_t* table) : decoder(table) {}
  const C decoder;

  // Begins the products of piece `piece` of quad q of a box with a record of x; `adds`: to what there is. from:
  // this lane's first words; second: bytes to those of its second row. kParts: of the decoder. The products of a
  // piece before may go on; when_done() is called when they have ended.
  template <bool kBefore, int kParts, typename WhenDone>
  __device__ __forceinline__ void begin(float (&dot)[kCount], bool adds, uint32_t from, int second,
                                        int q, int piece, uint32_t record,
                                        WhenDone&& when_done) const {
    constexpr int kBlocks = 4 / S::kQuadPieces, kAll = kBlocks * kParts;
    constexpr int kOperands =
        kCount > 16 && (kParts > 1 || (kBits == 8 && S::kEnds == 2)) ? 1 : 2;  // as registers allow
    // At a time as many as registers allow.
    constexpr int kLoaded = kCount > 16 && S::kHasTable ? 1 : kBlocks;
    uint32_t words[2][kLoaded * kBits / 4];
    const auto load = [&](int block) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
        load_words<S>(from + h * second, q, piece * kBlocks + block, words[h]);
    };
    load(0);
    // Operand B without a swizzle: 8 columns of 16 bytes are 128, and 8 k on are the next register.
    // Above 18 bits of an address is the number of a cluster's CTA.
    const uint64_t b = uint64_t{8} << 32 | uint64_t{S::kColumns} << 16 |
                       ((record & 0x3ffff) >> 4) + piece * (4 * kBlocks * S::kColumns);
#pragma unroll
    for (int i = 0; i < kAll; ++i) {
      const int j = i / kParts, word = j % kLoaded * kBits / 4;
      uint32_t a[2][4];
      if (j > 0 && j % kLoaded == 0 && i % kParts == 0) load(j);
#pragma unroll
      for (int h = 0; h < 2; ++h)
        decoder.decode(words[h][word], words[h][word + (kBits - 1) / 4], i % kParts, a[h]);
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

  // Adds what a piece's products came to.
  __device__ __forceinline__ void add(const float (&dot)[kCount], const float (&f)[2]) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) y[e] = fmaf(f[e / 2 % 2], dot[e], y[e]);
  }
  // Adds the shifts times the sums of x in a record.
  __device__ __forceinline__ void add_shifts(uint32_t record, int piece, const Terms& terms) {
    if constexpr (C::kHasShift)
#pragma unroll
      for (int p = 0; p < S::kColumns / 8; ++p) {
        const float2 sum = load_shared_pair(record + sums_at(S::kColumns, piece) +
                                            (8 * p + threadIdx.x % 4 * 2) * 4);
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
