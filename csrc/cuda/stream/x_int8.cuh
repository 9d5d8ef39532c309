// One or two rows of x as operand B of the integer mma.m16n8k32, and the weights that meet them.
//
// An mma has eight columns, of which few rows of x would leave most unused. So x becomes fixed point, by
// a power of two for each span of a row, and its four bytes are four columns: y is the sum of their exact
// products, weighted by powers of 256. Elements down to 2^-19 of the span's largest are
// exact, smaller ones are off by 2^-31 of it at most. A row of float32 is two such rows: what the first leaves
// becomes fixed point once more, so that elements down to 2^-38 are exact. Where entries of a table have two
// bytes, x has three: elements down to 2^-14 of the span's largest are exact, others off by 2^-23 of it at most.
//
// Codes need no conversion: a masked word is four codes in bytes, times a power of two that is shifted
// out of the product. An 8-bit word is ready as it is. Widths that do not divide a byte take a few
// operations for each four codes, and those of tables are looked up.
//
// Where two groups share a block, x of the second group has columns of its own, those of a second row.
//
// With a norm it is x * norm that becomes fixed point.
#pragma once

#include "../common/code_bytes.cuh"
#include "../common/norm.cuh"
#include "rows.cuh"
#include "table_pairs.cuh"
#include "x_pairs.cuh"

namespace jaxgemv::cuda::stream {

// Up to kMaxRows (1 or 2) rows of 16-bit x, only 1 where blocks have two groups; or one row of float32, if
// kMayBeInParts.
template <Format kFormat, int kBits, int kMaxRows, int kSpanBytes, int kUnits, bool kNormed,
          bool kHasHalves>
class XInt8 {
  static constexpr bool kIsRun = Unit<kBits, kUnits>::kIsRun;
  static constexpr bool kIsTable = kFormat == Format::kCodebook;
  using C = std::conditional_t<
      kIsTable, DigitPairs,
      std::conditional_t<kIsRun, RunCodes<kBits>, Codes<kFormat, kBits, int8_t>>>;
  static_assert(kMaxRows == 1 || !kHasHalves);

 public:
  using Units = typename Unit<kBits, kUnits>::Share[2];  // of rows g and g + 8 of the weights
  static constexpr bool kHasSums = C::kHasSums, kHalves = kHasHalves;
  static constexpr bool kMayLackNorm = is_rare(kBits);
  C codes;
  static constexpr int kBlocks = SpanRows<kBits, kSpanBytes, kUnits>::kBlocks,
                       kSpanK = kSpanBytes * 8 / kBits;
  static constexpr int kRows = kMaxRows, kRowsAColumn = 1;
  static constexpr int kRowBytes = 4 * kSpanK;  // of shared memory
  // Results of a lane: e is row g + 8 e of the weights, row t / 2 of x, for half of its bytes.
  static constexpr int kResults = 2;

  static __device__ __forceinline__ bool is_in_parts(Dtype x) {
    return kMayBeInParts && x == Dtype::kF32;
  }

