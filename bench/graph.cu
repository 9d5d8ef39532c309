// The kernel alone: calls captured in one CUDA graph and replayed, with nothing of XLA's between
// them. Compiled together with the kernels of csrc/cuda, so what is timed is what the package runs.

#include "../csrc/cuda/launch.h"
#include "graph.h"

namespace {

using jaxgemv::Affine;
using jaxgemv::Dtype;
using jaxgemv::Index;

}  // namespace

// y (M, N) = x (M, K) times weight i, for i in 0 .. calls. Scale and zero (or null) of one dtype, (N,)
// when group is 0, else (N, K / group). Dtypes are numbers of jaxgemv::Dtype; image: (M, image_bytes).
extern "C" float jaxgemv_bench_products(Scratch scratch, Index M, Index N, Index K, int bits,
                                        Index group, int x_dtype, int scale_dtype, const void* x,
                                        void* y, void* image, Index image_bytes, int calls,
                                        int replays, const uint8_t* const* packed,
                                        const void* const* scale, const void* const* zero) {
  jaxgemv::Problem problem;
  problem.M = M, problem.N = N, problem.K = K, problem.bits = bits;
  problem.group = group > 0 ? group : K;
  problem.x = problem.y = static_cast<Dtype>(x_dtype);
  problem.rounded = M > 64;
  const Dtype dtype = static_cast<Dtype>(scale_dtype);
  problem.affine = zero[0] != nullptr ? Affine::kZero : Affine::kSymmetric;
  const Index groups = group > 0 ? jaxgemv::ceil_div(K, group) : 1;
  return time_graph(calls, replays, scratch, [&](cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < calls && status == cudaSuccess; ++i) {
      jaxgemv::Operands operands;
      operands.x = x, operands.y = y, operands.packed = packed[i];
      operands.image = image, operands.image_row_bytes = image_bytes;
      operands.scale = {scale[i], dtype, 0, groups, groups > 1 ? 1 : 0};
      if (zero[i] != nullptr) operands.shift = {zero[i], dtype, 0, groups, groups > 1 ? 1 : 0};
      status = jaxgemv::cuda::launch(problem, operands, {}, stream, "");
    }
    return status;
  });
}
