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

// The scores of logits, given the highest one of their token and the sum of the exponentials of all less the highest; and what it
// takes to get the slopes at them. Each takes several logits, so that which function it is is asked once for all of them.
class Scoring {
 public:
  __device__ __forceinline__ Scoring(RouterKind kind, float highest, float sum)
      : kind_(kind), exponential_(highest), share_(sum) {}

  __device__ __forceinline__ float share(float logit) const { return share_(exponential_(logit)); }

  template <int V> __device__ __forceinline__ Vector<float, V> operator()(const Vector<float, V>& logits) const {
    if (kind_ == RouterKind::kSigmoid) return of_each(logits, [](float logit) { return sigmoid(Power(logit)); });
    if (kind_ == RouterKind::kSqrtSoftplus) return of_each(logits, [](float logit) { return root(Power(logit)); });
    return of_each(logits, [&](float logit) { return share(logit); });
  }
  // Of a sigmoid s the slope is s (1 - s), and of a root s it is sigmoid / 2 s, or 0 at 0.
  template <int V> __device__ __forceinline__ Vector<float, V> slopes(const Vector<float, V>& logits) const {
    if (kind_ == RouterKind::kSigmoid) {
      return of_each(logits, [](float logit) {
        const Power at(logit);
        return at.power * at.part * at.part;
      });
    }
    return of_each(logits, [](float logit) {
      const Power at(logit);
      const float score = root(at);
      return score == 0.0f ? 0.0f : sigmoid(at) * router_reciprocal(2.0f * score);
    });
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
  // Of a logit x: e to the power of -|x|, and the sigmoid of |x|; 1 less that is their product.
  struct Power {
    float x, power, part;
    __device__ __forceinline__ explicit Power(float of) : x(of), power(expf(-fabsf(of))), part(reciprocal(1.0f + power)) {}
  };
  static __device__ __forceinline__ float sigmoid(const Power& at) { return at.x >= 0.0f ? at.part : at.power * at.part; }
  static __device__ __forceinline__ float root(const Power& at) {
    return router_square_root(fmaxf(at.x, 0.0f) + log_of_one_plus(at.power));
  }
  template <int V, typename F> static __device__ __forceinline__ Vector<float, V> of_each(const Vector<float, V>& logits, const F& f) {
    Vector<float, V> results;
#pragma unroll
    for (int v = 0; v < V; ++v) results.element[v] = f(logits.element[v]);
    return results;
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

  // Reads a row's numbers into shared memory, with `fill` beyond the last, and returns the highest of the calling lane, NaN where there
  // is one. Several loads are on their way at once.
  static __device__ __forceinline__ float load(
      const AnyNumbers& from, int64_t first, int experts, int numbers, int lane, float fill, float* row) {
    uint32_t highest = __float_as_uint(-INFINITY);
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
        for (int v = 0; v < V; ++v) {
          floats.element[v] = widen(loaded.element[v]);
          highest = Word<float>::higher(highest, __float_as_uint(floats.element[v]));
        }
        *reinterpret_cast<Floats*>(row + at(c, lane)) = floats;
      }
    });
    return __uint_as_float(highest);
  }

  // Of the highest numbers of all lanes; NaN where there is one.
  static __device__ __forceinline__ float highest_of_all(float of_lane) { return logit_of(group_max<G>(order_of(of_lane))); }

  // kExact: scores are made of the sum, and not its logarithm alone.
  template <bool kExact> static __device__ __forceinline__ float sum_of_exponentials(
      float highest, int numbers, int lane, const float* row) {
    const Exponential<float, kExact> exponential(highest);
    float sum = 0;
    each(numbers, lane, [&](int at) {
      const Floats floats = *reinterpret_cast<const Floats*>(row + at);
#pragma unroll
      for (int v = 0; v < V; ++v) sum += exponential(floats.element[v]);
    });
    return group_sum<G>(sum);
  }

  static __device__ __forceinline__ Floats read(const AnyNumbers& from, int64_t first, int at) {
    Floats floats;
    with_type(from.dtype, [&](auto zero) {
      using Number = decltype(zero);
      const auto loaded = *reinterpret_cast<const Vector<Number, V>*>(static_cast<const Number*>(from.data) + first + at);
#pragma unroll
      for (int v = 0; v < V; ++v) floats.element[v] = widen(loaded.element[v]);
    });
    return floats;
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
  return Scoring(kind, highest, sum)(Vector<float, 1>{logit}).element[0];
}

}  // namespace
}  // namespace gbmoe
