// Chooses the variant of the transposed kernel: tiles of K, and rows of x at once.
#include "kernel.cuh"

namespace jaxgemv::cuda {

template <Format kFormat, int kBits, typename X>
struct Transposed {
  static constexpr int kMaxTilesM = kBits == 8 ? 2 : 4;  // as registers allow
  static constexpr KernelInfo kInfo{
      "transposed", kFormat, kBits, kDtypeOf<X>, 8 * kMaxTilesM, kTransposedOperands, true};

  // A tile has one group (or a part of one) or two; m, n and k fit into 32 bits.
  static bool supports(const Problem& problem, const Operands& operands, const Device&) {
    return choose(problem, operands).words > 0 && problem.M < (1 << 30) && problem.N < (1 << 30) &&
           problem.K < (1 << 30);
  }

  static cudaError_t run(const Problem& problem, const Operands& operands, const Device& device,
                         cudaStream_t stream) {
    const auto [words, groups] = choose(problem, operands);
    if (groups == 2) return run_words<kNarrow, 2>(problem, operands, device, stream);
    return words == kWide ? run_words<kWide, 1>(problem, operands, device, stream)
                          : run_words<kNarrow, 1>(problem, operands, device, stream);
  }

 private:
  // Words that a lane has of a row: kWide in tiles of 128 codes, kNarrow in tiles of 64, if that is a word or more.
  static constexpr int kWide = kBits / 2, kNarrow = kBits > 2 ? kBits / 4 : kWide;

  static constexpr Index tile_of(int words) { return words * 256 / kBits; }

  struct Choice {
    int words = 0, groups = 0;  // of a tile; no words if no tile suits
  };

  static Choice choose(const Problem& problem, const Operands& operands) {
    for (const Choice c : {Choice{kWide, 1}, Choice{kNarrow, 1}, Choice{kNarrow, 2}}) {
      const Index part = tile_of(c.words) / c.groups;
      const bool suits = c.groups == 1 ? problem.group >= problem.K || problem.group % part == 0
                                       : problem.group == part;
      if (suits && row_bytes(problem.K, kBits) % (4 * c.words) == 0 &&
          is_aligned(operands.packed, 4 * c.words))
        return c;
    }
    return {};
  }

  template <int kWords, int kGroups>
  static cudaError_t run_words(const Problem& problem, const Operands& operands,
                               const Device& device, cudaStream_t stream) {
    if (problem.M <= 8) return run_tiles<kWords, kGroups, 1>(problem, operands, device, stream);
    if (problem.M <= 16) return run_tiles<kWords, kGroups, 2>(problem, operands, device, stream);
    return run_tiles<kWords, kGroups, (kGroups == 1 ? kMaxTilesM : 2)>(problem, operands, device,
                                                                       stream);
  }

  template <int kWords, int kGroups, int kTilesM>
  static cudaError_t run_tiles(const Problem& problem, const Operands& operands,
                               const Device& device, cudaStream_t stream) {
    const Index tiles = ceil_div(problem.K, tile_of(kWords)) * ceil_div(problem.M, 8 * kTilesM);
    return transposed::launch(transposed::gemv_transposed<kBits, kWords, kGroups, kTilesM>, tiles,
                              kTilesM == 1 ? 2 : 1, transposed::kWarps * 32, problem, operands,
                              device, stream);
  }
};

Rows transposed_rows() { return rows_of<Transposed, Format::kAffine, 2, 4, 8>(); }

}  // namespace jaxgemv::cuda
