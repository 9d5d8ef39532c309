// The packed format of the weights: the only place in C++ that knows its word size and bit order.
//
// A row of K codes of `bits` bits is one dense little-endian bit stream: code k sits in bits
// [k * bits, (k + 1) * bits), least significant bit first, and the row is padded to whole 32-bit
// words. Eight consecutive codes (an octet) therefore fill exactly `bits` bytes, for every width.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define JAXGEMV_HD __host__ __device__ __forceinline__
#else
// Always inline: a copy compiled for one instruction set must not be linked into code for another.
#define JAXGEMV_HD inline __attribute__((always_inline))
#endif

namespace jaxgemv {

// What a code stands for: the integer itself, in an affine map with a scale (kAffine); an entry of a table
// (kCodebook); or, for 8 bits, the float8 with those bits.
enum class Format : uint8_t { kAffine, kCodebook, kE4M3, kE5M2 };

constexpr bool is_float8(Format format) {
  return format == Format::kE4M3 || format == Format::kE5M2;
}

inline constexpr const char* kFormatNames[] = {"affine", "codebook", "float8_e4m3fn",
                                               "float8_e5m2"};

// Every offset is computed in 64 bits: a stack of experts easily has more than 2^31 elements.
using Index = int64_t;

constexpr int kOctet = 8;

JAXGEMV_HD constexpr Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }

// Bytes of one packed row of k codes.
JAXGEMV_HD constexpr Index row_bytes(Index k, int bits) { return ceil_div(k * bits, 32) * 4; }

// Bytes from the start of a matrix to the octet that holds code k of row n.
JAXGEMV_HD constexpr Index octet_offset(Index n, Index k, Index k_total, int bits) {
  return n * row_bytes(k_total, bits) + k / kOctet * bits;
}

// The zero point of symmetric weights, which Python writes as `zero=None`.
JAXGEMV_HD constexpr int mid_code(int bits) { return 1 << (bits - 1); }

// Code i (0..7) of an octet whose bytes were read little-endian into the low bits of `octet`.
template <int kBits>
JAXGEMV_HD constexpr int code_of(uint64_t octet, int i) {
  return static_cast<int>(octet >> (i * kBits)) & ((1 << kBits) - 1);
}

static_assert(row_bytes(4096, 4) == 2048 && row_bytes(5, 3) == 4 && row_bytes(11, 3) == 8);
static_assert(octet_offset(1 << 20, 0, 1 << 14, 4) == Index{1} << 33, "offsets are 64-bit");

}  // namespace jaxgemv
