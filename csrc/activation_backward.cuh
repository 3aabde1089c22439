// The rows and the numbers of the activation's gradient, for the kernels that compute it from h, g and d in memory. The formulas stand at
// the top of activation_kernels.cu.

#pragma once

#include "activation_formulas.cuh"
#include "common.cuh"

namespace gbmoe {

// A row, its slot and router weight, and the lane's share of its dot product <a, d>.
template <typename A> struct Row {
  int64_t first;  // the row's first vector
  int slot;       // -1 for padding
  A weight, dot;
};

template <typename A>
__device__ __forceinline__ Row<A> row_of(int64_t row, int vectors, int slot, unsigned slots_in_all, const Scalars& weights) {
  if (static_cast<unsigned>(slot) >= slots_in_all) slot = -1;
  return Row<A>{row * vectors, slot, slot >= 0 && weights.data ? A(weights.read(slot)) : A(1), A(0)};
}

template <typename T, int N> struct ActivationOperands { Vector<T, N> h, g, d; };
template <typename T, int N> struct ActivationGradients { Vector<T, N> a, dh, dg; };

// Rows of pairs (h, g), [P,2F]: vector `at` of h and of g, which lie element by element in vectors 2 * at and 2 * at + 1.
template <typename T, int N>
__device__ __forceinline__ void load_pairs(const Vector<T, N>* pairs, int64_t at, Vector<T, N>& h, Vector<T, N>& g) {
  const Vector<T, N> vectors[2] = {pairs[2 * at], pairs[2 * at + 1]};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    h.element[i] = vectors[2 * i / N].element[2 * i % N];
    g.element[i] = vectors[(2 * i + 1) / N].element[(2 * i + 1) % N];
  }
}
template <typename T, int N>
__device__ __forceinline__ void store_pairs(Vector<T, N>* pairs, int64_t at, const Vector<T, N>& h, const Vector<T, N>& g) {
  Vector<T, N> vectors[2];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    vectors[2 * i / N].element[2 * i % N] = h.element[i];
    vectors[(2 * i + 1) / N].element[(2 * i + 1) % N] = g.element[i];
  }
  pairs[2 * at] = vectors[0], pairs[2 * at + 1] = vectors[1];
}

// g_PF may be null; of pairs it is, and h_PF are the pairs.
template <typename T, int N, bool kPairs = false>
__device__ __forceinline__ ActivationOperands<T, N> load_operands(
    const Vector<T, N>* h_PF, const Vector<T, N>* g_PF, const Vector<T, N>* d_PF, int64_t at) {
  ActivationOperands<T, N> operands;
  operands.d = d_PF[at];
  if constexpr (kPairs) {
    load_pairs(h_PF, at, operands.h, operands.g);
  } else {
    operands.h = h_PF[at], operands.g = {};
    if (g_PF) operands.g = g_PF[at];
  }
  return operands;
}

template <typename A> struct GradientsOfOne { A a, dh, dg; };

// Of one number of each operand, before it is rounded; its share of <a, d> is added to the row's. g counts where there is a gate.
template <int kKind, typename T, typename A = accumulate_t<T>>
__device__ __forceinline__ GradientsOfOne<A> activation_gradient(Row<A>& of, A h, bool gated, A g, A d, const ActivationOf& activation) {
  const ValueAndSlope<A> act = activation_at<kKind, sizeof(T) == 2>(h, activation);
  const ValueAndSlope<A> gate = gated ? gate_at<kKind>(g, activation) : ValueAndSlope<A>{A(1), A(1)};
  of.dot += act.value * gate.value * d;
  const A of_g = of.weight * d * act.value;
  return {of.weight * act.value * gate.value, of.weight * d * act.slope * gate.value, changes_gate(kKind) ? of_g * gate.slope : of_g};
}

// A vector's share of <a, d> is added to the row's. Without a slot the results are zeros, whatever the operands hold.
template <int kKind, typename T, int N>
__device__ __forceinline__ ActivationGradients<T, N> activation_gradients(
    Row<accumulate_t<T>>& of, const ActivationOperands<T, N>& operands, bool gated, const ActivationOf& activation) {
  using A = accumulate_t<T>;
  Vector<T, N> a, dh, dg;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const GradientsOfOne<A> result = activation_gradient<kKind, T>(
        of, widen(operands.h.element[i]), gated, widen(operands.g.element[i]), widen(operands.d.element[i]), activation);
    a.element[i] = narrow<T>(result.a);
    dh.element[i] = narrow<T>(result.dh);
    dg.element[i] = narrow<T>(result.dg);
  }
  if (of.slot < 0) a = dh = dg = Vector<T, N>{};
  return {a, dh, dg};
}

// The dot products of a warp's two rows, in a fixed order, to their slots' gradients. All lanes of the warp come here.
template <typename A> __device__ __forceinline__ void write_dots(Row<A>& one, Row<A>& two, const Scalars& grad_weights) {
  for (int step = 16; step > 0; step /= 2) {
    one.dot += __shfl_xor_sync(kFullWarp, one.dot, step);
    two.dot += __shfl_xor_sync(kFullWarp, two.dot, step);
  }
  if (threadIdx.x % 32 == 0 && one.slot >= 0) grad_weights.write(one.slot, one.dot);
  if (threadIdx.x % 32 == 0 && two.slot >= 0) grad_weights.write(two.slot, two.dot);
}

}  // namespace gbmoe
