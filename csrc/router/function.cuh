// What a router makes of its logits, as data: a score of each expert, a choice, and weights (gbmoe/router_function.py). The
// kernels that take it serve every function; a softmax, the K highest and their norm, without biases, have kernels of their own.

#pragma once

#include "arithmetic.cuh"
#include "keys.cuh"

namespace gbmoe {

enum class RouterKind : int { kSoftmaxTopK = 0, kSoftmax = 1, kSigmoid = 2, kSqrtSoftplus = 3, kSoftmaxOfChosen = 4 };

struct RouterFunction {
  RouterKind kind;
  int groups, group_topk, group_best;  // one group is no limit; group_best is 1 or 2
  bool normalize;  // divide weights by their sum plus epsilon
  float epsilon, scale;

  __host__ __device__ bool is_softmax() const { return kind == RouterKind::kSoftmax || kind == RouterKind::kSoftmaxOfChosen; }
};
constexpr int kMaxRouterGroups = 64;

namespace {

// The score of a logit, given the highest one of its token and the sum of the exponentials of all less the highest; and what it
// takes to get the slope at it.
class Scoring {
 public:
  __device__ __forceinline__ Scoring(RouterKind kind, float highest, float sum)
      : kind_(kind), exponential_(highest), share_(sum) {}

  __device__ __forceinline__ float share(float logit) const { return share_(exponential_(logit)); }

  __device__ __forceinline__ float operator()(float logit) const {
    if (kind_ == RouterKind::kSigmoid) return sigmoid(logit);
    if (kind_ == RouterKind::kSqrtSoftplus) return router_square_root(fmaxf(logit, 0.0f) + log_of_one_plus(expf(-fabsf(logit))));
    return share(logit);
  }
  // Of a sigmoid s the slope is s (1 - s), where 1 - s is the sigmoid of the negative logit; of a root s it is sigmoid / 2 s, or
  // 0 at 0.
  __device__ __forceinline__ float slope(float logit, float score) const {
    if (kind_ == RouterKind::kSigmoid) return score * sigmoid(-logit);
    return score == 0.0f ? 0.0f : sigmoid(logit) * router_reciprocal(2.0f * score);
  }

 private:
  // For x from 0 to 1, by the series of the inverse hyperbolic tangent: its argument z is at most a third, and terms from z^17 on
  // are below half a unit in the last place.
  static __device__ __forceinline__ float log_of_one_plus(float x) {
    const float z = x * reciprocal(2.0f + x), square = z * z;
    float series = 1.0f / 15;
    series = fmaf(series, square, 1.0f / 13);
    series = fmaf(series, square, 1.0f / 11);
    series = fmaf(series, square, 1.0f / 9);
    series = fmaf(series, square, 1.0f / 7);
    series = fmaf(series, square, 1.0f / 5);
    series = fmaf(series, square, 1.0f / 3);
    return fmaf(2.0f * z * square, series, 2.0f * z);
  }
  static __device__ __forceinline__ float sigmoid(float x) {
    const float power = expf(-fabsf(x)), part = reciprocal(1.0f + power);
    return x >= 0.0f ? part : power * part;
  }

  RouterKind kind_;
  Exponential<float, true> exponential_;
  Share<true> share_;
};

// What the lanes of a group share about a token's logits, which are in shared memory: the highest one, and the sum of their
// exponentials. Lane l has the numbers of vectors l, l + G, l + 2 G and so on, `numbers` in all.
template <int G, int V> struct RouterRow {
  using Floats = Vector<float, V>;

  static __device__ __forceinline__ int at(int c, int lane) { return (c * G + lane) * V; }

  template <typename F> static __device__ __forceinline__ void each(int numbers, int lane, const F& f) {
#pragma unroll 1
    for (int c = 0; c * V < numbers; ++c) f(at(c, lane));
  }

  // Reads a row's numbers into shared memory, with `fill` beyond the last. Several loads are on their way at once.
  static __device__ __forceinline__ void load(
      const AnyNumbers& from, int64_t first, int experts, int numbers, int lane, float fill, float* row) {
    with_type(from.dtype, [&](auto zero) {
      using Number = decltype(zero);
      const auto* vector = reinterpret_cast<const Vector<Number, V>*>(static_cast<const Number*>(from.data) + first);
#pragma unroll 4
      for (int c = 0; c * V < numbers; ++c) {
        Vector<Number, V> loaded;
#pragma unroll
        for (int v = 0; v < V; ++v) loaded.element[v] = narrow<Number>(fill);
        if (at(c, lane) < experts) loaded = vector[c * G + lane];
        Floats floats;
#pragma unroll
        for (int v = 0; v < V; ++v) floats.element[v] = widen(loaded.element[v]);
        *reinterpret_cast<Floats*>(row + at(c, lane)) = floats;
      }
    });
  }

  // NaN where there is one.
  static __device__ __forceinline__ float highest(int numbers, int lane, const float* row) {
    uint32_t highest = 0;
    each(numbers, lane, [&](int at) {
      const Floats floats = *reinterpret_cast<const Floats*>(row + at);
#pragma unroll
      for (int v = 0; v < V; ++v) highest = max(highest, order_of(floats.element[v]));
    });
    return logit_of(group_max<G>(highest));
  }

  static __device__ __forceinline__ float sum_of_exponentials(float highest, int numbers, int lane, const float* row) {
    const Exponential<float, true> exponential(highest);
    float sum = 0;
    each(numbers, lane, [&](int at) {
      const Floats floats = *reinterpret_cast<const Floats*>(row + at);
#pragma unroll
      for (int v = 0; v < V; ++v) sum += exponential(floats.element[v]);
    });
    return group_sum<G>(sum);
  }

  static __device__ __forceinline__ void store(const AnyNumbers& to, int64_t first, int at, const Floats& floats) {
    with_type(to.dtype, [&](auto zero) {
      using Number = decltype(zero);
      Vector<Number, V> narrowed;
#pragma unroll
      for (int v = 0; v < V; ++v) narrowed.element[v] = narrow<Number>(floats.element[v]);
      *reinterpret_cast<Vector<Number, V>*>(static_cast<Number*>(to.data) + first + at) = narrowed;
    });
  }
};

// Out of line, for the few logits of the experts that were chosen.
__device__ __noinline__ float score_of(RouterKind kind, float highest, float sum, float logit) {
  return Scoring(kind, highest, sum)(logit);
}

}  // namespace
}  // namespace gbmoe
