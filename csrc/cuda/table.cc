#include "table.h"

#include <vector>

namespace jaxgemv::cuda {

Rows table() {
  static const std::vector<Kernel> rows = [] {
    std::vector<Kernel> all;
    for (const Rows each :
         {stream_int1(),     stream_int2(),         stream_int3(),      stream_int4(),
          stream_int5(),     stream_int6(),         stream_int7(),      stream_int8(),
          stream_table4(),   stream_float8(),       wgmma_rows(),       wgmma_tma_narrow(),
          wgmma_tma_wide(),  wgmma_tma_table4(),    wgmma_tma_float8(), direct_integers(),
          direct_table4(),   direct_float8(),       fma_rows(),         wgmma_any_narrow(),
          wgmma_any_wide(),  wgmma_any_table4(),    wgmma_any_float8(), gemm_tma_narrow(),
          gemm_tma_wide(),   gemm_tma_table4(),     gemm_tma_float8(),  gemm_narrow(),
          gemm_wide(),       gemm_table4(),         gemm_float8(),      mma_any_narrow(),
          mma_any_wide(),    mma_any_table4(),      mma_any_float8(),   simt_rows(),
          transposed_rows(), transposed_simt_rows()})
      all.insert(all.end(), each.begin(), each.end());
    return all;
  }();
  return rows;
}

}  // namespace jaxgemv::cuda
