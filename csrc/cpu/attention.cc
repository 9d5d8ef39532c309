// The FFI handler for attention of one token. It does not throw.

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "../decode.h"
#include "detect.h"
#include "handler.h"
#include "task.h"

namespace jaxgemv::cpu {
namespace {

// Bytes of keys and values for which another thread is worth waking. Not tuned: a few times what a product needs
// (schedule.h).
constexpr Index kBytesOfThread = 512 << 10;

// q and y (..., heads, width), k and v (..., kv_heads, size, width), and a position for each index in "...".
struct AttentionCall {
  Attention first;  // of the first slice, without its range of positions
  const int32_t* positions;
  Index slices, window;

  static ffi::ErrorOr<AttentionCall> from(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v,
                                          ffi::AnyBuffer position, ffi::AnyBuffer out, Index window,
                                          float scale) {
    const auto refuse = [](const char* why) {
      return ffi::Unexpected(detail::invalid(std::string("attention: ") + why));
    };
    const auto of_q = q.dimensions(), of_k = k.dimensions(), of_position = position.dimensions();
    AttentionCall call;
    Attention& a = call.first;
    if (!detail::to_dtype(q.element_type(), &a.dtype) || !is_wide(a.dtype) ||
        k.element_type() != q.element_type() || v.element_type() != q.element_type() ||
        out.element_type() != q.element_type())
      return refuse("q, k, v and y must have one dtype, float16, bfloat16 or float32");
    const size_t lead = of_position.size();
    if (position.element_type() != ffi::DataType::S32 || of_q.size() != lead + 2 ||
        of_k.size() != lead + 3 || !std::ranges::equal(of_k, v.dimensions()) ||
        !std::ranges::equal(of_q, out.dimensions()) || of_k[lead + 2] != of_q[lead + 1] ||
        !std::equal(of_position.begin(), of_position.end(), of_q.begin()) ||
        !std::equal(of_position.begin(), of_position.end(), of_k.begin()))
      return refuse(
          "q and y must be (..., heads, D), k and v (..., kv_heads, S, D), position (...)");
    a.heads = of_q[lead], a.width = of_q[lead + 1];
    a.kv_heads = of_k[lead], a.size = of_k[lead + 1];
    if (a.kv_heads < 1 || a.size < 1 || a.heads % a.kv_heads != 0 || window < 0)
      return refuse("heads must be a multiple of kv_heads, S at least 1 and window not negative");
    a.scale = scale;
    a.q = q.untyped_data(), a.k = k.untyped_data(), a.v = v.untyped_data();
    a.out = out.untyped_data();
    call.positions = static_cast<const int32_t*>(position.untyped_data());
    call.slices = static_cast<Index>(position.element_count()), call.window = window;
    return call;
  }

  Attention slice(Index i) const {
    Attention a = first;
    const Index position = positions[i], bytes = a.width * size_of(a.dtype);
    a.end = std::clamp<Index>(position + 1, 0, a.size);
    a.first = window > 0 ? std::max<Index>(0, position + 1 - window) : 0;
    const auto moved = [&](const void* array, Index rows) {
      return static_cast<const char*>(array) + i * rows * bytes;
    };
    a.q = moved(a.q, a.heads), a.k = moved(a.k, a.kv_heads * a.size);
    a.v = moved(a.v, a.kv_heads * a.size);
    a.out = static_cast<char*>(a.out) + i * a.heads * bytes;
    return a;
  }

  Index tasks() const { return slices * first.kv_heads; }  // a key-value head each
};

// One call, shared by the threads that work on it. A thread may still come when all is done, and finds no task.
class Work {
 public:
  Work(const AttentionCall& call, const Isa& isa, Index workers, ffi::CountDownPromise done)
      : call_(call), isa_(isa), done_(std::move(done)) {
    Attention most = call.first;
    most.first = 0, most.end = most.size;
    size_ = isa.attention_scratch(most);
    scratch_ = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(size_ * workers));
  }

  void run(Index worker) {
    Index finished = 0;
    for (Index task; (task = next_.fetch_add(1)) < call_.tasks(); ++finished)
      isa_.attend(call_.slice(task / call_.first.kv_heads), task % call_.first.kv_heads,
                  scratch_.get() + worker * size_);
    if (finished > 0) done_.CountDown(finished);
  }

 private:
  const AttentionCall call_;
  const Isa& isa_;
  ffi::CountDownPromise done_;
  std::unique_ptr<float[]> scratch_;
  Index size_;
  std::atomic<Index> next_ = 0;
};

ffi::Future start(const AttentionCall& call, Index threads, ffi::ThreadPool& pool) {
  const Attention& a = call.first;
  const Index bytes = 2 * call.tasks() * a.size * a.width * size_of(a.dtype);
  const Index workers =
      std::min(call.tasks(), std::clamp<Index>(bytes / kBytesOfThread, 1, threads));
  ffi::CountDownPromise done(call.tasks());
  ffi::Future future(done);
  const auto work =
      std::make_shared<Work>(call, current_table().isa->with_vectors(), workers, std::move(done));
  try {
    for (Index i = 1; i < workers; ++i) pool.Schedule(Task([work, i] { work->run(i); }));
  } catch (const std::bad_alloc&) {
    // The threads already woken, and this one, do all of the work.
  }
  work->run(0);
  return future;
}

ffi::Future attention(ffi::AnyBuffer q, ffi::AnyBuffer k, ffi::AnyBuffer v, ffi::AnyBuffer position,
                      ffi::Result<ffi::AnyBuffer> out, int64_t window, float scale,
                      ffi::ThreadPool pool) {
  try {
    const auto call = AttentionCall::from(q, k, v, position, *out, window, scale);
    if (!call.has_value()) return finished(call.error());
    if (out->element_count() == 0) return finished(ffi::Error::Success());
    return start(*call, std::max<Index>(1, pool.num_threads()), pool);
  } catch (const std::bad_alloc&) {
    return finished(ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxgemv: no memory"));
  }
}

}  // namespace
}  // namespace jaxgemv::cpu

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxgemv_attend_v1, jaxgemv::cpu::attention,
                              xla::ffi::Ffi::Bind()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Arg<xla::ffi::AnyBuffer>()
                                  .Ret<xla::ffi::AnyBuffer>()
                                  .Attr<int64_t>("window")
                                  .Attr<float>("scale")
                                  .Ctx<xla::ffi::ThreadPool>());
