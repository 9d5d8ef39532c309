// The kernel alone: calls captured in one CUDA graph and replayed, with nothing of XLA's between
// them. Compiled together with csrc/cuda/kernels.cu, so what is timed is what the package runs.

#include <algorithm>
#include <vector>

#include "../csrc/cuda/launch.h"
#include "floor.h"

namespace {

using jaxgemv::Affine;
using jaxgemv::Dtype;
using jaxgemv::Index;

constexpr int kReplays = 15;

// Median microseconds of one of `calls` launches by launch_all(stream), or a negative number.
template <typename LaunchAll>
float time_graph(int calls, LaunchAll&& launch_all) {
  cudaStream_t stream;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t exec = nullptr;
  cudaEvent_t start, stop;
  cudaStreamCreate(&stream);
  cudaEventCreate(&start);
  cudaEventCreate(&stop);
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal);
  cudaError_t status = launch_all(stream);
  cudaStreamEndCapture(stream, &graph);
  if (status == cudaSuccess) status = cudaGraphInstantiate(&exec, graph, 0);
  std::vector<float> times;
  for (int i = 0; i < kReplays && status == cudaSuccess; ++i) {
    cudaEventRecord(start, stream);
    cudaGraphLaunch(exec, stream);
    cudaEventRecord(stop, stream);
    status = cudaEventSynchronize(stop);
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, start, stop);
    times.push_back(1e3f * milliseconds / calls);
  }
  if (exec != nullptr) cudaGraphExecDestroy(exec);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaStreamDestroy(stream);
  if (status != cudaSuccess) return -1;
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

// y (M, N) = x (M, K) times each of `copies` weights in turn; scale and zero (or null) in x's
// dtype, (N,) when group is 0, else (N, K / group).
extern "C" float jaxgemv_bench_products(Index M, Index N, Index K, int bits, Index group,
                                        int is_bf16, const void* x, void* y, int copies,
                                        const uint8_t* const* packed, const void* const* scale,
                                        const void* const* zero) {
  jaxgemv::Problem problem;
  problem.M = M, problem.N = N, problem.K = K, problem.bits = bits;
  problem.group = group > 0 ? group : K;
  problem.x = problem.y = is_bf16 ? Dtype::kBF16 : Dtype::kF16;
  problem.affine = zero[0] != nullptr ? Affine::kZero : Affine::kMid;
  const Index groups = group > 0 ? jaxgemv::ceil_div(K, group) : 1;
  return time_graph(copies, [&](cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < copies && status == cudaSuccess; ++i) {
      jaxgemv::Operands operands;
      operands.x = x, operands.y = y, operands.packed = packed[i];
      operands.scale = {scale[i], problem.x, 0, groups, groups > 1 ? 1 : 0};
      if (zero[i] != nullptr) operands.shift = {zero[i], problem.x, 0, groups, groups > 1 ? 1 : 0};
      status = jaxgemv::cuda::launch(problem, operands, stream);
    }
    return status;
  });
}

extern "C" float jaxgemv_bench_reads(Index words, int copies, const void* const* data, void* out,
                                     Index ctas_per_sm, Index threads, Index unroll) {
  return time_graph(copies, [&](cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < copies && status == cudaSuccess; ++i)
      status = launch_read(data[i], words / 4, out, ctas_per_sm, threads, unroll, stream);
    return status;
  });
}
