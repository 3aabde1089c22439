// The experts' activation between their two products, and its gradient with the router weight folded in.
//
//   forward:   a = act(h)            or a = act(h) * g                                   [P,F]
//   backward:  with d = grad of the unweighted output through w2 (d [P,F] = gathered grad @ w2[e].T) and w the row's
//              router weight:  a' = w * a (the left operand of w2's gradient),  dh = w * d * act'(h) [* g],
//              dg = w * d * act(h),  dw = <a, d>.   Recomputing a here is what lets backward save h and g only, and
//              taking dw from it is what lets the layer drop the experts' output y.
// dh takes the place of d, in the same memory: at [P,F] these are the largest tensors of a layer. Padding rows (slot -1)
// get zeros in a', dh and dg whatever h holds, so that a NaN there cannot leak. A slot beyond the weights counts as none.

#include <algorithm>
#include <initializer_list>
#include <type_traits>

#include "activations.cuh"
#include "common.cuh"
#include "ops.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256, kWarpsABlock = kThreads / 32;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) activate_kernel(
    const Vector<T, N>* h, const Vector<T, N>* g, Vector<T, N>* out, int64_t vectors, int activation) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  with_activation(activation, [&](auto kind) {
    for (int64_t v = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; v < vectors; v += stride) {
      const Vector<T, N> hv = h[v];
      Vector<T, N> gv{}, result;
      if (g) gv = g[v];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        accumulate_t<T> value = activation_at<decltype(kind)::value, sizeof(T) == 2>(widen(hv.element[i])).value;
        if (g) value *= widen(gv.element[i]);
        result.element[i] = narrow<T>(value);
      }
      out[v] = result;
    }
  });
}

// A row and what the router and the plan say of it.
template <typename A> struct Row {
  int64_t first;  // vector
  int slot;       // -1 for padding
  A weight, dot;
};

// One warp two rows: a row's dot product is reduced inside it, in a fixed order, short rows leave no thread idle, and the loads of
// both are on their way together. Of an odd number the last row is computed twice, with the same results.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) activate_backward_kernel(
    const Vector<T, N>* h_PF, const Vector<T, N>* g_PF, Vector<T, N>* d_PF, const int* slot_of_row, Scalars weights,
    const unsigned slots_in_all, Vector<T, N>* a_PF, Vector<T, N>* dg_PF, Scalars grad_weights, int64_t rows, int vectors,
    int activation) {
  using A = accumulate_t<T>;
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x) * kWarpsABlock + threadIdx.x / 32) * 2;
  if (first_row >= rows) return;
  const int lane = threadIdx.x % 32;
  struct Operands { Vector<T, N> h, g, d; };
  const auto load = [&](int64_t first, int v) {
    Operands operands{h_PF[first + v], {}, d_PF[first + v]};
    if (g_PF) operands.g = g_PF[first + v];
    return operands;
  };
  const int64_t second_row = min(first_row + 1, rows - 1);
  const int slots[2] = {slot_of_row[first_row], slot_of_row[second_row]};
  Operands of_one{}, of_two{};
  if (lane < vectors) {  // asked for before anything waits for the slots
    of_one = load(first_row * vectors, lane);
    of_two = load(second_row * vectors, lane);
  }
  const auto row_of = [&](int64_t row, int slot) {
    if (static_cast<unsigned>(slot) >= slots_in_all) slot = -1;
    return Row<A>{row * vectors, slot, slot >= 0 && weights.data ? A(weights.read(slot)) : A(1), A(0)};
  };
  Row<A> one = row_of(first_row, slots[0]), two = row_of(second_row, slots[1]);
  with_activation(activation, [&](auto kind) {
    const auto finish = [&](Row<A>& of, int v, const Operands& operands) {
      Vector<T, N> a, dh, dg;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const ValueAndSlope<A> act = activation_at<decltype(kind)::value, sizeof(T) == 2>(widen(operands.h.element[i]));
        const A gate = g_PF ? widen(operands.g.element[i]) : A(1), d = widen(operands.d.element[i]);
        of.dot += act.value * gate * d;
        a.element[i] = narrow<T>(of.weight * act.value * gate);
        dh.element[i] = narrow<T>(of.weight * d * act.slope * gate);
        dg.element[i] = narrow<T>(of.weight * d * act.value);
      }
      if (of.slot < 0) a = dh = dg = Vector<T, N>{};  // whatever the operands held
      a_PF[of.first + v] = a;
      d_PF[of.first + v] = dh;
      if (g_PF) dg_PF[of.first + v] = dg;
    };
    if (lane >= vectors) return;
    for (int v = lane;;) {
      finish(one, v, of_one);
      finish(two, v, of_two);
      v += 32;
      if (v >= vectors) break;
      of_one = load(one.first, v);
      of_two = load(two.first, v);
    }
  });
  if (!grad_weights.data) return;
  for (int step = 16; step > 0; step /= 2) {
    one.dot += __shfl_xor_sync(0xffffffffu, one.dot, step);
    two.dot += __shfl_xor_sync(0xffffffffu, two.dot, step);
  }
  if (lane == 0 && one.slot >= 0) grad_weights.write(one.slot, one.dot);
  if (lane == 0 && two.slot >= 0) grad_weights.write(two.slot, two.dot);
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
  constexpr int64_t kMostSlots = int64_t{1} << 31;  // whatever is not negative
  const unsigned slots = static_cast<unsigned>(weights ? std::min(weights->numel(), kMostSlots) : kMostSlots);
  GBMOE_DISPATCH_FLOATING(h.scalar_type(), "activate_backward", {
    const auto launch = [&](auto length) {
      constexpr int N = decltype(length)::value;
      activate_backward_kernel<T, N><<<static_cast<unsigned>(ceil_div(h.size(0), 2 * kWarpsABlock)), kThreads, 0, current_stream(h)>>>(
          vectors_of<T, N>(&h), vectors_of<T, N>(gate), vectors_of<T, N>(&d),
          static_cast<const int*>(slot_of_row.data_ptr()), scalars(weights), slots, vectors_of<T, N>(&a),
          vectors_of<T, N>(gate_grad), scalars(grad_weights), h.size(0), static_cast<int>(h.size(1) / N),
          static_cast<int>(activation));
    };
    if (vectors_fit<T>(h.size(1), {&h, gate, &d, &a, gate_grad})) launch(std::integral_constant<int, kVectorLength<T>>());
    else launch(std::integral_constant<int, 1>());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
