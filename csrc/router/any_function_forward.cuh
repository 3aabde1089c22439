// The router's forward kernel for any RouterFunction.
//
// A token's lanes put its logits into shared memory and turn each into a score, which is stored, and into the number that its expert
// is ranked by, which takes the logit's place. Loops over them are not unrolled: code for all scores would be most of a kernel. Of these
// numbers few are candidates (few_candidates.cuh, or ranked_candidates.cuh where a token has a whole warp).

#pragma once

#include "../early_launch.cuh"
#include "expert_groups.cuh"
#include "few_candidates.cuh"
#include "function.cuh"
#include "ranked_candidates.cuh"

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

// Whether a kernel is for the 129 to 512 experts of most models: the others have less code.
constexpr bool is_usual(int lanes, int numbers_per_lane) { return lanes < 32 && numbers_per_lane == 32; }

// Stores the scores of a row's logits, and puts what their experts are ranked by in their place. For scores other than a softmax, it
// returns the calling lane's sum of exponentials.
template <int G, int N, int V> __device__ __forceinline__ float score_row(
    const FunctionTensors& tensors, const RouterShape& shape, const RouterFunction& function, const Scoring& scoring, bool stored,
    int64_t first, int lane, float* row) {
  using Row = RouterRow<G, V>;
  using Floats = typename Row::Floats;
  // Where nothing is added to the scores, logits have their order, and more bits.
  const bool after = function.kind == RouterKind::kSoftmaxOfChosen;
  const bool by_logits = !tensors.bias_E && (after || function.groups == 1);
  float sum = 0;
  // Vectors are taken several at once, because what is asked of a call, and where its tensors are, takes as long as a vector's scores.
  const auto score_all = [&](auto at_once, auto is_softmax, const auto& score) {
    constexpr int kAtOnce = decltype(at_once)::value;
    static_assert(N / V % kAtOnce == 0);
#pragma unroll 1
    for (int c = 0; c < N / V; c += kAtOnce) {
      Floats* const place = reinterpret_cast<Floats*>(row + Row::at(c, lane));
      Floats logits[kAtOnce], scores[kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) logits[k] = place[k * G];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
#pragma unroll
        for (int v = 0; v < V; ++v) scores[k].element[v] = score(logits[k].element[v]);
      }
      // Vectors divide the number of experts: one is all of experts, or of none, whose logits are -inf.
      const auto exists = [&](int k) { return Row::at(c + k, lane) < shape.experts; };
      if (stored) {
        with_type(tensors.scores_TE.dtype, [&](auto zero) {
          using Number = decltype(zero);
          auto* const to =
              reinterpret_cast<Vector<Number, V>*>(static_cast<Number*>(tensors.scores_TE.data) + first + Row::at(c, lane));
#pragma unroll
          for (int k = 0; k < kAtOnce; ++k)
            if (exists(k)) to[k * G] = Row::template narrowed<Number>(scores[k]);
        });
      }
      if (by_logits) continue;
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        if constexpr (decltype(is_softmax)::value)
          if (after) scores[k] = logits[k];
        if (tensors.bias_E) {
          const Floats bias = *reinterpret_cast<const Floats*>(tensors.bias_E + min(Row::at(c + k, lane), shape.experts - V));
#pragma unroll
          for (int v = 0; v < V; ++v) scores[k].element[v] += bias.element[v];
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
        if (exists(k)) place[k * G] = scores[k];
    }
  };
  constexpr bool kIsUsual = is_usual(G, N);
  using std::integral_constant;
  if (function.is_softmax()) {
    score_all(integral_constant<int, kIsUsual ? 2 : 1>(), std::true_type(), [&](float logit) { return scoring.share(logit); });
  } else if (function.kind == RouterKind::kSigmoid) {
    score_all(integral_constant<int, kIsUsual ? 4 : 1>(), std::false_type(), [&](float logit) {
      const float exponential = Scoring::exponential(logit);
      sum += exponential;
      return Scoring::sigmoid(exponential);
    });
  } else {
    score_all(integral_constant<int, kIsUsual ? 2 : 1>(), std::false_type(), [&](float logit) {
      sum += Scoring::exponential(logit);
      return Scoring::root(logit);
    });
  }
  return sum;
}

