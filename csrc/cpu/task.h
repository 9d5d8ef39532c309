// What handlers give to XLA: tasks for its threads, and a future that is finished already.
#pragma once

#include <utility>

#include "xla/ffi/api/ffi.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define JAXGEMV_TSAN(call) call
#else
#define JAXGEMV_TSAN(call)
#endif

namespace jaxgemv::cpu {

// A task for XLA's thread pool. XLA is not instrumented: ThreadSanitizer has to be told that what comes before
// Schedule happens before the task.
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

inline xla::ffi::Future finished(const xla::ffi::Error& error) {
  xla::ffi::Promise promise;
  if (error.success())
    promise.SetAvailable();
  else
    promise.SetError(error);
  return xla::ffi::Future(promise);
}

}  // namespace jaxgemv::cpu
