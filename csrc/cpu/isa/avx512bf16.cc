// AVX-512 with VBMI and BF16.
#include "avx512bf16.h"

#include "../bf16_dot.h"
#include "../bf16_panel.h"
#include "../weights_panel.h"
#include "avx512bf16_weights.h"
#include "kernels.h"

namespace jaxgemv::cpu {
namespace {

template <typename C>
using Bf16Weights = WeightsPanel<C, PairsProduct>;

constexpr Rows kBf16Rows = make_rows([](Rows& rows) {
  rows.add<Bf16Panel, XKind::kPairs, Format::kAffine, Format::kCodebook, Format::kE4M3,
           Format::kE5M2>();
  rows.add<Bf16Weights, XKind::kFloats, Format::kAffine, Format::kCodebook, Format::kE4M3,
           Format::kE5M2>();
  rows.add<Bf16Dot, XKind::kPairBlocks, Format::kAffine, Format::kCodebook, Format::kE4M3,
           Format::kE5M2>();
});

}  // namespace

constinit const Isa kAvx512Bf16 = make_isa("avx512bf16", kAvx512Vbmi, kBf16Rows);
}  // namespace jaxgemv::cpu
