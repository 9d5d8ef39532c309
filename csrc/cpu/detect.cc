#include "detect.h"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <iterator>
#include <string_view>

namespace jaxgemv::cpu {
namespace {

#if JAXGEMV_X86
// AMX tiles are 8 KB of registers, which Linux gives only to a process that asks for them.
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
  if (has_bf16 && may_use_tiles()) found.push_back(&kAmx);
  if (has_bf16) found.push_back(&kAvx512Bf16);
  if (has_vbmi) found.push_back(&kAvx512Vbmi);
  if (has_avx2 && has_avx512) found.push_back(&kAvx512);
  if (has_avx2 && __builtin_cpu_supports("avxvnni")) found.push_back(&kAvxVnni);
  if (has_avx2) found.push_back(&kAvx2);
#endif
  found.push_back(&kPortable);
  return found;
}

// The kernels of an instruction set: its own, then those of its base that it does not replace by name.
std::vector<Kernel> kernels_of(const Isa& isa) {
  std::vector<Kernel> kernels(isa.own.begin(), isa.own.end());
  if (isa.base == nullptr) return kernels;
  for (const Kernel& kernel : kernels_of(*isa.base)) {
    const auto replaces = [&](const Kernel& own) {
      return own.info.name == std::string_view(kernel.info.name);
    };
    if (std::none_of(isa.own.begin(), isa.own.end(), replaces)) kernels.push_back(kernel);
  }
  return kernels;
}

// The kernels of the best instruction set, then transposed ones of lesser sets, then ragged ones. Narrower vectors
// have smaller blocks: a group that is no whole blocks in the best set may be so in a lesser one (of 16 codes in
// AVX2, say), which is then faster than a ragged kernel.
std::vector<Kernel> with_lesser(std::span<const Isa* const> isas) {
  std::vector<Kernel> kernels = kernels_of(*isas.front());
  for (const Isa* lesser : isas.subspan(1))
    for (const Kernel& kernel : lesser->own)
      if (kernel.info.transposed) kernels.push_back(kernel);
  const Kernels& ragged = isas.front()->with_vectors().ragged;
  kernels.insert(kernels.end(), ragged.begin(), ragged.end());
  return kernels;
}

std::atomic<const Table*>& current() {
  static std::atomic<const Table*> table = &supported_tables().front();
  return table;
}

}  // namespace

Table::Table(std::span<const Isa* const> isas)
    : isa(isas.front()),
      kernels(with_lesser(isas)),
      of_isa(kernels_of(*isa).size()),
      taken(kernels) {}

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
