// From the sums of a CTA's warps to y, four results at a time.
#pragma once

#include "results.cuh"

namespace jaxgemv::cuda::image {

__device__ __forceinline__ float4 load4(const float* from) {
  return *reinterpret_cast<const float4*>(from);
}
__device__ __forceinline__ void add4(float4& to, const float4& v) {
  to.x += v.x, to.y += v.y, to.z += v.z, to.w += v.w;
}

// The epilogue of four results of a row of x; `up`: the sums of a gated activation's second half.
__device__ __forceinline__ void put_four(const Output& output, Index at, float4 sum, float4 up) {
  float residual[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) residual[i] = residual_of(output, at + i);
  // A loop and not unrolled, since the code of all activations is long.
#pragma unroll 1
  for (int i = 0; i < 4; ++i) {
    const float y = finished(output, sum.x, up.x, residual[0]);
    sum = {sum.y, sum.z, sum.w, y}, up = {up.y, up.z, up.w, up.x};
    residual[0] = residual[1], residual[1] = residual[2], residual[2] = residual[3];
  }
  store4(output.y, output.dtype, at, sum);
}

// The results of a thread: four rows of the weights, and every `step`th row of x from `first` on. kParts: whether there
// may be a norm, an activation or a residual.
template <typename S, bool kParts>
class Fours {
 public:
  const int first, step;
  const bool gated;

  // `four`: which four rows of the weights, of the `fours` in a tile.
  __device__ __forceinline__ Fours(const Params& params, const Share& own, int tile, int fours,
                                   int four, int first, int step)
      : first(first),
        step(step),
        gated(kParts && is_gated(params.output.activation)),
        params_(params),
        own_(own),
        sums_(params),
        row_(gated ? four / 2 * kTileN + four % 2 * 4 : four * 4),
        n_((tile * fours + four) * 4) {}

  // at(): where the sums of row m of x lie, in this CTA's first share of K; next(): how far it is to this thread's next
  // row.
  __device__ __forceinline__ float* at(float* partial, int m) const {
    return partial + sums_.of(0, m * params_.parts, row_);
  }
  __device__ __forceinline__ int next() const { return step * params_.parts * sums_.pitch; }
  // The sums over all shares of K, of the results or (of_up) of what they are gated by.
  __device__ __forceinline__ float4 of_shares(const float* from, bool of_up) const {
    if (of_up) from += kPair;
    const auto columns = [&] {
      float4 sum = load4(from);
      if (params_.parts == 2) add4(sum, load4(from + sums_.pitch));
      return sum;
    };
    float4 sum = columns();
#pragma unroll 1
    for (int w = 1; w < params_.deep; ++w) from += sums_.of_share, add4(sum, columns());
    return sum;
  }

  // Calls use(put), where put(at, factor, sum) writes four results to y[at]: sum(of_up) is the products' sum so far,
  // and factor the norm's.
  template <typename Use>
  __device__ __forceinline__ void with_put(Use&& use) const {
    if (n_ >= params_.width) return;
    const Terms terms = terms_of(n_), of_up = gated ? terms_of(n_ + params_.width) : Terms{};
    use([&](Index at, float factor, auto&& sum) {
      const auto total = [&](bool up, const Terms& of) {
        const float4 v = sum(up);
        return float4{fmaf(v.x, factor * of.worth[0], of.bias[0]),
                      fmaf(v.y, factor * of.worth[1], of.bias[1]),
                      fmaf(v.z, factor * of.worth[2], of.bias[2]),
                      fmaf(v.w, factor * of.worth[3], of.bias[3])};
      };
      const float4 result = total(false, terms);
      if (!kParts || params_.plain)
        store4(params_.output.y, params_.output.dtype, at, result);
      else
        put_four(params_.output, at, result, gated ? total(true, of_up) : float4{1, 1, 1, 1});
    });
  }
  // Where in y the results of row m of x are, and how far it is to this thread's next row.
  __device__ __forceinline__ Index of_y(int m) const {
    return (own_.first_row + m) * params_.width + n_;
  }
  __device__ __forceinline__ Index next_of_y() const { return Index{step} * params_.width; }

 private:
  const Params& params_;
  const Share& own_;
  const Placing<S> sums_;
  const int row_, n_;

  struct Terms {
    float bias[4], worth[4];
  };
  __device__ __forceinline__ Terms terms_of(int n) const {
    const Output& output = params_.output;
    Terms terms;
#pragma unroll
    for (int i = 0; i < 4; ++i) terms.bias[i] = own_.s < 0 ? NAN : 0.f, terms.worth[i] = S::kWorth;
    if (own_.s < 0) return terms;
    if (output.bias.data != nullptr)
#pragma unroll
      for (int i = 0; i < 4; ++i) terms.bias[i] = bias_of(output, true, own_.s, n + i);
    if constexpr (S::kHasGlobalScale)
      if (output.global_scale.data != nullptr)
#pragma unroll
        for (int i = 0; i < 4; ++i) terms.worth[i] *= global_scale_of(output, true, own_.s, n + i);
    return terms;
  }
};

// put_results for a product alone, where rows of y are whole fours of results. (As a part of put_results, this made
// wgmma_any's kernels of tables spill registers.)
template <typename S>
__device__ __forceinline__ void put_fours(const Params& params, const Share& own, int tile,
                                          float* partial, int threads) {
  // Divides the number of threads, so that all fours of a thread are of the same rows of the weights.
  const int fours = params.across * S::kRows / 4, thread = threadIdx.x;
  const Fours<S, false> mine(params, own, tile, fours, thread % fours, thread / fours,
                             threads / fours);
  const bool alone = params.ranks == 1;
  if (!alone) {
    float* from = mine.at(partial, mine.first);
    if (params.deep * params.parts > 1)
      for (int m = mine.first; m < own.M; m += mine.step, from += mine.next())
        *reinterpret_cast<float4*>(from) = mine.of_shares(from, false);
    sync_cluster();
  }
  const auto over_ranks = [&](const float* from) {
    constexpr int kAtOnce = 4;
    float4 sum{};
#pragma unroll 1
    for (int first = 0; first < params.ranks; first += kAtOnce) {
      float4 of_rank[kAtOnce];  // all loads are issued before one is used
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r)
        of_rank[r] = first + r < params.ranks ? load4_of_rank(from, first + r) : float4{};
#pragma unroll
      for (int r = 0; r < kAtOnce; ++r) add4(sum, of_rank[r]);
    }
    return sum;
  };
  mine.with_put([&](auto&& put) {
    int m = own.rank * mine.step + mine.first;
    const float* from = mine.at(partial, m);
#pragma unroll 1
    for (; m < own.M; m += params.ranks * mine.step, from += params.ranks * mine.next())
      put(mine.of_y(m), 1,
          [&](bool) { return alone ? mine.of_shares(from, false) : over_ranks(from); });
  });
  if (!alone) leave_cluster();
}

}  // namespace jaxgemv::cuda::image
