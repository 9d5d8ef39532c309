// Activations of vectors. Under the rule of isa/kernels.h: internal linkage, and none of the
// standard library's functions.
//
// Polynomials are minimax in the relative error, which is below 2^-28 for both.
#pragma once

#include "convert.h"

namespace jaxgemv::cpu {
namespace {

template <int kCount>
inline Floats polynomial(const float (&coefficients)[kCount], Floats x) {
  Floats sum = broadcast(coefficients[kCount - 1]);
  for (int i = kCount - 2; i >= 0; --i) sum = sum * x + coefficients[i];
  return sum;
}

// 2^n * e^r with |r| <= log(2) / 2. Zero below -87, where float32 becomes subnormal.
inline Floats exp_of(Floats x) {
  constexpr float kLeast = -87, kMost = 88;
  constexpr float kLog2High = 0x1.62ep-1f, kLog2Low = 0x1.0bfbe8p-15f;  // n * kLog2High is exact
  constexpr float kInteger = 0x1.8p23f;  // rounds what is added to it
  Floats inside = select(x < kLeast, broadcast(kLeast), x);
  inside = select(x > kMost, broadcast(kMost), inside);
  const Floats n = (inside * 0x1.715476p+0f + kInteger) - kInteger;
  const Floats r = inside - n * kLog2High - n * kLog2Low;
  // (e^r - 1 - r) / r^2
  constexpr float kTail[] = {0.49999993f, 0.16666515f, 0.041668457f, 0.0083694193f, 0.0013813140f};
  const Floats value = polynomial(kTail, r) * r * r + r + 1.f;
  const Floats power = (Floats)((__builtin_convertvector(n, Ints) + 127) << 23);
  const Floats finite = select(x < kLeast, Floats{}, value * power);
  return select(x > kMost, broadcast(__builtin_inff()), finite);
}

inline Floats silu_of(Floats x) { return x / (1.f + exp_of(-x)); }

// x / 2 * (1 + tanh(u)) = x / (1 + e^(-2 u))
inline Floats gelu_of(Floats x) {
  constexpr float kTwice = 1.5957691f;  // 2 * sqrt(2 / pi)
  return x / (1.f + exp_of(-kTwice * (x + 0.044715f * x * x * x)));
}

// x times the share of a normal distribution that is below x: e^(-z^2 / 2) * t * p(t) beyond
// z = |x|, with t = 1 / (1 + 0.3 z).
inline Floats gelu_exact_of(Floats x) {
  constexpr float kTail[] = {0.11968663f,  0.11957283f, 0.11022741f,  0.078425146f, 0.096059114f,
                             -0.07924977f, 0.1915846f,  -0.22806976f, 0.11237674f,  -0.020613007f};
  const Floats z = (Floats)((Ints)x & 0x7fffffff);
  const Floats t = 1.f / (1.f + 0.3f * z);
  const Floats beyond = exp_of(-0.5f * z * z) * t * polynomial(kTail, t);
  return x * select(x > 0.f, 1.f - beyond, beyond);
}

// A gated activation applies the function of its gate alone.
inline Floats activate(Activation activation, Floats x) {
  switch (activation) {
    case Activation::kNone: return x;
    case Activation::kRelu: return select(x < 0.f, Floats{}, x);  // keeps NaN
    case Activation::kSilu:
    case Activation::kSwiglu: return silu_of(x);
    case Activation::kGelu:
    case Activation::kGeglu: return gelu_of(x);
    case Activation::kGeluExact: return gelu_exact_of(x);
  }
  __builtin_unreachable();
}

}  // namespace
}  // namespace jaxgemv::cpu
