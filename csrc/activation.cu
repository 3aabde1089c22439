// The experts' activation between their two products, and its gradient with the router weight folded in.
//
//   forward:   a = act(h)            or a = act(h) * g                                   [P,F]
//   backward:  with d = grad of the unweighted output through w2 (d [P,F] = gathered grad @ w2[e].T) and w the row's
//              router weight:  a' = w * a (the left operand of w2's gradient),  dh = w * d * act'(h) [* g],
//              dg = w * d * act(h),  dw = <a, d>.   Recomputing a here is what lets backward save h and g only, and
//              taking dw from it is what lets the layer drop the experts' output y.
// dh takes the place of d, in the same memory: at [P,F] these are the largest tensors of a layer. Padding rows (slot -1)
// get zeros in a', dh and dg whatever h holds, so that a NaN there cannot leak.

#include <algorithm>
#include <initializer_list>

#include "activations.cuh"
#include "common.cuh"
#include "ops.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256, kRowsABlock = kThreads / 32;

template <typename A> struct ValueAndSlope { A value, slope; };

template <typename A> __device__ __forceinline__ ValueAndSlope<A> activation_at(A x, int activation) {
  switch (activation) {
    case kSilu: {
      const A s = A(1) / (A(1) + exp(-x));
      return {x * s, s * (A(1) + x * (A(1) - s))};
    }
    case kGeluTanh: {
      const A c = A(0.7978845608028654), cubic = A(0.044715);
      const A t = tanh(c * (x + cubic * x * x * x));
      return {A(0.5) * x * (A(1) + t), A(0.5) * (A(1) + t) + A(0.5) * x * (A(1) - t * t) * c * (A(1) + A(3) * cubic * x * x)};
    }
    case kGelu: {
      const A cdf = A(0.5) * (A(1) + erf(x * A(0.7071067811865476)));
      return {x * cdf, cdf + x * A(0.3989422804014327) * exp(A(-0.5) * x * x)};
    }
    case kRelu: return {x > A(0) || x != x ? x : A(0), x > A(0) ? A(1) : A(0)};
    case kReluSquared: {
      const A r = x > A(0) || x != x ? x : A(0);
      return {r * r, A(2) * r};
    }
    default: return {x, A(1)};
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) activate_kernel(
    const Vector<T, N>* h, const Vector<T, N>* g, Vector<T, N>* out, int64_t vectors, int activation) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t v = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; v < vectors; v += stride) {
    const Vector<T, N> hv = h[v];
    Vector<T, N> gv{}, result;
    if (g) gv = g[v];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      accumulate_t<T> value = activation_at(widen(hv.element[i]), activation).value;
      if (g) value *= widen(gv.element[i]);
      result.element[i] = narrow<T>(value);
    }
    out[v] = result;
  }
}

// One warp a row: the row's dot product is reduced inside it, in a fixed order, and short rows leave no thread idle.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) activate_backward_kernel(
    const Vector<T, N>* h_PF, const Vector<T, N>* g_PF, Vector<T, N>* d_PF, const int* slot_of_row, Scalars weights,
    Vector<T, N>* a_PF, Vector<T, N>* dg_PF, Scalars grad_weights, int64_t rows, int vectors, int activation) {
  using A = accumulate_t<T>;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsABlock + threadIdx.x / 32;
  if (row >= rows) return;
  const int lane = threadIdx.x % 32;
  const int64_t first = row * vectors;
  const int slot = slot_of_row[row];
  if (slot < 0) {
    for (int v = lane; v < vectors; v += 32) {
      a_PF[first + v] = Vector<T, N>{};
      d_PF[first + v] = Vector<T, N>{};
      if (g_PF) dg_PF[first + v] = Vector<T, N>{};
    }
    return;
  }
  const A weight = weights.data ? weights.read(slot) : 1.0;
  A dot = 0;
  for (int v = lane; v < vectors; v += 32) {
    const Vector<T, N> hv = h_PF[first + v], dv = d_PF[first + v];
    Vector<T, N> gv{}, a, dh, dg;
    if (g_PF) gv = g_PF[first + v];
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const ValueAndSlope<A> act = activation_at(widen(hv.element[i]), activation);
      const A gate = g_PF ? widen(gv.element[i]) : A(1), d = widen(dv.element[i]);
      dot += act.value * gate * d;
      a.element[i] = narrow<T>(weight * act.value * gate);
      dh.element[i] = narrow<T>(weight * d * act.slope * gate);
      dg.element[i] = narrow<T>(weight * d * act.value);
    }
    a_PF[first + v] = a;
    d_PF[first + v] = dh;
    if (g_PF) dg_PF[first + v] = dg;
  }
  if (!grad_weights.data) return;
  for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(0xffffffffu, dot, step);
  if (lane == 0) grad_weights.write(slot, dot);
}

template <typename T> bool vectors_fit(int64_t columns, std::initializer_list<const Tensor*> tensors) {
  bool fits = columns % kVectorLength<T> == 0;
  for (const Tensor* tensor : tensors) fits = fits && (!tensor || aligned_16(*tensor));
  return fits;
}

template <typename T, int N> Vector<T, N>* vectors_of(const Tensor* tensor) {
  return tensor ? static_cast<Vector<T, N>*>(tensor->data_ptr()) : nullptr;
}

}  // namespace

void activate(Tensor h, std::optional<Tensor> g, int64_t activation, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(h.get_device_index());
  if (out.numel() == 0) return;
  const Tensor* gate = g ? &*g : nullptr;
  GBMOE_DISPATCH_FLOATING(h.scalar_type(), "activate", {
    const auto launch = [&](auto length) {
      constexpr int N = decltype(length)::value;
      const int64_t vectors = h.numel() / N;
      const unsigned blocks = static_cast<unsigned>(std::min<int64_t>(ceil_div(vectors, kThreads), 132 * 32));
      activate_kernel<T, N><<<blocks, kThreads, 0, current_stream(h)>>>(
          vectors_of<T, N>(&h), vectors_of<T, N>(gate), vectors_of<T, N>(&out), vectors, static_cast<int>(activation));
    };
    if (vectors_fit<T>(h.numel(), {&h, gate, &out})) launch(std::integral_constant<int, kVectorLength<T>>());
    else launch(std::integral_constant<int, 1>());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void activate_backward(
    Tensor h, std::optional<Tensor> g, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights, int64_t activation,
    Tensor a, std::optional<Tensor> dg, std::optional<Tensor> grad_weights) {
  const torch::stable::accelerator::DeviceGuard guard(h.get_device_index());
  if (h.numel() == 0) return;
  const Tensor* gate = g ? &*g : nullptr;
  const Tensor* gate_grad = dg ? &*dg : nullptr;
  GBMOE_DISPATCH_FLOATING(h.scalar_type(), "activate_backward", {
    const auto launch = [&](auto length) {
      constexpr int N = decltype(length)::value;
      activate_backward_kernel<T, N><<<static_cast<unsigned>(ceil_div(h.size(0), kRowsABlock)), kThreads, 0, current_stream(h)>>>(
          vectors_of<T, N>(&h), vectors_of<T, N>(gate), vectors_of<T, N>(&d),
          static_cast<const int*>(slot_of_row.data_ptr()), scalars(weights), vectors_of<T, N>(&a),
          vectors_of<T, N>(gate_grad), scalars(grad_weights), h.size(0), static_cast<int>(h.size(1) / N),
          static_cast<int>(activation));
    };
    if (vectors_fit<T>(h.size(1), {&h, gate, &d, &a, gate_grad})) launch(std::integral_constant<int, kVectorLength<T>>());
    else launch(std::integral_constant<int, 1>());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
