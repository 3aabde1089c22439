// The experts' activations, in the order of ACTIVATIONS in gbmoe/plain/plain_activation.py: each formula once, and three ways to
// evaluate it.
//
//   activation_at      value and slope of one number, in any accumulation type: the kernels of activation_kernels.cu
//   activations_at     value and slope of several floats side by side, by the hardware's approximations: the epilogue that goes
//                      back through the activation
//   *Activation        value of one float, with the kind chosen at run time inside a family, and values of several: the epilogues of
//                      the up projection
//
//   silu       x * sigmoid(x)
//   gelu_tanh  x * sigmoid(x * (kGeluLinear + kGeluCubic * x^2)), because (1 + tanh(u)) / 2 = sigmoid(2u)
//   gelu       x * Phi(x), with Phi the normal distribution function, (1 + erf(x / sqrt(2))) / 2
//   relu       max(x, 0);   relu_squared  max(x, 0)^2;   identity  x
//
// Two have constants, and change the gate that they are multiplied by, too:
//
//   clamped_silu  y * sigmoid(alpha * y) with y = min(x, limit);    gate  min(max(g, -gate_limit), gate_limit) + gate_offset
//   situ          beta * tanh(x / beta) * sigmoid(x);               gate  gate_limit * tanh(g / gate_limit)
//
// NaN stays NaN in all of them. Values and slopes of finite numbers are finite, unless the square of relu_squared overflows; those of
// infinities and of NaN are what torch's activations have, so that relu's slope at NaN is 1.

#pragma once

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "approximations.cuh"

namespace gbmoe {

enum Activation { kSilu, kGeluTanh, kGelu, kRelu, kReluSquared, kIdentity, kClampedSilu, kSitu };

// An activation with its constants; those of situ lie in alpha (its beta) and in gate_limit. In double too, for layers in fp64.
struct ActivationOf {
  int kind;
  float alpha, limit, gate_limit, gate_offset;
  double wide[4];