  // As in XPairs, but a lane copies neighbouring octets; float32 goes to where its second row will be.
  template <bool kAnyK>
  static __device__ __forceinline__ void ask(const void* x, Dtype dtype, Index first, int rows,
                                             int K, int k0, uint8_t* staged) {
    const bool wide = is_in_parts(dtype);
    const int size = wide ? 4 : 2;
    const char* const row = static_cast<const char*>(x) + first * size;
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m >= rows) break;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        const int piece = lane_id() * kPieces + j, k = k0 + 8 * piece;
        const char* const from = row + (m * K + k) * size;
        uint8_t* const to = staged + (wide ? 1 : m) * kRowBytes + piece * 8 * size;
        copy_octet<kAnyK>(to, from, size, k, K);
      }
    }
  }

  // Turns the x that this warp has copied into operands. norm: from the span's first k on; count: elements
  // of the span that exist.
  // Returns the sums of squares of two rows of x, as far as this lane has them.
  __device__ __forceinline__ float2 take(int rows, Dtype dtype, uint8_t* staged,
                                         const StagedNorm& norm, int count) {
    const int g = lane_id() / 4, t = lane_id() % 4;
    float2 squares{};
    const bool in_parts = is_in_parts(dtype);
#pragma unroll
    for (int m = 0; m < kRows; ++m) {
      if (m >= rows) break;
      const uint8_t* const raw = staged + (in_parts ? 1 : m) * kRowBytes;
      const bool is_rest = m == 1 && in_parts;
      const Row row = make_slices(staged + m * kRowBytes, raw, dtype, norm, count, is_rest);
      const bool is_mine = m == 0 || t >= 2;
      (m == 0 ? squares.x : squares.y) = row.squares;
      if (is_mine) {
        worth[0] = row.power * (t % 2 ? 65536.f : 1.f) / (1 << C::kUp);
        worth[1] = worth[0] * 256;
      }
      if constexpr (kHasSums) {
        // Neighbouring lanes have the x of a block, or half of one. The lanes with the lowest bytes keep its sum.
        constexpr int kLanes = 32 / kBlocks, kSumLanes = kLanes / (kHalves ? 2 : 1);
        float total = row.sum * row.power;
#pragma unroll
        for (int i = kSumLanes / 2; i > 0; i /= 2) total += __shfl_xor_sync(~0u, total, i);
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          const float of_block =
              __shfl_sync(~0u, total, i * kLanes + (kHalves ? t / 2 * kSumLanes : 0));
          if (is_mine) sum[i] = t % 2 ? 0 : of_block;
        }
      }
    }
    __syncwarp();
    // The last row also fills the columns of rows that are not there.
    const uint8_t* const row = staged + min(g / 4, rows - 1) * kRowBytes + t * kShare;
    const auto plane = [&](int digit) { return row + digit % 4 * kSpanK; };
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if constexpr (kIsTable) {
        uint32_t of_high[kShare / 4], of_low[kShare / 4];
        load_shared<kShare / 4>(of_high, plane(g + 3) + i * 4 * kShare);
        load_shared<kShare / 4>(of_low, plane(g) + i * 4 * kShare);
#pragma unroll
        for (int q = 0; q < kShare / 2; ++q)
          b[i][q / kSteps][q % kSteps] =
              __byte_perm(of_high[q / 2], of_low[q / 2], q % 2 ? 0x7362 : 0x5140);
      } else {
        load_shared<kShare / 4>(&b[i][0][0], plane(g) + i * 4 * kShare);
      }
      if (kHalves && g / 4 != t / 2)
#pragma unroll
        for (auto& unit : b[i])
