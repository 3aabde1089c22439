// The experts' activation between their two GEMMs, and its gradient with the router weight folded in.
//
//   forward:   a = act(h)            or a = act(h) * g                                   [P,F]
//   backward:  with d = grad of the unweighted output through w2 (d [P,F] = gathered grad @ w2[e].T) and w the row's
//              router weight:  a' = w * a (the left operand of w2's gradient),  dh = w * d * act'(h) [* g],
//              dg = w * d * act(h),  dw = <a, d>.   Recomputing a here is what lets backward save h and g only, and
//              taking dw from it is what lets the layer drop the experts' output y.
// dh takes the place of d, in the same memory: at [P,F] these are the largest tensors of a layer. Padding rows (slot -1)
// get zeros in a', dh and dg whatever h holds, so that a NaN there cannot leak. A slot beyond the weights counts as none.
// h and g may come as pairs, [P,2F], whose gradients are pairs then, in memory of their own.
// Both kernels load and store vectors of 16 bytes where rows and pointers allow it, and single elements otherwise.

#include <algorithm>
#include <type_traits>

#include "activation_backward.cuh"
#include "activation_formulas.cuh"
#include "common.cuh"
#include "operators.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256, kWarpsPerCta = kThreads / 32;
// activate_kernel's grid is at most this many CTAs per multiprocessor, and its threads walk on in strides of the grid.
constexpr int kCtasPerMultiprocessor = 32;

template <bool kPairs, typename T, int N>
__global__ void __launch_bounds__(kThreads) activate_kernel(
    const Vector<T, N>* h, const Vector<T, N>* g, Vector<T, N>* out, int64_t vectors, const __grid_constant__ ActivationOf activation) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  with_activation(activation.kind, [&](auto kind) {
    for (int64_t v = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; v < vectors; v += stride) {
      Vector<T, N> hv, gv{}, result;
      if constexpr (kPairs) load_pairs(h, v, hv, gv);
      else hv = h[v];
      if (!kPairs && g) gv = g[v];
#pragma unroll
      for (int i = 0; i < N; ++i) {
        accumulate_t<T> value = activation_at<decltype(kind)::value, sizeof(T) == 2>(widen(hv.element[i]), activation).value;
        if (kPairs || g) value *= gate_at<decltype(kind)::value>(widen(gv.element[i]), activation).value;
        result.element[i] = narrow<T>(value);
      }
      out[v] = result;
    }
  });
}

// Each warp owns two rows. A row's dot product is reduced inside the warp, in a fixed order; short rows leave no thread idle; and
// the loads of both rows are in flight together. Where the number of rows is odd, the last row is computed twice, with the same
// results.
template <bool kPairs, typename T, int N>
__global__ void __launch_bounds__(kThreads) activate_backward_kernel(
    const Vector<T, N>* h_PF, const Vector<T, N>* g_PF, Vector<T, N>* d_PF, const int* slot_of_row, Scalars weights,
    const unsigned slots_in_all, Vector<T, N>* a_PF, Vector<T, N>* dg_PF, Scalars grad_weights, int64_t rows, int vectors,
    const __grid_constant__ ActivationOf activation) {
  using A = accumulate_t<T>;
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x) * kWarpsPerCta + threadIdx.x / 32) * 2;
  if (first_row >= rows) return;
  const int lane = threadIdx.x % 32;
  const auto load = [&](int64_t first, int v) { return load_operands<T, N, kPairs>(h_PF, g_PF, d_PF, first + v); };
  const int64_t second_row = min(first_row + 1, rows - 1);
  const int slots[2] = {slot_of_row[first_row], slot_of_row[second_row]};
  ActivationOperands<T, N> of_one{}, of_two{};
  if (lane < vectors) {  // loads are started before anything waits for the slots
    of_one = load(first_row * vectors, lane);
    of_two = load(second_row * vectors, lane);
  }
  Row<A> one = row_of<A>(first_row, vectors, slots[0], slots_in_all, weights);
  Row<A> two = row_of<A>(second_row, vectors, slots[1], slots_in_all, weights);
  with_activation(activation.kind, [&](auto kind) {
    const auto compute = [&](Row<A>& of, int v, const ActivationOperands<T, N>& operands) {
      const ActivationGradients<T, N> result = activation_gradients<decltype(kind)::value, T, N>(
          of, operands, kPairs || g_PF != nullptr, activation);
      a_PF[of.first + v] = result.a;
      if constexpr (kPairs) store_pairs(dg_PF, of.first + v, result.dh, result.dg);
      else d_PF[of.first + v] = result.dh;
      if (!kPairs && g_PF) dg_PF[of.first + v] = result.dg;
    };
    if (lane >= vectors) return;
    for (int v = lane;;) {
      compute(one, v, of_one);
      compute(two, v, of_two);
      v += 32;
      if (v >= vectors) break;
      of_one = load(one.first, v);
      of_two = load(two.first, v);
    }
  });
  if (grad_weights.data) write_dots(one, two, grad_weights);
}

}  // namespace

