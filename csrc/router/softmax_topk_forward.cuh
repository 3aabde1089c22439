// The router's forward kernel for a softmax over the experts, the K highest, their p-norm and the logsumexp of the z-loss.

#pragma once

#include "../early_launch.cuh"
#include "arithmetic.cuh"
#include "ranked_candidates.cuh"
#include "sorted_lists.cuh"

namespace gbmoe {
namespace {

constexpr int kThreads = 128;

// kList: the length of the list that a token's lanes share, a power of two that is at least the number of slots; or 0 where the
// token has a whole warp, which ranks candidates. T: bfloat16, for logits of that type, or float, for those of any.
template <typename T, int G, int N, int kList, int kMaxVector>
__global__ void __launch_bounds__(kThreads) route_kernel(
    const AnyNumbers logits_TE, const AnyNumbers scores_TE, const AnyNumbers weights_TK, int64_t* __restrict__ ids_TK,
    float* __restrict__ logsumexp_T, const RouterShape shape) {
  wait_for_kernel_before();
  constexpr int V = kVector<T, N, kMaxVector>, kNumbers = Word<T>::kNumbers;
  constexpr bool kAnyNorm = serves_any_norm(G, N, kNumbers == 1 ? kList : 0);
  using Layout = RowLayout<T, G, N, V>;
  using Key = typename Keys<T>::Key;
  const int lane = threadIdx.x % G;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / G) + threadIdx.x / G;
  // Lanes of a warp stay together for the shuffles; those after the last token read token 0 and write nothing.
  const bool live = token < shape.tokens;
  const int64_t first = (live ? token : 0) * shape.experts;
  // One logit: all have been read before, the few that matter are read from memory again.
  const auto key_of = [&](int expert) {
    if constexpr (kNumbers == 2) return Keys<T>::of(static_cast<const T*>(logits_TE.data)[first + expert], expert);
    else return Keys<T>::of(logits_TE.read(first + expert), expert);
  };

  // What a lane holds beyond the last expert is -inf, of an expert higher than all others: after every one that can be chosen.
  uint32_t word[Layout::kWords];
  if constexpr (kNumbers == 2) {
    Layout::load(static_cast<const T*>(logits_TE.data) + first, shape.experts, lane, -INFINITY, word);
  } else {
    float logit[N];
    logits_TE.load<G, V>(first, shape.experts, lane, -INFINITY, logit);
#pragma unroll
    for (int i = 0; i < N; ++i) word[i] = __float_as_uint(logit[i]);
  }
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
  const bool exact = scores_TE.dtype == ScalarType::Float;
  if (exact) divide_up(std::true_type());
  else divide_up(std::false_type());
  scores_TE.store<G, V>(first, live ? shape.experts : 0, lane, value);
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
      const bool exists = candidates != 0 && expert < shape.experts;
      ranking.enter(exists ? key_of(expert) : 0);
      candidates &= candidates - 1;
    }
    chosen[0] = ranking.ranked();
  } else {
    uint32_t order[Layout::kWords];
#pragma unroll
    for (int w = 0; w < Layout::kWords; ++w) order[w] = Keys<T>::order(word[w]);
    choose_listed<T, Layout, G, N, kList, listed(G, kList)>(order, shape.experts, lane, shape.slots, key_of, chosen, slot);
  }

  float weight[R], raised = 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const float logit = Keys<T>::logit(chosen[r]);
    const float score = exact ? Share<true>(sum)(Exponential<T, true>(highest)(logit))
                              : Share<false>(sum)(Exponential<T, false>(highest)(logit));
    weight[r] = slot[r] < shape.slots ? score : 0.0f;
    if (shape.p > 0 && slot[r] < shape.slots) raised += power<kAnyNorm>(weight[r], shape.p);
  }
  const float norm = shape.p > 0 ? root<kAnyNorm>(group_sum<G>(raised), shape.p) : 1.0f;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (!live || slot[r] >= shape.slots) continue;
    const int64_t at = token * shape.slots + slot[r];
    weights_TK.write(at, weight[r] / norm);
    ids_TK[at] = Keys<T>::expert(chosen[r]);
  }
}

}  // namespace
}  // namespace gbmoe
