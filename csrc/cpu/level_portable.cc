// What every processor has: vectors of four floats, SSE2 or NEON.
#include <cstdint>

namespace jaxgemv {
namespace {

constexpr int kLanes = 4;
typedef float Floats __attribute__((vector_size(16)));
typedef int32_t Ints __attribute__((vector_size(16)));

constexpr int kLookupSize = 0;  // no instruction for it

inline Floats lookup(Floats table, Ints) { return table; }

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

}  // namespace
}  // namespace jaxgemv

#include "kernel.h"

namespace jaxgemv {
const Level kPortable = make_level("portable");
}
