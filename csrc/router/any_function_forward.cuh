// The router's forward kernel for any RouterFunction.
//
// A token's lanes put its logits into shared memory and turn each into a score, which is stored, and into the order of what its
// expert is ranked by, which takes the logit's place. Loops over them are not unrolled: code for all scores would be most of a
// kernel. The choice among the orders is that of the other kernels (sorted_lists.cuh, ranked_candidates.cuh).

#pragma once

#include "../early_launch.cuh"
#include "expert_groups.cuh"
#include "function.cuh"
#include "ranked_candidates.cuh"
#include "sorted_lists.cuh"

namespace gbmoe {
namespace {

constexpr int kFunctionThreads = 128;

// The tensors of one call; those that are not given are null.
struct FunctionTensors {
  AnyNumbers logits_TE;
  const float* bias_E;
  const bool* padding_T;
  const int64_t* given_TK;
  AnyNumbers scores_TE, weights_TK;
  int64_t* ids_TK;
  float* logsumexp_T;
};

// kList: as that of route_kernel.
template <int G, int N, int kList, int kMaxVector>
__global__ void __launch_bounds__(kFunctionThreads)
    route_by_function_kernel(const FunctionTensors tensors, const RouterShape shape, const RouterFunction function) {
  wait_for_kernel_before();
  constexpr int V = kVector<float, N, kMaxVector>, kTokens = kFunctionThreads / G;
  using Layout = RowLayout<float, G, N, V>;
  using Row = RouterRow<G, V>;
  using Floats = typename Row::Floats;
  using Key = typename Keys<float>::Key;
  struct alignas(16) Rows { float number[kTokens][G * N]; };
  __shared__ Rows rows;
  __shared__ uint32_t worths[kTokens][kMaxRouterGroups];
  const int lane = threadIdx.x % G, own = threadIdx.x / G;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokens + own;
  // Lanes of a warp stay together for the shuffles; those after the last token read token 0 and write nothing.
  const bool live = token < shape.tokens;
  const bool padding = live && tensors.padding_T && tensors.padding_T[token];
  const int64_t first = (live ? token : 0) * shape.experts;
  float* const row = rows.number[own];
  uint32_t* const order_E = reinterpret_cast<uint32_t*>(row);

  const float highest = Row::highest_of_all(Row::load(tensors.logits_TE, first, shape.experts, N, lane, -INFINITY, row));
  const float sum = function.is_softmax() ? Row::template sum_of_exponentials<true>(highest, N, lane, row)
                                          : Row::template sum_of_exponentials<false>(highest, N, lane, row);
  if (live && lane == 0) tensors.logsumexp_T[token] = padding ? 0.0f : isinf(highest) ? highest : highest + logf(sum);

  const Scoring scoring(function.kind, highest, sum);
  const bool after = function.kind == RouterKind::kSoftmaxOfChosen;
  // Where nothing is added to the scores, logits have their order, and more bits.
  const bool by_logits = after || (!tensors.bias_E && function.groups == 1);
  Row::each(N, lane, [&](int at) {
    // Vectors divide the number of experts: one is all of experts, or of none. The logits of none are -inf, and ranked by themselves.
    const Floats logits = *reinterpret_cast<const Floats*>(row + at);
    Floats ranks = logits;
    if (at < shape.experts) {
      const Floats scores = scoring(logits);
      if (!by_logits) ranks = scores;
      if (tensors.bias_E) {
        const Floats bias = *reinterpret_cast<const Floats*>(tensors.bias_E + at);
#pragma unroll
        for (int v = 0; v < V; ++v) ranks.element[v] += bias.element[v];
      }
      if (live) Row::store(tensors.scores_TE, first, at, padding ? Floats{} : scores);
    }
    Vector<uint32_t, V> order;
#pragma unroll
    for (int v = 0; v < V; ++v) order.element[v] = order_of(ranks.element[v]);
    *reinterpret_cast<Vector<uint32_t, V>*>(order_E + at) = order;
  });
  __syncwarp();

  constexpr int R = kList > G ? kList / G : 1;  // slots per lane
  const int rank = kList > 0 ? rank_of(lane) : lane;
  Key chosen[R];
  int slot[R], id[R];
#pragma unroll
  for (int r = 0; r < R; ++r) slot[r] = r * G + rank;
  if (tensors.given_TK) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
      const bool exists = live && slot[r] < shape.slots;
      const int64_t given = exists ? tensors.given_TK[token * shape.slots + slot[r]] : -1;
      id[r] = static_cast<uint64_t>(given) < static_cast<uint64_t>(shape.experts) ? static_cast<int>(given) : -1;
    }
  } else {
    if (function.groups > 1) {
      if (shape.experts / function.groups % V == 0) leave_groups_out<G, V>(function, shape.experts, lane, order_E, worths[own]);
      else leave_groups_out<G, 1>(function, shape.experts, lane, order_E, worths[own]);
    }
    const auto key_of = [&](int expert) { return Keys<float>::make(order_E[expert], 0, Keys<float>::complement(expert)); };
    uint32_t order[N];
#pragma unroll
    for (int i = 0; i < N; ++i) order[i] = order_E[Layout::expert(i, lane)];
    if constexpr (kList == 0) {
      __shared__ typename Ranking<Key>::Memory memory[kFunctionThreads / 32];
      Ranking<Key> ranking(memory[threadIdx.x / 32], lane, shape.slots);
      // Those that are left out count as -inf while candidates are looked for; their keys are below those of -inf.
      const uint32_t minus_infinity = order_of(-INFINITY);
      float best[2] = {-INFINITY, -INFINITY};
      uint32_t word[N], high[2] = {minus_infinity, minus_infinity};
#pragma unroll
      for (int i = 0; i < N; ++i) {
        high[i % 2] = max(high[i % 2], order[i]);
        word[i] = __float_as_uint(logit_of(max(order[i], minus_infinity)));
      }
      best[0] = logit_of(high[0]);
      best[1] = logit_of(high[1]);
      unsigned candidates = find_candidates<float>(word, best, shape.slots, 1u << lane);
      while (__any_sync(kFullWarp, candidates != 0)) {
        const int expert = Layout::expert(__ffs(candidates) - 1, lane);
        const bool exists = candidates != 0 && expert < shape.experts;
        ranking.enter(exists ? key_of(expert) : 0);
        candidates &= candidates - 1;
      }
      chosen[0] = ranking.ranked();
    } else {
      choose_listed<float, Layout, G, N, kList, kList>(order, shape.experts, lane, shape.slots, key_of, chosen, slot);
    }
#pragma unroll
    for (int r = 0; r < R; ++r) id[r] = slot[r] < shape.slots ? Keys<float>::expert(chosen[r]) : -1;
  }

