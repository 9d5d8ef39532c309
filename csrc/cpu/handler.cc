// The FFI handler: divides the rows of the weights among XLA's threads.

#include "handler.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <vector>

#include "../call.h"
#include "level.h"

namespace jaxgemv {

const std::vector<const Level*>& supported_levels() {
  static const std::vector<const Level*> levels = [] {
    std::vector<const Level*> found = {&kPortable};
#if JAXGEMV_X86
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
    const bool has_avx512 =
        __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vnni");
    if (has_avx2) found.insert(found.begin(), &kAvx2);
    if (has_avx2 && has_avx512) found.insert(found.begin(), &kAvx512);
#endif
    return found;
  }();
  return levels;
}

const Level*& current_level() {
  static const Level* level = supported_levels().front();
  return level;
}

namespace {

// Weights that are worth a task of their own, for one row of x.
constexpr Index kTaskBytes = 64 << 10;
// Tasks for each thread: threads that start late or run slowly take fewer.
constexpr Index kTasksPerThread = 8;

struct alignas(64) Line {
  static constexpr Index kValues = 16;
  std::byte bytes[64];
};
using Lines = std::vector<Line>;

// One call, shared by the threads that work on it. A thread may come when all is done, and the
// call's buffers gone; it finds no task and touches nothing.
struct Job {
  Job(const Call& call, Index threads)
      : problem(call.problem),
        operands(call.operands),
        kernel(current_level()->kernels[problem.bits - 1]) {
    const Index bytes = std::max<Index>(1, row_bytes(problem.K, problem.bits) * problem.M);
    const Index rows = std::max(kTaskBytes / bytes, problem.N / (threads * kTasksPerThread));
    task_rows = std::max<Index>(1, ceil_div(rows, kStrip)) * kStrip;
    tasks_per_slice = ceil_div(problem.N, task_rows);
    tasks = tasks_per_slice * problem.batch;
    workers = std::min(threads, tasks);
    done = ffi::CountDownPromise(tasks);

    arranged_lines = ceil_div(kernel.arranged_size(problem), Line::kValues);
    arranged.resize(arranged_lines * problem.batch);
    for (Index slice = 0; slice < problem.batch; ++slice)
      kernel.arrange(problem, operands, slice, arranged_of(slice));
    for (Index i = 0; i < workers; ++i)
      scratch.emplace_back(ceil_div(kernel.scratch_size(problem), Line::kValues));
  }

  float* arranged_of(Index slice) {
    return reinterpret_cast<float*>(arranged.data() + slice * arranged_lines);
  }

  void work(Index worker) {
    Index finished = 0;
    for (Index task; (task = next.fetch_add(1)) < tasks; ++finished) {
      const Index slice = task / tasks_per_slice, begin = task % tasks_per_slice * task_rows;
      const Index end = std::min(begin + task_rows, problem.N);
      kernel.run(problem, operands, slice, arranged_of(slice), begin, end,
                 reinterpret_cast<float*>(scratch[worker].data()));
    }
    if (finished > 0) done.CountDown(finished);
  }

  const Problem problem;
  const Operands operands;
  const Kernel& kernel;
  Index task_rows, tasks_per_slice, tasks, workers;
  Index arranged_lines;  // of a slice of x
  Lines arranged;
  std::vector<Lines> scratch;  // one for each worker
  std::atomic<Index> next = 0;
  ffi::CountDownPromise done;
};

ffi::Future finished(const ffi::Error& error) {
  ffi::Promise promise;
  if (error.success())
    promise.SetAvailable();
  else
    promise.SetError(error);
  return ffi::Future(promise);
}

ffi::Future gemv(ffi::AnyBuffer x, ffi::AnyBuffer packed, ffi::AnyBuffer scale, ffi::AnyBuffer zero,
                 ffi::AnyBuffer offset, ffi::AnyBuffer bias, ffi::AnyBuffer index,
                 ffi::Result<ffi::AnyBuffer> y, int64_t bits, int64_t group, ffi::ThreadPool pool) {
  const ffi::ErrorOr<Call> call =
      Call::from(x, packed, scale, zero, offset, bias, index, *y, bits, group);
  if (!call.has_value()) return finished(call.error());
  if (y->element_count() == 0) return finished(ffi::Error::Success());

  std::shared_ptr<Job> job;
  try {
    job = std::make_shared<Job>(*call, std::max<Index>(1, pool.num_threads()));
  } catch (const std::bad_alloc&) {
    return finished(ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxgemv: no memory for x"));
  }
  ffi::Future future(job->done);
  for (Index worker = 1; worker < job->workers; ++worker)
    pool.Schedule([job, worker] { job->work(worker); });
  job->work(0);
  return future;
}

}  // namespace

const int kFfiApiMinor = XLA_FFI_API_MINOR;

}  // namespace jaxgemv

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgemv_gemv_v1, jaxgemv::gemv,
                              jaxgemv::bind_call().Ctx<xla::ffi::ThreadPool>());
