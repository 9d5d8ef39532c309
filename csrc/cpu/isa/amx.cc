// AVX-512 with BF16 and AMX.
#include "amx.h"

#include "../amx_bf16.h"
#include "../amx_int8.h"
#include "../bf16_dot.h"
#include "../weights_panel.h"
#include "amx_weights.h"
#include "kernels.h"

namespace jaxgemv::cpu {
namespace {

template <typename C>
using AmxPanel = WeightsPanel<C, AmxProduct>;

constexpr Rows kAmxRows = make_rows([](Rows& rows) {
  rows.add<AmxBf16, XKind::kTileFloats, Format::kAffine, Format::kCodebook, Format::kE4M3,
           Format::kE5M2>();
  rows.add<AmxInt8, XKind::kTileSlices, Format::kAffine>();
  rows.add<AmxPanel, XKind::kFloats, Format::kAffine, Format::kCodebook, Format::kE4M3,
           Format::kE5M2>();
  // For integers int8_dot is as fast or faster: "Tables and float8 on AMX, a few rows" in docs/cpu-notes.md.
  rows.add<Bf16Dot, XKind::kPairBlocks, Format::kCodebook, Format::kE4M3, Format::kE5M2>();
});

}  // namespace

constinit const Isa kAmx = make_isa("amx", kAvx512Vbmi, kAmxRows);
}  // namespace jaxgemv::cpu
