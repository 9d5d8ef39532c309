// The streaming kernel for float8 weights. One file for each format, so that they compile side by side.
#include "launch.cuh"

namespace jaxgemv::cuda {

Rows stream_float8() {
  static constexpr auto kRows =
      join(kRowsOf<Stream, Format::kE4M3, 8>, kStreamNarrow<Format::kE5M2, 8>);
  return kRows;
}

}  // namespace jaxgemv::cuda