  template <typename A> __device__ __forceinline__ A constant(int i) const {
    if constexpr (sizeof(A) == 8) return wide[i];
    else return i == 0 ? alpha : i == 1 ? limit : i == 2 ? gate_limit : gate_offset;
  }
};
// `kind_and_constants` are the kind, and alpha, limit, gate_limit and gate_offset or nothing; plain_activation.kernel_arguments makes them.
inline ActivationOf activation_of(const std::vector<double>& kind_and_constants) {
  ActivationOf of{static_cast<int>(kind_and_constants[0]), 1.0f, INFINITY, INFINITY, 0.0f, {1.0, INFINITY, INFINITY, 0.0}};
  float* const narrow[] = {&of.alpha, &of.limit, &of.gate_limit, &of.gate_offset};
  for (size_t i = 0; i + 1 < kind_and_constants.size() && i < 4; ++i) {
    of.wide[i] = kind_and_constants[i + 1];
    *narrow[i] = static_cast<float>(of.wide[i]);
  }
  return of;
}
constexpr bool changes_gate(int kind) { return kind == kClampedSilu || kind == kSitu; }

// --------------------------------------------------------------------------------------------------- what formulas are made of

constexpr float kMinusLog2E = -1.4426950408889634f;  // exp(-x) = exp2(kMinusLog2E * x)

// 1 / (1 + exp(-x)), and 1 less that, which a subtraction would leave with few bits where the sigmoid is near 1. Where results are
// rounded to 16 bits, the subtraction and the hardware's approximations are good enough: their relative error grows with |x| and is
// below 2^-16 wherever the result is not 0.
template <typename A> struct Sigmoid { A value, complement; };
template <bool kFast, typename A> __device__ __forceinline__ Sigmoid<A> sigmoid(A x) {
  if constexpr (kFast) {
    const A s = fast_reciprocal(1.0f + fast_exp2(x * kMinusLog2E));
    return {s, 1.0f - s};
  } else {
    const A power = exp(-A(fabs(x))), greater = A(1) / (A(1) + power), smaller = power * greater;
    return x < A(0) ? Sigmoid<A>{smaller, greater} : Sigmoid<A>{greater, smaller};
  }
}

// Several at once, of arguments that were multiplied by kMinusLog2E, in place: the exponentials are under way together, and then the
// reciprocals. One after the other, each sigmoid takes the time of two waits.
template <int N> __device__ __forceinline__ void fast_sigmoids(float (&x)[N]) {
#pragma unroll
  for (float& one : x) one = fast_exp2(one);
#pragma unroll
  for (float& one : x) one = fast_reciprocal(1.0f + one);
}

constexpr double kGeluLinear = 1.5957691216057308, kGeluCubic = 0.07135481627260025;

// What silu and gelu_tanh take the sigmoid of, times `scale`, which is folded into the coefficients.
template <typename A> __device__ __forceinline__ A cubic_argument(A x, A linear, A cubic) { return x * (linear + cubic * x * x); }
template <int kKind, typename A> __device__ __forceinline__ A sigmoid_argument(A x, A scale) {
  if constexpr (kKind == kSilu) return x * scale;
  else return cubic_argument(x, A(kGeluLinear) * scale, A(kGeluCubic) * scale);
}
// x^2, but no more than 64^2: for gelu_tanh, whose sigmoid is 0 or 1 from there on, so that what x^2 is multiplied by is 0, and x^2 must
// not be infinite. That of NaN is 64^2.
template <typename A> __device__ __forceinline__ A bounded_square(A x) {
  const A bounded = min(A(fabs(x)), A(64));
  return bounded * bounded;
}
// The slope of gelu_tanh's argument; its factor in the activation's slope is 0 where the bound matters.
template <typename A> __device__ __forceinline__ A gelu_argument_slope(A x) {
  return A(kGeluLinear) + A(3) * A(kGeluCubic) * bounded_square(x);
}

// 1 + erf(x / sqrt(2)): twice the normal distribution function.
template <typename A> __device__ __forceinline__ A twice_normal_cdf(A x) { return A(1) + erf(x * A(0.7071067811865476)); }

template <typename A> __device__ __forceinline__ A relu(A x) { return x <= A(0) ? A(0) : x; }

// ------------------------------------------------------------------------------------------------------------ value and slope

template <typename A> struct ValueAndSlope { A value, slope; };

// scale * tanh(x / scale)
template <typename A> __device__ __forceinline__ ValueAndSlope<A> scaled_tanh(A x, A scale) {
  const A t = tanh(x / scale);
  return {scale * t, A(1) - t * t};
}

template <int kKind, bool kFast, typename A>
__device__ __forceinline__ ValueAndSlope<A> activation_at(A x, const ActivationOf& of) {
  if constexpr (kKind == kClampedSilu) {
    const A alpha = of.constant<A>(0), limit = of.constant<A>(1);
    const A y = x > limit ? limit : x;
    const Sigmoid<A> s = sigmoid<kFast>(alpha * y);
    const A value = y * s.value;
    return {value, x <= limit ? s.value + alpha * value * s.complement : A(0)};
  } else if constexpr (kKind == kSitu) {
    const ValueAndSlope<A> bounded = scaled_tanh(x, of.constant<A>(0));
    const Sigmoid<A> s = sigmoid<kFast>(x);
    return {bounded.value * s.value, bounded.slope * s.value + bounded.value * s.value * s.complement};
  } else if constexpr (kKind == kSilu || kKind == kGeluTanh) {
    const Sigmoid<A> s = sigmoid<kFast>(sigmoid_argument<kKind>(x, A(1)));
    const A value = x * s.value;
    if constexpr (kKind == kSilu) return {value, s.value + value * s.complement};
    else return {value, s.value + value * (s.complement * gelu_argument_slope(x))};
  } else if constexpr (kKind == kGelu) {
    const A cdf = A(0.5) * twice_normal_cdf(x);
    return {x * cdf, cdf + x * A(0.3989422804014327) * exp(A(-0.5) * x * x)};
  } else if constexpr (kKind == kIdentity) {
    return {x, A(1)};
  } else {
    const A r = relu(x);
    if constexpr (kKind == kRelu) return {r, x <= A(0) ? A(0) : A(1)};
    return {r * r, A(2) * r};
  }
}

// What the activation is multiplied by, of g.
template <int kKind, typename A> __device__ __forceinline__ ValueAndSlope<A> gate_at(A g, const ActivationOf& of) {
  if constexpr (kKind == kClampedSilu) {
    const A limit = of.constant<A>(2), bounded = g > limit ? limit : g < -limit ? -limit : g;
    return {bounded + of.constant<A>(3), fabs(g) <= limit ? A(1) : A(0)};
  } else if constexpr (kKind == kSitu) {
    return scaled_tanh(g, of.constant<A>(2));
  } else {
    return {g, A(1)};
  }
}

// The same for several numbers side by side, by the hardware's approximations. The slope is computed from the value, which is
// needed anyway. That takes fewer instructions than in activation_at, and rounds differently.
template <int kKind, int N>
__device__ __forceinline__ void activations_at(const float (&x)[N], ValueAndSlope<float> (&result)[N], const ActivationOf& of) {
  if constexpr (kKind == kSilu || kKind == kGeluTanh) {
    float s[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if constexpr (kKind == kSilu) s[i] = sigmoid_argument<kSilu>(x[i], kMinusLog2E);
      // The square is that of the slope, so that bounding it takes no instruction more than two squares would.
      else
        s[i] = x[i] * fmaf(
                          static_cast<float>(kGeluCubic) * kMinusLog2E, bounded_square(x[i]),
                          static_cast<float>(kGeluLinear) * kMinusLog2E);
    }
    fast_sigmoids(s);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = x[i] * s[i], rise = value * (1.0f - s[i]);
      result[i] = {value, kKind == kSilu ? s[i] + rise : s[i] + rise * gelu_argument_slope(x[i])};
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) result[i] = activation_at<kKind, true>(x[i], of);
  }
}

