// Which kernel is the fastest, of those that support a call. Numbers are of an H100 and an H200;
// `python -m bench.choices` times all kernels and says what these choices cost: "Which kernel" in
// docs/cuda-notes.md.
#pragma once

#include <algorithm>

#include "limits.h"

namespace jaxgemv::cuda {

// 1, 3, 5, 6 and 7 bits: stream has kernels for one and two rows of x only, wgmma has none.
constexpr bool has_rare_width(const Problem& problem) {
  return has_integers(problem) && (problem.bits == 1 || 8 % problem.bits != 0);
}

constexpr bool has_groups_of_64(const Problem& problem) { return problem.group % 64 == 0; }

// Tables whose scales stream does not multiply into its operand.
constexpr bool has_wide_table(const Problem& problem) {
  return all<has_table, has_groups_of_64>(problem);
}

// Weights with so few rows for their length that direct, whose CTAs share K, has many more warps than stream.
constexpr bool has_long_rows(const Problem& problem) { return problem.K >= 4 * problem.N; }

// Whether stream has enough CTAs, one for 16 rows of the weights; for a wide table and for long rows it does more:
// "Which kernel".
constexpr bool has_many_tiles(const Problem& problem) {
  const bool is_slower = problem.M > 1 || has_rare_width(problem);
  const bool is_long = problem.K > (is_slower ? 6143 : 8192);
  const Index of_long = !has_whole_pieces(problem) ? 1536 : is_slower ? 1100 : 880;
  const Index tables = has_wide_table(problem) ? 1024 : 512, rows = is_long ? of_long : 512;
  return problem.batch * problem.N >= std::max(tables, rows);
}

// Rows with which a quarter of stream's eight warps, or more, idle: they take 128 codes each in turn. 576, 1152, 1536 or
// 2304 codes, not 2048 ("Which kernel").
constexpr bool leaves_warps_idle(const Problem& problem) {
  return problem.K > 512 && 4 * problem.K <= 3 * (ceil_div(problem.K, Index{1024}) * 1024);
}

// Weights that wgmma does not take, so that only wgmma_any competes with wgmma_tma.
constexpr bool is_not_for_wgmma(const Problem& problem) {
  return any<none<has_integers>, has_small_groups, has_rare_width>(problem);
}

// wgmma_any does as much for 32 columns of x as for few, and a float32 row of x takes two columns; mma_any does more
// work at the end of a group.
constexpr bool has_many_columns(const Problem& problem) {
  return problem.M > 16 ||
         all<has_rows<512>, has_codes<4>, any<has_x<Dtype::kF32>, none<has_one_group>>>(problem);
}

inline constexpr OperandSet kOneByteScale = OperandSet::of(Operand::kOneByteScale);
inline constexpr OperandSet kNorm = OperandSet::of(Operand::kNorm);
inline constexpr OperandSet kEpilogue = OperandSet::of(Operand::kActivation, Operand::kResidual);

inline constexpr Crossover kCrossovers[] = {
    // Against direct: "One and two rows of any format".
    {"fma", 0, 1, 1, 1'000'000},
    {"fma", 0, 1, 2, 1 << 20, all<has_16_bit_x, any<has_small_groups, has_odd_rows>>},
    {"fma", 0, 1, 4, 5 << 20,
     all<has_16_bit_x, any<has_small_groups, has_odd_rows>, none<has_rows<513>>>},
    // Against all others: "Small matrices".
    {"direct", 0, 1, 64, 1 << 20, any<has_integers, has_groups_of_64>},
    {"direct", 0, 1, 64, 1 << 19},
    // Against each other and stream, which takes only one row of x here: "One row of float32 beside tables and float8".
    {"wgmma_tma", 4, 1, 1, kNoLimit, all<has_wide_floats, has_codes<5>, has_columns<6144>>},
    {"wgmma_tma", 8, 1, 1, kNoLimit, all<has_wide_floats, has_codes<6>, has_columns<6144>>},
    {"wgmma_tma", 4, 1, 1, 24 << 20, all<has_wide_floats, has_codes<6>, none<has_columns<769>>>},
    {"stream", 4, 1, 1, kNoLimit,
     all<has_wide_floats, has_many_tiles, any<has_groups_of_16, has_columns<1024>>>, kOneByteScale},
    {"wgmma_tma", 4, 1, 1, kNoLimit, all<has_wide_floats, has_codes<12>, has_columns<2048>>},
    {"direct", 0, 1, 1, 11 << 19, all<has_wide_floats, any<has_table, none<has_columns<1024>>>>},
    {"wgmma_tma", 0, 2, 2, kNoLimit, all<has_wide_floats, has_codes<2>>, kOneByteScale},
    {"wgmma_tma", 0, 3, 6, kNoLimit, all<has_wide_floats, has_codes<4>>, kOneByteScale},
    {"wgmma_tma", 0, 7, 8, kNoLimit, all<has_wide_floats, has_codes<3>>, kOneByteScale},
    // Against stream, whose CTAs each make a table of their own: "Short rows beside a table".
    {"direct", 4, 1, 8, 2 << 20, all<has_table, has_16_bit_x, none<has_columns<257>>>},
    {"direct", 4, 1, 8, 3 << 20, all<has_table, has_16_bit_x, none<has_columns<129>>>},
    // Against stream, which takes a microsecond longer with parts: "Parts in direct".
    {"direct", 0, 1, 16, 1 << 22,
     all<is_fast_in_direct, none<has_columns<2049>>, has_x<Dtype::kBF16>>, kNorm},
    {"direct", 0, 1, 16, 1 << 21, all<is_fast_in_direct, none<has_columns<2049>>>, kNorm},
    {"stream", 0, 1, 16, 1 << 22, all<is_fast_in_direct, none<has_columns<2049>>>, kNorm},
    {"direct", 0, 1, 16, 1 << 22, all<is_fast_in_direct, none<has_columns<2049>>>, kEpilogue},
    // Against stream, in which x * norm is two numbers, as it is in these: "Few rows of x".
    {"wgmma_tma", 0, 3, 4, kNoLimit, has_codes<100>, kNorm},
    {"wgmma_tma", 0, 5, 8, kNoLimit, has_codes<24>, kNorm},
    {"direct", 4, 4, 8, 16 << 20, is_fast_in_direct, kNorm},
    // Against stream, wgmma and wgmma_any. wgmma_tma makes an image of x first, as others do of x * norm: "Boxes of
    // weights"; for tables "One fp16 for an entry".
    {"wgmma_tma", 4, 9, 64, kNoLimit, has_codes<8>, kNorm},
    {"wgmma_tma", 4, 9, 16, kNoLimit, all<has_table, has_codes<24>>, kOneByteScale},
    {"wgmma_tma", 4, 9, 16, kNoLimit, all<has_table, has_codes<8>, has_columns<8192>>,
     kOneByteScale},
    {"wgmma_tma", 8, 9, 16, kNoLimit, all<has_float8, has_codes<20>, has_columns<16384>>},
    {"wgmma_tma", 4, 9, 16, kNoLimit, all<has_codes<15>, leaves_warps_idle>},
    {"wgmma_tma", 8, 9, 16, kNoLimit, all<has_codes<15>, leaves_warps_idle>},
    {"stream", 4, 9, 16, kNoLimit, all<has_table, has_many_tiles>, kOneByteScale},
    {"direct", 4, 9, 16, 5 << 20, all<has_table, has_16_bit_x, none<has_columns<1024>>>},
    {"stream", 4, 9, 16, 17 << 20,
     all<has_wide_table, has_many_tiles, none<has_rows<8192>>, none<has_columns<4097>>,
         none<has_long_rows>>},
    {"wgmma_tma", 4, 9, 16, kNoLimit, all<has_table, has_codes<7>, has_columns<1025>>},
    {"wgmma_tma", 4, 9, 16, kNoLimit,
     all<has_codes<48>, none<has_small_groups>, any<has_one_group, has_rows<14336>>>},
    {"wgmma_tma", 4, 9, 16, kNoLimit, all<has_codes<20>, has_columns<8193>>},
    {"wgmma_tma", 4, 17, 64, kNoLimit, all<has_codes<24>, has_rows<8192>>},
    {"wgmma_tma", 4, 17, 64, kNoLimit, all<has_table, has_codes<3>>},
    {"direct", 0, 17, 32, 8 << 20, all<is_not_for_wgmma, none<has_rows<513>>>},
    {"direct", 0, 33, 64, 8 << 20, all<has_16_bit_x, is_not_for_wgmma, none<has_rows<513>>>},
    {"wgmma_tma", 0, 17, 64, kNoLimit, all<is_not_for_wgmma, has_codes<3>, none<has_long_rows>>},
    {"wgmma_tma", 0, 33, 64, kNoLimit, all<is_not_for_wgmma, has_codes<2>, none<has_long_rows>>},
    {"wgmma_tma", 0, 17, 64, kNoLimit, all<is_not_for_wgmma, has_codes<6>, has_rows<513>>},
    {"wgmma_tma", 8, 17, 32, kNoLimit, has_codes<64>},
    {"wgmma_tma", 8, 33, 64, kNoLimit, has_codes<8>},
    {"direct", 0, 9, 16, 20 << 20, all<has_16_bit_x, has_wide_table, has_long_rows>},
    // Against all but stream: "Few rows of x".
    {"wgmma_tma", 0, 2, 2, kNoLimit, all<has_x<Dtype::kF32>, has_codes<8>, has_rows<512>>},
    {"wgmma_tma", 0, 3, 8, kNoLimit, all<has_x<Dtype::kF32>, has_codes<6>, has_rows<512>>},
    {"stream", 4, 3, 8, kNoLimit, all<has_table, has_many_tiles>, kOneByteScale},
    {"wgmma_tma", 4, 3, 8, kNoLimit,
     all<has_table, none<has_groups_of_16>, has_long_rows, has_codes<8>>},
    {"wgmma_tma", 0, 4, 8, kNoLimit, all<has_rare_width, has_small_groups, has_codes<17>>},
    {"wgmma_tma", 0, 5, 8, kNoLimit,
     all<has_rare_width, any<has_codes<48>, all<has_width<5>, has_codes<24>>>>},
    // Against mma_any and wgmma_any: "The streaming kernel", M = 1 to 64; "Normal numbers for tensor cores".
    {"stream", 2, 1, 24, kNoLimit, has_many_tiles},
    {"stream", 2, 25, 48, 24 << 20, has_many_tiles},
    {"stream", 2, 49, 64, 8 << 20, has_many_tiles},
    {"stream", 4, 1, 16, kNoLimit, has_many_tiles},
    {"stream", 8, 1, 16, kNoLimit, has_many_tiles},
    {"fma", 0, 1, 1, 2 << 20, all<has_rare_width, has_16_bit_x>},
    {"stream", 0, 1, 2, kNoLimit, all<has_rare_width, has_codes<2>, has_many_tiles>},
    {"stream", 0, 1, 16, kNoLimit,
     all<none<has_integers>, has_columns<4096>, any<has_rows<448>, none<has_columns<8193>>>>,
     kOneByteScale},
    // Against direct and mma_any: "One and two rows of any format", "Which kernel".
    {"direct", 0, 1, 1, 12 << 20,
     all<has_rows<640>, has_columns<8192>, none<has_rows<880>, has_small_groups>>},
    {"fma", 0, 1, 1, kNoLimit, all<has_small_groups, any<none<has_odd_rows>, has_16_bit_x>>},
    {"mma_any", 1, 1, 1, kNoLimit,
     all<has_x<Dtype::kF32>, has_codes<8>, has_rows<2048>, none<has_small_groups>>},
    {"fma", 0, 1, 1, 256 << 20, all<any<none<has_rows<1793>>, has_codes<20>>, none<has_odd_rows>>},
    {"fma", 0, 1, 2, 5 << 20, all<has_16_bit_x, has_odd_rows>},
    // With a norm, for which direct makes x * norm again for every 16 rows of the weights; only these kernels take one.
    {"direct", 0, 1, 8, 16 << 20, is_fast_in_direct, kNorm},
    {"direct", 0, 9, 16, 8 << 20, is_fast_in_direct, kNorm},
    {"direct", 0, 1, 16, 5 << 20, nullptr, kNorm},
    {"direct", 0, 17, 64, 3 << 20, has_16_bit_x, kNorm},
    {"wgmma_tma", 0, 9, 64, kNoLimit, has_codes<24>, kNorm},
    {"wgmma_any", 0, 9, 64, kNoLimit, has_many_columns, kNorm},
    {"mma_any", 0, 1, 64, kNoLimit, nullptr, kNorm},
    // Against wgmma, wgmma_any and mma_any: "Which kernel".
    {"direct", 0, 9, 16, 10 << 20, all<has_rare_width, is_fast_in_direct>},
    {"wgmma_tma", 0, 9, 16, kNoLimit, all<has_codes<4>, none<has_long_rows>>},
    {"direct", 0, 9, 16, 20 << 20, all<has_16_bit_x, has_columns<512>>},
    {"direct", 0, 17, 32, 16 << 20, all<is_fast_in_direct, has_long_rows>},
    {"wgmma_tma", 0, 17, 64, kNoLimit, all<has_long_rows, has_codes<4>, none<has_rows<1536>>>},
    {"wgmma_tma", 4, 17, 32, kNoLimit, all<has_codes<48>, none<has_one_group>>},
    {"wgmma", 4, 17, 32, kNoLimit, all<has_codes<4>, none<has_long_rows>>},
    {"wgmma_tma", 4, 33, 64, kNoLimit, has_codes<12>},
    {"wgmma", 4, 33, 64, kNoLimit, all<has_codes<2>, none<has_long_rows>>},
    {"direct", 0, 17, 32, 6 << 20, has_16_bit_x},
    {"direct", 0, 33, 64, 4 << 20, has_16_bit_x},
    {"direct", 0, 1, 8, 11 << 20},
    {"direct", 0, 2, 2, 24 << 20, all<has_integers, has_small_groups>},
    {"direct", 0, 3, 8, 24 << 20,
     all<has_x<Dtype::kF32>, has_integers, has_small_groups, none<has_columns<4096>>>},
    {"wgmma_tma", 4, 3, 8, kNoLimit, all<has_table, has_codes<12>>, kOneByteScale},
    {"wgmma_any", 0, 1, 1, kNoLimit, all<has_wide_floats, has_groups_of_16, has_codes<8>>},
    {"wgmma_any", 0, 2, 8, kNoLimit, all<has_groups_of_16, has_codes<11>>},
    {"wgmma_any", 4, 3, 8, kNoLimit, all<has_table, has_codes<8>, any<has_odd_rows, has_codes<17>>>,
     kOneByteScale},
    {"wgmma_any", 4, 3, 8, kNoLimit, all<has_wide_table, has_odd_rows, has_codes<8>>},
    {"wgmma_any", 0, 6, 8, kNoLimit, all<has_x<Dtype::kF32>, has_codes<16>>},
    {"direct", 0, 1, 8, 24 << 20, has_groups_of_16},
    {"wgmma_tma", 0, 17, 64, kNoLimit, all<has_wide_floats, has_codes<1>>},
    {"direct", 0, 9, 32, 3 << 20},
    {"direct", 0, 33, 64, 3 << 19, has_long_rows},
    // Against mma_any: "Many rows on Hopper". Up to 8 rows of x wgmma stages more zeros than x.
    {"wgmma_tma", 8, 9, 64, kNoLimit, all<has_columns<8192>, none<has_rows<4096>>>},
    {"wgmma", 0, 9, 64},
    // Against wgmma_any: "Boxes of weights".
    {"wgmma_tma", 0, 9, 64, kNoLimit, has_codes<1>},
    // "Which kernel" again, and against fma.
    {"direct", 0, 1, 8, 28 << 20, all<has_16_bit_x, none<has_integers>>},
    {"direct", 0, 2, 8, 28 << 20, all<has_16_bit_x, has_groups_of_64>},
    {"direct", 0, 1, 16, 64 << 20, is_fast_in_direct},
    {"direct", 8, 1, 8, 256 << 20, is_fast_in_direct},
    {"fma", 0, 2, 2, kNoLimit, all<has_16_bit_x, has_small_groups, none<has_odd_rows>>},
    // Against mma_any: "Many rows of every width".
    {"mma_any", 0, 9, 12, kNoLimit, all<has_16_bit_x, has_small_groups, has_codes<48>>},
    {"wgmma_any", 0, 9, 64, kNoLimit, has_many_columns},
    // Where wgmma_any cannot run.
    {"direct", 0, 17, 64, 8 << 20, has_16_bit_x},
    // Against XLA's product with the dequantised matrix: "More than 64 rows".
    {"direct", 0, 65, kNoLimit, kNoLimit, is_for_direct},
    {"gemm_tma", 4, 65, kNoLimit, kNoLimit, is_for_pairs, kOneByteScale},
    {"gemm", 0, 65, 128, kNoLimit,
     all<is_for_gemm, has_codes<96>, is_slow_to_decode, any<has_table, has_x<Dtype::kF32>>>},
    {"gemm", 0, 65, 128, kNoLimit,
     all<is_for_gemm, has_x<Dtype::kF32>, has_rows<5000>, none<is_slow_to_decode>>},
    {"gemm_tma", 0, 65, kNoLimit, kNoLimit, all<is_for_gemm, is_for_gemm_tma>},
    {"gemm", 0, 65, kNoLimit, kNoLimit, is_for_gemm},
    // Against mma_any, which decodes a weight once for each 64 rows, where a kernel was asked for, or a
    // program is for any number of rows.
    {"gemm_tma", 0, 65, kNoLimit, kNoLimit, has_codes<3>},
    {"gemm", 0, 65, kNoLimit, kNoLimit, has_codes<3>},
    // Against mma_any: "Few rows of x".
    {"wgmma_tma", 0, 3, 8, kNoLimit, all<has_codes<48>, has_one_group>},
    // Against mma_any: "Every width". stream with few tiles is for parts that the kernels above refuse.
    {"stream", 0, 1, 1, kNoLimit, has_16_bit_x},
    {"stream", 0, 1, 16, kNoLimit, has_whole_pieces},
    {"mma_any", 0, 1, kNoLimit},
    {"transposed", 0, 1, kNoLimit},
};

}  // namespace jaxgemv::cuda
