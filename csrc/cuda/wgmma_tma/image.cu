// The kernels in front of wgmma_tma.
#include <algorithm>

#include "../common/launch.cuh"
#include "image.cuh"

namespace jaxgemv::cuda::wgmma_tma {
namespace {

// As many CTAs as there are SMs, but for each row at least one, and for a thread one octet.
template <typename C, typename X, int kThreads, bool kSplit>
cudaError_t launch(const Problem& problem, const Params& params, uint8_t* image,
                   const Records& records, bool keeps_shared, const Device& device,
                   cudaStream_t stream) {
  const Index most = ceil_div(Index{records.quads} * 16, Index{kThreads});
  const Index parts = std::clamp<Index>(device.sms / (problem.M * problem.batch), 1, most);
  const dim3 grid(static_cast<unsigned>(problem.M), static_cast<unsigned>(parts),
                  static_cast<unsigned>(problem.batch));
  LaunchShape shape{grid, kThreads};
  shape.keeps_shared = keeps_shared;
  return launch_kernel(make_image<C, X, kThreads, kSplit>, shape, device, stream, params, image,
                       records);
}

// Calls use<C, X, kThreads>().
template <typename C, typename Use>
cudaError_t with_x(Dtype x, bool has_norm, Use&& use) {
  if (has_norm) return use.template operator()<C, float, kNormThreads>();
  if (x == Dtype::kF32) return use.template operator()<C, float, kImageThreads>();
  if (x == Dtype::kF16) return use.template operator()<C, __half, kImageThreads>();
  return use.template operator()<C, __nv_bfloat16, kImageThreads>();
}

}  // namespace

cudaError_t launch_image(const Problem& problem, const Params& params, uint8_t* image,
                         const Records& records, bool has_pairs, bool keeps_shared,
                         const Device& device, cudaStream_t stream) {
  const auto use = [&]<typename C, typename X, int kThreads>() {
    const auto run = C::kHasShift && records.split ? launch<C, X, kThreads, C::kHasShift>
                                                   : launch<C, X, kThreads, false>;
    return run(problem, params, image, records, keeps_shared, device, stream);
  };
  const bool has_norm = params.x.norm.data != nullptr;
  return has_pairs ? with_x<OrderOf<true>>(problem.x, has_norm, use)
                   : with_x<OrderOf<false>>(problem.x, has_norm, use);
}

}  // namespace jaxgemv::cuda::wgmma_tma
