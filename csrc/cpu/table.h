// A row of the CPU's table of kernels, and the instruction sets that kernels are compiled for.
#pragma once

#include "../kernel.h"

namespace jaxgemv::cpu {

// What a task computes. In a product: rows [n0, n1) of y. In the transposed product: what rows [n0, n1) of the
// weight add to codes [k0, k0 + codes) of y, of which the last may lie beyond K. n0 is a multiple of the rows of y
// in a row block, or of kDecoded; k0 and codes are multiples of kTileUnit.
struct Tile {
  Index n0, n1, k0, codes;
};

// Sizes are in values of four bytes.
struct Kernel {
  KernelInfo info;
  bool takes_any_x;  // any values of x: pack_x is always true
  bool (*supports)(const Problem&, const Operands&);

  // x is converted once per call, to what the kernel reads: `prepare` writes what rows share, then
  // several threads pack rows [m0, m1) each. pack_x returns false where the values of x do not suit
  // the kernel.
  Index (*x_size)(const Problem&, const Operands&);
  void (*prepare)(const Problem&, const Operands&, float* packed);
  bool (*pack_x)(const Problem&, const Operands&, Index slice, Index m0, Index m1, float* packed);

  // sums: only in the transposed product, what the tile adds to y[slice], in the kernel's own order.
  Index (*scratch_size)(const Problem&, const Operands&, Index codes);
  void (*run)(const Problem&, const Operands&, Index slice, float* packed, const Tile&, float* sums,
              float* scratch);

  // Only in the transposed product, else null: writes y[slice, :, k0:k0 + codes] from the sums of the `parts` tiles
  // with these codes, which lie one after another.
  void (*finish)(const Problem&, const Operands&, Index slice, const Tile&, const float* sums,
                 Index parts);
};

struct Kernels {
  const Kernel* rows;
  int count;

  const Kernel* begin() const { return rows; }
  const Kernel* end() const { return rows + count; }
};

// Attention of one token: queries (heads, width), keys and values (kv_heads, size, width), of which it sees
// positions [first, end). `out` is as q is.
struct Attention {
  Dtype dtype;  // a wide one, of all arrays
  Index heads, kv_heads, size, width, first, end;
  float scale;  // of the scores
  const void *q, *k, *v;
  void* out;
};

// An instruction set: the kernels, compiled for one kind of processor. Kernels that its instructions do
// not improve come from `base`, another set that has the same vectors.
struct Isa {
  const char* name;
  Kernels own;
  Kernels ragged;  // transposed ones for groups that are not whole blocks
  const Isa* base = nullptr;

  // Set only without a base: attention for one key-value head, and how many floats of scratch that needs.
  void (*attend)(const Attention&, Index kv_head, float* scratch) = nullptr;
  Index (*attention_scratch)(const Attention&) = nullptr;

  const Isa& with_vectors() const { return base == nullptr ? *this : base->with_vectors(); }
};

extern const Isa kAmx, kAvx512Bf16, kAvx512Vbmi, kAvx512, kAvxVnni, kAvx2, kPortable;

// The operands, besides kRequired, that kernels of products take.
constexpr OperandSet kAllParts =
    kEpilogueOperands |
    OperandSet::of(Operand::kNorm, Operand::kOneByteScale, Operand::kGlobalScale);

// The same with int8 x.
constexpr OperandSet kInt8Parts =
    kAllParts.without(OperandSet::of(Operand::kNorm)) | OperandSet::of(Operand::kXScale);

// Rows of the weight that most kernels take at a time: a row block.
constexpr int kRowBlock = 32;
// Kernels that multiply bfloat16 leave x with elements beyond 2^kMostExponent to others, amx_bf16 also with those
// below 2^-kMostExponent: their parts or sums might be no float32.
constexpr int kMostExponent = 100;
// For the transposed product: tiles are multiples of kTileUnit codes; kDecoded rows of the weight are decoded at
// once; and kSharedRows rows of x share these, whose sums fit into the first-level cache.
constexpr int kTileUnit = 128, kDecoded = 4, kSharedRows = 16;
constexpr int kMaxTileCodes = 2048;
// Rows of x that share a decoded panel, KernelInfo::rows of kernels for many rows: their sums stay in the
// second-level cache.
constexpr int kSharingRows = 512;
// Groups of kSumGroup codes, or a multiple, are whole panels of weights_panel.h, which then scales the sums of
// their codes.
constexpr int kSumGroup = 128;
constexpr bool fills_panels(const Problem& p) { return p.group >= p.K || p.group % kSumGroup == 0; }

}  // namespace jaxgemv::cpu
