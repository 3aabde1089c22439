// The experts' activations, in the order of ACTIVATIONS in gbmoe/reference.py.

#pragma once

namespace gbmoe {

enum Activation { kSilu, kGeluTanh, kGelu, kRelu, kReluSquared, kIdentity };

// fp32, for kernels that finish a product. Each family is a type, chosen when the kernel is launched, and its members differ by
// numbers that it takes from the kind. NaN stays NaN.

// x * sigmoid(x * (linear + cubic * x^2)): silu, and gelu by tanh, since (1 + tanh(u)) / 2 = sigmoid(2u).
struct SigmoidActivation {
  float linear, cubic;

  __device__ __forceinline__ explicit SigmoidActivation(int kind)
      : linear(kind == kSilu ? 1.0f : 1.5957691216057308f), cubic(kind == kSilu ? 0.0f : 0.07135481627260025f) {}
  __device__ __forceinline__ float value(float x) const { return __fdividef(x, 1.0f + __expf(-x * (linear + cubic * x * x))); }
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
