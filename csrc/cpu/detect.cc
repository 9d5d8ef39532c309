#include "detect.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <iterator>

namespace jaxgemv::cpu {
namespace {

#if JAXGEMV_X86
// Tiles are 8 KB of registers, which Linux gives a process that asks.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILE_DATA
  return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-bf16") &&
         __builtin_cpu_supports("amx-int8") && syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}
#endif

std::vector<const Isa*> supported_isas() {
  std::vector<const Isa*> found;
#if JAXGEMV_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                        __builtin_cpu_supports("f16c");
  const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") &&
                          __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512vnni");
  const bool has_vbmi = has_avx2 && has_avx512 && __builtin_cpu_supports("avx512vbmi");
  const bool has_bf16 = has_vbmi && __builtin_cpu_supports("avx512bf16");
  if (has_vbmi && may_use_tiles()) found.push_back(&kAmx);
  if (has_bf16) found.push_back(&kAvx512Bf16);
  if (has_vbmi) found.push_back(&kAvx512Vbmi);
  if (has_avx2 && has_avx512) found.push_back(&kAvx512);
  if (has_avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&kAvxVnni);
  if (has_avx2) found.push_back(&kAvx2);
#endif
  found.push_back(&kPortable);
  return found;
}

// Narrower vectors have smaller blocks. A group that is not whole blocks in the instruction set in
// use may be in a lesser one, which is then faster: AVX2 for groups of 16, say.
std::vector<Kernel> kernels_of(std::span<const Isa* const> isas) {
  const Isa& best = *isas.front();
  std::vector<Kernel> kernels(best.kernels.begin(), best.kernels.end());
  for (const Isa* lesser : isas.subspan(1))
    for (const Kernel& kernel : lesser->kernels)
      if (kernel.info.transposed) kernels.push_back(kernel);
  kernels.insert(kernels.end(), best.ragged.begin(), best.ragged.end());
  return kernels;
}

std::atomic<const Table*>& current() {
  static std::atomic<const Table*> table = &supported_tables().front();
  return table;
}

}  // namespace

Table::Table(std::span<const Isa* const> isas)
    : isa(isas.front()), kernels(kernels_of(isas)), taken(kernels) {}

const std::vector<Table>& supported_tables() {
  static const std::vector<Table> tables = [] {
    const std::vector<const Isa*> isas = supported_isas();
    std::vector<Table> tables;
    for (size_t i = 0; i < isas.size(); ++i) tables.emplace_back(std::span(isas).subspan(i));
    return tables;
  }();
  return tables;
}

const Table& current_table() { return *current(); }

bool set_isa(std::string_view name) {
  for (const Table& table : supported_tables())
    if (table.isa->name == name) return current() = &table, true;
  return false;
}

}  // namespace jaxgemv::cpu
