// The gradients of padded_scatter: of the rows, with the padding cleared, and of the weights.

#include "../operators.h"
#include "padded_rows.cuh"

namespace gbmoe {
namespace {

// grad_y[row] = weight * grad[token]; grad_weight[slot] = <grad[token], y[row]>. Either may be left out.
template <typename T, int N, int S, bool kDots>
__global__ void __launch_bounds__(kThreads) scatter_backward_kernel(
    const Vector<T, N>* __restrict__ grad_TH, const Vector<T, N>* __restrict__ y_PH, const Slots slots,
    const int* __restrict__ slot_of_row, const Scalars weights, Vector<T, N>* __restrict__ grad_y_PH, const Scalars grad_weights,
    const LaunchShape shape) {
  using A = accumulate_t<T>;
  constexpr int U = S >= 8 ? 1 : S >= 4 ? 2 : 4;
  const PaddingRows padding(slot_of_row, shape);
  __shared__ A warp_sums[kWarps][S];
  const int64_t token = shape.own_token();
  const bool live = token < shape.tokens;
  const int in_use = live ? slots.in_use(token) : 0;
  const int thread = threadIdx.x % shape.token_threads;  // of those that own the token
  // Tokens of one CTA may have different numbers of slots in use, and all threads must meet at the barriers.
  __shared__ int most_in_use;
  int passes = slots.most;
  if (slots.count) {
    if (threadIdx.x == 0) most_in_use = 0;
    __syncthreads();
    if (thread == 0) atomicMax(&most_in_use, in_use);
    __syncthreads();
    passes = most_in_use;
  }
  for (int first = 0; first < passes; first += S) {
    const Pass<A, S> pass(slots, weights, live ? token : 0, first, in_use, shape.vectors);
    A dot[S] = {};
    if (pass.exists) {
      for (int v = thread; v < shape.vectors; v += U * shape.token_threads) {
        Vector<T, N> grad[U], value[U][S];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int at = min(v + u * shape.token_threads, shape.vectors - 1);
          grad[u] = grad_TH[token * shape.vectors + at];
          if constexpr (kDots) {
#pragma unroll
            for (int j = 0; j < S; ++j) value[u][j] = y_PH[pass.at[j] + at];
          }
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int at = v + u * shape.token_threads;
          if (at >= shape.vectors) continue;
#pragma unroll
          for (int j = 0; j < S; ++j) {
            if (!pass.has(j)) continue;
            if constexpr (kDots) {
#pragma unroll
              for (int i = 0; i < N; ++i) dot[j] += widen(grad[u].element[i]) * widen(value[u][j].element[i]);
            }
            if (grad_y_PH) {
              Vector<T, N> scaled;
#pragma unroll
              for (int i = 0; i < N; ++i) scaled.element[i] = narrow<T>(pass.weight[j] * widen(grad[u].element[i]));
              grad_y_PH[pass.at[j] + at] = scaled;
            }
          }
        }
      }
    }
    if constexpr (kDots) {
      // Summed over the threads of a warp by a butterfly, then over the token's warps in ascending order.
      A sum = 0;
#pragma unroll
      for (int j = 0; j < S; ++j) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) dot[j] += __shfl_xor_sync(kFullWarp, dot[j], step);
        if (thread == j) sum = dot[j];
        if (shape.token_threads > 32 && threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32][j] = dot[j];
      }
      if (shape.token_threads > 32) {
        __syncthreads();
        const int first_warp = threadIdx.x / shape.token_threads * (shape.token_threads / 32);
        for (int w = 1; thread < S && w < shape.token_threads / 32; ++w) sum += warp_sums[first_warp + w][thread];
        if (first + S < passes) __syncthreads();
      }
      // A ragged map's slot without a row may have any column; grad_weights is zero beforehand.
      if (thread < S && first + thread < in_use && (!slots.column || slots.row_of(token, first + thread) >= 0)) {
        const int64_t scalar = slots.scalar_of(token, first + thread);
        if (scalar >= 0) grad_weights.write(scalar, sum);
      }
    }
  }
  padding.clear(grad_y_PH, slot_of_row, shape, [](int64_t) {});
}

}  // namespace

// row_of_slot, columns and counts may be views with a row stride
void padded_scatter_backward(
    Tensor grad, std::optional<Tensor> y, Tensor row_of_slot, Tensor slot_of_row, std::optional<Tensor> columns,
    std::optional<Tensor> counts, std::optional<Tensor> weights, bool clear_behind, std::optional<Tensor> grad_y,
    std::optional<Tensor> grad_weights) {
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const int64_t hidden = grad.size(1), tokens = grad.size(0), rows = grad_y ? grad_y->size(0) : 0;
  if (hidden == 0 || (tokens == 0 && rows == 0)) return;
  if (!grad_weights) y.reset();  // y is read for grad_weights only
  const int64_t rows_of_both = grad_y && y ? std::min(rows, y->size(0)) : y ? y->size(0) : rows;
  const Slots slots = make_slots(row_of_slot, columns, counts, rows_of_both, {&weights, &grad_weights});
  const Tensor* y_data = y ? &*y : nullptr;
  const Tensor* grad_y_data = grad_y ? &*grad_y : nullptr;
  GBMOE_DISPATCH_FLOATING(grad.scalar_type(), "padded_scatter_backward", {
    const bool fits = fits_16_bytes(hidden * sizeof(T), {&grad, y_data, grad_y_data});
    GBMOE_DISPATCH_VECTOR_AND_SLOTS(fits, slots.most, {
      using V = Vector<T, N>;
      const LaunchShape shape = make_launch_shape(tokens, slots.most, rows, hidden / N, few_threads(hidden / N), clear_behind);
      const auto kernel = y ? scatter_backward_kernel<T, N, S, true> : scatter_backward_kernel<T, N, S, false>;
      kernel<<<shape.ctas, shape.threads, 0, current_stream(grad)>>>(
          data<V>(grad), data<V>(y), slots, data<const int>(slot_of_row), scalars(weights),
          data<V>(grad_y), scalars(grad_weights), shape);
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(padded_scatter_backward,
               "(Tensor grad, Tensor? y, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns, Tensor? counts, Tensor? "
               "weights, bool clear_behind, Tensor(a!)? grad_y, Tensor(b!)? grad_weights) -> ()");

}  // namespace gbmoe
