// padded_gather and padded_scatter: tokens to expert-major padded rows and back, with their gradients.
//
// All three kernels are token-major: the threads of one group own one token, read what belongs to it once and visit its K
// slots in ascending order. Sums are kept in fp32 (fp64 for fp64), in slot order, and rounded once; there are no atomics,
// so two runs give the same bits. Row and slot numbers fit int32; element offsets are int64.
//
// The kernels that write padded rows write the padding too (rows whose slot is -1, become zero): blocks behind the token
// blocks look for such rows and clear them, so no memset precedes the launch.

#include <algorithm>

#include "common.cuh"
#include "ops.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256;
constexpr int kScanRows = 64;  // padded rows that one clearing block looks at

// How one launch divides its work: `group` threads own one token, blocks [0, token_blocks) own tokens, the rest own rows.
struct Shape {
  int64_t tokens, rows;
  int slots, vectors;   // K, and vectors in one row of H elements
  int group;            // threads that own one token: a power of two, 32 to kThreads
  unsigned token_blocks;
};

Shape make_shape(int64_t tokens, int64_t slots, int64_t rows, int64_t vectors) {
  int group = 32;
  while (group < kThreads && group < vectors) group *= 2;
  return {tokens, rows, static_cast<int>(slots), static_cast<int>(vectors), group,
          static_cast<unsigned>(ceil_div(tokens, kThreads / group))};
}

template <typename V>
__device__ void clear_padding_rows(V* rows_PH, const int* slot_of_row, const Shape& shape) {
  __shared__ int padding[kScanRows];
  __shared__ int found;
  if (threadIdx.x == 0) found = 0;
  __syncthreads();
  const int64_t first = static_cast<int64_t>(blockIdx.x - shape.token_blocks) * kScanRows;
  const int64_t row = first + threadIdx.x;
  // The order in which rows enter the list does not matter: every entry receives the same zeros.
  if (threadIdx.x < kScanRows && row < shape.rows && slot_of_row[row] < 0) padding[atomicAdd(&found, 1)] = threadIdx.x;
  __syncthreads();
  for (int i = threadIdx.x / 32; i < found; i += kThreads / 32) {
    V* out = rows_PH + (first + padding[i]) * shape.vectors;
    for (int v = threadIdx.x % 32; v < shape.vectors; v += 32) out[v] = V{};
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) gather_kernel(
    const Vector<T, N>* x_TH, const int* row_of_slot, const int* slot_of_row, Vector<T, N>* out_PH, const Shape shape) {
  if (blockIdx.x >= shape.token_blocks) {
    clear_padding_rows(out_PH, slot_of_row, shape);
    return;
  }
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / shape.group) + threadIdx.x / shape.group;
  if (token >= shape.tokens) return;
  const Vector<T, N>* x = x_TH + token * shape.vectors;
  const int* rows = row_of_slot + token * shape.slots;
  for (int v = threadIdx.x % shape.group; v < shape.vectors; v += shape.group) {
    const Vector<T, N> value = x[v];
    for (int j = 0; j < shape.slots; ++j) {
      const int64_t row = rows[j];
      if (row >= 0) out_PH[row * shape.vectors + v] = value;
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) scatter_kernel(
    const Vector<T, N>* y_PH, const int* row_of_slot, Scalars weights, Vector<T, N>* out_TH, const Shape shape) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / shape.group) + threadIdx.x / shape.group;
  if (token >= shape.tokens) return;
  const int64_t first_slot = token * shape.slots;
  for (int v = threadIdx.x % shape.group; v < shape.vectors; v += shape.group) {
    accumulate_t<T> sum[N] = {};
#pragma unroll 4
    for (int j = 0; j < shape.slots; ++j) {
      const int64_t row = row_of_slot[first_slot + j];
      if (row < 0) continue;
      const accumulate_t<T> weight = weights.data ? weights.read(first_slot + j) : 1.0;
      const Vector<T, N> value = y_PH[row * shape.vectors + v];
#pragma unroll
      for (int i = 0; i < N; ++i) sum[i] += weight * widen(value.element[i]);
    }
    Vector<T, N> out;
#pragma unroll
    for (int i = 0; i < N; ++i) out.element[i] = narrow<T>(sum[i]);
    out_TH[token * shape.vectors + v] = out;
  }
}

