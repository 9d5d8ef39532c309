// AVX-512 with AMX: tiles of bfloat16 for many rows of 16 bits, of digits for the others.
#include "tile_digits.h"
#include "tiles.h"

namespace jaxgemv {
namespace {

template <template <int> typename First, int kBits, typename Second>
using OrElse = std::conditional_t<First<kBits>::kExists, Either<First<kBits>, Second>, Second>;

template <int kBits>
using TiledGemv = OrElse<Tiles, kBits, OrElse<TileDigits, kBits, Gemv<kBits>>>;

}  // namespace

const Level kAmx = make_level<TiledGemv>("amx", 512);
}  // namespace jaxgemv
