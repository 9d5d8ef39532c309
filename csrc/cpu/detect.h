// The instruction sets that this processor has, and the table of kernels of the one in use.
#pragma once

#include <span>
#include <vector>

#include "table.h"

namespace jaxgemv::cpu {

struct Table {
  explicit Table(std::span<const Isa* const> isas);

  const Isa* isa;
  // The kernels of `isa`, then transposed ones of lesser instruction sets, for groups that are whole blocks there.
  std::vector<Kernel> kernels;
  size_t of_isa;  // how many of the first ones are of `isa` itself
  Taken taken;
};

// A table for each instruction set that this processor has, best first.
const std::vector<Table>& supported_tables();

// The table in use, which tests may change. set_isa returns false if there is no such instruction set.
const Table& current_table();
bool set_isa(std::string_view name);

}  // namespace jaxgemv::cpu
