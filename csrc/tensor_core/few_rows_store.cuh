// How the kernels for groups of few rows (few_rows.cuh, hopper/few_rows_gemm.cuh) add biases to their sums, and store them.

#pragma once

#include <optional>

#include "../activation_formulas.cuh"
#include "../common.cuh"

namespace gbmoe {

// What is added to a tensor's columns before they are rounded: a tensor [E,N] with any strides, or nothing where `data` is null.
struct Bias {
  const void* data;
  int64_t of_group, of_column;  // elements from one to the next
};
template <typename Tensor> Bias bias_of(const std::optional<Tensor>& bias) {
  return bias ? Bias{bias->data_ptr(), bias->stride(0), bias->stride(1)} : Bias{};
}
// Without one -0, which, unlike 0, changes no sum.
template <typename T> __device__ __forceinline__ float bias_at(const Bias& bias, int group, int column, int size_n) {
  if (!bias.data || column >= size_n) return -0.0f;
  return widen(static_cast<const T*>(bias.data)[group * bias.of_group + column * bias.of_column]);
}

// Stores `rows` rows of `columns` columns, which begin in row first_row and column n of tensors with size_n columns. All `threads` threads of
// those that store call this. rounded_sum(row, column) is a sum as it is stored; in a GLU those of g are `columns` columns after h's.
// out[0] gets the sums themselves, or with kActivates a = act(h) or act(h) * g, out[1] then h and out[2] g, unless they are null; these two
// have `step` elements from one column to the next, and rows that are as much longer.
template <typename T, bool kActivates, bool kGlu, typename F>
__device__ __forceinline__ void store_few_rows(
    void* const (&out)[3], const ActivationOf& activation, int64_t first_row, int rows, int size_n, int n, int columns, int step,
    int threads, const F& rounded_sum) {
  const auto to = [&](int i) { return static_cast<T*>(out[i]); };
  for (int i = threadIdx.x; i < rows * columns; i += threads) {
    const int row = i / columns, column = i % columns;
    if (n + column >= size_n) continue;
    const int64_t at = (first_row + row) * size_n + n + column;
    const T h = rounded_sum(row, column);
    if constexpr (!kActivates) {
      to(0)[at] = h;
    } else {
      // h and g are rounded for storage before a is computed from them.
      float a = 0.0f;
      with_activation(activation.kind, [&](auto kind) { a = activation_at<decltype(kind)::value, true>(widen(h), activation).value; });
      if (to(1)) to(1)[at * step] = h;
      if constexpr (kGlu) {
        const T g = rounded_sum(row, columns + column);
        if (to(2)) to(2)[at * step] = g;
        with_activation(activation.kind, [&](auto kind) { a *= gate_at<decltype(kind)::value>(widen(g), activation).value; });
      }
      to(0)[at] = narrow<T>(a);
    }
  }
}

}  // namespace gbmoe