#pragma unroll
          for (uint32_t& quad : unit) quad = 0;
    }
    return squares;
  }

  // v <- a tile's products with block i.
  template <bool>
  __device__ __forceinline__ void dot(const Units& w, int i, float (&v)[kResults]) const {
    int sums[C::kSums][4];
#pragma unroll
    for (int e = 0; e < 4 * C::kSums; ++e) sums[e / 4][e % 4] = C::start(e / 4);
    if constexpr (!C::kSumsByStep) {  // an mma takes two steps of a unit
#pragma unroll
      for (int j = 0; j < kShares; ++j)
#pragma unroll
        for (int step = 0; step < kSteps; step += 2) {
          const auto quad = [&](int r, int next) {
            if constexpr (kIsRun)
              return C::quad(w[r], step + next);
            else
              return codes.quad(w[r][j], step + next);
          };
          mma_bytes<C::kSigned>(sums[0], quad(0, 0), quad(1, 0), quad(0, 1), quad(1, 1),
                                b[i][j][step], b[i][j][step + 1]);
        }
    } else {  // or one of two words
      constexpr int kNext = kUnits > 1;
#pragma unroll
      for (int step = 0; step < kSteps; ++step)
#pragma unroll
        for (int j = 0; j < kUnits; j += 2)
          mma_bytes<false>(sums[step], codes.quad(w[0][j], step), codes.quad(w[1][j], step),
                           kNext ? codes.quad(w[0][j + kNext], step) : 0,
                           kNext ? codes.quad(w[1][j + kNext], step) : 0, b[i][j][step],
                           b[i][j + kNext][step]);
    }
    float column[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) column[e] = C::total(sums, e);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      v[r] = fmaf(worth[1], column[2 * r + 1], worth[0] * column[2 * r]);
    }
  }

  // For result e: which of the rows g and g + 8 of the weights, which half of a block's groups, and x's
  // sum over block i.
  static __device__ constexpr int row(int e) { return e; }
  static __device__ __forceinline__ int half(int) { return lane_id() % 4 / 2; }
  __device__ __forceinline__ float sum_of(int, int i) const { return sum[i]; }

  // Adds results to partial sums, at row g of the weights. The two halves of a row's bytes stay apart, and those of a
  // block with two groups are added as if they were two rows of x.
  static __device__ __forceinline__ void add(float2* to, int column_size, int rows, bool more,
                                             const float (&v)[kResults], bool both_rows) {
    const int t = lane_id() % 4;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (r > 0 && !both_rows) break;
      if (t >= 2 * rows && !kHalves) continue;
      float& at = reinterpret_cast<float*>(to + t / 2 * column_size + 8 * r)[t % 2];
      at = more ? at + v[r] : v[r];
    }
  }

  // Adds up over all lanes the squares that `take` returned, and adds them to partial sums.
  static __device__ __forceinline__ void add_squares(float2* to, int column_size, int rows,
                                                     bool more, float2 squares) {
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
      squares.x += __shfl_xor_sync(~0u, squares.x, i);
      if (kRows > 1) squares.y += __shfl_xor_sync(~0u, squares.y, i);
    }
    const int t = lane_id();
    if (t >= 4) return;
    const float v[kResults] = {t % 2 || (kHalves && t > 1) ? 0 : t < 2 ? squares.x : squares.y, 0};
    add(to, column_size, rows, more, v, false);
  }

 private:
  // Limited by registers.
  static constexpr bool kMayBeInParts = kFormat == Format::kAffine && kMaxRows == 2 && kBits > 2;
  static constexpr int kSteps = C::kSteps;             // registers of four codes that a unit has
  static constexpr int kPieces = kSpanK / 256;         // octets of x that a lane copies
  static constexpr int kShares = kIsRun ? 1 : kUnits;  // a run is four units
  // Bytes that a lane takes of a plane of a block.
  static constexpr int kShare = kShares * kSteps * (kIsTable ? 2 : 4);
  static constexpr int kTop = kIsTable ? 22 : 30;  // fixed point is less than 2^kTop
  // The sums over a block stay below 2^22.
  static constexpr int kMostBits =
      kIsTable ? 8 : kBits + C::kUp;  // of a byte, or of two that are neighbours
  static_assert(kSpanK / kBlocks * ((1 << kMostBits) - 1) * 128 < 1 << 22);

  // Lane (g, t) has byte g % 4 of row g / 4 of x, for units t * kUnits .. of each block.
  uint32_t b[kBlocks][kShares][kSteps];
  // What columns 2 t and 2 t + 1 of a product are worth, and x's sums over each block.
  float worth[2], sum[kBlocks];

  // For a row: what its lowest byte is worth, and for this lane's elements their sum in that unit, and the sum of
  // their squares before the norm.
  struct Row {
    float power, sum, squares;
  };

  // Makes four planes of bytes from a row's raw elements, or (is_rest) from what such planes of it leave.
  static __device__ __forceinline__ Row make_slices(uint8_t* row, const uint8_t* raw, Dtype dtype,
                                                    const StagedNorm& norm, int count,
                                                    bool is_rest) {
    constexpr int kCount = kPieces * 8;
    float v[kCount];
    uint32_t largest = load_raw(v, raw, dtype);
    float squares = 0;
    if constexpr (kNormed) {
      float factor[kPieces][8] = {};  // zeros past K
      if (norm.is_one) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) factor[k / 8][k % 8] = 1;
      } else if constexpr (kIsRun) {
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          if (place_of(k / kAlong * kAlong) < count) factor[k / 8][k % 8] = norm.of(place_of(k));
      } else {
#pragma unroll
        for (int j = 0; j < kPieces; ++j)
          if (place_of(8 * j) < count) norm.load_octet(factor[j], place_of(8 * j));
      }
      float of[4] = {};  // four sums, so that chains of dependent instructions are short
      float most[4] = {};
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        of[k % 4] = fmaf(v[k], v[k], of[k % 4]);
        v[k] *= factor[k / 8][k % 8];
        most[k % 4] = largest_of(most[k % 4], v[k]);
      }
      largest =
          __float_as_uint(largest_of(largest_of(most[0], most[1]), largest_of(most[2], most[3])));
      squares = (of[0] + of[1]) + (of[2] + of[3]);
    }
    largest = __reduce_max_sync(~0u, largest);
    const int exponent = normal_exponent<float>(largest, kTop);
    const bool finite = largest < 0x7f800000u;
    const float scale = power_of_two(exponent);
