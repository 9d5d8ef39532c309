// An instruction-set level: the same kernels, compiled for one kind of processor.
#pragma once

#include <vector>

#include "../gemv.h"

namespace jaxgemv {

// The code for one width of weights. Sizes are in values of four bytes.
struct Kernel {
  // x is converted once per call, to what the kernel reads.
  Index (*arranged_size)(const Problem&);
  void (*arrange)(const Problem&, const Operands&, Index slice, float* arranged);

  // Computes y[slice, :, begin:end], where begin is a multiple of kStrip.
  Index (*scratch_size)(const Problem&);
  void (*run)(const Problem&, const Operands&, Index slice, float* arranged, Index begin, Index end,
              float* scratch);
};

struct Level {
  const char* name;
  Kernel kernels[8];  // of widths 1..8
};

extern const Level kAvx512, kAvx2, kPortable;

// Rows of weights that a kernel takes at a time; work is divided in multiples of this.
constexpr int kStrip = 32;
// Rows of x that share a read of the weights: any number, but Python calls with no more.
constexpr int kMaxRows = 64;
// Rows of x that are taken as integers.
constexpr int kDigitRows = 4;

// Those this processor can run, best first.
const std::vector<const Level*>& supported_levels();
// The one in use, which tests may change.
const Level*& current_level();

}  // namespace jaxgemv
