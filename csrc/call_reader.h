// Reads the arrays and attributes of a call (call.h) into a Problem and its Operands, in steps: sizes first, then
// whatever depends on the sizes.
#pragma once

#include <optional>
#include <string>

#include "decode.h"

namespace jaxgemv::detail {

class CallReader {
 public:
  using Wrong = std::optional<ffi::Error>;  // what a step finds wrong, or nothing

  CallReader(const Arrays& arrays, const Attributes& attrs, ffi::AnyBuffer y, Problem* problem,
             Operands* operands)
      : arrays_(arrays), attrs_(attrs), y_(y), p(*problem), o(*operands) {}

  // Checks that every required operand is there, and that some kernel takes the rest. given: all operands present
  // besides kRequired.
  Wrong look_for_operands(const char* backend, const Taken& taken, OperandSet* given) {
    has_x_ = array(Operand::kX).has_value() || !attrs_.transposed || !taken.without_x;
    for (const Operand each : {Operand::kX, Operand::kPacked, Operand::kScale})
      if (!array(each) && (each != Operand::kX || has_x_) &&
          (each != Operand::kScale || !is_exact()))
        return invalid("needs " + std::string(kOperandNames[static_cast<int>(each)]));
    for (int i = 0; i < kArrayCount; ++i)
      if (arrays_[i] && !kRequired.has(static_cast<Operand>(i)))
        given_.add(static_cast<Operand>(i));
    if (attrs_.activation != Activation::kNone) given_.add(Operand::kActivation);
    const auto scale = array(Operand::kScale);
    if (scale && ffi::ByteWidth(scale->element_type()) == 1) given_.add(Operand::kOneByteScale);
    *given = given_;
    const OperandSet missing =
        given_.without(has_x_ ? taken.by[attrs_.transposed] : *taken.without_x);
    if (missing.empty()) return {};
    return invalid(std::string("no ") + backend + " kernel " +
                   (attrs_.transposed ? "for gradients " : "") + "takes " + names_of(missing));
  }

  // The sizes of x, Wq (the packed weights) and y.
  Wrong read_sizes() {
    const auto w_dims = packed().dimensions(), y_dims = y_.dimensions();
    const ffi::AnyBuffer x =
        has_x_ ? *array(Operand::kX) : y_;  // y has the same batch, M and dtype
    const auto x_dims = x.dimensions();
    if (x_dims.size() != 3 || w_dims.size() != 3 || y_dims.size() != 3)
      return invalid("x, Wq and y must have rank 3");
    if (attrs_.bits < 1 || attrs_.bits > 8) return invalid("bits must be 1..8");
    if (!to_dtype(x.element_type(), &p.x) || (!is_wide(p.x) && p.x != Dtype::kI8) ||
        !to_dtype(y_.element_type(), &p.y) || (!is_wide(p.y) && !p.is_exact()))
      return invalid("x and y must be float16, bfloat16 or float32, or x int8 and y int32");
    const bool is_int8 = p.x == Dtype::kI8;
    if (is_int8 ? attrs_.transposed || given_.has(Operand::kNorm) : given_.has(Operand::kXScale))
      return invalid("int8 x has no norm and no transposed product, and other x no x_scale");
    if (is_exact() &&
        (!is_int8 || array(Operand::kScale) || !given_.without(kExactOperands).empty()))
      return invalid("y of int32 is of int8 x, packed, zero and index alone");

    p.bits = static_cast<int>(attrs_.bits);
    p.batch = x_dims[0], p.M = x_dims[1], p.N = w_dims[1];
    p.transposed = attrs_.transposed;
    p.activation = attrs_.activation;
    p.rounded = attrs_.rounded && p.M > kExactRows;  // such a program may have any M
    p.K = p.transposed ? y_dims[2] : x_dims[2];
    if (attrs_.k) {
      if (has_x_ || *attrs_.k > p.K) return invalid("k must be that of wider weights");
      p.padding = p.K - *attrs_.k, p.K = *attrs_.k;
    }
    p.group = attrs_.group > 0 ? attrs_.group : p.K;
    if (p.K < 1 || p.N < 1) return invalid("N and K must be at least 1");
    if (is_gated(p.activation) && p.N % 2 != 0)
      return invalid("N must be even for a gated activation");
    if (has_x_ ? x_dims[2] != p.x_width() : p.M != p.N)
      return invalid("x must have the N of Wq in the transposed product");
    if (y_dims[0] != p.batch || y_dims[1] != p.M || y_dims[2] != p.y_width())
      return invalid(
          "y must have shape (batch, M, N), (batch, M, N / 2) for a gated activation, or "
          "(batch, M, K) transposed");
    o.x = has_x_ ? x.untyped_data() : nullptr;
    o.y = y_.untyped_data();
    return {};
  }