#pragma unroll
    for (float& each : v) each *= scale;
    if (is_rest) [[unlikely]]
#pragma unroll
      for (float& each : v) each = (each - rintf(each)) * kOfRest;  // exact
    uint32_t bytes[kCount];
    float sums[4] = {};
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      sums[k % 4] += v[k];
      const int fixed = __float2int_rn(v[k]);
      bytes[k] = static_cast<uint32_t>(fixed + 0x00808080) ^ 0x00808080u;  // signed bytes
    }
    uint32_t planes[4][kPieces * 2];
#pragma unroll
    for (int r = 0; r < kPieces * 2; ++r) {
      const auto code = [&](int i) {
        return bytes[kIsRun ? i * kAlong + r : r / kSteps * kSteps * 4 + C::code(r % kSteps, i)];
      };
      const uint32_t a = code(0), b = code(1), c = code(2), d = code(3);
      const uint32_t low[2] = {__byte_perm(a, b, 0x5140), __byte_perm(c, d, 0x5140)};
      const uint32_t high[2] = {__byte_perm(a, b, 0x7362), __byte_perm(c, d, 0x7362)};
      planes[0][r] = __byte_perm(low[0], low[1], 0x5410);
      planes[1][r] = __byte_perm(low[0], low[1], 0x7632);
      planes[2][r] = __byte_perm(high[0], high[1], 0x5410);
      planes[3][r] = __byte_perm(high[0], high[1], 0x7632);
    }
    __syncwarp();
#pragma unroll
    for (int d = 0; d < 4; ++d)
#pragma unroll
      for (int r = 0; r < kPieces; ++r)
        *reinterpret_cast<uint2*>(row + d * kSpanK + (lane_id() * kPieces + r) * 8) = {
            planes[d][2 * r], planes[d][2 * r + 1]};
    const float power = finite ? power_of_two(-exponent) : NAN;  // NaN for all results
    if (is_rest) return {power / kOfRest, 0, 0};
    return {power, (sums[0] + sums[1]) + (sums[2] + sums[3]), squares};
  }

  static constexpr float kOfRest = 0x1p31f;

  // How many of this lane's elements follow one another in the span, from element e at place_of(e) on: all, or in runs
  // those for its registers in each octet.
  static constexpr int kAlong = kPieces * (kIsRun ? 2 : 8);
  static __device__ __forceinline__ int place_of(int e) {
    if constexpr (!kIsRun) return lane_id() * kAlong + e;
    const int step = lane_id() * kAlong % kSteps;
    return lane_id() * kAlong / kSteps * (4 * kSteps) + C::code(step, e / kAlong) + e % kAlong;
  }

  // This lane's elements, and the bits of the largest magnitude among them.
  static __device__ __forceinline__ uint32_t load_raw(float (&v)[kPieces * 8], const uint8_t* row,
                                                      Dtype dtype) {
    if (is_in_parts(dtype)) [[unlikely]] {
      uint32_t largest = 0;
#pragma unroll
      for (int e = 0; e < kPieces * 8; e += kAlong)
        load_shared<kAlong>(reinterpret_cast<uint32_t*>(v) + e, row + place_of(e) * 4);
#pragma unroll
      for (float each : v) largest = max(largest, __float_as_uint(each) & 0x7fffffffu);
      return largest;
    }
    uint32_t pairs[kPieces * 4];
#pragma unroll
    for (int e = 0; e < kPieces * 8; e += kAlong)
      load_shared<kAlong / 2>(pairs + e / 2, row + place_of(e) * 2);
    const auto convert = [&](Dtype known) {
#pragma unroll
      for (int k = 0; k < kPieces * 8; ++k)
        v[k] = float_of_bits(k % 2 ? pairs[k / 2] >> 16 : pairs[k / 2] & 0xffffu, known);
    };
    if (dtype == Dtype::kF16) [[unlikely]]
      convert(Dtype::kF16);
    else
      convert(Dtype::kBF16);
    return __float_as_uint(float_of_bits(largest_of(pairs), dtype));
  }
};

}  // namespace jaxgemv::cuda::stream
