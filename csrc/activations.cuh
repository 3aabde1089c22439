// The experts' activations, in the order of ACTIVATIONS in gbmoe/reference.py.

#pragma once

#include <type_traits>

namespace gbmoe {

enum Activation { kSilu, kGeluTanh, kGelu, kRelu, kReluSquared, kIdentity };

// The hardware's approximations. Volatile, which keeps several of them in the order in which they are written: started one after the
// other, not each waited for.
__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / (1 + exp(-x)). Where results are rounded to 16 bits, the hardware's approximations are good enough: their relative error
// grows with |x| and is below 2^-16 wherever the result is not 0.
template <bool kFast, typename A> __device__ __forceinline__ A sigmoid(A x) {
  if constexpr (kFast) return fast_reciprocal(1.0f + fast_exp2(x * -1.4426950408889634f));
  else return A(1) / (A(1) + exp(-x));
}

template <typename A> struct ValueAndSlope { A value, slope; };

template <int kKind, bool kFast, typename A> __device__ __forceinline__ ValueAndSlope<A> activation_at(A x) {
  if constexpr (kKind == kSilu) {
    const A s = sigmoid<kFast>(x);
    return {x * s, s + x * s * (A(1) - s)};
  } else if constexpr (kKind == kGeluTanh) {  // (1 + tanh(u)) / 2 = sigmoid(2u)
    const A linear = A(1.5957691216057308), cubic = A(0.07135481627260025);
    const A s = sigmoid<kFast>(x * (linear + cubic * x * x));
    return {x * s, s * (A(1) + x * (A(1) - s) * (linear + A(3) * cubic * x * x))};
  } else if constexpr (kKind == kGelu) {
    const A cdf = A(0.5) * (A(1) + erf(x * A(0.7071067811865476)));
    return {x * cdf, cdf + x * A(0.3989422804014327) * exp(A(-0.5) * x * x)};
  } else if constexpr (kKind == kIdentity) {
    return {x, A(1)};
  } else {
    const A r = x > A(0) || x != x ? x : A(0);
    if constexpr (kKind == kRelu) return {r, x > A(0) ? A(1) : A(0)};
    return {r * r, A(2) * r};
  }
}

// The same of several numbers by the hardware's approximations, side by side.
template <int kKind, int N> __device__ __forceinline__ void activations_at(const float (&x)[N], ValueAndSlope<float> (&result)[N]) {
  if constexpr (kKind == kSilu || kKind == kGeluTanh) {
    constexpr float kLinear = 1.5957691216057308f, kCubic = 0.07135481627260025f, kBase = -1.4426950408889634f;
    float s[N];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      s[i] = fast_exp2(kKind == kSilu ? x[i] * kBase : x[i] * (kLinear * kBase + kCubic * kBase * x[i] * x[i]));
    }
#pragma unroll
    for (int i = 0; i < N; ++i) s[i] = fast_reciprocal(1.0f + s[i]);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const float value = x[i] * s[i], rise = value * (1.0f - s[i]);
      result[i] = {value, kKind == kSilu ? s[i] + rise : s[i] + rise * (kLinear + 3.0f * kCubic * x[i] * x[i])};
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) result[i] = activation_at<kKind, true>(x[i]);
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
    default: return f(std::integral_constant<int, kIdentity>());
  }
}

// fp32, for kernels that finish a product. Each family is a type, chosen when the kernel is launched, and its members differ by
// numbers that it takes from the kind. NaN stays NaN.

// x * sigmoid(x * (linear + cubic * x^2)): silu, and gelu by tanh, since (1 + tanh(u)) / 2 = sigmoid(2u).
struct SigmoidActivation {
  float linear, cubic;

  __device__ __forceinline__ explicit SigmoidActivation(int kind)
      : linear(kind == kSilu ? 1.0f : 1.5957691216057308f), cubic(kind == kSilu ? 0.0f : 0.07135481627260025f) {}
  __device__ __forceinline__ float value(float x) const { return x * sigmoid<true>(x * (linear + cubic * x * x)); }
};

// relu, its square, and the identity.
struct PiecewiseActivation {
  bool clips, squares;

  __device__ __forceinline__ explicit PiecewiseActivation(int kind) : clips(kind != kIdentity), squares(kind == kReluSquared) {}
  __device__ __forceinline__ float value(float x) const {
    const float r = clips && x <= 0.0f ? 0.0f : x;
    return squares ? r * r : r;
  }
};

struct ErfActivation {
  __device__ __forceinline__ explicit ErfActivation(int) {}
  __device__ __forceinline__ float value(float x) const { return 0.5f * x * (1.0f + erff(x * 0.7071067811865476f)); }
};

}  // namespace gbmoe
