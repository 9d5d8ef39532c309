#include "table.h"

#include <vector>

namespace jaxgemv::cuda {

Rows table() {
  static const std::vector<Kernel> rows = [] {
    std::vector<Kernel> all;
    for (const Rows each : {stream_int2(), stream_int4(), stream_int8(), wgmma_rows(), mma_rows(),
                            simt_rows(), transposed_rows(), transposed_simt_rows()})
      all.insert(all.end(), each.begin(), each.end());
    return all;
  }();
  return rows;
}

}  // namespace jaxgemv::cuda