  float weight[R], divisor = 1.0f;
  float logit[R];
#pragma unroll
  for (int r = 0; r < R; ++r) logit[r] = id[r] >= 0 ? tensors.logits_TE.read(first + id[r]) : -INFINITY;
  if (after) {
    uint32_t highest_chosen = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) highest_chosen = max(highest_chosen, order_of(logit[r]));
    const Exponential<float, true> exponential(logit_of(group_max<G>(highest_chosen)));
    float total = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      weight[r] = id[r] >= 0 ? exponential(logit[r]) : 0.0f;
      total += weight[r];
    }
    divisor = group_sum<G>(total);
  } else {
    float total = 0;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      weight[r] = id[r] >= 0 ? score_of(function.kind, highest, sum, logit[r]) : 0.0f;
      total += weight[r];
    }
    total = group_sum<G>(total);
    if (function.normalize) divisor = total + function.epsilon;
  }
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (!live || slot[r] >= shape.slots) continue;
    const int64_t at = token * shape.slots + slot[r];
    const bool exists = id[r] >= 0 && !padding;
    tensors.weights_TK.write(at, exists ? weight[r] / divisor * function.scale : 0.0f);
    tensors.ids_TK[at] = exists ? id[r] : -1;
  }
}

}  // namespace
}  // namespace gbmoe