// Calls f with the activation as a constant: outside the loops, so that these have no branches.
template <typename F> __device__ __forceinline__ void with_activation(int activation, F f) {
  switch (activation) {
    case kSilu: return f(std::integral_constant<int, kSilu>());
    case kGeluTanh: return f(std::integral_constant<int, kGeluTanh>());
    case kGelu: return f(std::integral_constant<int, kGelu>());
    case kRelu: return f(std::integral_constant<int, kRelu>());
    case kReluSquared: return f(std::integral_constant<int, kReluSquared>());
    case kClampedSilu: return f(std::integral_constant<int, kClampedSilu>());
    case kSitu: return f(std::integral_constant<int, kSitu>());
    default: return f(std::integral_constant<int, kIdentity>());
  }
}

// The same for those that Hopper's kernels for pairs of h and g have.
constexpr bool has_pairs(int kind) { return kind == kSilu || kind == kGeluTanh || changes_gate(kind); }
template <typename F> __device__ __forceinline__ void with_activation_of_pairs(int activation, F f) {
  switch (activation) {
    case kSilu: return f(std::integral_constant<int, kSilu>());
    case kGeluTanh: return f(std::integral_constant<int, kGeluTanh>());
    case kSitu: return f(std::integral_constant<int, kSitu>());
    default: return f(std::integral_constant<int, kClampedSilu>());
  }
}

// -------------------------------------------------------------------------------------- values only, for epilogues of a GEMM

// Each family is a type, which is chosen when the kernel is launched. Its members differ by numbers that it takes from the activation.
// gate() is what value() is multiplied by.

struct PlainGate {
  __device__ __forceinline__ float gate(float g) const { return g; }
};

