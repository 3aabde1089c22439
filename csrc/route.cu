// The router behind its linear layer: softmax over the experts, the K highest, their p-norm and the logsumexp of the z-loss,
// from the logits in one launch; and the gradient of all of that in another.
//
// A group of G lanes (a power of two, at most a warp) owns one token and keeps its E logits in registers, N a lane in vectors
// of V: lane l has the experts [(c * G + l) * V, ... + V) of every chunk c. Ties go to the lower expert; NaN ranks above every
// number, as in torch.topk.

#include <climits>

#include "common.cuh"
#include "ops.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256;
constexpr unsigned kFull = 0xffffffffu;

// A logit and its expert in one integer, so that the largest key is the highest logit and, among equals, the lowest expert;
// NaN is highest, and 0, below -inf, stands for "taken". 32 bits hold the 16 of a half-precision logit beside the expert.
template <typename T> struct Keys {
  using Key = uint32_t;
  static __device__ __forceinline__ Key make(float x, int expert) {
    const T half = narrow<T>(x + 0.0f);  // -0 ranks as 0
    const unsigned bits = *reinterpret_cast<const uint16_t*>(&half);
    const unsigned order = x != x ? 0xffffu : bits & 0x8000u ? ~bits & 0xffffu : bits | 0x8000u;
    return order << 16 | (0xffffu - expert);
  }
  static __device__ __forceinline__ int expert(Key key) { return 0xffffu - (key & 0xffffu); }
  static __device__ __forceinline__ float logit(Key key) {
    const unsigned order = key >> 16;
    const uint16_t bits = order & 0x8000u ? order & 0x7fffu : ~order;
    return order == 0xffffu ? NAN : widen(*reinterpret_cast<const T*>(&bits));
  }
};
template <> struct Keys<float> {
  using Key = uint64_t;
  static __device__ __forceinline__ Key make(float x, int expert) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    const unsigned order = x != x ? UINT_MAX : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64_t>(order) << 32 | (UINT_MAX - expert);
  }
  static __device__ __forceinline__ int expert(Key key) { return UINT_MAX - static_cast<unsigned>(key); }
  static __device__ __forceinline__ float logit(Key key) {
    const unsigned order = key >> 32;
    return order == UINT_MAX ? NAN : __uint_as_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
  }
};

template <int G> __device__ __forceinline__ uint32_t group_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  if (G == 32) return __reduce_max_sync(kFull, x);
#endif
#pragma unroll
  for (int step = G / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kFull, x, step));
  return x;
}
template <int G> __device__ __forceinline__ uint64_t group_max(uint64_t x) {
  const uint32_t high = group_max<G>(static_cast<uint32_t>(x >> 32));
  const uint32_t low = group_max<G>(static_cast<uint32_t>(x >> 32) == high ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}
template <int G> __device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int step = G / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFull, x, step);
  return x;
}
__device__ __forceinline__ float power(float x, float p) { return p == 1.0f ? x : p == 2.0f ? x * x : powf(x, p); }
__device__ __forceinline__ float root(float x, float p) { return p == 1.0f ? x : p == 2.0f ? sqrtf(x) : powf(x, 1.0f / p); }

struct Rows {
  int64_t tokens;
  int experts, slots;
  float p;  // of the norm the weights are divided by; 0 for none
};

// One token's E values, as the lane that calls sees them. Vectors are used where a row is whole vectors (kWhole: E == G * N).
template <typename T, int G, int N, int V, bool kWhole> struct Row {
  static __device__ __forceinline__ int expert(int i, int lane) { return (i / V * G + lane) * V + i % V; }

  static __device__ __forceinline__ void load(const T* row, int experts, int lane, float fill, float (&value)[N]) {
    if constexpr (kWhole) {
#pragma unroll
      for (int c = 0; c < N / V; ++c) {
        const Vector<T, V> vector = reinterpret_cast<const Vector<T, V>*>(row)[c * G + lane];
#pragma unroll
        for (int i = 0; i < V; ++i) value[c * V + i] = static_cast<float>(widen(vector.element[i]));
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) value[i] = expert(i, lane) < experts ? static_cast<float>(widen(row[expert(i, lane)])) : fill;
    }
  }
  static __device__ __forceinline__ void store(T* row, int experts, int lane, const float (&value)[N]) {
    if constexpr (kWhole) {
#pragma unroll
      for (int c = 0; c < N / V; ++c) {
        Vector<T, V> vector;
#pragma unroll
        for (int i = 0; i < V; ++i) vector.element[i] = narrow<T>(value[c * V + i]);
        reinterpret_cast<Vector<T, V>*>(row)[c * G + lane] = vector;
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) if (expert(i, lane) < experts) row[expert(i, lane)] = narrow<T>(value[i]);
    }
  }
};

