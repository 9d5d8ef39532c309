// AVX-512 with AMX: tiles of bfloat16.
#include "tiles.h"

namespace jaxgemv {
namespace {

// Tiles where kernels have them, which is wherever they are faster.
template <int kBits>
using TiledGemv =
    std::conditional_t<Tiles<kBits>::kExists, Either<Tiles<kBits>, Gemv<kBits>>, Gemv<kBits>>;

}  // namespace

const Level kAmx = make_level<TiledGemv>("amx");
}  // namespace jaxgemv
