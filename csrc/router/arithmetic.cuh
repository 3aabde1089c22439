// Exponentials and quotients of the router's scores.

#pragma once

#include "approximations.cuh"
#include "rows.cuh"

namespace gbmoe {
namespace {

// e to the power of a logit of type T less the highest. Results that are stored in 16 bits, for which kExact is false, are not
// affected by the error of the fast instruction (two units in the last place of a float, and 0 instead of a subnormal).
template <typename T, bool kExact> class Exponential {
 public:
  // 16-bit logits: the rounding of highest * log2(e) is a factor of all results, and cancels as such, unless it overflows. Above
  // a million these logits are so far apart that any rate only tells whether they are equal, and the products of this one, 0.5,
  // are exact. Logits in float32 still differ by fractions there, so that the highest one is subtracted first.
  __device__ __forceinline__ explicit Exponential(float highest)
      : highest_(highest), rate_(sizeof(T) == 2 && fabsf(highest) > 1e6f ? 0.5f : 1.44269504f) {}

  __device__ __forceinline__ float operator()(float logit) const {
    if constexpr (kExact) return expf(logit - highest_);
    return router_exp2(sizeof(T) == 2 ? fmaf(logit, rate_, -highest_ * rate_) : (logit - highest_) * rate_);
  }

 private:
  float highest_, rate_;
};

// 1 / x for x >= 1, without the branch that other numbers would need.
__device__ __forceinline__ float reciprocal(float x) {
  const float result = router_reciprocal(x);
  return fmaf(fmaf(-x, result, 1.0f), result, result);
}

// x / sum for sum >= 1. An exact result is rounded once: its error would otherwise be twice that of a division.
template <bool kExact> class Share {
 public:
  __device__ __forceinline__ explicit Share(float sum) : sum_(sum), inverse_(reciprocal(sum)) {}

  __device__ __forceinline__ float operator()(float x) const {
    const float share = x * inverse_;
    return kExact ? fmaf(fmaf(-share, sum_, x), inverse_, share) : share;
  }

 private:
  float sum_, inverse_;
};

}  // namespace
}  // namespace gbmoe