template <typename T, int N> constexpr int kVector = N < kVectorLength<T> ? N : kVectorLength<T>;

template <typename T, typename S, int G, int N, bool kWhole>
__global__ void __launch_bounds__(kThreads) route_kernel(
    const T* __restrict__ logits_TE, S* __restrict__ scores_TE, S* __restrict__ weights_TK, int64_t* __restrict__ ids_TK,
    float* __restrict__ logsumexp_T, const Rows rows) {
  // One V for logits and scores keeps the experts of a lane the same.
  constexpr int V = kVector<T, N> < kVector<S, N> ? kVector<T, N> : kVector<S, N>;
  using Map = Row<T, G, N, V, kWhole>;
  using Key = typename Keys<T>::Key;
  constexpr int kBlock = N < 8 ? N : 8, kBlocks = N / kBlock;  // a lane's logits in blocks whose best is remembered
  const int lane = threadIdx.x % G;
  const int64_t token = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / G;
  // Lanes of a warp stay together for the shuffles; those behind the last token read token 0 and write nothing.
  const bool live = token < rows.tokens;
  const int64_t first = (live ? token : 0) * rows.experts;

  float value[N];
  Map::load(logits_TE + first, rows.experts, lane, -INFINITY, value);
  Key key[N], block_best[kBlocks], best = 0;
#pragma unroll
  for (int b = 0; b < kBlocks; ++b) {
    block_best[b] = 0;
#pragma unroll
    for (int i = b * kBlock; i < (b + 1) * kBlock; ++i) {
      const int expert = Map::expert(i, lane);
      key[i] = kWhole || expert < rows.experts ? Keys<T>::make(value[i], expert) : 0;
      block_best[b] = max(block_best[b], key[i]);
    }
    best = max(best, block_best[b]);
  }
  const float highest = Keys<T>::logit(group_max<G>(best));
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    value[i] = expf(value[i] - highest);
    sum += value[i];
  }
  sum = group_sum<G>(sum);
  const float inverse = 1.0f / sum;
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] *= inverse;
  if (live) {
    Row<S, G, N, V, kWhole>::store(scores_TE + first, rows.experts, lane, value);
    if (lane == 0) logsumexp_T[token] = isinf(highest) ? highest : highest + logf(sum);
  }

  // Round j finds the group's best key; only the lane that had it looks for its next one, in the one block that lost an entry.
  // Lane j keeps what round j found (K is at most 32, and at most E, which is at most G where G is less than 32).
  Key slot_key = 0;
  for (int j = 0; j < rows.slots; ++j) {
    const Key top = group_max<G>(best);
    if (j == lane) slot_key = top;
    if (best == top) {
      best = 0;
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        if (kBlocks == 1 || block_best[b] == top) {
          block_best[b] = 0;
#pragma unroll
          for (int i = b * kBlock; i < (b + 1) * kBlock; ++i) {
            if (key[i] == top) key[i] = 0;
            block_best[b] = max(block_best[b], key[i]);
          }
        }
        best = max(best, block_best[b]);
      }
    }
  }
  const bool has_slot = lane < rows.slots;
  const float weight = has_slot ? expf(Keys<T>::logit(slot_key) - highest) * inverse : 0.0f;
  float scale = 1.0f;
  if (rows.p > 0) scale = 1.0f / root(group_sum<G>(has_slot ? power(weight, rows.p) : 0.0f), rows.p);
  if (!live || !has_slot) return;
  weights_TK[token * rows.slots + lane] = narrow<S>(weight * scale);
  ids_TK[token * rows.slots + lane] = Keys<T>::expert(slot_key);
}

