// What XLA's threads are given. They are not instrumented: ThreadSanitizer has to be told that what comes
// before Schedule comes before the task.
#pragma once

#include <utility>

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define JAXGEMV_TSAN(call) call
#else
#define JAXGEMV_TSAN(call)
#endif

namespace jaxgemv::cpu {

template <typename F>
class Task {
 public:
  explicit Task(F f) : f_(std::move(f)) {}
  Task(Task&& other) : f_(std::move(other.f_)) { JAXGEMV_TSAN(__tsan_release(this)); }
  void operator()() {
    JAXGEMV_TSAN(__tsan_acquire(this));
    f_();
  }

 private:
  F f_;
};

}  // namespace jaxgemv::cpu
