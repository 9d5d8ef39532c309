// Writes the dequantised weights, (batch, N, width) of 16 bits: each is made in float32 exactly as the format says and
// rounded once, with zeros from K to width. For products with so many rows of x that XLA's matmul is the
// faster way.
//
// A lane makes 16-byte pieces of several rows, and the 32 lanes of a warp make neighbouring ones, so that whole lines
// are written. Writing memory should be the bound, so instructions count: one lane converts a scale, for
// all lanes whose codes share it; and a CTA has several tiles, and requests the next while it makes one.
#pragma once

#include "../common/grid.cuh"
#include "pieces.cuh"

namespace jaxgemv::cuda::dequantize {

constexpr int kWarps = 8;
// Rows that a lane has, where there are many. Those of a CTA are neighbours.
constexpr int kMostRows = 4;
// Codes for which a lane converts one scale, so that half a warp has the scales of a row of a tile.
constexpr int kUnit = kTileK / 16;

// CTAs on an SM, as many as there are registers for.
template <int kBits>
inline constexpr int kCtas = Window<kBits>::kWords == 1 ? 4 : 3;

// Each lane makes the same piece of kRows rows, which are kWarps apart. Groups are multiples of 16 codes.
template <Format kFormat, int kBits, int kRows>
__global__ void __launch_bounds__(kWarps * 32, kCtas<kBits>)
    weights(const __grid_constant__ Params p) {
  wait_for_earlier();
  using M = Maker<kFormat, kBits>;
  constexpr int kAsks = (kRows + 1) / 2;  // a lane has a unit's scale of one row of two
  constexpr int kRowsOfTile = kWarps * kRows;
  M maker(p);
  const WeightSource& w = p.weights;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int first_k = min(static_cast<int>(blockIdx.x) * kTileK + lane % 16 * kUnit, p.K - 1);
  const int group = w.group_of(first_k / kOctet);
  const Column scale_of(w.scale, maker.s, group), shift_of(w.shift, maker.s, group);
  struct Asked {
    Window<kBits> windows[kRows];
    Column::Bits scales[kAsks], shifts[kAsks];
  };
  const auto row = [&](int tile, int i) { return tile * kRowsOfTile + i * kWarps + warp; };
  const auto row_of_ask = [&](int tile, int ask) {
    return min(row(tile, min(ask * 2 + lane / 16, kRows - 1)), p.N - 1);
  };
  const auto ask = [&](int tile, Asked& to) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) maker.ask(to.windows[i], min(row(tile, i), p.N - 1));
#pragma unroll
    for (int i = 0; i < kAsks; ++i) {
      const int n = row_of_ask(tile, i);
      to.scales[i] = scale_of.ask(n);
      if (M::kHasShift) to.shifts[i] = shift_of.ask(n);
    }
  };
  Asked asked;
  ask(static_cast<int>(blockIdx.z), asked);
  maker.fill_table();
  for (int tile = static_cast<int>(blockIdx.z); tile < p.tiles;
       tile += static_cast<int>(gridDim.z)) {
    Asked next = asked;
    const int below = tile + static_cast<int>(gridDim.z);
    if (below < p.tiles) ask(below, next);
    float scales[kAsks], shifts[kAsks];
#pragma unroll
    for (int i = 0; i < kAsks; ++i) {
      scales[i] = scale_of.value(asked.scales[i]);
      if (M::kHasShift) shifts[i] = shift_of.value(asked.shifts[i]);
      if (p.global_scale.data != nullptr) {
        const float global = load(p.global_scale, maker.s, row_of_ask(tile, i), 0);
        scales[i] *= global;
        if (M::kHasShift && w.affine == Affine::kOffset) shifts[i] *= global;
      }
      if (maker.entry < 0) scales[i] = __int_as_float(0x7fc00000);  // NaN
      if (M::kHasShift && w.affine == Affine::kSymmetric) shifts[i] = M::kMid;
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int from = i % 2 * 16 + lane / 2;
      const float scale = __shfl_sync(~0u, scales[i / 2], from);
      const float shift = M::kHasShift ? __shfl_sync(~0u, shifts[i / 2], from) : M::kMid;
      float same[2][kPiece];
#pragma unroll
      for (int e = 0; e < kPiece; ++e) same[0][e] = scale, same[1][e] = shift;
      maker.write(asked.windows[i], row(tile, i), same[0], same[1]);
    }
    asked = next;
  }
}

// For groups of any size: a warp takes a row at a time, and a lane loads a scale wherever a group begins.
template <Format kFormat, int kBits>
__global__ void __launch_bounds__(kWarps * 32, 3)
    weights_in_any_groups(const __grid_constant__ Params p) {
  wait_for_earlier();
  using M = Maker<kFormat, kBits>;
  M maker(p);
  maker.fill_table();
  const int k = maker.k();
  const Affine affine = p.weights.affine;
  const float nan = __int_as_float(0x7fc00000);
  for (Index row = Index{blockIdx.z} * kWarps + threadIdx.x / 32; row < p.N;
       row += Index{gridDim.z} * kWarps) {
    const int n = static_cast<int>(row);
    Window<kBits> window;
    maker.ask(window, n);
    const float global = p.global_scale.data == nullptr ? 1 : load(p.global_scale, maker.s, n, 0);
    const float of_shift = affine == Affine::kOffset ? global : 1;
    float scales[kPiece], shifts[kPiece], scale = nan, shift = M::kMid;
#pragma unroll
    for (int e = 0; e < kPiece; ++e) {
      if (k + e < p.K && (e == 0 || (k + e) % p.group == 0)) {
        const int group = (k + e) / p.group;
        if (maker.entry >= 0) scale = load_scale(p.scale, maker.s, n, group) * global;
        if (M::kHasShift && affine != Affine::kSymmetric)
          shift = load(p.shift, maker.s, n, group) * of_shift;
      }
      scales[e] = scale, shifts[e] = shift;
    }
    maker.write(window, n, scales, shifts);
  }
}

}  // namespace jaxgemv::cuda::dequantize