// With s the scores, r_j the chosen ones, n their norm and w = r / n:  through the weights r_j receives
// gw_j / n - <gw, r> / n^2 * (r_j / n)^(p-1); the logits receive s * (G - <s, G>) + g_lse * s, G the sum of what s receives.
template <typename T, typename S, int G, int N, bool kWhole>
__global__ void __launch_bounds__(kThreads) route_backward_kernel(
    const S* __restrict__ scores_TE, const int64_t* __restrict__ ids_TK, const S* __restrict__ grad_scores_TE,
    const S* __restrict__ grad_weights_TK, const float* __restrict__ grad_logsumexp_T, T* __restrict__ grad_TE, const Rows rows) {
  constexpr int V = kVector<T, N> < kVector<S, N> ? kVector<T, N> : kVector<S, N>;
  extern __shared__ float chosen_grads[];  // [tokens of the block][E]: what the weights send back to the scores
  const int lane = threadIdx.x % G;
  const int64_t token = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / G;
  const bool live = token < rows.tokens;
  const int64_t first = (live ? token : 0) * rows.experts, first_slot = (live ? token : 0) * rows.slots;
  float score[N], grad[N];
  Row<S, G, N, V, kWhole>::load(scores_TE + first, rows.experts, lane, 0.0f, score);
  if (grad_scores_TE) {
    Row<S, G, N, V, kWhole>::load(grad_scores_TE + first, rows.experts, lane, 0.0f, grad);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] = 0.0f;
  }
  if (grad_weights_TK) {
    float* sent = chosen_grads + threadIdx.x / G * (G * N);
#pragma unroll
    for (int i = 0; i < N; ++i) sent[i * G + lane] = 0.0f;
    const bool has_slot = lane < rows.slots;
    const int id = has_slot ? static_cast<int>(ids_TK[first_slot + lane]) : 0;
    const float r = has_slot ? static_cast<float>(widen(scores_TE[first + id])) : 0.0f;
    float gradient = has_slot ? static_cast<float>(widen(grad_weights_TK[first_slot + lane])) : 0.0f;
    if (rows.p > 0) {
      const float norm = root(group_sum<G>(has_slot ? power(r, rows.p) : 0.0f), rows.p);
      const float inner = group_sum<G>(gradient * r);
      const float share = rows.p == 1.0f ? 1.0f : rows.p == 2.0f ? r / norm : powf(r / norm, rows.p - 1.0f);
      gradient = rows.slots == 1 ? 0.0f : gradient / norm - inner / (norm * norm) * share;  // a lone weight is always 1
    }
    __syncwarp();
    if (has_slot) sent[id] = gradient;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] += sent[Row<S, G, N, V, kWhole>::expert(i, lane)];
  }
  float inner = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) inner += score[i] * grad[i];
  inner = group_sum<G>(inner);
  if (!live) return;
  const float grad_lse = grad_logsumexp_T ? grad_logsumexp_T[token] : 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) grad[i] = score[i] * (grad[i] - inner + grad_lse);
  Row<T, G, N, V, kWhole>::store(grad_TE + first, rows.experts, lane, grad);
}

