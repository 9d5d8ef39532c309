// The FFI handlers: divide the weights among XLA's threads.

#include "handler.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include "../call.h"
#include "level.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define JAXGEMV_TSAN(call) call
#else
#define JAXGEMV_TSAN(call)
#endif

namespace jaxgemv {

#if JAXGEMV_X86
// Tiles are 8 KB of registers, which Linux gives a process that asks.
static bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("amx-int8") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

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
    if (has_avx2 && __builtin_cpu_supports("avxvnni")) found.insert(found.begin(), &kAvxVnni);
    if (has_avx2 && has_avx512) found.insert(found.begin(), &kAvx512);
    if (has_avx2 && has_avx512 && may_use_tiles()) found.insert(found.begin(), &kAmx);
#endif
    return found;
  }();
  return levels;
}

const Level*& current_level() {
  static const Level* level = supported_levels().front();
  return level;
}

// Transposed ones are behind the others, as on CUDA.
std::vector<KernelInfo> kernels() {
  const Level& level = *current_level();
  std::vector<KernelInfo> rows;
  for (const bool transposed : {false, true})
    for (int bits = 1; bits <= 8; ++bits)
      for (const Dtype x : {Dtype::kF16, Dtype::kBF16, Dtype::kF32})
        rows.push_back({level.name, Format::kAffine, bits, x, transposed ? kSharedRows : level.rows,
                        transposed ? kTransposedOperands : kProductOperands, transposed});
  return rows;
}

namespace {

// Weights that are worth a task of their own, for one row of x.
constexpr Index kTaskBytes = 64 << 10;
// Values of x that are worth the time to divide them.
constexpr Index kPieceValues = 32 << 10;
// Tasks for each thread: threads that start late or run slowly take fewer.
constexpr Index kTasksPerThread = 8;

struct alignas(64) Next {  // a line of its own: each thread counts up another
  std::atomic<Index> value;
};

struct alignas(64) Line {
  static constexpr Index kValues = 16;
  std::byte bytes[64];
};

// The product, rows of the weight by rows.
struct Product {
  Product(const Call& call, Index threads)
      : problem(call.problem),
        operands(call.operands),
        kernel(current_level()->kernels[problem.bits - 1]) {
    const Index bytes = std::max<Index>(1, row_bytes(problem.K, problem.bits) * problem.M);
    const Index rows = std::max(kTaskBytes / bytes, problem.N / (threads * kTasksPerThread));
    task_rows = std::max<Index>(1, ceil_div(rows, kStrip)) * kStrip;
    tasks_per_slice = ceil_div(problem.N, task_rows);
    tasks = tasks_per_slice * problem.batch;
  }

  Index scratch_size() const { return kernel.scratch_size(problem); }

  // Pieces of a slice of x, arranged by themselves.
  Index pieces(Index threads) const {
    return problem.M * problem.K < kPieceValues ? 1 : std::min(threads, problem.M);
  }
  void prepare(float* arranged) { kernel.prepare(problem, arranged); }
  bool arrange(Index slice, Index piece, Index pieces, float* arranged) {
    return kernel.arrange(problem, operands, slice, problem.M * piece / pieces,
                          problem.M * (piece + 1) / pieces, arranged);
  }
  void arrange_anew(Index slice, float* arranged) {
    do {
      kernel.fall_back(problem, arranged);
    } while (!arrange(slice, 0, 1, arranged));
  }

  void run(Index task, float* arranged, float* scratch) {
    const Index slice = task / tasks_per_slice, begin = task % tasks_per_slice * task_rows;
    const Index end = std::min(begin + task_rows, problem.N);
    kernel.run(problem, operands, slice, arranged, begin, end, scratch);
  }

  const Problem problem;
  const Operands operands;
  const Kernel& kernel;
  Index task_rows, tasks_per_slice, tasks;
};

// The transposed product, by tiles. How they are cut depends on shapes alone, and so does the order
// in which their sums are added up, by whoever finishes the last tile of some codes.
struct TransposedProduct {
  // Sums of a tile for a row of x, and tiles for as many threads as gain by them.
  static constexpr Index kMinCodes = 256, kMaxCodes = 2048, kSums = 4096, kTiles = 64;