// kList: the most slots of a token that G < 32 lanes share, or 0 where it has a whole warp, which ranks up to 32.
template <int G, int N, int kList, int kMaxVector>
__global__ void __launch_bounds__(kFunctionThreads, 8) route_by_function_kernel(
    const FunctionTensors tensors, const RouterShape shape, const RouterFunction function, const GroupLayout groups) {
  wait_for_kernel_before();
  static_assert(kList == (G == 32 ? 0 : 8));
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
  const bool padding = live && tensors.padding_T && tensors.padding_T[token], counts = live && !padding;
  const int64_t first = (live ? token : 0) * shape.experts;
  float* const row = rows.number[own];

  Row::template load<is_usual(G, N) ? N / V : 4>(tensors.logits_TE, first, shape.experts, N, lane, row);
  float highest = 0, sum = 1;
  if (function.is_softmax()) {
    highest = Row::highest(N, lane, row);
    sum = Row::template sum_of_exponentials<true>(highest, N, lane, row);
  }
  const float of_lane =
      score_row<G, N, V>(tensors, shape, function, Scoring(function.kind, highest, sum), counts, first, lane, row);
  if (!function.is_softmax()) sum = group_sum<G>(of_lane);
  if (padding) {
    Row::each(N, lane, [&](int at) {
      if (at < shape.experts) Row::store(tensors.scores_TE, first, at, Floats{});
    });
  }
  __syncwarp();

  int id = -1;  // of the expert in slot `lane`
  if (tensors.given_TK) {
    const int64_t given = live && lane < shape.slots ? tensors.given_TK[token * shape.slots + lane] : -1;
    if (static_cast<uint64_t>(given) < static_cast<uint64_t>(shape.experts)) id = static_cast<int>(given);
  } else {
    KeptGroups kept;
    if (function.groups > 1) kept = leave_groups_out<G, V>(function, groups, shape.experts, lane, row, worths[own]);
    const auto key_of = [&](int expert) {
      return expert < shape.experts && kept.have(expert) ? Keys<float>::of(row[expert], expert) : Key{0};
    };
    float number[N];
#pragma unroll
    for (int i = 0; i < N; ++i) number[i] = row[Layout::expert(i, lane)];
    Key chosen;
    if constexpr (kList == 0) {
      __shared__ typename Ranking<Key>::Memory memory[kFunctionThreads / 32];
      Ranking<Key> ranking(memory[threadIdx.x / 32], lane, shape.slots);
      uint32_t word[N], high[2];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        word[i] = __float_as_uint(number[i]);
        high[i % 2] = i < 2 ? word[i] : Word<float>::higher(high[i % 2], word[i]);
      }
      const float best[2] = {__uint_as_float(high[0]), __uint_as_float(high[1])};
      unsigned candidates = find_candidates<float>(word, best, shape.slots, 1u << lane);
      while (__any_sync(kFullWarp, candidates != 0)) {
        ranking.enter(candidates != 0 ? key_of(Layout::expert(__ffs(candidates) - 1, lane)) : 0);
        candidates &= candidates - 1;
      }
      chosen = ranking.ranked();
    } else {
      __shared__ FewCandidates memory[kTokens];
      chosen = choose_candidates<Layout, G, N>(number, shape.experts, lane, shape.slots, counts, row, key_of, memory[own]);
    }
    if (counts && lane < shape.slots) id = Keys<float>::expert(chosen);
  }

  // A lane has a slot at most.
  const float logit = id >= 0 ? tensors.logits_TE.read(first + id) : -INFINITY;
  float weight = 0, divisor = 1;
  if (function.kind == RouterKind::kSoftmaxOfChosen) {
    const Exponential<float, true> exponential(logit_of(group_max<G>(order_of(logit))));
    weight = id >= 0 ? exponential(logit) : 0.0f;
    divisor = group_sum<G>(weight);
  } else {
    weight = id >= 0 ? score_of(function.kind, highest, sum, logit) : 0.0f;
    if (function.normalize) divisor = group_sum<G>(weight) + function.epsilon;
  }
  if (live && lane < shape.slots) {
    const int64_t at = token * shape.slots + lane;
    const bool exists = id >= 0 && !padding;
    tensors.weights_TK.write(at, exists ? weight / divisor * function.scale : 0.0f);
    tensors.ids_TK[at] = exists ? id : -1;
  }

  // Exponentials that were not taken of logits less the highest one are too large or too small for a sum, where logits are.
  const bool far = counts && !function.is_softmax() && !(sum >= 1e-30f && sum <= 1e30f);
  if (__any_sync(kFullWarp, far)) {
    __syncwarp();
    Row::template load<1>(tensors.logits_TE, first, shape.experts, N, lane, row);
    const float actual = Row::highest(N, lane, row), less = Row::template sum_of_exponentials<true>(actual, N, lane, row);
    if (far) {
      highest = actual;
      sum = less;
    }
  }
  if (live && lane == 0) tensors.logsumexp_T[token] = padding ? 0.0f : isinf(highest) ? highest : highest + logf(sum);
}

}  // namespace
}  // namespace gbmoe