// Runs body with G lanes a token, N experts a lane and kWhole; vectors are kept to where they pay, 64 experts and more.
#define GBMOE_DISPATCH_EXPERTS(experts, ...)                                                                    \
  do {                                                                                                          \
    if (experts <= 8) { constexpr int G = 8, N = 1; constexpr bool kWhole = false; __VA_ARGS__; }               \
    else if (experts <= 32) { constexpr int G = 32, N = 1; constexpr bool kWhole = false; __VA_ARGS__; }        \
    else if (experts == 64) { constexpr int G = 32, N = 2; constexpr bool kWhole = true; __VA_ARGS__; }         \
    else if (experts == 128) { constexpr int G = 32, N = 4; constexpr bool kWhole = true; __VA_ARGS__; }        \
    else if (experts <= 128) { constexpr int G = 32, N = 4; constexpr bool kWhole = false; __VA_ARGS__; }       \
    else if (experts == 256) { constexpr int G = 32, N = 8; constexpr bool kWhole = true; __VA_ARGS__; }        \
    else if (experts == 512) { constexpr int G = 32, N = 16; constexpr bool kWhole = true; __VA_ARGS__; }       \
    else if (experts <= 512) { constexpr int G = 32, N = 16; constexpr bool kWhole = false; __VA_ARGS__; }      \
    else if (experts == 1024) { constexpr int G = 32, N = 32; constexpr bool kWhole = true; __VA_ARGS__; }      \
    else { constexpr int G = 32, N = 32; constexpr bool kWhole = false; __VA_ARGS__; }                          \
  } while (0)

// Runs body with T bound to the logits' type and S to the scores': the same, or float.
#define GBMOE_DISPATCH_LOGITS(logits, scores, name, ...)                                                              \
  do {                                                                                                                \
    if (logits == ScalarType::Float) { using T = float; using S = float; __VA_ARGS__; }                               \
    else if (logits == ScalarType::BFloat16 && scores == logits) { using T = __nv_bfloat16; using S = T; __VA_ARGS__; } \
    else if (logits == ScalarType::BFloat16) { using T = __nv_bfloat16; using S = float; __VA_ARGS__; }               \
    else if (logits == ScalarType::Half && scores == logits) { using T = __half; using S = T; __VA_ARGS__; }          \
    else if (logits == ScalarType::Half) { using T = __half; using S = float; __VA_ARGS__; }                          \
    else STD_TORCH_CHECK(false, name, ": expected bfloat16, float16 or float32");                                     \
  } while (0)

template <typename V> V* data(const Tensor& tensor) { return static_cast<V*>(tensor.data_ptr()); }
template <typename V> V* data(const std::optional<Tensor>& tensor) { return tensor ? data<V>(*tensor) : nullptr; }

unsigned blocks_for(int64_t tokens, int lanes) { return static_cast<unsigned>(ceil_div(tokens * lanes, kThreads)); }

}  // namespace

void route(Tensor logits, double p, Tensor scores, Tensor weights, Tensor ids, Tensor logsumexp) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const Rows rows{logits.size(0), static_cast<int>(logits.size(1)), static_cast<int>(ids.size(1)), static_cast<float>(p)};
  if (rows.tokens == 0) return;
  GBMOE_DISPATCH_LOGITS(logits.scalar_type(), scores.scalar_type(), "route", GBMOE_DISPATCH_EXPERTS(rows.experts, {
    route_kernel<T, S, G, N, kWhole><<<blocks_for(rows.tokens, G), kThreads, 0, current_stream(logits)>>>(
        data<T>(logits), data<S>(scores), data<S>(weights), data<int64_t>(ids), data<float>(logsumexp), rows);
  }));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void route_backward(
    Tensor scores, Tensor ids, std::optional<Tensor> grad_scores, std::optional<Tensor> grad_weights,
    std::optional<Tensor> grad_logsumexp, double p, Tensor grad) {
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  const Rows rows{scores.size(0), static_cast<int>(scores.size(1)), static_cast<int>(ids.size(1)), static_cast<float>(p)};
  if (rows.tokens == 0) return;
  GBMOE_DISPATCH_LOGITS(grad.scalar_type(), scores.scalar_type(), "route_backward", GBMOE_DISPATCH_EXPERTS(rows.experts, {
    const int shared_bytes = kThreads * N * static_cast<int>(sizeof(float));
    route_backward_kernel<T, S, G, N, kWhole><<<blocks_for(rows.tokens, G), kThreads, shared_bytes, current_stream(scores)>>>(
        data<S>(scores), data<int64_t>(ids), data<S>(grad_scores), data<S>(grad_weights), data<float>(grad_logsumexp),
        data<T>(grad), rows);
  }));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
