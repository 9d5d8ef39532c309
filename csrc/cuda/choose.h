// Which kernel is the fastest, of those that support a call. All numbers: one H200, the shapes and
// the tables of docs/cuda-notes.md, `python -m bench`.
#pragma once

#include <limits>

#include "../kernel.h"

namespace jaxgemv::cuda {

inline constexpr Index kAnyRows = std::numeric_limits<Index>::max();

inline constexpr Crossover kCrossovers[] = {
    // Against mma, mma_any and wgmma, which has no code for 2 bits: "The streaming kernel", M = 1 to 64.
    {"stream", 2, 1, 64},
    {"stream", 4, 1, 16},
    {"stream", 8, 1, 16},
    // Against mma_any: "Many rows on Hopper". Up to 8 rows it stages more zeros than x.
    {"wgmma", 0, 9, 64},
    // Against mma_any: "Every width".
    {"mma", 0, 1, 8},
    {"mma_any", 0, 1, kAnyRows},
    {"transposed", 0, 1, kAnyRows},
};

// 64: above, XLA's product with the dequantised matrix is faster ("Many rows"). Parts inside a
// kernel, `python -m bench.parts` ("Four nouns"): with a norm always, since XLA would make x float32
// of it, which is slower than 16 bits; an activation or a residual alone only for one and two rows,
// since the plain kernels for more have more warps.
inline constexpr Index kMostRows = 64, kFusedRows = 64, kEpilogueRows = 2;

}  // namespace jaxgemv::cuda
