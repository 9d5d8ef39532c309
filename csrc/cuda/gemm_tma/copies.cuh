// Copies that single threads issue: codes and x from memory, and decoded weights to the other CTA of a pair.
#pragma once

#include "shape.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Issues the copies of codes and x, in one thread. Not one that decodes: its fence_proxy() would wait for the copies.
template <typename S>
class Bringer {
 public:
  __device__ __forceinline__ Bringer(const Params& params, const Work<S>& own,
                                     const CUtensorMap& weights, const CUtensorMap& x,
                                     uint32_t shared, const Barriers<S>& barriers)
      : params_(params),
        own_(own),
        weights_(weights),
        x_(x),
        barriers_(barriers),
        shared_(shared),
        stages_(own.rounded()),
        entry_(params.packed_stack_stride == 0 ? 0 : own.s),  // one matrix may serve all
        byte_(own.first_unit * S::kRowBytes),
        x_bytes_(128 * (rows_of_x(params.rows_m, own.ctas) + (own.ctas > 1 ? own.rows() : 0))),
        box_(params, own),
        of_x_(params, own) {}

  __device__ __forceinline__ void begin() {
#pragma unroll 1
    for (int i = 0; i < own_.slots(); ++i) ask_for_box();
#pragma unroll 1
    for (int i = 0; i < S::kStages; ++i) ask_for_x();
  }
  // Called when stage i of a tile is being multiplied, so that it has been decoded. A warp that multiplies asks for x
  // two stages late, when all others have used the stage that this overwrites.
  __device__ __forceinline__ void next(int i) {
    if (S::kBrings || late_ == 2)
      ask_for_x();
    else
      ++late_;
    if ((i + 1) % S::kBoxStages == 0) ask_for_box();
  }

 private:
  const Params& params_;
  const Work<S>& own_;
  const CUtensorMap &weights_, &x_;
  const Barriers<S>& barriers_;
  const uint32_t shared_;
  const int stages_, entry_, byte_, x_bytes_;  // bytes of x, and from the other CTA
  Cursor<S> box_, of_x_;
  int slot_ = 0, round_ = 0, x_round_ = 0, late_ = 0;

  __device__ __forceinline__ void ask_for_box() {
    if (box_.is_over()) return;
    wait(barriers_.read(slot_), round_ ^ 1);
    arrive_and_expect(barriers_.came(slot_), own_.box_bytes());
    copy_box(shared_ + S::kBoxes + slot_ * own_.box_bytes(), weights_,
             byte_ + box_.stage() * S::kStageRowBytes,
             box_.tile().number * kTileRows + own_.first(), entry_, barriers_.came(slot_));
    box_.go_on(S::kBoxStages, stages_);
    if (++slot_ == own_.slots()) slot_ = 0, round_ ^= 1;
  }
  __device__ __forceinline__ void ask_for_x() {
    if (of_x_.is_over()) return;
    const int i = of_x_.stage(), stage = i % S::kStages;
    wait(barriers_.empty(stage), x_round_ ^ 1);
    if (i < own_.stages) {
      arrive_and_expect(barriers_.full(stage), x_bytes_);
      copy_box(shared_ + stage * S::kStageBytes + kXAt, x_, (own_.first_stage + i) * S::kStageK,
               own_.rows_of(params_, of_x_.tile()).m0, blockIdx.y, barriers_.full(stage),
               read_again());
    } else {
      arrive(barriers_.full(stage));
    }
    if (stage == S::kStages - 1) x_round_ ^= 1;
    of_x_.go_on(1, stages_);
  }
};

// Sends what this CTA has decoded of a stage to the other of its pair, in one thread that does not decode (see
// Bringer).
template <typename S>
class Sender {
 public:
  __device__ __forceinline__ Sender(const Params& params, const Work<S>& own, uint32_t shared,
                                    const Barriers<S>& barriers)
      : own_(own),
        barriers_(barriers),
        there_(address_of_rank(shared, own.other()) - shared),
        from_(shared + own.first() * 128),
        all_(own.all_stages(params)) {}

  // The next stage, if it has been decoded; waits for that if it `must`.
  __device__ __forceinline__ void send(bool must) {
    if (sent_ >= all_) return;
    const int stage = sent_ % S::kStages, round = sent_ / S::kStages % 2;
    if (!must && !has_ended(barriers_.decoded(stage), round)) return;
    wait(barriers_.decoded(stage), round);
    const uint32_t from = from_ + stage * S::kStageBytes;
    if (stage_ < own_.stages)
      copy_there(from + there_, from, kTileRows / 2 * 128, barriers_.full(stage) + there_);
    ++sent_;
    if (++stage_ == own_.rounded()) stage_ = 0;
  }
  // Sends the next stage if it has been decoded; waits for that while fewer than `count` have been sent.
  __device__ __forceinline__ void send_up_to(int count) { send(sent_ < count); }
  __device__ __forceinline__ void tell_empty(int stage) const {
    arrive_there(barriers_.empty(stage) + there_);
  }

 private:
  const Work<S>& own_;
  const Barriers<S>& barriers_;
  const uint32_t there_, from_;
  const int all_;
  int sent_ = 0, stage_ = 0;  // stages of all tiles, and of this one
};

#endif

}  // namespace jaxgemv::cuda::gemm_tma
