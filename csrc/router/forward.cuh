// The router's forward kernel: softmax over the experts, the K highest, their p-norm and the logsumexp of the z-loss.

#pragma once

#include "../early_launch.cuh"
#include "candidates.cuh"
#include "sorted_lists.cuh"

namespace gbmoe {
namespace {

constexpr int kThreads = 128;

// e to the power of a logit of type T less the highest. Results that are stored in 16 bits, for which kExact is false, are not affected by
// the error of the fast instruction (two units in the last place of a float, and 0 instead of a subnormal).
template <typename T, bool kExact> class Exponential {
 public:
  // 16-bit logits: the rounding of highest * log2(e) is a factor of all results, and cancels as such, unless it overflows. Above a million
  // these logits are so far apart that any rate only tells whether they are equal, and the products of this one, 0.5, are exact. Logits in
  // float32 still differ by fractions there, so that the highest one is subtracted first.
  __device__ __forceinline__ explicit Exponential(float highest)
      : highest_(highest), rate_(sizeof(T) == 2 && fabsf(highest) > 1e6f ? 0.5f : 1.44269504f) {}

  __device__ __forceinline__ float operator()(float logit) const {
    if constexpr (kExact) return expf(logit - highest_);
    const float power = sizeof(T) == 2 ? fmaf(logit, rate_, -highest_ * rate_) : (logit - highest_) * rate_;
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(power));
    return result;
  }

 private:
  float highest_, rate_;
};

// 1 / x for x >= 1, without the branch that other numbers would need.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
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

// kList: the length of the list that a token's lanes share, a power of two that is at least the number of slots; or 0 where the
// token has a whole warp, which ranks candidates.
template <typename T, typename S, int G, int N, int kList, int kMaxVector>
__global__ void __launch_bounds__(kThreads) route_kernel(
    const T* __restrict__ logits_TE, S* __restrict__ scores_TE, S* __restrict__ weights_TK, const ScalarType scores_dtype,
    int64_t* __restrict__ ids_TK, float* __restrict__ logsumexp_T, const RouterShape shape) {
  wait_for_kernel_before();
  constexpr int V = kVector<T, S, N, kMaxVector>, kNumbers = Word<T>::kNumbers;
  using Layout = RowLayout<T, G, N, V>;
  using Key = typename Keys<T>::Key;
  const int lane = threadIdx.x % G;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / G) + threadIdx.x / G;
  // Lanes of a warp stay together for the shuffles; those behind the last token read token 0 and write nothing.
  const bool live = token < shape.tokens;
  const int64_t first = (live ? token : 0) * shape.experts;

  // What a lane holds beyond the last expert is -inf, of an expert higher than all others: behind every one that can be chosen.
  uint32_t word[Layout::kWords];
  Layout::load(logits_TE + first, shape.experts, lane, -INFINITY, word);
  constexpr int kSets = 2 / kNumbers;
  uint32_t high[kSets];
#pragma unroll
  for (int w = 0; w < Layout::kWords; ++w) high[w % kSets] = w < kSets ? word[w] : Word<T>::higher(high[w % kSets], word[w]);
  // The highest of the even numbers and that of the odd ones.
  const float best[2] = {Word<T>::get(high[0], 0), Word<T>::get(high[kSets - 1], kNumbers - 1)};
  const float highest = logit_of(group_max<G>(max(order_of(best[0]), order_of(best[1]))));

  float value[N], sum = 0;
  const auto divide_up = [&](auto is_exact) {
    constexpr bool kExact = decltype(is_exact)::value;
    const Exponential<T, kExact> exponential(highest);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      value[i] = exponential(Layout::get(word, i));
      sum += value[i];
    }
    sum = group_sum<G>(sum);
    const Share<kExact> share(sum);
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = share(value[i]);
  };
  // In kernels for one type of scores the compiler knows this.
  const bool exact = std::is_void_v<S> ? scores_dtype == ScalarType::Float : std::is_same_v<S, float>;
  if (exact) divide_up(std::true_type());
  else divide_up(std::false_type());
  with_scores_type<S>(scores_dtype, [&](auto zero) {
    using Score = decltype(zero);
    RowLayout<Score, G, N, V>::store(static_cast<Score*>(scores_TE) + first, live ? shape.experts : 0, lane, value);
  });
  if (live && lane == 0) {
    const float logarithm = exact || sizeof(T) > 2 ? logf(sum) : __logf(sum);
    logsumexp_T[token] = isinf(highest) ? highest : highest + logarithm;
  }

  constexpr int R = kList > G ? kList / G : 1;  // slots per lane
  const int rank = kList > 0 ? rank_of(lane) : lane;
  Key chosen[R];
  int slot[R];
