// Up to how many rows of x the kernels are the faster way, which Python (`_ffi.py`) asks before it makes a call.
#pragma once

#include "kernel.h"

namespace jaxgemv {

// Rows of x up to which a backend's kernels are used, whatever the weight. Beyond, XLA does that part.
//   most_rows   the product: kernels are at least as fast as dequantising and letting XLA multiply
//   fused_rows  with a norm: one kernel that does every part is faster than XLA's operations around another kernel
//   epilogue_rows  activation and residual inside the kernel, without a norm or with one that may be rounded
//   residual_rows  a residual alone inside the kernel
//   global_scale_rows  any of these beside a global scale (a global scale alone is always inside)
//   gradient_rows  most_rows of the transposed product
struct RowLimits {
  Index most_rows, fused_rows, epilogue_rows, residual_rows, global_scale_rows, gradient_rows;
};

// Limits that depend on the weight too.
//   loop_rows  rows up to which XLA's own loop over the weight is faster than any kernel
//   rounded_rows  most_rows where the weight may be rounded to x's dtype
//   epilogue_from  rows from which an activation and a residual are faster inside the kernel again
struct WeightLimits {
  Index loop_rows = 0, rounded_rows = 0, epilogue_from = kNoLimit;
};

}  // namespace jaxgemv
