// The launch of the kernel in front of wgmma_tma, which is the same for many of its variants.
#pragma once

#include "../device.h"
#include "../image/params.cuh"

namespace jaxgemv::cuda::wgmma_tma {

// How the records of a launch lie. 2^log_lanes of the 16 lanes of a quad have a group; `sums`: whether a group has a
// sum of x, and `split`: as two numbers; `runs`: whether lanes take runs; `totals`: whether a row, of one column, has
// one sum and no groups; `waits`: whether the kernel behind this one has little to do before it needs x. `each`: the
// quads of a CTA; `shares`: whether the CTAs of a row are a cluster.
struct Records {
  int quads, columns;
  int bytes;  // of a record
  int log_lanes;
  bool sums, split, runs, totals, waits;
  int each = 0;
  bool shares = false;
};

// has_pairs: the Shape's kHasPairs. keeps_shared: as LaunchShape has it. x may have a norm.
cudaError_t launch_image(const Problem& problem, const image::Params& params, uint8_t* image,
                         const Records& records, bool has_pairs, bool keeps_shared,
                         const Device& device, cudaStream_t stream);

}  // namespace jaxgemv::cuda::wgmma_tma
