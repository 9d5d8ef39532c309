// The FFI handler of products: reads a call, chooses its kernel, and runs it on XLA's threads.
//
// It does not throw. A job allocates all of its memory at once (job.h); if that, or an object of XLA's own, finds
// none, the answer is kResourceExhausted. While a thread may be at work nothing else fails.

#include "handler.h"

#include <new>
#include <utility>
#include <vector>

#include "choose.h"
#include "detect.h"
#include "job.h"
#include "task.h"

namespace jaxgemv::cpu {
namespace {

// A worker's reference to a job, which keeps the job alive, and the work that it does.
class Share {
 public:
  Share(Job* job, Index worker) : job_(job), worker_(worker) { job->share(); }
  Share(Share&& other) : job_(std::exchange(other.job_, nullptr)), worker_(other.worker_) {}
  ~Share() {
    if (job_ != nullptr) job_->release();
  }
  void operator()() const { job_->work(worker_); }

 private:
  Job* job_;
  Index worker_;
};

const Kernel* choose_kernel(const Table& table, const Call& call, bool must_take_any_x) {
  const char* only = trace().only;
  return choose(std::span<const Kernel>(table.kernels), std::span<const Crossover>(kCrossovers),
                call.problem, call.given, only == nullptr ? "" : only, [&](const Kernel& kernel) {
                  return (kernel.takes_any_x || !must_take_any_x) &&
                         kernel.supports(call.problem, call.operands);
                });
}

// Splits a call into calls that run one after another, each with as many rows of x as a cache holds when they are
// packed: memory for all of x would be new for each call, which takes longer to get than to fill. A call that
// writes y where x lies is not split: it has to copy x before.
std::vector<Call> shares_of(const Call& call) {
  const Problem& p = call.problem;
  const Index count = ceil_div(p.M, std::max(kPackedRows, kPackedValues / p.K));
  if (p.transposed || p.batch > 1 || count == 1 || call.overlap(/*copies_x=*/false)) return {call};
  std::vector<Call> shares(count, call);
  Problem row = p;
  row.M = 1;
  for (Index i = 0; i < count; ++i) {
    const Index first = p.M * i / count;
    shares[i].operands = call.operands.from_slice(row, first);
    shares[i].operands.index = call.operands.index;
    shares[i].problem.M = p.M * (i + 1) / count - first;
  }
  return shares;
}

void run(Job* job, ffi::ThreadPool& pool) {
  const Share own(job, 0);
  job->release();
  try {
    for (Index worker = 1; worker < job->workers(); ++worker)
      pool.Schedule(Task(Share(job, worker)));
  } catch (const std::bad_alloc&) {
    // The threads already woken, and this one, do all of the work.
  }
  job->work(0);
}

ffi::Future start(ffi::RemainingArgs args, ffi::AnyBuffer y, const ffi::Dictionary& attributes,
                  ffi::ThreadPool& pool) {
  const Table& table = current_table();
  const ffi::ErrorOr<Call> call = Call::from(args, y, attributes, "cpu", table.taken);
  if (!call.has_value()) return finished(call.error());
  if (const auto error = call->overlap(/*copies_x=*/true)) return finished(*error);
  if (y.element_count() == 0) return finished(ffi::Error::Success());
  const Kernel* kernel = choose_kernel(table, *call, /*must_take_any_x=*/false);
  if (kernel == nullptr)
    return finished(ffi::Error(ffi::ErrorCode::kUnimplemented,
                               "jaxgemv: no cpu kernel that may run takes this call"));
  const Kernel* fallback =
      kernel->takes_any_x ? nullptr : choose_kernel(table, *call, /*must_take_any_x=*/true);
  const std::vector<Call> shares = shares_of(*call);
  const Index threads = std::max<Index>(1, pool.num_threads());
  Index tasks = 0;
  for (const Call& share : shares) tasks += Schedule(share.problem, threads).tasks;
  ffi::CountDownPromise done(tasks);
  ffi::Future future(done);
  for (const Call& share : shares) {
    const Schedule schedule(share.problem, threads);
    Job* job = Job::make(share, *kernel, fallback, schedule, threads, done);
    if (job == nullptr) {
      done.CountDown(tasks,
                     ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxgemv: no memory for x"));
      break;
    }
    tasks -= schedule.tasks;
    run(job, pool);
  }
  return future;
}

ffi::Future gemv(ffi::RemainingArgs args, ffi::Result<ffi::AnyBuffer> y, ffi::Dictionary attributes,
                 ffi::ThreadPool pool) {
  try {
    return start(args, *y, attributes, pool);
  } catch (const std::bad_alloc&) {
    return finished(ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxgemv: no memory"));
  }
}

}  // namespace

const int kFfiApiMinor = XLA_FFI_API_MINOR;

}  // namespace jaxgemv::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgemv_gemv_v1, jaxgemv::cpu::gemv,
                              jaxgemv::bind_call().Ctx<xla::ffi::ThreadPool>());