namespace {

// h [P,F] and g, or without g and with pairs [P,2F]; out [P,F].
template <bool kPairs>
void launch_activate(const Tensor& h, const Tensor* g, const std::vector<double>& activation, const Tensor& out) {
  const torch::stable::accelerator::DeviceGuard guard(h.get_device_index());
  if (out.numel() == 0) return;
  GBMOE_DISPATCH_FLOATING(h.scalar_type(), "activate", {
    const auto launch = [&](auto length) {
      constexpr int N = decltype(length)::value;
      using V = Vector<T, N>;
      const int64_t vectors = out.numel() / N;
      const int64_t most_ctas = int64_t{kCtasPerMultiprocessor} * multiprocessors(h.get_device_index());
      const unsigned ctas = static_cast<unsigned>(std::min(ceil_div(vectors, kThreads), most_ctas));
      activate_kernel<kPairs, T, N><<<ctas, kThreads, 0, current_stream(h)>>>(
          data<V>(h), g ? data<V>(*g) : nullptr, data<V>(out), vectors, activation_of(activation));
    };
    if (fits_16_bytes(out.numel() * sizeof(T), {&h, g, &out})) launch(std::integral_constant<int, kVectorLength<T>>());
    else launch(std::integral_constant<int, 1>());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// d becomes dh, and dg is written where there is g; or of pairs h, dg is written with pairs. grad_weights comes as zeros.
template <bool kPairs>
void launch_activate_backward(
    const Tensor& h, const Tensor* g, const Tensor& d, const Tensor& slot_of_row, const std::optional<Tensor>& weights,
    const std::vector<double>& activation, const Tensor& a, const Tensor* dg, const std::optional<Tensor>& grad_weights) {
  const torch::stable::accelerator::DeviceGuard guard(h.get_device_index());
  if (h.numel() == 0) return;
  const uint32_t slots = count_of_slots(weights);
  GBMOE_DISPATCH_FLOATING(h.scalar_type(), "activate_backward", {
    const auto launch = [&](auto length) {
      constexpr int N = decltype(length)::value;
      using V = Vector<T, N>;
      const unsigned ctas = static_cast<unsigned>(ceil_div(d.size(0), 2 * kWarpsPerCta));
      activate_backward_kernel<kPairs, T, N><<<ctas, kThreads, 0, current_stream(h)>>>(
          data<V>(h), g ? data<V>(*g) : nullptr, data<V>(d), data<const int>(slot_of_row), scalars(weights), slots, data<V>(a),
          dg ? data<V>(*dg) : nullptr, scalars(grad_weights), d.size(0), static_cast<int>(d.size(1) / N), activation_of(activation));
    };
    const bool fits = fits_16_bytes(d.size(1) * sizeof(T), {&h, g, &d, &a, dg});
    if (fits) launch(std::integral_constant<int, kVectorLength<T>>());
    else launch(std::integral_constant<int, 1>());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

const Tensor* pointer(const std::optional<Tensor>& tensor) { return tensor ? &*tensor : nullptr; }

}  // namespace

void activate(Tensor h, std::optional<Tensor> g, std::vector<double> activation, Tensor out) {
  launch_activate<false>(h, pointer(g), activation, out);
}

// pairs [P,2F], out [P,F]
void activate_pairs(Tensor pairs, std::vector<double> activation, Tensor out) { launch_activate<true>(pairs, nullptr, activation, out); }

// d becomes dh; grad_weights comes as zeros
void activate_backward(
    Tensor h, std::optional<Tensor> g, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights,
    std::vector<double> activation, Tensor a, std::optional<Tensor> dg, std::optional<Tensor> grad_weights) {
  launch_activate_backward<false>(h, pointer(g), d, slot_of_row, weights, activation, a, pointer(dg), grad_weights);
}

// pairs and dpairs [P,2F], d and a [P,F]; grad_weights comes as zeros
void activate_pairs_backward(
    Tensor pairs, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights, std::vector<double> activation, Tensor a,
    Tensor dpairs, std::optional<Tensor> grad_weights) {
  launch_activate_backward<true>(pairs, nullptr, d, slot_of_row, weights, activation, a, &dpairs, grad_weights);
}

GBMOE_OPERATOR(activate, "(Tensor h, Tensor? g, float[] activation, Tensor(a!) out) -> ()");
GBMOE_OPERATOR(activate_pairs, "(Tensor pairs, float[] activation, Tensor(a!) out) -> ()");
GBMOE_OPERATOR(activate_backward,
               "(Tensor h, Tensor? g, Tensor(a!) d, Tensor slot_of_row, Tensor? weights, float[] activation, Tensor(b!) a, "
               "Tensor(c!)? dg, Tensor(d!)? grad_weights) -> ()");
GBMOE_OPERATOR(activate_pairs_backward,
               "(Tensor pairs, Tensor d, Tensor slot_of_row, Tensor? weights, float[] activation, Tensor(a!) a, "
               "Tensor(b!) dpairs, Tensor(c!)? grad_weights) -> ()");

}  // namespace gbmoe
