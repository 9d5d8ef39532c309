// What one thread asks for: codes and x from memory, and what the other CTA of a pair lacks.
#pragma once

#include "shape.cuh"

namespace jaxgemv::cuda::gemm_tma {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Asks for codes and x, by one thread. Not one that decodes: fence_proxy() would wait for its copies.
template <typename S>
class Bringer {
 public:
  __device__ __forceinline__ Bringer(const Params& params, const Work<S>& own, int tile,
                                     int first_stage, int stages, const CUtensorMap& weights,
                                     const CUtensorMap& x, uint32_t shared,
                                     const Barriers<S>& barriers)
      : weights_(weights),
        x_(x),
        barriers_(barriers),
        shared_(shared),
        stages_(stages),
        boxes_((stages + kBoxStages - 1) / kBoxStages),
        slots_(own.slots()),
        box_bytes_(own.box_bytes()),
        stage_bytes_(128 * (rows_of_x(params.rows_m, own.ctas) + (own.ctas > 1 ? own.rows() : 0))),
        byte_(own.first_unit * S::kRowBytes),
        row_(tile * kTileRows + own.first()),
        entry_(params.packed_stack_stride == 0 ? 0 : own.s),  // one matrix may serve all
        k_(first_stage * S::kStageK),
        m_(own.m0) {}

  __device__ __forceinline__ void begin() {
    for (int i = 0; i < slots_; ++i) ask_for_box();
    for (int i = 0; i < S::kStages; ++i) ask_for_x();
  }
  // When stage i is being multiplied, so that it has been decoded; a warp that multiplies asks for x two stages late,
  // when all others have used what that takes the place of.
  __device__ __forceinline__ void next(int i) {
    if (S::kBrings || i > 1) ask_for_x();
    if ((i + 1) % kBoxStages == 0) ask_for_box();
  }

 private:
  static constexpr int kBoxStages = S::kBoxTurns * kTurnStages;
  const CUtensorMap &weights_, &x_;
  const Barriers<S>& barriers_;
  const uint32_t shared_;
  const int stages_, boxes_, slots_, box_bytes_, stage_bytes_, byte_, row_, entry_, k_, m_;
  int stage_ = 0, box_ = 0, slot_ = 0, round_ = 0;

  __device__ __forceinline__ void ask_for_box() {
    if (box_ >= boxes_) return;
    if (box_ >= slots_) wait(barriers_.read(slot_), round_ ^ 1);
    arrive_and_expect(barriers_.came(slot_), box_bytes_);
    copy_box(shared_ + S::kBoxes + slot_ * box_bytes_, weights_, byte_ + box_ * S::kRowBytes, row_,
             entry_, barriers_.came(slot_));
    ++box_;
    if (++slot_ == slots_) slot_ = 0, round_ ^= 1;
  }
  __device__ __forceinline__ void ask_for_x() {
    if (stage_ >= stages_) return;
    const int stage = stage_ % S::kStages;
    if (stage_ >= S::kStages) wait(barriers_.empty(stage), stage_ / S::kStages % 2 ^ 1);
    arrive_and_expect(barriers_.full(stage), stage_bytes_);
    copy_box(shared_ + stage * S::kStageBytes + kXAt, x_, k_ + stage_ * S::kStageK, m_, blockIdx.y,
             barriers_.full(stage), read_again());
    ++stage_;
  }
};

// Sends what this CTA has decoded of a stage to the other of its pair, by one thread that does not decode, as above.
template <typename S>
class Sender {
 public:
  __device__ __forceinline__ Sender(const Work<S>& own, int stages, uint32_t shared,
                                    const Barriers<S>& barriers)
      : barriers_(barriers),
        there_(address_of_rank(shared, own.other()) - shared),
        from_(shared + own.first() * 128),
        stages_(stages) {}

  // The next stage, if it has been decoded; waits for that if it is `needed`.
  __device__ __forceinline__ void send(int needed) {
    const int stage = sent_ % S::kStages, parity = sent_ / S::kStages % 2;
    if (sent_ >= stages_) return;
    if (sent_ > needed && !has_ended(barriers_.decoded(stage), parity)) return;
    wait(barriers_.decoded(stage), parity);
    const uint32_t from = from_ + stage * S::kStageBytes;
    copy_there(from + there_, from, kTileRows / 2 * 128, barriers_.full(stage) + there_);
    ++sent_;
  }
  __device__ __forceinline__ void tell_empty(int stage) const {
    arrive_there(barriers_.empty(stage) + there_);
  }

 private:
  const Barriers<S>& barriers_;
  const uint32_t there_, from_;
  const int stages_;
  int sent_ = 0;
};

#endif

}  // namespace jaxgemv::cuda::gemm_tma
