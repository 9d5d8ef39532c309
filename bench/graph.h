// Launches captured in one CUDA graph and replayed: what they take with nothing of XLA's between
// them.
#pragma once

#include <algorithm>
#include <vector>

#include "floor.h"

inline constexpr float kMilliseconds = 60;  // are enough: fewer replays of a slow kernel

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
