// The fallback that every processor can run: vectors of four floats, SSE2 or NEON.
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

namespace jaxgemv::cpu {
namespace {

constexpr int kLanes = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));
typedef int16_t Shorts __attribute__((vector_size(8)));

constexpr int kLookupSize = 0;  // no instruction for it

[[maybe_unused]] inline Floats lookup(Floats table, Ints index) {
  Floats found;
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = table[index[lane]];
  return found;
}

template <int kSize>
inline Floats lookup(const float* table, Ints index) {
  Floats found;
  for (int lane = 0; lane < kLanes; ++lane) found[lane] = table[index[lane] & (kSize - 1)];
  return found;
}

// Two lanes at a time in 64-bit registers: compilers insert single lanes through memory.
inline Ints widen_bytes(const uint8_t* from) {
  typedef uint64_t Pairs __attribute__((vector_size(16)));
  uint32_t word;
  __builtin_memcpy(&word, from, sizeof(word));
  const uint64_t wide = word;
  return (Ints)Pairs{(wide & 0xff) | (wide & 0xff00) << 24, (wide >> 16 & 0xff) | wide >> 24 << 32};
}

inline Ints gather_words(const uint8_t* from, const uint8_t* places) {
  Ints words;
  for (int lane = 0; lane < kLanes; ++lane) {
    int32_t word;
    __builtin_memcpy(&word, from + places[4 * lane], sizeof(word));
    words[lane] = word;
  }
  return words;
}

inline float sum_of(Floats value) { return (value[0] + value[2]) + (value[1] + value[3]); }

inline Ints load_words(const uint8_t* from) {
  Ints words;
  __builtin_memcpy(&words, from, sizeof(words));
  return words;
}

inline Ints load_words(const uint8_t* from, int64_t count) {
  Ints words = {};
  __builtin_memcpy(&words, from, 4 * static_cast<size_t>(count));
  return words;
}

#if defined(__SSE2__)
constexpr int kSliceBits = 16;

inline Ints dot(Ints sum, Ints codes, Ints slices) {
  return sum + (Ints)_mm_madd_epi16((__m128i)codes, (__m128i)slices);
}
#else
constexpr int kSliceBits = 0;

[[maybe_unused]] inline Ints dot(Ints sum, Ints, Ints) { return sum; }
#endif

inline void transpose(Ints (&square)[kLanes]) {
  const Ints a = square[0], b = square[1], c = square[2], d = square[3];
  for (int i = 0; i < kLanes; ++i) square[i] = Ints{a[i], b[i], c[i], d[i]};
}

constexpr bool kConvertsF16 = false;

inline Floats load_f16(const char*) { return Floats{}; }
[[maybe_unused]] inline Shorts widen_to_shorts(const char*) { return Shorts{}; }

constexpr bool kCanSpread = false, kCanMultishift = false;

template <int kBits>
inline Ints multishift(Ints words) {
  return words;
}

[[maybe_unused]] inline Ints shuffle_bytes(Ints v, Ints) { return v; }
[[maybe_unused]] inline Ints multiply_low(Ints a, Ints) { return a; }
[[maybe_unused]] inline Ints multiply_high(Ints a, Ints) { return a; }

constexpr int kTileRows = 4, kTileVectors = 2;

}  // namespace
}  // namespace jaxgemv::cpu

#include "kernels.h"

namespace jaxgemv::cpu {
constinit const Isa kPortable = make_isa("portable");
}
