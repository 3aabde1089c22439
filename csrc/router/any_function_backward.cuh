// The gradient of the logits through a router of any RouterFunction, from the logits.
//
// With s the scores, r_j those chosen, n their sum plus epsilon and w = c r / n the weights: r_j receives c (gw_j / n - <gw, r> /
// n^2), or c gw_j where nothing is normalised. A logit receives what its score receives, G, times the slope; through a softmax s
// (G - <s, G>). Where the softmax is taken over the chosen logits, these receive c w_j (gw_j - <gw, w>) as well. Through
// logsumexp each receives its share of the exponentials.

#pragma once

#include "config.h"
#include "function.cuh"

namespace gbmoe {
namespace {

constexpr int kFunctionBackwardThreads = 128;
constexpr int kMaxNumbersPerLane = 32;  // a CTA has no more than 48 KiB of shared memory unless it asks for it

// The tensors of one call; those that are not given are null.
struct FunctionGradients {
  AnyNumbers logits_TE;
  const int64_t* ids_TK;
  const bool* padding_T;
  AnyNumbers grad_scores_TE, grad_weights_TK;
  const float* grad_logsumexp_T;
  AnyNumbers grad_TE;
};

// What a token's slots send back: their experts, or -1 for none, and a number for each, in shared memory.
struct SlotGradients {
  int id[kMaxRouterSlots];
  float part[kMaxRouterSlots], gradient[kMaxRouterSlots];

