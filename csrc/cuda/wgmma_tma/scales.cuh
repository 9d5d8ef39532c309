// Scales and shifts of the wgmma_tma kernel, from global memory to the terms of a piece.
#pragma once

#include "shape.cuh"

namespace jaxgemv::cuda::wgmma_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The first row, of the warp's 16, of lanes 4 g .. 4 g + 3; their second is 8 further on. In this order the lanes that
// load from shared memory together find their rows in different banks.
template <typename S>
__device__ __forceinline__ int row_of_lane() {
  const int g = threadIdx.x % 32 / 4;
  if (!S::kSwizzles) return g;
  return S::kRuns ? g / 2 | g % 2 * 4 : g % 4 * 2 | g / 4;
}

// A scale or a shift of any dtype.
__device__ __forceinline__ float number_at(const char* at, Dtype dtype) {
  if (is_wide(dtype)) return float_of_bits(load_bits(at, dtype, 0), dtype);
  return float_of_byte(__ldg(reinterpret_cast<const uint8_t*>(at)), dtype);
}

// Scale and shift of a warp's rows, for four pieces at a time. Of the four lanes of two rows, even t are for the first
// row and odd for the second; they load scales (t < 2) and shifts, or where there is no shift two scales each. `ahead`:
// where scales of four pieces follow one another, they are copied four pieces before they are used.
template <typename S>
class Scales {
 public:
  // For tile `tile` of 16 rows. shared: kScaleBytes of this warp's own.
  __device__ __forceinline__ Scales(const Params& params, int s, int tile, int unit, bool by_fours,
                                    bool ahead, uint32_t shared)
      : params_(params),
        by_fours_(by_fours),
        s_(s),
        tile_(tile),
        terms_(shared + threadIdx.x % 32 * 4),
        from_(nullptr) {
    if (ahead) from_ = row() + ((unit * S::kPieces / 4 * 4 + first()) * source().g_bytes & ~3);
  }

  // Starts the copy for the first four pieces, which another object of this class will read.
  __device__ __forceinline__ void ask_for_first() const {
    if (from_ != nullptr) with_size(source().g_bytes, [&]<int kSize>() { ask<kSize>(); });
  }

  // Moves on to a box, the first one or params.deep further on.
  __device__ __forceinline__ void step(int unit, bool is_first) {
    if (kUnits > 1 && (is_first || of_four(unit) < (by_fours_ ? 1 : params_.deep))) make(unit, 0);
  }

  // Moves on to the four pieces that piece p of the box begins.
  __device__ __forceinline__ void reach(int unit, int p) {
    if (kUnits == 1) make(unit, p);
  }

  // The terms of piece p of the box, y += f * dot(q, x) + c * sum(x): f of both rows, and c unless S::kSplitsSums.
  __device__ __forceinline__ Terms terms(int unit, int p) const {
    const uint32_t at = terms_of(unit, p);
    if constexpr (!S::C::kHasShift || S::kSplitsSums) {
      const float2 f = load_shared_pair(at);
      return {{f.x, f.y}, {}};
    }
    const uint4 v = load_shared16(at);
    return {{__uint_as_float(v.x), __uint_as_float(v.y)},
            {__uint_as_float(v.z), __uint_as_float(v.w)}};
  }
  // c of two pieces from p on, as operand A of TF32 whose k are those of the sums in a record: high, low, and again.
  __device__ __forceinline__ void shifts(int unit, int p, uint32_t (&a)[4]) const {
    const int t = threadIdx.x % 4;
    const auto of = [&](int piece) { return load_shared_pair(terms_of(unit, piece) + 8); };
    if constexpr (S::kQuadPieces == 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float2 c = i < S::kPieces ? of(p + i) : float2{};
        const TwoTf32 first(c.x), second(c.y);
        a[2 * i] = t < 2 ? first.high : first.low;
        a[2 * i + 1] = t < 2 ? second.high : second.low;
      }
    } else {
      const float2 c = of(p + t / 2);
      const TwoTf32 first(c.x), second(c.y);
      a[0] = first.high, a[1] = second.high, a[2] = first.low, a[3] = second.low;
    }
  }

 private:
  static constexpr int kUnits = S::kFourBoxes;
  static constexpr int kNumbers = S::kNumbers;
  const Params& params_;
  const bool by_fours_;  // as Turns has it
  const int s_, tile_;
  uint32_t place_ = 0;  // the buffer of what comes next, in bytes
  const uint32_t terms_;
  const char* from_;  // what was asked for last; null if not ahead

  // Which box this is, of the kUnits that have four pieces together.
  static __device__ __forceinline__ int of_four(int unit) {
    return static_cast<int>(static_cast<unsigned>(unit) % kUnits);
  }
  __device__ __forceinline__ uint32_t terms_of(int unit, int p) const {
    return (terms_ & ~15u) + (kUnits > 1 ? of_four(unit) * S::kPieces + p : p % 4) * (32 * 4);
  }
  // Which of four pieces a lane's numbers begin with.
  static __device__ __forceinline__ int first() {
    return S::C::kHasShift ? 0 : threadIdx.x % 4 / 2 * 2;
  }
  __device__ __forceinline__ ScaleSource source() const {
    const ScaleSource &a = params_.scales[0], &b = params_.scales[1];
    if constexpr (!S::C::kHasShift) return a;
    // Not by an index at run time, which would make these slow loads; and nothing of them is kept through the loop.
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

  // ask() starts the copy of a lane's numbers of four pieces, of kSize bytes each; read() takes them when they have
  // come.
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
  // Calls use<kSize>() for the bytes of a number.
  template <typename Use>
  __device__ __forceinline__ static void with_size(int size, Use&& use) {
    if (size == 2)
      use.template operator()<2>();
    else if (size == 4)
      use.template operator()<4>();
    else
      use.template operator()<1>();
  }

  // Makes the terms of the four pieces to which piece p of a box belongs.
  __device__ __forceinline__ void make(int unit, int p) {
    const Dtype dtype = source().dtype;
    float mine[kNumbers];
    const int number = (unit * S::kPieces + p) / 4 * 4;
    if (from_ != nullptr) {
      const int boxes =  // to the first four of another one
          by_fours_ ? 4 * params_.deep : max(params_.deep, kUnits) * S::kPieces;
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
        uint32_t bits[kNumbers];  // all loads are issued before one is used
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) bits[i] = load_bits(at[i], dtype, 0);
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) mine[i] = float_of_bits(bits[i], dtype);
      } else {
#pragma unroll
        for (int i = 0; i < kNumbers; ++i) mine[i] = number_at(at[i], dtype);
      }
    }
    __syncwarp();  // all lanes have read the terms before
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

#endif

}  // namespace jaxgemv::cuda::wgmma_tma
