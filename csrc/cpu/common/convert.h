// Dtypes to and from float32. Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "vector.h"

namespace jaxgemv::cpu {
namespace {

inline float f32_of_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
inline uint32_t bits_of_f32(float value) { return __builtin_bit_cast(uint32_t, value); }

inline float f32_of_bf16(uint16_t bits) { return f32_of_bits(uint32_t{bits} << 16); }

// Branch-free, and without a subnormal float32 on the way: XLA's threads flush those to zero.
inline float f32_of_f16(uint16_t half) {
  constexpr uint32_t kRebias = (127 - 15) << 23, kExponent = 0x7c00u << 13;
  const uint32_t magnitude = (half & 0x7fffu) << 13;
  const uint32_t normal = magnitude + kRebias;
  const uint32_t special = normal + kRebias;  // exponent 255: infinity or NaN
  const uint32_t subnormal =
      bits_of_f32(f32_of_bits(normal + (1u << 23)) - f32_of_bits(kRebias + (1u << 23)));
  const uint32_t exponent = magnitude & kExponent;
  const uint32_t bits = exponent == kExponent ? special : exponent == 0 ? subnormal : normal;
  return f32_of_bits(bits | (half & 0x8000u) << 16);
}

// bf16_of_f32 and f16_of_f32 round to nearest, ties to even.
inline uint16_t bf16_of_f32(float value) {
  const uint32_t bits = bits_of_f32(value);
  if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline uint16_t f16_of_f32(float value) {
  const uint32_t bits = bits_of_f32(value);
  const uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  uint32_t half;
  if (magnitude > 0x7f800000) {
    half = 0x7e00;  // NaN
  } else if (magnitude >= 143u << 23) {
    half = 0x7c00;  // 2^16 and above
  } else if (magnitude < 113u << 23) {
    half = bits_of_f32(f32_of_bits(magnitude) + 0.5f) - bits_of_f32(0.5f);  // below 2^-14
  } else {
    half = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

// Loads and stores are unaligned: XLA may pass slices that are aligned to nothing.
template <typename T>
inline T load(const void* data, Index i) {
  T value;
  __builtin_memcpy(&value, static_cast<const char*>(data) + i * Index{sizeof(T)}, sizeof(T));
  return value;
}

template <typename T>
inline void store(void* data, Index i, T value) {
  __builtin_memcpy(static_cast<char*>(data) + i * Index{sizeof(T)}, &value, sizeof(T));
}

// out[0, count) = data[first, first + count). Not inlined: the code of all dtypes is long, and the kernels of every
// format and width would have it, for AVX2 a fifth of all that there is to compile (docs/cpu-notes.md).
__attribute__((noinline)) inline void read_floats(Dtype dtype, const void* data, Index first,
                                                  Index count, float* out) {
  switch (dtype) {
    case Dtype::kF32:
      for (Index i = 0; i < count; ++i) out[i] = load<float>(data, first + i);
      return;
    case Dtype::kBF16:
      for (Index i = 0; i < count; ++i) out[i] = f32_of_bf16(load<uint16_t>(data, first + i));
      return;
    case Dtype::kF16:
      for (Index i = 0; i < count; ++i) out[i] = f32_of_f16(load<uint16_t>(data, first + i));
      return;
    case Dtype::kE4M3:
      for (Index i = 0; i < count; ++i)
        out[i] = f32_of_bits(bits_of_e4m3(load<uint8_t>(data, first + i)));
      return;
    case Dtype::kE8M0:
      for (Index i = 0; i < count; ++i)
        out[i] = f32_of_bits(bits_of_e8m0(load<uint8_t>(data, first + i)));
      return;
    case Dtype::kI8:
      for (Index i = 0; i < count; ++i) out[i] = load<int8_t>(data, first + i);
      return;
    case Dtype::kI32: break;
  }
  __builtin_unreachable();
}

// data[first, first + count) = values[0, count), of one of the wide dtypes.
inline void write_floats(Dtype dtype, void* data, Index first, Index count, const float* values) {
  switch (dtype) {
    case Dtype::kF32:
      for (Index i = 0; i < count; ++i) store(data, first + i, values[i]);
      return;
    case Dtype::kBF16:
      for (Index i = 0; i < count; ++i) store(data, first + i, bf16_of_f32(values[i]));
      return;
    case Dtype::kF16:
      for (Index i = 0; i < count; ++i) store(data, first + i, f16_of_f32(values[i]));
      return;
    case Dtype::kE4M3:
    case Dtype::kE8M0:
    case Dtype::kI8:
    case Dtype::kI32: __builtin_unreachable();  // Call::from refuses such a result, or the epilogue
  }
}

inline void write_float(Dtype dtype, void* data, Index i, float value) {
  write_floats(dtype, data, i, 1, &value);
}

typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));

// f32_of_f16 in each lane.
inline Floats floats_of_f16(Ints half) {
  constexpr int32_t kRebias = (127 - 15) << 23, kExponent = 0x7c00 << 13;
  const Ints magnitude = (half & 0x7fff) << 13, normal = magnitude + kRebias;
  const Ints subnormal = (Ints)((Floats)(normal + (1 << 23)) - f32_of_bits(kRebias + (1u << 23)));
  const Ints exponent = magnitude & kExponent;
  const Ints is_special = exponent == kExponent, is_subnormal = exponent == 0;
  const Ints finite = (normal & ~is_subnormal) | (subnormal & is_subnormal);
  return (Floats)((finite + (is_special & kRebias)) | (half & 0x8000) << 16);
}

// The values of float8 bytes, in the lowest bits of lanes with anything above them. Read as a normal number, the bits
// give f. Below the least normal number n, 2 f - n is right; elsewhere it is larger than f: so the smaller one is the
// value. kSpecial: the magnitude bits from which on a byte is NaN or infinite.
template <int kMantissa, int kSpecial>
inline Floats floats_of_float8(Ints byte) {
  constexpr int kShift = 23 - kMantissa, kBias = (1 << (6 - kMantissa)) - 1;
  constexpr float kLeast = __builtin_bit_cast(float, (128 - kBias) << 23);
  const Ints magnitude = byte << kShift & (127 << kShift);
  const Floats normal = (Floats)(magnitude + ((127 - kBias) << 23));
  const Floats other = normal * 2.f - kLeast;
  const Ints value = (Ints)(normal < other ? normal : other);
  const Ints special = magnitude >= (kSpecial << kShift);
  return (Floats)(value | (special & 0x7f800000) | (byte << 24 & INT32_MIN));
}
inline Floats floats_of_e4m3(Ints byte) { return floats_of_float8<3, 127>(byte); }
inline Floats floats_of_e5m2(Ints byte) { return floats_of_float8<2, 124>(byte); }

// float8 bytes, sign-extended to 16-bit words, become float16. For e4m3 the exponent comes out 8 too small, so that
// the result is 1 / kE4M3Unit of the value.
constexpr float kE4M3Unit = kConvertsF16 ? 256 : 1;
template <typename Words>
inline Words halves_of_e4m3(Words bytes) {
  constexpr int16_t kMagnitude = 127 << 7;
  const Words halves = bytes << 7 & ~0x4000;
  return halves | (((halves & kMagnitude) == kMagnitude) & 0x4000);  // NaN
}

// The values of kLanes bytes from `from` on, of e4m3 in units of kE4M3Unit.
inline Floats e4m3_at(const char* from) {
  if constexpr (kConvertsF16) {
    const Shorts halves = halves_of_e4m3(widen_to_shorts(from));
    return load_f16(reinterpret_cast<const char*>(&halves));
  } else {
    return floats_of_e4m3(widen_bytes(reinterpret_cast<const uint8_t*>(from)));
  }
}
inline Floats e5m2_at(const char* from) {
  if constexpr (kConvertsF16) {
    const Shorts halves = widen_to_shorts(from) << 8;
    return load_f16(reinterpret_cast<const char*>(&halves));
  } else {
    return floats_of_e5m2(widen_bytes(reinterpret_cast<const uint8_t*>(from)));
  }
}

// bits_of_e8m0 in each lane. 2^-127 is subnormal, and so zero in XLA's threads.
inline Floats floats_of_e8m0(Ints byte) {
  const Floats value = select(byte == 0, (Floats)(Ints{} + 0x00400000), (Floats)(byte << 23));
  return select(byte == 255, broadcast(__builtin_nanf("")), value);
}

// Calls f<dtype>() for a dtype that is known only at run time.
template <typename F>
inline auto with_dtype(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kF32: return f.template operator()<Dtype::kF32>();
    case Dtype::kBF16: return f.template operator()<Dtype::kBF16>();
    case Dtype::kF16: return f.template operator()<Dtype::kF16>();
    case Dtype::kE4M3: return f.template operator()<Dtype::kE4M3>();
    case Dtype::kE8M0: return f.template operator()<Dtype::kE8M0>();
    case Dtype::kI8:
    case Dtype::kI32: break;  // never dtypes of scaled parameters
  }
  __builtin_unreachable();
}

// Lane i <- element i of the array at `from`.
template <Dtype kDtype>
inline Floats read_whole(const char* from) {
  const auto widen = [&]<typename Narrow>(Narrow narrow) {
    __builtin_memcpy(&narrow, from, sizeof(narrow));
    return __builtin_convertvector(narrow, Ints);
  };
  switch (kDtype) {
    case Dtype::kF32: return (Floats)load_ints(from);
    case Dtype::kBF16: return (Floats)(widen(Halves{}) << 16);
    case Dtype::kF16: return kConvertsF16 ? load_f16(from) : floats_of_f16(widen(Halves{}));
    case Dtype::kE4M3: return e4m3_at(from) * kE4M3Unit;
    case Dtype::kE8M0: return floats_of_e8m0(widen_bytes(reinterpret_cast<const uint8_t*>(from)));
    case Dtype::kI8:
    case Dtype::kI32: break;
  }
  __builtin_unreachable();
}

// Lane i <- data[first + i], or zero from `count` on.
template <Dtype kDtype>
inline Floats read_vector(const void* data, Index first, Index count) {
  const char* from = static_cast<const char*>(data) + first * size_of(kDtype);
  if (count >= kLanes) return read_whole<kDtype>(from);
  char whole[sizeof(Floats)] = {};
  __builtin_memcpy(whole, from, static_cast<size_t>(count * size_of(kDtype)));
  return read_whole<kDtype>(whole);
}

inline Floats read_vector(Dtype dtype, const void* data, Index first, Index count) {
  return with_dtype(dtype, [&]<Dtype kDtype>() { return read_vector<kDtype>(data, first, count); });
}

// The same for 1 to kLanes elements, if nobody writes to `data` meanwhile: reads whole vectors that begin
// before `first`, which is faster than copying a part of one.
template <Dtype kDtype>
inline Floats read_constants(const void* data, Index first, Index count) {
  const Index missing = kLanes - count;
  if (kLookupSize == 0 || first < missing) return read_vector<kDtype>(data, first, count);
  const char* from = static_cast<const char*>(data) + (first - missing) * size_of(kDtype);
  const Ints lane = lane_numbers();
  const Floats values = lookup(read_whole<kDtype>(from), lane + static_cast<int32_t>(missing));
  return select(lane < static_cast<int32_t>(count), values, Floats{});
}

}  // namespace
}  // namespace jaxgemv::cpu
