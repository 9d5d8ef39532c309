// The instruction sets that this processor has, and the table of kernels of the one in use.
#pragma once

#include <span>
#include <vector>

#include "table.h"

namespace jaxgemv::cpu {

struct Table {
  explicit Table(std::span<const Isa* const> isas);

  const Isa* isa;
  // Those of `isa`; and of the transposed product those of lesser ones too, for what is whole there.
  std::vector<Kernel> kernels;
  size_t of_isa;  // so many of them, the first ones
  Taken taken;
};

// Those that this processor can run, best first.
const std::vector<Table>& supported_tables();

// The one in use, which tests may change. Returns false if there is none of this name.
const Table& current_table();
bool set_isa(std::string_view name);

}  // namespace jaxgemv::cpu
