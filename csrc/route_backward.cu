// The gradient of the router's softmax, choice, p-norm and logsumexp, in one launch; forward is in route.cu, rows in route.cuh.

#include "ops.h"
#include "route.cuh"

namespace gbmoe {
namespace {

constexpr int kThreads = 256;

// With s the scores, r_j the chosen ones, n their norm and w = r / n:  through the weights r_j receives
// gw_j / n - <gw, r> / n^2 * (r_j / n)^(p-1); the logits receive s * (G - <s, G>) + g_lse * s, G the sum of what s receives.
template <typename T, typename S, int G, int N, int R, int kWidest>
__global__ void __launch_bounds__(kThreads) route_backward_kernel(
    const S* __restrict__ scores_TE, const int64_t* __restrict__ ids_TK, const S* __restrict__ grad_scores_TE,
    const S* __restrict__ grad_weights_TK, const float* __restrict__ grad_logsumexp_T, T* __restrict__ grad_TE, const Rows rows) {
  constexpr int V = kVector<T, S, N, kWidest>;
  using Map = Row<S, G, N, V>;
  extern __shared__ float chosen_grads[];  // [warp][N][32]: what the weights send back to the scores of each lane
  const int lane = threadIdx.x % G;
  const int64_t token = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / G;
  const bool live = token < rows.tokens;
  const int64_t first = (live ? token : 0) * rows.experts, first_slot = (live ? token : 0) * rows.slots;
  uint32_t word[Map::kWords];
  float score[N], grad[N];
  Map::load(scores_TE + first, rows.experts, lane, 0.0f, word);
#pragma unroll
  for (int i = 0; i < N; ++i) score[i] = Map::get(word, i);
  if (grad_scores_TE) {
    Map::load(grad_scores_TE + first, rows.experts, lane, 0.0f, word);
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] = Map::get(word, i);
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
      const bool has_slot = slot < rows.slots;
      // An id that names no expert counts as none: neither its score nor its place in `sent` is there.
      const int64_t expert = has_slot ? ids_TK[first_slot + slot] : -1;
      id[k] = static_cast<uint64_t>(expert) < static_cast<uint64_t>(rows.experts) ? static_cast<int>(expert) : -1;
      r[k] = id[k] >= 0 ? static_cast<float>(widen(scores_TE[first + id[k]])) : 0.0f;
      gradient[k] = has_slot ? static_cast<float>(widen(grad_weights_TK[first_slot + slot])) : 0.0f;
      if (rows.p > 0 && id[k] >= 0) raised += power(r[k], rows.p);
      inner += gradient[k] * r[k];
    }
    if (rows.p > 0) {
      const float norm = root(group_sum<G>(raised), rows.p);
      inner = group_sum<G>(inner);
#pragma unroll
      for (int k = 0; k < R; ++k) {
        const float share = rows.p == 1.0f ? 1.0f : rows.p == 2.0f ? r[k] / norm : any_power(r[k] / norm, rows.p - 1.0f);
        gradient[k] = rows.slots == 1 ? 0.0f : gradient[k] / norm - inner / (norm * norm) * share;  // a lone weight is always 1
      }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < R; ++k) {
      if (id[k] >= 0) sent[Map::index_of(id[k]) * 32 + Map::lane_of(id[k]) - lane] = gradient[k];
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
  Row<T, G, N, V>::store(grad_TE + first, rows.experts, lane, grad);
}

template <typename T, typename S> struct RouteBackward {
  const S* scores;
  const int64_t* ids;
  const S *grad_scores, *grad_weights;
  const float* grad_logsumexp;
  T* grad;
  Rows rows;
  cudaStream_t stream;

  template <int G, int N, int R, int kWidest> void launch() const {
    const unsigned blocks = static_cast<unsigned>(ceil_div(rows.tokens * G, kThreads));
    const int shared_bytes = kThreads * N * static_cast<int>(sizeof(float));
    route_backward_kernel<T, S, G, N, R, kWidest><<<blocks, kThreads, shared_bytes, stream>>>(
        scores, ids, grad_scores, grad_weights, grad_logsumexp, grad, rows);
  }
  template <int N, int kWidest> void launch_8_lanes() const {
    if (rows.slots <= 8) launch<8, N, 1, kWidest>();
    else launch<8, N, 2, kWidest>();
  }
  // Eight lanes up to where a warp is faster, measured.
  void launch() const {
    const int experts = rows.experts;
    const bool eights = experts % 8 == 0;
    if (rows.slots <= 16) {
      if (experts <= 16) return launch_8_lanes<2, 1>();
      if (experts <= 32 && experts % 4 == 0) return launch_8_lanes<4, 16>();
      if (experts <= 64 && eights) return launch_8_lanes<8, 16>();
      if (experts <= 64) return launch_8_lanes<8, 1>();
      if constexpr (sizeof(T) == 2) {
        if (experts <= 128 && eights) return launch_8_lanes<16, 16>();
        if (experts <= 256 && eights) return launch_8_lanes<32, 16>();
      } else {
        if (experts <= 128 && eights && rows.slots <= 6) return launch<8, 16, 1, 16>();
      }
    }
    if (experts <= 64) return launch<32, 2, 1, 1>();
    if (experts <= 128 && experts % 4 == 0) return launch<32, 4, 1, 16>();
    if (experts <= 256 && eights) return launch<32, 8, 1, 16>();
    if (experts <= 256) return launch<32, 8, 1, 1>();
    if (experts <= 512 && eights) return launch<32, 16, 1, 16>();
    if (eights) return launch<32, 32, 1, 16>();
    return launch<32, 32, 1, 1>();
  }
};

}  // namespace

void route_backward(
    Tensor scores, Tensor ids, std::optional<Tensor> grad_scores, std::optional<Tensor> grad_weights,
    std::optional<Tensor> grad_logsumexp, double p, Tensor grad) {
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  const Rows rows{scores.size(0), static_cast<int>(scores.size(1)), static_cast<int>(ids.size(1)), static_cast<float>(p)};
  if (rows.tokens == 0) return;
  GBMOE_DISPATCH_LOGITS(grad.scalar_type(), scores.scalar_type(), "route_backward", {
    const RouteBackward<T, S> call{data<S>(scores), data<int64_t>(ids), data<S>(grad_scores), data<S>(grad_weights),
                                   data<float>(grad_logsumexp), data<T>(grad), rows, current_stream(scores)};
    call.launch();
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