  // What an expert gets from all slots that chose it, in their order.
  __device__ __forceinline__ float sum_of(int expert, int slots) const {
    float sum = 0;
#pragma unroll 1
    for (int slot = 0; slot < slots; ++slot) sum += id[slot] == expert ? gradient[slot] : 0.0f;
    return sum;
  }
};

// Fills `slots` with what the weights send back: to the chosen scores, or where the softmax is taken over the chosen logits, to these.
template <int G> __device__ __forceinline__ void weights_backward(
    const FunctionGradients& tensors, const RouterShape& shape, const RouterFunction& function, bool live, int64_t first_slot, int lane,
    float highest, float sum, const float* row, SlotGradients& slots) {
  const bool after = function.kind == RouterKind::kSoftmaxOfChosen;
  uint32_t highest_chosen = 0;
#pragma unroll 1
  for (int slot = lane; slot < shape.slots; slot += G) {
    // An id that names no expert counts as none.
    const int64_t expert = live ? tensors.ids_TK[first_slot + slot] : -1;
    const bool exists = static_cast<uint64_t>(expert) < static_cast<uint64_t>(shape.experts);
    slots.id[slot] = exists ? static_cast<int>(expert) : -1;
    if (exists) highest_chosen = max(highest_chosen, order_of(row[expert]));
  }
  const Exponential<float, true> exponential(logit_of(group_max<G>(highest_chosen)));
  float total = 0, inner = 0;
#pragma unroll 1
  for (int slot = lane; slot < shape.slots; slot += G) {
    const int id = slots.id[slot];
    float part = 0, gradient = 0;
    if (id >= 0) {
      part = after ? exponential(row[id]) : score_of(function.kind, highest, sum, row[id]);
      gradient = tensors.grad_weights_TK.read(first_slot + slot) * function.scale;
    }
    slots.part[slot] = part;
    slots.gradient[slot] = gradient;
    total += part;
    inner += gradient * part;
  }
  total = group_sum<G>(total) + (after ? 0.0f : function.epsilon);
  inner = group_sum<G>(inner);
#pragma unroll 1
  for (int slot = lane; slot < shape.slots; slot += G) {
    const float gradient = slots.gradient[slot];
    if (after) slots.gradient[slot] = slots.part[slot] / total * (gradient - inner / total);
    else if (function.normalize) slots.gradient[slot] = (gradient - inner / total) / total;
  }
}

// Shared memory: a row of floats for each token, of `numbers` for each lane. The gradients of all logits are written as if no weight sent
// anything back, and then those of the chosen ones once more.
template <int G, int V>
__global__ void __launch_bounds__(kFunctionBackwardThreads) route_by_function_backward_kernel(
    const FunctionGradients tensors, const RouterShape shape, const RouterFunction function, const int numbers) {
  constexpr int kTokens = kFunctionBackwardThreads / G;
  using Row = RouterRow<G, V>;
  using Floats = typename Row::Floats;
  extern __shared__ Vector<float, 4> function_rows[];
  __shared__ SlotGradients of_slots[kTokens];
  const int lane = threadIdx.x % G, own = threadIdx.x / G;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kTokens + own;
  const bool live = token < shape.tokens;
  const bool padding = live && tensors.padding_T && tensors.padding_T[token];
  const int64_t first = (live ? token : 0) * shape.experts, first_slot = (live ? token : 0) * shape.slots;
  float* const row = reinterpret_cast<float*>(function_rows) + own * (G * numbers);

  const float highest_of_lane = Row::load(tensors.logits_TE, first, shape.experts, numbers, lane, -INFINITY, row);
  // Only shares of exponentials need their sum.
  const bool shares = function.is_softmax() || tensors.grad_logsumexp_T;
  const float highest = shares ? Row::highest_of_all(highest_of_lane) : 0.0f;
  const float sum = shares ? Row::template sum_of_exponentials<true>(highest, numbers, lane, row) : 1.0f;
  const Scoring scoring(function.kind, highest, sum);
  const bool after = function.kind == RouterKind::kSoftmaxOfChosen;
  __syncwarp();

  SlotGradients& slots = of_slots[own];
  const bool has_weights = tensors.grad_weights_TK.data;
  if (has_weights) weights_backward<G>(tensors, shape, function, live, first_slot, lane, highest, sum, row, slots);
  __syncwarp();

  float inner = 0;
  if (function.is_softmax()) {
    if (tensors.grad_scores_TE.data) {
      Row::each(numbers, lane, [&](int at) {
        if (at >= shape.experts) return;
        const Floats logits = *reinterpret_cast<const Floats*>(row + at), received = Row::read(tensors.grad_scores_TE, first, at);
#pragma unroll
        for (int v = 0; v < V; ++v) inner += scoring.share(logits.element[v]) * received.element[v];
      });
    }
    if (has_weights && !after) {
#pragma unroll 1
      for (int slot = lane; slot < shape.slots; slot += G) {
        if (slots.id[slot] >= 0) inner += scoring.share(row[slots.id[slot]]) * slots.gradient[slot];
      }
    }
    inner = group_sum<G>(inner);
  }
  const float grad_logsumexp = live && tensors.grad_logsumexp_T ? tensors.grad_logsumexp_T[token] : 0.0f;
  // What logits receive whose scores receive this.
  const auto backward = [&](const auto& logits, const auto& received) {
    constexpr int kNumbers = sizeof(logits) / sizeof(float);
    Vector<float, kNumbers> result{};
    if (padding) return result;
    if (function.is_softmax()) {
#pragma unroll
      for (int v = 0; v < kNumbers; ++v) {
        result.element[v] = scoring.share(logits.element[v]) * (received.element[v] - inner + grad_logsumexp);
      }
      return result;
    }
    result = scoring.slopes(logits);
#pragma unroll
    for (int v = 0; v < kNumbers; ++v) result.element[v] *= received.element[v];
    if (tensors.grad_logsumexp_T) {
#pragma unroll
      for (int v = 0; v < kNumbers; ++v) result.element[v] += grad_logsumexp * scoring.share(logits.element[v]);
    }
    return result;
  };
  Row::each(numbers, lane, [&](int at) {
    if (!live || at >= shape.experts) return;
    const Floats received = tensors.grad_scores_TE.data ? Row::read(tensors.grad_scores_TE, first, at) : Floats{};
    Row::store(tensors.grad_TE, first, at, backward(*reinterpret_cast<const Floats*>(row + at), received));
  });
  if (!has_weights) return;
  __syncwarp();
#pragma unroll 1
  for (int slot = lane; slot < shape.slots; slot += G) {
    const int id = slots.id[slot];
    if (!live || padding || id < 0) continue;
    // Slots with the same expert write the same number.
    const float of_weights = slots.sum_of(id, shape.slots);
    float received = tensors.grad_scores_TE.data ? tensors.grad_scores_TE.read(first + id) : 0.0f;
    if (!after) received += of_weights;
    float result = backward(Vector<float, 1>{row[id]}, Vector<float, 1>{received}).element[0];
    if (after) result += of_weights;
    tensors.grad_TE.write(first + id, result);
  }
}

}  // namespace
}  // namespace gbmoe