// values() is value() of several numbers, in place, with the same bits.
template <typename Family, int N> __device__ __forceinline__ void values(const Family& family, float (&x)[N]) {
#pragma unroll
  for (float& one : x) one = family.value(one);
}

struct SigmoidActivation : PlainGate {  // silu, whose cubic coefficient is 0, and gelu_tanh
  float linear, cubic;

  __device__ __forceinline__ explicit SigmoidActivation(const ActivationOf& of)
      : linear(of.kind == kSilu ? 1.0f : static_cast<float>(kGeluLinear)),
        cubic(of.kind == kSilu ? 0.0f : static_cast<float>(kGeluCubic)) {}
  // silu's cubic coefficient, 0, times +inf would be NaN. fminf drops a NaN, but x itself is a factor of the result.
  __device__ __forceinline__ float value(float x) const {
    return x * sigmoid<true>(cubic_argument(fminf(x, FLT_MAX), linear, cubic)).value;
  }
};

template <int N> __device__ __forceinline__ void values(const SigmoidActivation& family, float (&x)[N]) {
  float s[N];
#pragma unroll
  for (int i = 0; i < N; ++i) s[i] = sigmoid_argument<kSilu>(x[i], kMinusLog2E);
  if (family.cubic != 0.0f) {
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = cubic_argument(x[i], family.linear, family.cubic) * kMinusLog2E;
  }
  fast_sigmoids(s);
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] *= s[i];
}

struct PiecewiseActivation : PlainGate {  // relu, its square, and the identity
  bool clips, squares;

  __device__ __forceinline__ explicit PiecewiseActivation(const ActivationOf& of) : clips(of.kind != kIdentity), squares(of.kind == kReluSquared) {}
  __device__ __forceinline__ float value(float x) const {
    const float r = clips ? relu(x) : x;
    return squares ? r * r : r;
  }
};

struct ErfActivation : PlainGate {  // gelu; half of x is at hand before erf is
  __device__ __forceinline__ explicit ErfActivation(const ActivationOf&) {}
  __device__ __forceinline__ float value(float x) const { return 0.5f * x * twice_normal_cdf(x); }
};

struct GatingActivation {  // clamped_silu and situ, which change the gate
  const ActivationOf& of;

  __device__ __forceinline__ explicit GatingActivation(const ActivationOf& of_) : of(of_) {}
  __device__ __forceinline__ float value(float x) const {
    return of.kind == kSitu ? activation_at<kSitu, true>(x, of).value : activation_at<kClampedSilu, true>(x, of).value;
  }
  __device__ __forceinline__ float gate(float g) const {
    return of.kind == kSitu ? gate_at<kSitu>(g, of).value : gate_at<kClampedSilu>(g, of).value;
  }
};

// value(h) * gate(g) of several numbers, to h, with the same bits.
template <typename Family, int N>
__device__ __forceinline__ void gated_values(const Family& family, float (&h)[N], const float (&g)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) h[i] = family.value(h[i]) * family.gate(g[i]);
}
// The branch is outside the loops, and the sigmoids are under way together.
template <int N> __device__ __forceinline__ void gated_values(const GatingActivation& family, float (&h)[N], const float (&g)[N]) {
  const ActivationOf& of = family.of;
  if (of.kind == kSitu) {
#pragma unroll
    for (int i = 0; i < N; ++i) h[i] = activation_at<kSitu, true>(h[i], of).value * gate_at<kSitu>(g[i], of).value;
    return;
  }
  const float alpha = of.constant<float>(0), limit = of.constant<float>(1);
  float s[N];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    h[i] = h[i] > limit ? limit : h[i];
    s[i] = alpha * h[i] * kMinusLog2E;
  }
  fast_sigmoids(s);
#pragma unroll
  for (int i = 0; i < N; ++i) h[i] = h[i] * s[i] * gate_at<kClampedSilu>(g[i], of).value;
}

}  // namespace gbmoe
