// The kernel alone: calls captured in one CUDA graph and replayed, with nothing of XLA's between
// them. Compiled together with the kernels of csrc/cuda, so what is timed is what the package runs.

#include <algorithm>
#include <vector>

#include "../csrc/cuda/launch.h"
#include "../csrc/kernel.h"
#include "floor.h"

namespace {

using jaxgemv::Affine;
using jaxgemv::Dtype;
using jaxgemv::Index;

constexpr float kMilliseconds = 60;  // are enough: fewer replays of a slow kernel

// Median microseconds of one of `calls` launches by launch_all(stream), or minus a cudaError_t.
template <typename LaunchAll>
float time_graph(int calls, int replays, const Scratch& scratch, LaunchAll&& launch_all) {
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
  float total = 0;
  for (int i = -1; i < replays && (i < 1 || total < kMilliseconds) && status == cudaSuccess; ++i) {
    status = launch_flush(scratch, stream);  // the host launches the graph while this runs
    cudaEventRecord(start, stream);
    cudaGraphLaunch(exec, stream);
    cudaEventRecord(stop, stream);
    if (status == cudaSuccess) status = cudaEventSynchronize(stop);
    float milliseconds = 0;
    cudaEventElapsedTime(&milliseconds, start, stop);
    total += milliseconds;
    if (i >= 0) times.push_back(1e3f * milliseconds / calls);
  }
  if (exec != nullptr) cudaGraphExecDestroy(exec);
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaEventDestroy(start);
  cudaEventDestroy(stop);
  cudaStreamDestroy(stream);
  cudaGetLastError();  // a refused launch must not haunt the next measurement
  if (status != cudaSuccess) return -static_cast<float>(status);
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

}  // namespace

// Name of the kernel that ran last.
extern "C" const char* jaxgemv_bench_kernel() { return jaxgemv::trace().last; }

extern "C" const char* jaxgemv_bench_error(int status) {
  return cudaGetErrorString(static_cast<cudaError_t>(status));
}

// y (M, N) = x (M, K) times weight i, for i in 0 .. calls. Scale and zero (or null) in x's dtype,
// (N,) when group is 0, else (N, K / group).
// `kernel`: the name of the only one to run, or "".
extern "C" float jaxgemv_bench_products(Scratch scratch, Index M, Index N, Index K, int bits,
                                        Index group, int is_bf16, const void* x, void* y, int calls,
                                        int replays, const uint8_t* const* packed,
                                        const void* const* scale, const void* const* zero,
                                        const char* kernel) {
  jaxgemv::Problem problem;
  problem.M = M, problem.N = N, problem.K = K, problem.bits = bits;
  problem.group = group > 0 ? group : K;
  problem.x = problem.y = is_bf16 ? Dtype::kBF16 : Dtype::kF16;
  problem.affine = zero[0] != nullptr ? Affine::kZero : Affine::kSymmetric;
  const Index groups = group > 0 ? jaxgemv::ceil_div(K, group) : 1;
  return time_graph(calls, replays, scratch, [&](cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < calls && status == cudaSuccess; ++i) {
      jaxgemv::Operands operands;
      operands.x = x, operands.y = y, operands.packed = packed[i];
      operands.scale = {scale[i], problem.x, 0, groups, groups > 1 ? 1 : 0};
      if (zero[i] != nullptr) operands.shift = {zero[i], problem.x, 0, groups, groups > 1 ? 1 : 0};
      status = jaxgemv::cuda::launch(problem, operands, {}, stream, kernel);
    }
    return status;
  });
}

// Each call reads the next part of scratch, and begins again where that ends.
extern "C" float jaxgemv_bench_reads(Scratch scratch, Index bytes, int calls, int replays,
                                     Index ctas_per_sm, Index threads) {
  const Index stride = jaxgemv::ceil_div(bytes, 256) * 256;
  const Index parts = std::max<Index>(1, scratch.bytes / stride);
  return time_graph(calls, replays, scratch, [&](cudaStream_t stream) {
    cudaError_t status = cudaSuccess;
    for (int i = 0; i < calls && status == cudaSuccess; ++i)
      status = launch_read(static_cast<const char*>(scratch.data) + i % parts * stride, bytes,
                           ctas_per_sm, threads, stream);
    return status;
  });
}
