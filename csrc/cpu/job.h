// One call, shared by the threads that work on it.
#pragma once

#include <atomic>
#include <cstddef>
#include <new>
#include <thread>

#include "../call.h"
#include "schedule.h"

namespace jaxgemv::cpu {

// One allocation holds a job and all memory that its call needs. It lives as long as its last
// thread: a thread may come when all is done and the call's buffers are gone; it then finds no task and
// touches nothing.
class Job {
 public:
  // Null if there is no memory. fallback: the kernel for values of x that do not suit `kernel`, or null. done: counts
  // the tasks of the schedule.
  static Job* make(const Call& call, const Kernel& kernel, const Kernel* fallback,
                   const Schedule& schedule, Index threads, const ffi::CountDownPromise& done) {
    const Index workers = std::min({threads, schedule.tasks, schedule.workers});
    const Layout layout(call, kernel, fallback, schedule, workers);
    void* memory = operator new(layout.size, std::align_val_t{kLine}, std::nothrow);
    if (memory == nullptr) return nullptr;
    return new (memory) Job(call, kernel, fallback, schedule, layout, workers, done);
  }

  Index workers() const { return workers_; }

  void share() { ++owners_; }
  void release() {
    if (--owners_ > 0) return;
    this->~Job();
    operator delete(this, std::align_val_t{kLine});
  }

  // Takes the tasks of its own share first, in the order of memory, which is then one stream; then those of others.
  void work(Index worker) {
    pack_x();
    Index finished = 0;
    for (Index i = 0; i < workers_; ++i) {
      const Index share = (worker + i) % workers_, end = begin_of(share + 1);
      for (Index task; (task = at<Next>(layout_.next)[share].fetch_add(1)) < end; ++finished)
        if (kernel_ != nullptr)
          run(task, at<float>(layout_.scratch) + worker * layout_.scratch_size);
    }
    if (finished > 0 && kernel_ != nullptr) done_.CountDown(finished);
    if (finished > 0 && kernel_ == nullptr)
      done_.CountDown(finished, ffi::Error(ffi::ErrorCode::kUnimplemented,
                                           "jaxgemv: the only kernel that may run does not take "
                                           "these values of x"));
  }

 private:
  // Two lines of the caches, which bring lines in pairs: where one thread wrote beside what another reads, calls took
  // a tenth longer (docs/cpu-notes.md, "Short rows").
  static constexpr Index kLine = 128;
  struct alignas(kLine) Next : std::atomic<Index> {};  // next task of a share
  using Count = std::atomic<Index>;

  // Where the parts of the memory begin, in bytes; sizes in floats.
  struct Layout {
    Layout(const Call& call, const Kernel& kernel, const Kernel* fallback, const Schedule& schedule,
           Index workers) {
      const auto most = [&](auto size_of) {
        const Index size = std::max(size_of(kernel), fallback ? size_of(*fallback) : 0);
        return ceil_div(size, kLine / 4) * kLine / 4;
      };
      const Problem& p = call.problem;
      const Operands& o = call.operands;
      x_size = most([&](const Kernel& k) { return k.x_size(p, o); });
      scratch_size = most([&](const Kernel& k) { return k.scratch_size(p, o, schedule.codes); });
      const auto take = [&](Index bytes) {
        const Index at = size;
        size += ceil_div(bytes, kLine) * kLine;
        return at;
      };
      take(sizeof(Job));
      next = take(workers * Index{sizeof(Next)});
      finished_parts = take(schedule.columns * p.batch * Index{sizeof(Count)});
      x = take(p.batch * x_size * 4);
      sums = take(schedule.tasks * schedule.sums * 4);
      scratch = take(workers * scratch_size * 4);
    }

    Index next, finished_parts, x, sums, scratch, size = 0;
    Index x_size, scratch_size;  // floats for a slice; for a worker
  };

  Job(const Call& call, const Kernel& kernel, const Kernel* fallback, const Schedule& schedule,
      const Layout& layout, Index workers, const ffi::CountDownPromise& done)
      : problem_(call.problem),
        operands_(call.operands),
        kernel_(&kernel),
        fallback_(fallback),
        schedule_(schedule),
        layout_(layout),
        workers_(workers),
        done_(done) {
    for (Index i = 0; i < workers; ++i) (new (at<Next>(layout.next) + i) Next)->store(begin_of(i));
    for (Index i = 0; i < schedule.columns * problem_.batch; ++i)
      new (at<Count>(layout.finished_parts) + i) Count(0);
    for (Index slice = 0; slice < problem_.batch; ++slice)
      kernel.prepare(problem_, operands_, x_of(slice));
    trace().last = kernel.info.name;
  }

  template <typename T>
  T* at(Index offset) {
    return reinterpret_cast<T*>(reinterpret_cast<std::byte*>(this) + offset);
  }
  float* x_of(Index slice) { return at<float>(layout_.x) + slice * layout_.x_size; }
  Index begin_of(Index share) const { return schedule_.tasks * share / workers_; }

  // Packs pieces of x, and returns when all of x is packed, by whichever threads have come. None waits for one that
  // has not begun.
  void pack_x() {
    const Index pieces = schedule_.x_pieces, all = pieces * problem_.batch;
    for (Index i; (i = next_piece_.fetch_add(1)) < all;) {
      const Index slice = i / pieces, m = problem_.M, piece = i % pieces;
      if (!kernel_->pack_x(problem_, operands_, slice, m * piece / pieces, m * (piece + 1) / pieces,
                           x_of(slice)))
        is_unsuitable_ = true;
      if (finished_pieces_.fetch_add(1) + 1 < all) continue;
      if (is_unsuitable_) fall_back();
      is_packed_ = true;
    }
    while (!is_packed_) std::this_thread::yield();
  }

  void fall_back() {
    kernel_ = fallback_;
    if (kernel_ == nullptr) return;
    trace().last = kernel_->info.name;
    for (Index slice = 0; slice < problem_.batch; ++slice) {
      kernel_->prepare(problem_, operands_, x_of(slice));
      kernel_->pack_x(problem_, operands_, slice, 0, problem_.M, x_of(slice));
    }
  }

  void run(Index task, float* scratch) {
    const Index slice = schedule_.slice_of(task), place = schedule_.place_of(task);
    const Tile tile = schedule_.tile_of(task);
    float* first = at<float>(layout_.sums) + place * schedule_.parts * schedule_.sums;
    kernel_->run(problem_, operands_, slice, x_of(slice), tile,
                 first + schedule_.part_of(task) * schedule_.sums, scratch);
    if (kernel_->finish != nullptr &&
        at<Count>(layout_.finished_parts)[place].fetch_add(1) + 1 == schedule_.parts)
      kernel_->finish(problem_, operands_, slice, tile, first, schedule_.parts);
  }

  const Problem problem_;
  const Operands operands_;
  const Kernel* kernel_;  // becomes the fallback, or null, if x turns out not to suit
  const Kernel* const fallback_;
  const Schedule schedule_;
  const Layout layout_;
  const Index workers_;
  ffi::CountDownPromise done_;
  std::atomic<Index> owners_ = 1;
  std::atomic<Index> next_piece_ = 0, finished_pieces_ = 0;
  std::atomic<bool> is_unsuitable_ = false, is_packed_ = false;
};

}  // namespace jaxgemv::cpu
