// The kernels in front of wgmma_tma.
#include <algorithm>

#include "../common/launch.cuh"
#include "image.cuh"

namespace jaxgemv::cuda::wgmma_tma {
namespace {

Index octets_of(const Records& records) { return Index{records.quads} * 16; }

// As many CTAs as there are SMs, but at least one for each row, and at least one octet for a thread. The CTAs of a row
// share the first look at it where one CTA's threads could not ask for all of it at once, and where half of the SMs are
// enough: with more, one SM may have two CTAs of clusters, and no room for the next kernel (docs/cuda-notes.md).
template <typename C, typename X, int kThreads, bool kNorm, bool kSplit>
cudaError_t launch(const Problem& problem, const Params& params, uint8_t* image, Records records,
                   bool keeps_shared, const Device& device, cudaStream_t stream) {
  const Index most = ceil_div(octets_of(records), Index{kThreads}),
              rows = problem.M * problem.batch, shares = rows * 8 <= device.sms / 2 ? 8 : 4;
  records.shares = most > kAtOnce && rows * shares <= device.sms / 2;
  const Index parts = records.shares ? shares : std::clamp<Index>(device.sms / rows, 1, most);
  records.each = static_cast<int>(ceil_div(records.quads, parts));
  const dim3 grid(static_cast<unsigned>(parts), static_cast<unsigned>(problem.M),
                  static_cast<unsigned>(problem.batch));
  LaunchShape shape{grid, kThreads};
  if (records.shares) shape.ranks = static_cast<int>(parts);
  shape.keeps_shared = keeps_shared, shape.leads = true;
  return launch_kernel(make_image<C, X, kThreads, kNorm, kSplit>, shape, device, stream, params,
                       image, records);
}

// Calls use<C, X, kThreads, kNorm>(). is_long: whether there are many threads, which leave the next kernel no room.
template <typename C, typename X, typename Use>
cudaError_t with_threads(bool is_long, Use&& use) {
  if (is_long) return use.template operator()<C, X, kManyThreads, false>();
  return use.template operator()<C, X, kFewThreads, false>();
}
template <typename C, typename Use>
cudaError_t with_x(Dtype x, bool has_norm, bool is_long, Use&& use) {
  if (has_norm) return use.template operator()<C, float, kManyThreads, true>();
  if (x == Dtype::kF32) return with_threads<C, float>(is_long, use);
  if (x == Dtype::kF16) return with_threads<C, __half>(is_long, use);
  return with_threads<C, __nv_bfloat16>(is_long, use);
}

}  // namespace

cudaError_t launch_image(const Problem& problem, const Params& params, uint8_t* image,
                         const Records& records, bool has_pairs, bool keeps_shared,
                         const Device& device, cudaStream_t stream) {
  const auto use = [&]<typename C, typename X, int kThreads, bool kNorm>() {
    const auto run = C::kHasShift && records.split ? launch<C, X, kThreads, kNorm, C::kHasShift>
                                                   : launch<C, X, kThreads, kNorm, false>;
    return run(problem, params, image, records, keeps_shared, device, stream);
  };
  const bool has_norm = params.x.norm.data != nullptr;
  // What waits may begin behind this kernel.
  const bool is_long = records.waits && octets_of(records) > kAtOnce * kFewThreads;
  return has_pairs ? with_x<OrderOf<true>>(problem.x, has_norm, is_long, use)
                   : with_x<OrderOf<false>>(problem.x, has_norm, is_long, use);
}

}  // namespace jaxgemv::cuda::wgmma_tma