  // The stack of packed weights, and their format.
  Wrong read_packed() {
    const auto w_dims = packed().dimensions();
    const ffi::DataType word = packed().element_type();
    const bool is_e4m3 = word == ffi::DataType::F8E4M3FN, is_e5m2 = word == ffi::DataType::F8E5M2;
    if (word != ffi::DataType::U32 && word != ffi::DataType::U8 && !is_e4m3 && !is_e5m2)
      return invalid("Wq must be uint32, uint8, float8_e4m3fn or float8_e5m2");
    if ((is_e4m3 || is_e5m2) && p.bits != 8) return invalid("bits must be 8 for a float8 Wq");
    const Index bytes = w_dims[2] * (word == ffi::DataType::U32 ? 4 : 1);
    if (bytes != row_bytes(p.K, p.bits)) return invalid("the rows of Wq do not hold K codes");

    p.stack = w_dims[0];
    for (const Operand each :
         {Operand::kScale, Operand::kZero, Operand::kOffset, Operand::kGlobalScale,
          Operand::kCodebook, Operand::kNorm, Operand::kBias}) {
      const auto of = array(each);
      if (p.stack == 1 && of && of->dimensions().size() > 0 && of->dimensions()[0] > 1)
        p.stack = of->dimensions()[0];
    }
    if (w_dims[0] < 1 && !array(Operand::kIndex))
      return invalid("Wq must have an entry unless there is an index");
    o.packed_stack_stride = w_dims[0] > 1 ? p.N * bytes : 0;
    o.packed = static_cast<const uint8_t*>(packed().untyped_data());

    const bool has_zero = array(Operand::kZero).has_value(),
               has_offset = array(Operand::kOffset).has_value(),
               has_codebook = array(Operand::kCodebook).has_value();
    if (has_zero + has_offset + has_codebook + is_e4m3 + is_e5m2 > 1)
      return invalid("only one of zero, offset, codebook and a float8 Wq can be given");
    p.format = has_codebook ? Format::kCodebook
               : is_e4m3    ? Format::kE4M3
               : is_e5m2    ? Format::kE5M2
                            : Format::kAffine;
    p.affine = has_zero ? Affine::kZero : has_offset ? Affine::kOffset : Affine::kSymmetric;
    return {};
  }

  // What turns codes into weights: scale, zero or offset, global scale, codebook.
  Wrong read_scales() {
    if (const auto scale = array(Operand::kScale);
        scale && (!to_param(*scale, p, &o.scale) ||
                  (!is_wide(o.scale.dtype) && !is_one_byte_scale(o.scale.dtype))))
      return invalid("scale has the wrong shape or dtype");
    for (const Operand each : {Operand::kZero, Operand::kOffset})
      if (const auto shift = array(each);
          shift && (!to_param(*shift, p, &o.shift) ||
                    (is_exact() ? o.shift.dtype != Dtype::kI32 : !is_wide(o.shift.dtype))))
        return invalid("zero or offset has the wrong shape or dtype");
    if (const auto global = array(Operand::kGlobalScale);
        global && (global->dimensions().size() > 2 || !to_param(*global, p, &o.global_scale) ||
                   !is_wide(o.global_scale.dtype)))
      return invalid("global_scale has the wrong shape or dtype");
    if (const auto codebook = array(Operand::kCodebook);
        codebook && !to_vector(*codebook, p, Index{1} << p.bits, &o.codebook))
      return invalid("codebook has the wrong shape or dtype");
    return {};
  }

