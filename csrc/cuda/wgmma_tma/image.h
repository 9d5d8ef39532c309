// The launch of the kernel in front of wgmma_tma, which is the same for many of its variants.
#pragma once

#include "../device.h"
#include "../image/params.cuh"

namespace jaxgemv::cuda::wgmma_tma {

// How the records of a launch lie. 2^log_lanes of the 16 lanes of a quad have a group; `sums`: whether it has a sum,
// and `split`: of two numbers; `runs`: whether lanes take runs; `totals`: whether a row, of one column, has one sum
// and no groups. `each`: the quads of a CTA; `shares`: whether the CTAs of a row are a cluster.
struct Records {
  int quads, columns;
  int bytes;  // of one
  int log_lanes;
  bool sums, split, runs, totals;
  int each = 0;
  bool shares = false;
};

// With a Shape's kHasPairs, or without; x with a norm, or without. keeps_shared: as LaunchShape has it.
cudaError_t launch_image(const Problem& problem, const image::Params& params, uint8_t* image,
                         const Records& records, bool has_pairs, bool keeps_shared,
                         const Device& device, cudaStream_t stream);

}  // namespace jaxgemv::cuda::wgmma_tma