  TransposedProduct(const Call& call, Index)
      : problem(call.problem), operands(call.operands), kernel(kernel_for(problem)) {
    const Index most = std::clamp(kSums / problem.M, kMinCodes, kMaxCodes);
    codes = ceil_div(std::min(most, problem.K), kTileUnit) * kTileUnit;
    columns = ceil_div(problem.K, codes);
    // Each part of N writes sums of its own, (M, codes) floats that `finish` adds up: so a part
    // reads at least kTaskBytes of weights, and there are at most kTiles parts and 256 / M of them.
    const Index bytes = codes * problem.bits / 8 * problem.M;
    const Index rows = std::max({kTaskBytes / bytes, ceil_div(problem.N * columns, kTiles),
                                 problem.N * problem.M / 256, Index{1}});
    part_rows = ceil_div(rows, kDecoded) * kDecoded;
    parts = ceil_div(problem.N, part_rows);
    tasks = columns * parts * problem.batch;
    done_parts = std::vector<std::atomic<Index>>(columns * problem.batch);
    sums = std::make_unique_for_overwrite<Line[]>(tasks * tile_sums() / Line::kValues);
  }

  Index scratch_size() const { return kernel.scratch_size(problem, codes); }
  Index tile_sums() const { return problem.M * codes; }

  Index pieces(Index) const { return 1; }
  void prepare(float*) {}
  bool arrange(Index slice, Index, Index, float* arranged) {
    kernel.arrange(problem, operands, slice, arranged);
    return true;
  }
  void arrange_anew(Index, float*) {}

  // Neighbouring tasks are neighbours in memory.
  void run(Index task, float* arranged, float* scratch) {
    const Index column = task % columns, part = task / columns % parts;
    const Index slice = task / (columns * parts), place = slice * columns + column;
    const Index n0 = part * part_rows;
    const Tile tile = {n0, std::min(n0 + part_rows, problem.N), column * codes, codes};
    float* first = reinterpret_cast<float*>(sums.get()) + place * parts * tile_sums();
    kernel.run(problem, operands, slice, arranged, tile, first + part * tile_sums(), scratch);
    if (done_parts[place].fetch_add(1) + 1 == parts)
      kernel.finish(problem, operands, slice, tile, first, parts);
  }

  // Narrower vectors have smaller blocks. A group that is not whole blocks at the current level may
  // be at a lower one, which is then faster: AVX2 for groups of 16, say.
  static const TransposedKernel& kernel_for(const Problem& problem) {
    const auto& levels = supported_levels();
    const auto current = std::find(levels.begin(), levels.end(), current_level());
    const auto kernel_of = [&](const Level* level) -> const TransposedKernel& {
      return level->transposed[problem.bits - 1];
    };
    const auto whole = std::find_if(current, levels.end(), [&](const Level* level) {
      return kernel_of(level).is_whole(problem);
    });
    return kernel_of(whole == levels.end() ? *current : *whole);
  }

  const Problem problem;
  const Operands operands;
  const TransposedKernel& kernel;
  Index codes, columns, part_rows, parts, tasks;
  std::vector<std::atomic<Index>> done_parts;
  std::unique_ptr<Line[]> sums;  // [slice][column][part][m][code]
};

// One call, shared by the threads that work on it. A thread may come when all is done, and the
// call's buffers gone; it finds no task and touches nothing.
template <typename Work>
struct Job {
  Job(const Call& call, Index threads) : product(call, threads) {
    workers = std::min(threads, product.tasks);
    done = ffi::CountDownPromise(product.tasks);
    const Problem& problem = product.problem;
    arranged_lines = ceil_div(product.kernel.arranged_size(problem), Line::kValues);
    arranged = std::make_unique_for_overwrite<Line[]>(arranged_lines * problem.batch);
    for (Index slice = 0; slice < problem.batch; ++slice) product.prepare(arranged_of(slice));
    pieces = product.pieces(workers);
    is_bad = std::vector<std::atomic<bool>>(problem.batch);
    next = std::vector<Next>(workers);
    for (Index i = 0; i < workers; ++i) next[i].value = begin_of(i);
    for (Index i = 0; i < workers; ++i)
      scratch.push_back(
          std::make_unique_for_overwrite<Line[]>(ceil_div(product.scratch_size(), Line::kValues)));
  }

  float* arranged_of(Index slice) {
    return reinterpret_cast<float*>(arranged.get() + slice * arranged_lines);
  }