  // What comes before the product (norm, x_scale) and after it (bias, residual).
  Wrong read_parts() {
    const auto norm = array(Operand::kNorm), bias = array(Operand::kBias),
               residual = array(Operand::kResidual), x_scale = array(Operand::kXScale);
    if (norm && !to_vector(*norm, p, p.K, &o.norm))
      return invalid("norm has the wrong shape or dtype");
    if (norm.has_value() != attrs_.eps.has_value())
      return invalid("eps must be given with norm, and only with it");
    if (attrs_.round_norm && !norm) return invalid("round_norm must be given with norm");
    p.eps = attrs_.eps.value_or(0), p.round_norm = attrs_.round_norm;
    if (bias && !to_vector(*bias, p, p.N, &o.bias))
      return invalid("bias has the wrong shape or dtype");
    if (residual) {
      if (residual->dimensions() != y_.dimensions() ||
          !to_dtype(residual->element_type(), &o.residual.dtype) || !is_wide(o.residual.dtype))
        return invalid("residual must have the shape of y and a float dtype");
      o.residual.data = residual->untyped_data();
    }
    if (x_scale) {
      const auto dims = x_scale->dimensions();
      if (x_scale->element_type() != ffi::DataType::F32 || dims.size() != 3 || dims[0] != p.batch ||
          dims[1] != p.M || dims[2] < 1 || p.K % dims[2] != 0)
        return invalid("x_scale has the wrong shape or dtype");
      o.x_scale = static_cast<const float*>(x_scale->untyped_data());
      p.x_group = p.K / dims[2];
    }
    return {};
  }

  // Which stack entry each slice of x is multiplied with.
  Wrong read_index() {
    if (const auto index = array(Operand::kIndex)) {
      if (index->element_type() != ffi::DataType::S32 ||
          index->element_count() != static_cast<size_t>(p.batch))
        return invalid("index must hold one int32 for each slice of x");
      o.index = static_cast<const int32_t*>(index->untyped_data());
    } else if (p.batch > 1) {
      return invalid("a batch of x needs an index");
    }
    if (attrs_.entry) {
      if (array(Operand::kIndex) || *attrs_.entry < 0 || *attrs_.entry >= p.stack)
        return invalid("entry must be one of the stack, and without index");
      keep_entry(*attrs_.entry, &p, &o);
    }
    return {};
  }

  // Call it after all other steps. An operand that overlaps y, other than x, residual and the bias of a single row.
  std::optional<Operand> met_by_y() const {
    const bool is_row_of_bias = p.batch * p.M == 1 && o.bias.data == o.y && o.bias.dtype == p.y;
    std::optional<Operand> met;
    for (int i = 0; i < kArrayCount; ++i) {
      const Operand each = static_cast<Operand>(i);
      if (!arrays_[i] || each == Operand::kX || each == Operand::kResidual) continue;
      if (each == Operand::kBias && is_row_of_bias && !is_gated(p.activation)) continue;
      const Index bytes = static_cast<Index>(arrays_[i]->size_bytes());
      if (meets_y(p, o, arrays_[i]->untyped_data(), bytes)) met = each;
    }
    return met;
  }

 private:
  const Arrays& arrays_;
  const Attributes& attrs_;
  const ffi::AnyBuffer y_;
  Problem& p;
  Operands& o;
  OperandSet given_;
  bool has_x_ = true;

  const std::optional<ffi::AnyBuffer>& array(Operand operand) const {
    return arrays_[static_cast<int>(operand)];
  }
  const ffi::AnyBuffer& packed() const { return *array(Operand::kPacked); }
  bool is_exact() const { return y_.element_type() == ffi::DataType::S32; }
};

}  // namespace jaxgemv::detail