// grad_y[row] = weight * grad[token]; grad_weight[slot] = <grad[token], y[row]>. Slots go in passes of S, so that their
// partial dot products stay in registers while the token's gradient is read once for all of them.
template <typename T, int N, int S>
__global__ void __launch_bounds__(kThreads) scatter_backward_kernel(
    const Vector<T, N>* grad_TH, const Vector<T, N>* y_PH, const int* row_of_slot, const int* slot_of_row, Scalars weights,
    Vector<T, N>* grad_y_PH, Scalars grad_weights, const Shape shape) {
  using A = accumulate_t<T>;
  if (blockIdx.x >= shape.token_blocks) {
    clear_padding_rows(grad_y_PH, slot_of_row, shape);
    return;
  }
  __shared__ A warp_sums[kThreads / 32][S];
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / shape.group) + threadIdx.x / shape.group;
  const bool live = token < shape.tokens;
  for (int pass = 0; pass < shape.slots; pass += S) {
    const int64_t first_slot = token * shape.slots + pass;
    int64_t row[S];
    A weight[S], dot[S];
#pragma unroll
    for (int j = 0; j < S; ++j) {
      const bool exists = live && pass + j < shape.slots;
      row[j] = exists ? row_of_slot[first_slot + j] : -1;
      weight[j] = row[j] >= 0 && weights.data ? weights.read(first_slot + j) : 1.0;
      dot[j] = 0;
    }
    if (live) {
      for (int v = threadIdx.x % shape.group; v < shape.vectors; v += shape.group) {
        const Vector<T, N> grad = grad_TH[token * shape.vectors + v];
#pragma unroll
        for (int j = 0; j < S; ++j) {
          if (row[j] < 0) continue;
          const int64_t at = row[j] * shape.vectors + v;
          if (y_PH) {
            const Vector<T, N> value = y_PH[at];
#pragma unroll
            for (int i = 0; i < N; ++i) dot[j] += widen(grad.element[i]) * widen(value.element[i]);
          }
          Vector<T, N> scaled;
#pragma unroll
          for (int i = 0; i < N; ++i) scaled.element[i] = narrow<T>(weight[j] * widen(grad.element[i]));
          grad_y_PH[at] = scaled;
        }
      }
    }
    if (!y_PH) continue;
    // Threads of a warp by a butterfly, then the group's warps in ascending order.
#pragma unroll
    for (int j = 0; j < S; ++j) {
      for (int lane = 16; lane > 0; lane /= 2) dot[j] += __shfl_xor_sync(0xffffffffu, dot[j], lane);
      if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32][j] = dot[j];
    }
    __syncthreads();
    const int within = threadIdx.x % shape.group;
    if (live && within < S && pass + within < shape.slots) {
      const int first_warp = threadIdx.x / shape.group * (shape.group / 32);
      A sum = 0;
      for (int w = 0; w < shape.group / 32; ++w) sum += warp_sums[first_warp + w][within];
      grad_weights.write(first_slot + within, sum);
    }
    __syncthreads();
  }
}

unsigned clearing_blocks(int64_t rows) { return static_cast<unsigned>(ceil_div(rows, kScanRows)); }

// Runs body with N bound to the vector length: 16 bytes where rows and pointers allow it, one element otherwise.
#define GBMOE_DISPATCH_VECTOR(fits, ...)                                \
  do {                                                                  \
    if (fits) { constexpr int N = kVectorLength<T>; __VA_ARGS__; }      \
    else { constexpr int N = 1; __VA_ARGS__; }                          \
  } while (0)

template <typename T> bool vectors_fit(int64_t hidden, const Tensor& a, const Tensor& b) {
  return hidden % kVectorLength<T> == 0 && aligned_16(a) && aligned_16(b);
}

template <typename T, int N> Vector<T, N>* vectors(const Tensor& tensor) {
  return static_cast<Vector<T, N>*>(tensor.data_ptr());
}

const int* ints(const Tensor& tensor) { return static_cast<const int*>(tensor.data_ptr()); }

}  // namespace

void padded_gather(Tensor x, Tensor row_of_slot, Tensor slot_of_row, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t hidden = x.size(1), rows = slot_of_row.size(0);
  if (out.numel() == 0) return;
  GBMOE_DISPATCH_FLOATING(x.scalar_type(), "padded_gather", GBMOE_DISPATCH_VECTOR(vectors_fit<T>(hidden, x, out), {
    const Shape shape = make_shape(x.size(0), row_of_slot.size(1), rows, hidden / N);
    gather_kernel<T, N><<<shape.token_blocks + clearing_blocks(rows), kThreads, 0, current_stream(x)>>>(
        vectors<T, N>(x), ints(row_of_slot), ints(slot_of_row), vectors<T, N>(out), shape);
  }));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void padded_scatter(Tensor y, Tensor row_of_slot, std::optional<Tensor> weights, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  const int64_t hidden = y.size(1), tokens = row_of_slot.size(0);
  if (out.numel() == 0) return;
  GBMOE_DISPATCH_FLOATING(y.scalar_type(), "padded_scatter", GBMOE_DISPATCH_VECTOR(vectors_fit<T>(hidden, y, out), {
    const Shape shape = make_shape(tokens, row_of_slot.size(1), y.size(0), hidden / N);
    scatter_kernel<T, N><<<shape.token_blocks, kThreads, 0, current_stream(y)>>>(
        vectors<T, N>(y), ints(row_of_slot), scalars(weights), vectors<T, N>(out), shape);
  }));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void padded_scatter_backward(
    Tensor grad, std::optional<Tensor> y, Tensor row_of_slot, Tensor slot_of_row, std::optional<Tensor> weights,
    Tensor grad_y, std::optional<Tensor> grad_weights) {
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const int64_t hidden = grad.size(1), tokens = grad.size(0), slots = row_of_slot.size(1), rows = slot_of_row.size(0);
  if (grad_y.numel() == 0) return;
  if (!grad_weights) y.reset();  // y serves its gradient only
  GBMOE_DISPATCH_FLOATING(grad.scalar_type(), "padded_scatter_backward", {
    const bool fits = vectors_fit<T>(hidden, grad, grad_y) && (!y || aligned_16(*y));
    GBMOE_DISPATCH_VECTOR(fits, {
      const Shape shape = make_shape(tokens, slots, rows, hidden / N);
      const auto launch = [&](auto pass_size) {
        scatter_backward_kernel<T, N, decltype(pass_size)::value>
            <<<shape.token_blocks + clearing_blocks(rows), kThreads, 0, current_stream(grad)>>>(
                vectors<T, N>(grad), y ? vectors<T, N>(*y) : nullptr, ints(row_of_slot), ints(slot_of_row),
                scalars(weights), vectors<T, N>(grad_y), scalars(grad_weights), shape);
      };
      if (slots == 1) launch(std::integral_constant<int, 1>());
      else if (slots == 2) launch(std::integral_constant<int, 2>());
      else launch(std::integral_constant<int, 4>());
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