  // Returns when all of x is arranged, by whichever threads have come. None waits for one that has
  // not begun.
  void arrange() {
    const Index all = pieces * product.problem.batch;
    for (Index i; (i = next_piece.fetch_add(1)) < all;) {
      const Index slice = i / pieces;
      if (!product.arrange(slice, i % pieces, pieces, arranged_of(slice))) is_bad[slice] = true;
      if (finished_pieces.fetch_add(1) + 1 < all) continue;
      for (Index bad = 0; bad < product.problem.batch; ++bad)
        if (is_bad[bad]) product.arrange_anew(bad, arranged_of(bad));
      is_arranged = true;
    }
    while (!is_arranged) std::this_thread::yield();
  }

  Index begin_of(Index share) const { return product.tasks * share / workers; }

  // Its own share, in the order of memory, which is then read as one stream; then the others'.
  void work(Index worker) {
    arrange();
    const Index per_slice = product.tasks / product.problem.batch;
    Index finished = 0;
    for (Index i = 0; i < workers; ++i) {
      const Index share = (worker + i) % workers, end = begin_of(share + 1);
      for (Index task; (task = next[share].value.fetch_add(1)) < end; ++finished)
        product.run(task, arranged_of(task / per_slice),
                    reinterpret_cast<float*>(scratch[worker].get()));
    }
    if (finished > 0) done.CountDown(finished);
  }

  Work product;
  Index workers;
  Index arranged_lines;  // of a slice of x
  std::unique_ptr<Line[]> arranged;
  std::vector<std::unique_ptr<Line[]>> scratch;  // one for each worker
  Index pieces;                                  // of a slice of x
  std::atomic<Index> next_piece = 0, finished_pieces = 0;
  std::vector<std::atomic<bool>> is_bad;  // slices
  std::atomic<bool> is_arranged = false;
  std::vector<Next> next;  // task of each worker's share
  ffi::CountDownPromise done;
};

// A worker's share of a job, as XLA's threads take it. They are not instrumented: ThreadSanitizer
// has to be told that what comes before Schedule comes before the task.
template <typename Work>
struct Task {
  Task(std::shared_ptr<Job<Work>> job, Index worker) : job(std::move(job)), worker(worker) {}
  Task(Task&& other) : job(std::move(other.job)), worker(other.worker) {
    JAXGEMV_TSAN(__tsan_release(this));
  }
  void operator()() {
    JAXGEMV_TSAN(__tsan_acquire(this));
    job->work(worker);
  }

  std::shared_ptr<Job<Work>> job;
  Index worker;
};

ffi::Future finished(const ffi::Error& error) {
  ffi::Promise promise;
  if (error.success())
    promise.SetAvailable();
  else
    promise.SetError(error);
  return ffi::Future(promise);
}

template <typename Work>
ffi::Future start(const Call& call, ffi::ThreadPool pool) {
  std::shared_ptr<Job<Work>> job;
  try {
    job = std::make_shared<Job<Work>>(call, std::max<Index>(1, pool.num_threads()));
  } catch (const std::bad_alloc&) {
    return finished(ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxgemv: no memory for x"));
  }
  ffi::Future future(job->done);
  for (Index worker = 1; worker < job->workers; ++worker) pool.Schedule(Task<Work>(job, worker));
  job->work(0);
  return future;
}

ffi::Future gemv(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary attributes,
                 ffi::ThreadPool pool) {
  struct Row {
    KernelInfo info;
  };
  static const Taken taken([] {
    std::vector<Row> rows;
    for (const KernelInfo& info : kernels()) rows.push_back({info});
    return rows;
  }());
  const ffi::ErrorOr<Call> call = Call::from(args, *y, attributes, "cpu", taken);
  if (!call.has_value()) return finished(call.error());
  if (const auto error = call->overlap(/*copies_x=*/true)) return finished(*error);
  if (y->element_count() == 0) return finished(ffi::Error::Success());
  return call->problem.transposed ? start<TransposedProduct>(*call, pool)
                                  : start<Product>(*call, pool);
}

}  // namespace

const int kFfiApiMinor = XLA_FFI_API_MINOR;

}  // namespace jaxgemv

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgemv_gemv_v1, jaxgemv::gemv,
                              jaxgemv::bind_call().Ctx<xla::ffi::ThreadPool>());