#pragma unroll
  for (int r = 0; r < R; ++r) slot[r] = r * G + rank;
  if constexpr (kList == 0) {
    __shared__ typename Ranking<Key>::Memory memory[kThreads / 32];
    Ranking<Key> ranking(memory[threadIdx.x / 32], lane, shape.slots);
    unsigned candidates = find_candidates<T>(word, best, shape.slots, 1u << lane);
    while (__any_sync(kFullWarp, candidates != 0)) {
      const unsigned bit = __ffs(candidates) - 1;
      const int expert = Layout::expert(kNumbers == 2 ? bit % 16 * 2 + bit / 16 : bit, lane);
      // All logits have been read before; the few of the candidates are read from memory again.
      const bool exists = candidates != 0 && expert < shape.experts;
      ranking.enter(exists ? Keys<T>::of(logits_TE[first + expert], expert) : 0);
      candidates &= candidates - 1;
    }
    chosen[0] = ranking.ranked();
  } else {
    uint32_t order[Layout::kWords], brief[R];
#pragma unroll
    for (int w = 0; w < Layout::kWords; ++w) order[w] = Keys<T>::order(word[w]);
    const uint32_t complement = Keys<T>::complement(Layout::expert(0, lane));
    list_highest<T, Layout, G, N, kList, listed(G, kList)>(order, complement, lane, shape.slots, brief);
    if constexpr (Keys<T>::kBriefIsExact) {
#pragma unroll
      for (int r = 0; r < R; ++r) chosen[r] = brief[r];
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int expert = Keys<T>::expert(brief[r]);
        chosen[r] = slot[r] < shape.slots ? Keys<T>::of(logits_TE[first + expert], expert) : 0;
      }
      // Among logits whose first 22 bits are alike, brief keys choose the lowest experts, not the highest logits. So it is
      // checked whether any logit that was not chosen is above the lowest one that was. Among logits equal to the lowest the
      // right ones were chosen, because their brief keys differ in the experts only.
      uint32_t lowest = UINT_MAX;
#pragma unroll
      for (int r = 0; r < R; ++r) if (slot[r] < shape.slots) lowest = min(lowest, static_cast<uint32_t>(chosen[r] >> 32));
      lowest = ~group_max<G>(~lowest);
      int missed = 0;
#pragma unroll
      for (int w = 0; w < Layout::kWords; ++w) missed += order[w] > lowest;
#pragma unroll
      for (int r = 0; r < R; ++r) missed -= static_cast<uint32_t>(chosen[r] >> 32) > lowest;
      if (__any_sync(kFullWarp, group_sum<G>(missed) > 0)) {
        const Key above = Keys<T>::above(lowest);
        int certain = 0;
#pragma unroll
        for (int r = 0; r < R; ++r) certain += chosen[r] > above;
        choose_in_rounds<T, Layout, G, N>(order, complement, above, group_sum<G>(certain), shape.slots, rank, chosen);
      }
      exchange_neighbours<G, kList>(chosen, rank, slot);
    }
  }

  float weight[R], raised = 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float logit = Keys<T>::logit(chosen[r]);
    const float score = exact ? Share<true>(sum)(Exponential<T, true>(highest)(logit))
                              : Share<false>(sum)(Exponential<T, false>(highest)(logit));
    weight[r] = slot[r] < shape.slots ? score : 0.0f;
    if (shape.p > 0 && slot[r] < shape.slots) raised += power(weight[r], shape.p);
  }
  const float norm = shape.p > 0 ? root(group_sum<G>(raised), shape.p) : 1.0f;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (!live || slot[r] >= shape.slots) continue;
    const int64_t at = token * shape.slots + slot[r];
    with_scores_type<S>(scores_dtype, [&](auto zero) {
      static_cast<decltype(zero)*>(weights_TK)[at] = narrow<decltype(zero)>(weight[r] / norm);
    });
    ids_TK[at] = Keys<T>::expert(chosen[r]);
  }
}

}  // namespace
}  // namespace gbmoe
