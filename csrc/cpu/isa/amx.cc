// AVX-512 with AMX.
#include "amx.h"

#include "../amx_bf16.h"
#include "../amx_int8.h"
#include "kernels.h"

namespace jaxgemv::cpu {
namespace {

constexpr Rows kAmxRows = make_rows([](Rows& rows) {
  rows.add<AmxBf16, XKind::kTileFloats, Format::kAffine, Format::kCodebook, Format::kE4M3,
           Format::kE5M2>();
  rows.add<AmxInt8, XKind::kTileSlices, Format::kAffine>();
  add_vector_rows(rows);
});

}  // namespace

constinit const Isa kAmx = make_isa("amx", kAmxRows);
}  // namespace jaxgemv::cpu
