// For how many rows of x kernels are the faster way, which Python asks before it makes a call (`_ffi.py`).
#pragma once

#include "kernel.h"

namespace jaxgemv {

// Rows of x up to which a backend's kernels are used at all.
//   most_rows   where they are at least as fast as to dequantise and let XLA multiply
//   fused_rows  with a norm, where all parts of a call inside a kernel are faster than XLA's around another one
//   epilogue_rows  the same without a norm, or with one that may be rounded: activation and residual
//   residual_rows  of a residual alone
//   global_scale_rows  the same of these beside a global scale, which alone is always inside
//   gradient_rows  most_rows of the transposed product
struct RowLimits {
  Index most_rows, fused_rows, epilogue_rows, residual_rows, global_scale_rows, gradient_rows;
};

// The same beside one weight.
//   loop_rows  up to which XLA's own loop over it is faster than any kernel
//   rounded_rows  most_rows where it may be rounded to x's dtype
//   epilogue_from  from which an activation and a residual are faster inside again
struct WeightLimits {
  Index loop_rows = 0, rounded_rows = 0, epilogue_from = kNoLimit;
};

}  // namespace jaxgemv
