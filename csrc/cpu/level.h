// An instruction-set level: the same kernels, compiled for one kind of processor.
#pragma once

#include <vector>

#include "../kernel.h"

namespace jaxgemv {

// The code for one width of weights. Sizes are in values of four bytes.
struct Kernel {
  // x is converted once per call, to what the kernel reads: `prepare` writes what rows share, then
  // several threads `arrange` rows [m0, m1) each. `arrange` returns false where the values of x do
  // not suit the kernel; then `fall_back` chooses another one, and all of x is arranged anew.
  Index (*arranged_size)(const Problem&);
  void (*prepare)(const Problem&, float* arranged);
  bool (*arrange)(const Problem&, const Operands&, Index slice, Index m0, Index m1,
                  float* arranged);
  void (*fall_back)(const Problem&, float* arranged);

  // Computes y[slice, :, begin:end], where begin is a multiple of kStrip.
  Index (*scratch_size)(const Problem&);
  void (*run)(const Problem&, const Operands&, Index slice, float* arranged, Index begin, Index end,
              float* scratch);
};

// Rows [n0, n1) and codes [k0, k0 + codes) of the weight, of which the last may lie beyond K. k0
// and codes are multiples of kTileUnit, n0 of kDecoded.
struct Tile {
  Index n0, n1, k0, codes;
};

// The same for the transposed product.
struct TransposedKernel {
  bool (*is_whole)(const Problem&);
  Index (*arranged_size)(const Problem&);
  void (*arrange)(const Problem&, const Operands&, Index slice, float* arranged);

  // sums[m][code], in an order of the kernel's own: what the tile adds to y[slice].
  Index (*scratch_size)(const Problem&, Index codes);
  void (*run)(const Problem&, const Operands&, Index slice, const float* arranged, const Tile&,
              float* sums, float* scratch);

  // Writes y[slice, :, k0:k0 + codes]. sums: of `parts` tiles with these codes, one after another.
  void (*finish)(const Problem&, const Operands&, Index slice, const Tile&, const float* sums,
                 Index parts);
};

struct Level {
  const char* name;
  // Rows of x, up to which kernels are at least as fast as to dequantise and let XLA multiply
  // (docs/cpu-notes.md). They take any number.
  int rows;
  Kernel kernels[8];  // of widths 1..8
  TransposedKernel transposed[8];
};

extern const Level kAmx, kAvx512, kAvxVnni, kAvx2, kPortable;

// Rows of weights that a kernel takes at a time; work is divided in multiples of this.
constexpr int kStrip = 32;
// Rows of x that are taken as integers. (4 were 1.4 to 1.7 times as slow as panels:
// docs/cpu-notes.md.)
constexpr int kDigitRows = 2;

// Of the transposed product: tiles are multiples of so many codes; so many rows of the weight are
// decoded at once; and so many rows of x share that, whose sums fit into the nearest cache.
constexpr int kTileUnit = 128, kDecoded = 4, kSharedRows = 16;

// The table, of the level in use.
std::vector<KernelInfo> kernels();

// Those this processor can run, best first.
const std::vector<const Level*>& supported_levels();
// The one in use, which tests may change.
const Level*& current_level();

}  // namespace jaxgemv
