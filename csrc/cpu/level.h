// An instruction-set level: the same kernels, compiled for one kind of processor.
#pragma once

#include <vector>

#include "../gemv.h"

namespace jaxgemv {

// The code for one width of weights. Sizes are in values of four bytes.
struct Kernel {
  // Whether it is fast: groups are whole blocks of codes.
  bool (*is_whole)(const Problem&);

  // x is converted once per call to float32, in the order in which the kernel meets the codes.
  Index (*arranged_size)(const Problem&);
  void (*arrange)(const Problem&, const Operands&, Index slice, float* arranged);

  // Computes y[slice, :, begin:end], where begin is a multiple of kStrip.
  Index (*scratch_size)(const Problem&);
  void (*run)(const Problem&, const Operands&, Index slice, const float* arranged, Index begin,
              Index end, void* scratch);
};

struct Level {
  const char* name;
  Kernel kernels[8];  // of widths 1..8
};

extern const Level kAvx512, kAvx2, kPortable;

// Rows of weights that a kernel takes at a time; work is divided in multiples of this.
constexpr int kStrip = 4;
// Rows of x that share one decoding of the weights.
constexpr int kRowTiles[] = {1, 2, 4};

// Those this processor can run, best first.
const std::vector<const Level*>& supported_levels();
// The one in use, which tests may change.
const Level*& current_level();

}  // namespace jaxgemv
