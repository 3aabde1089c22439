// The kernel of the gradient of the router's softmax, choice, p-norm and logsumexp, from the scores.

#pragma once

#include "rows.cuh"

namespace gbmoe {
namespace {

constexpr int kBackwardThreads = 256;

// With s the scores, r_j the chosen ones, n their norm and w = r / n:  through the weights r_j receives
// gw_j / n - <gw, r> / n^2 * (r_j / n)^(p-1); the logits receive s * (G - <s, G>) + g_lse * s, where G is the sum of what s
// receives.
// R: the most slots per lane.
template <int G, int N, int R, int kMaxVector>
__global__ void __launch_bounds__(kBackwardThreads) route_backward_kernel(
    const AnyNumbers scores_TE, const int64_t* __restrict__ ids_TK, const AnyNumbers grad_scores_TE,
    const AnyNumbers grad_weights_TK, const float* __restrict__ grad_logsumexp_T, const AnyNumbers grad_TE,
    const RouterShape shape) {
  constexpr int V = kVector<float, N, kMaxVector>;
  constexpr bool kAnyNorm = serves_any_norm(G, N);
  using Layout = RowLayout<float, G, N, V>;
  extern __shared__ float chosen_grads[];  // [warp][N][32]: what the weights send back to the scores of each lane
  const int lane = threadIdx.x % G;
  const int64_t token = (static_cast<int64_t>(blockIdx.x) * kBackwardThreads + threadIdx.x) / G;
  const bool live = token < shape.tokens;
  const int64_t first = (live ? token : 0) * shape.experts, first_slot = (live ? token : 0) * shape.slots;
  float score[N], grad[N];
  scores_TE.load<G, V>(first, shape.experts, lane, 0.0f, score);
  if (grad_scores_TE.data) {
    grad_scores_TE.load<G, V>(first, shape.experts, lane, 0.0f, grad);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] = 0.0f;
  }
  if (grad_weights_TK.data) {
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
      r[k] = id[k] >= 0 ? scores_TE.read(first + id[k]) : 0.0f;
      gradient[k] = has_slot ? grad_weights_TK.read(first_slot + slot) : 0.0f;
      if (shape.p > 0 && id[k] >= 0) raised += power<kAnyNorm>(r[k], shape.p);
      inner += gradient[k] * r[k];
    }
    if (shape.p > 0) {
      const float norm = root<kAnyNorm>(group_sum<G>(raised), shape.p);
      inner = group_sum<G>(inner);
#pragma unroll
      for (int k = 0; k < R; ++k) {
        const float share = shape.p == 1.0f                ? 1.0f
                            : !kAnyNorm || shape.p == 2.0f ? r[k] / norm
                                                           : any_power(r[k] / norm, shape.p - 1.0f);
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
  grad_TE.store<G, V>(first, shape.experts, lane, grad);
}

}  // namespace
}  // namespace gbmoe
