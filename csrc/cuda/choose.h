// Which kernel is the fastest, of those that support a call. All numbers: one H200, the shapes and
// the tables of docs/cuda-notes.md, `python -m bench`.
#pragma once

#include <limits>

#include "../kernel.h"

namespace jaxgemv::cuda {

inline constexpr Index kAnyRows = std::numeric_limits<Index>::max();

inline constexpr Crossover kCrossovers[] = {
    // Against mma and wgmma, which has no code for 2 bits: "The streaming kernel", M = 1 to 64.
    {"stream", 2, 1, 64},
    {"stream", 4, 1, 16},
    {"stream", 8, 1, 16},
    // Against mma: "Many rows on Hopper". Up to 8 rows it stages more zeros than x.
    {"wgmma", 0, 9, 64},
    {"mma", 0, 1, kAnyRows},
    {"transposed", 0, 1, kAnyRows},
};

// 64: above, XLA's product with the dequantised matrix is faster ("Many rows"). 16: the kernels
// that have an epilogue are for so many rows; above, wgmma or mma with XLA's kernels around them.
inline constexpr Index kMostRows = 64, kFusedRows = 16;

}  // namespace jaxgemv::cuda
