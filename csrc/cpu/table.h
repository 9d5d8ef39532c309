// The rows of the CPU's table of kernels, and the instruction sets that they are compiled for.
#pragma once

#include "../kernel.h"

namespace jaxgemv::cpu {

// What is computed at a time. Of a product rows [n0, n1) of y; of the transposed product what rows
// [n0, n1) of the weight add to codes [k0, k0 + codes) of y, of which the last may lie beyond K.
// n0 is a multiple of the rows of a row block, or of kDecoded; k0 and codes are of kTileUnit.
struct Tile {
  Index n0, n1, k0, codes;
};

// Sizes are in values of four bytes.
struct Kernel {
  KernelInfo info;
  bool takes_any_x;  // values of x, that is: pack_x is always true
  bool (*supports)(const Problem&, const Operands&);

  // x is converted once per call, to what the kernel reads: `prepare` writes what rows share, then
  // several threads pack rows [m0, m1) each. pack_x returns false where the values of x do not suit
  // the kernel.
  Index (*x_size)(const Problem&, const Operands&);
  void (*prepare)(const Problem&, const Operands&, float* packed);
  bool (*pack_x)(const Problem&, const Operands&, Index slice, Index m0, Index m1, float* packed);

  // sums, of a tile of the transposed product: what it adds to y[slice], in an order of its own.
  Index (*scratch_size)(const Problem&, const Operands&, Index codes);
  void (*run)(const Problem&, const Operands&, Index slice, float* packed, const Tile&, float* sums,
              float* scratch);

  // Of the transposed product: y[slice, :, k0:k0 + codes] from the sums of `parts` tiles with these
  // codes, one after another.
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
  float scale;  // of scores
  const void *q, *k, *v;
  void* out;
};

// An instruction set: the same kernels, compiled for one kind of processor. What its instructions do
// nothing for comes from another one that has the same vectors.
struct Isa {
  const char* name;
  Kernels own;
  Kernels ragged;  // transposed ones for groups that are not whole blocks
  const Isa* base = nullptr;

  // Of its own where there is no base: of a key-value head, with memory for so many floats.
  void (*attend)(const Attention&, Index kv_head, float* scratch) = nullptr;
  Index (*attention_scratch)(const Attention&) = nullptr;

  const Isa& with_vectors() const { return base == nullptr ? *this : base->with_vectors(); }
};

extern const Isa kAmx, kAvx512Bf16, kAvx512Vbmi, kAvx512, kAvxVnni, kAvx2, kPortable;

// What products take.
constexpr OperandSet kAllParts =
    kEpilogueOperands |
    OperandSet::of(Operand::kNorm, Operand::kOneByteScale, Operand::kGlobalScale);

// What those of int8 x take.
constexpr OperandSet kInt8Parts =
    kAllParts.without(OperandSet::of(Operand::kNorm)) | OperandSet::of(Operand::kXScale);

// Rows of the weight that kernels take at a time, in a row block.
constexpr int kRowBlock = 32;
// Elements of x beyond these powers of two are left to f32_panel where x is bfloat16: their parts or
// sums might be no float32.
constexpr int kMostExponent = 100;
// Of the transposed product: tiles are multiples of so many codes; so many rows of the weight are
// decoded at once; and so many rows of x share that, whose sums fit into the nearest cache.
constexpr int kTileUnit = 128, kDecoded = 4, kSharedRows = 16;
constexpr int kMaxTileCodes = 2048;
// KernelInfo::rows of kernels for many rows, and of a panel, whose sums stay in the second-level cache.
constexpr int kSharingRows = 512;
// Groups of so many codes, and multiples of that, are whole panels of weights_panel.h, which scales the sums of
// their codes.
constexpr int kSumGroup = 128;
constexpr bool fills_panels(const Problem& p) { return p.group >= p.K || p.group % kSumGroup == 0; }

}  // namespace jaxgemv::cpu
