// The gradient of the router's softmax, choice, p-norm and logsumexp, in one launch.

#include "../operators.h"
#include "instances.cuh"

namespace gbmoe {
namespace {

constexpr int kThreads = 256;

// With s the scores, r_j the chosen ones, n their norm and w = r / n:  through the weights r_j receives
// gw_j / n - <gw, r> / n^2 * (r_j / n)^(p-1); the logits receive s * (G - <s, G>) + g_lse * s, where G is the sum of what s
// receives.
// R: slots per lane.
template <typename T, typename S, int G, int N, int R, int kMaxVector>
__global__ void __launch_bounds__(kThreads) route_backward_kernel(
    const S* __restrict__ scores_TE, const int64_t* __restrict__ ids_TK, const S* __restrict__ grad_scores_TE,
    const S* __restrict__ grad_weights_TK, const ScalarType scores_dtype, const float* __restrict__ grad_logsumexp_T,
    T* __restrict__ grad_TE, const RouterShape shape) {
  constexpr int V = kVector<T, S, N, kMaxVector>;
  using Layout = RowLayout<T, G, N, V>;
  extern __shared__ float chosen_grads[];  // [warp][N][32]: what the weights send back to the scores of each lane
  const int lane = threadIdx.x % G;
  const int64_t token = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / G;
  const bool live = token < shape.tokens;
  const int64_t first = (live ? token : 0) * shape.experts, first_slot = (live ? token : 0) * shape.slots;
  float score[N], grad[N];
  const auto load = [&](const S* from_TE, float(&to)[N]) {
    with_scores_type<S>(scores_dtype, [&](auto zero) {
      using ScoreLayout = RowLayout<decltype(zero), G, N, V>;
      uint32_t word[ScoreLayout::kWords];
      ScoreLayout::load(static_cast<const decltype(zero)*>(from_TE) + first, shape.experts, lane, 0.0f, word);
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = ScoreLayout::get(word, i);
    });
  };
  // One element of the scores, or of the weights' gradients.
  const auto read = [&](const S* from, int64_t at) {
    float number;
    with_scores_type<S>(scores_dtype, [&](auto zero) { number = widen(static_cast<const decltype(zero)*>(from)[at]); });
    return number;
  };
  load(scores_TE, score);
  if (grad_scores_TE) {
    load(grad_scores_TE, grad);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] = 0.0f;
  }
  if (grad_weights_TK) {
    float* sent = chosen_grads + threadIdx.x / 32 * (32 * N) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N; ++i) sent[i * 32] = 0.0f;
    int id[R];
    float r[R], gradient[R], raised = 0, inner = 0;
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int slot = k * G + lane;
      const bool has_slot = slot < shape.slots;
      // An id that names no expert counts as none: neither its score nor its place in `sent` is there.
      const int64_t expert = has_slot ? ids_TK[first_slot + slot] : -1;
      id[k] = static_cast<uint64_t>(expert) < static_cast<uint64_t>(shape.experts) ? static_cast<int>(expert) : -1;
      r[k] = id[k] >= 0 ? read(scores_TE, first + id[k]) : 0.0f;
      gradient[k] = has_slot ? read(grad_weights_TK, first_slot + slot) : 0.0f;
      if (shape.p > 0 && id[k] >= 0) raised += power(r[k], shape.p);
      inner += gradient[k] * r[k];
    }
    if (shape.p > 0) {
      const float norm = root(group_sum<G>(raised), shape.p);
      inner = group_sum<G>(inner);
#pragma unroll
      for (int k = 0; k < R; ++k) {
        const float share = shape.p == 1.0f ? 1.0f : shape.p == 2.0f ? r[k] / norm : any_power(r[k] / norm, shape.p - 1.0f);
        gradient[k] = shape.slots == 1 ? 0.0f : gradient[k] / norm - inner / (norm * norm) * share;  // a lone weight is always 1
      }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < R; ++k) {
      if (id[k] >= 0) sent[Layout::index_of(id[k]) * 32 + Layout::lane_of(id[k]) - lane] = gradient[k];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] += sent[i * 32];
  }
  float inner = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) inner += score[i] * grad[i];
  inner = group_sum<G>(inner);
  if (!live) return;
  const float grad_lse = grad_logsumexp_T ? grad_logsumexp_T[token] : 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) grad[i] = score[i] * (grad[i] - inner + grad_lse);
  Layout::store(grad_TE + first, shape.experts, lane, grad);
}

// The arguments of one call.
template <typename T, typename S> struct RouteBackward {
  const S* scores;
  const int64_t* ids;
  const S *grad_scores, *grad_weights;
  ScalarType scores_dtype;
  const float* grad_logsumexp;
  T* grad;
  RouterShape shape;
  cudaStream_t stream;

  void launch(const RouterConfig& config) const {
    using Table = BackwardInstances<T>;
    const bool served = launch_from<Table>(config, [&](auto index, auto slots_per_lane) {
      constexpr RouterInstances instance = Table::kAll[index];
      constexpr int kVectors = kVector<T, S, instance.numbers_per_lane, instance.longest_vector>;
      check_router_call("route_backward", config, shape, kVectors, slots_per_lane * instance.lanes);
      const unsigned ctas = static_cast<unsigned>(ceil_div(shape.tokens * instance.lanes, kThreads));
      constexpr int kSharedBytes = kThreads * instance.numbers_per_lane * static_cast<int>(sizeof(float));
      const auto kernel =
          route_backward_kernel<T, S, instance.lanes, instance.numbers_per_lane, slots_per_lane, instance.longest_vector>;
      kernel<<<ctas, kThreads, kSharedBytes, stream>>>(
          scores, ids, grad_scores, grad_weights, scores_dtype, grad_logsumexp, grad, shape);
    });
    if (!served) refuse_router_call("route_backward", config);
  }
};

}  // namespace

// As route has them. Scores and weights have one dtype, with their gradients; grad may be float32 or of that dtype, or have 16 bits where that
// is float32.
void route_backward(
    Tensor scores, Tensor ids, std::optional<Tensor> grad_scores, std::optional<Tensor> grad_weights,
    std::optional<Tensor> grad_logsumexp, double p, int64_t lanes, int64_t numbers_per_lane, int64_t longest_vector,
    int64_t slots_per_lane, Tensor grad) {
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  const RouterShape shape{
      scores.size(0), static_cast<int>(scores.size(1)), static_cast<int>(ids.size(1)), static_cast<float>(p)};
  if (shape.tokens == 0) return;
  GBMOE_DISPATCH_LOGITS(grad.scalar_type(), scores.scalar_type(), "route_backward", {
    // Qualified, because std::data is found beside it for an optional tensor, and has no meaning for void.
    const RouteBackward<T, S> call{data<S>(scores),
                                   data<int64_t>(ids),
                                   gbmoe::data<S>(grad_scores),
                                   gbmoe::data<S>(grad_weights),
                                   scores.scalar_type(),
                                   data<float>(grad_logsumexp),
                                   data<T>(grad),
                                   shape,
                                   current_stream(scores)};
    call.launch({lanes, numbers_per_lane, longest_vector, slots_per_lane});
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(route_backward,
               "(Tensor scores, Tensor ids, Tensor? grad_scores, Tensor? grad_weights, Tensor? grad_logsumexp, "
               "float p, int lanes, int numbers_per_lane, int longest_vector, int slots_per_lane, Tensor(a!) grad) "
               "-> ()");

}  // namespace gbmoe
