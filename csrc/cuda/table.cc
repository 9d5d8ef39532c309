#include "table.h"

#include <vector>

namespace jaxgemv::cuda {

Rows table() {
  static const std::vector<Kernel> rows = [] {
    std::vector<Kernel> all;
    for (const Rows each :
         {stream_int1(),      stream_int2(),         stream_int3(),      stream_int4(),
          stream_int5(),      stream_int6(),         stream_int7(),      stream_int8(),
          stream_table4(),    stream_float8(),       wgmma_rows(),       wgmma_tma_int3(),
          wgmma_tma_int4(),   wgmma_tma_int5(),      wgmma_tma_int6(),   wgmma_tma_int7(),
          wgmma_tma_int8(),   wgmma_tma_table4(),    wgmma_tma_float8(), direct_integers(),
          direct_table4(),    direct_float8(),       fma_rows(),         wgmma_any_int1(),
          wgmma_any_int2(),   wgmma_any_int3(),      wgmma_any_int4(),   wgmma_any_int5(),
          wgmma_any_int6(),   wgmma_any_int7(),      wgmma_any_int8(),   wgmma_any_table4(),
          wgmma_any_float8(), gemm_tma_int1(),       gemm_tma_int2(),    gemm_tma_int3(),
          gemm_tma_int4(),    gemm_tma_int5(),       gemm_tma_int6(),    gemm_tma_int7(),
          gemm_tma_int8(),    gemm_tma_table4(),     gemm_tma_float8(),  gemm_int1(),
          gemm_int2(),        gemm_int3(),           gemm_int4(),        gemm_int5(),
          gemm_int6(),        gemm_int7(),           gemm_int8(),        gemm_table4(),
          gemm_float8(),      mma_any_int1(),        mma_any_int2(),     mma_any_int3(),
          mma_any_int4(),     mma_any_int5(),        mma_any_int6(),     mma_any_int7(),
          mma_any_int8(),     mma_any_table4(),      mma_any_float8(),   simt_rows(),
          transposed_rows(),  transposed_simt_rows()})
      all.insert(all.end(), each.begin(), each.end());
    return all;
  }();
  return rows;
}

}  // namespace jaxgemv::cuda
