// The stopwatch of clock.cu for a CPU: the time of what XLA runs between two calls, without what
// it takes to start a program.
#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>

#include "xla/ffi/api/ffi.h"

extern "C" double jaxgemv_bench_read(const char* data, int64_t total, int64_t bytes, int threads,
                                     int calls);

namespace {

namespace ffi = xla::ffi;
using Clock = std::chrono::steady_clock;

std::atomic<Clock::time_point> started, stopped;

// Caches of a core are emptied by that core: as many threads as may run.
int threads() {
#ifdef __linux__
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Hands on x. The caches are emptied first.
ffi::Error start(ffi::AnyBuffer x, ffi::Buffer<ffi::U32> scratch, ffi::Result<ffi::AnyBuffer> out) {
  std::memcpy(out->untyped_data(), x.untyped_data(), x.size_bytes());
  const int64_t bytes = static_cast<int64_t>(scratch.size_bytes());
  const auto* data = static_cast<const char*>(scratch.untyped_data());
  jaxgemv_bench_read(data, bytes, bytes, threads(), 1);
  started = Clock::now();
  return ffi::Error::Success();
}

// Its arguments are what it waits for; its result is only there to be asked for.
ffi::Error stop(ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer>) {
  stopped = Clock::now();
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgemv_bench_start, start,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()         // x
                                  .Arg<ffi::Buffer<ffi::U32>>()  // scratch
                                  .Ret<ffi::AnyBuffer>());       // x

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgemv_bench_stop, stop,
                              ffi::Ffi::Bind().RemainingArgs().Ret<ffi::AnyBuffer>());

// Microseconds from the last start to the last stop.
extern "C" double jaxgemv_bench_elapsed() {
  return std::chrono::duration<double, std::micro>(stopped.load() - started.load()).count();
}
