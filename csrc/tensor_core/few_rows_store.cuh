// How the kernels for groups of few rows (few_rows.cuh, hopper/few_rows_gemm.cuh) store their sums.

#pragma once

#include "../activation_formulas.cuh"
#include "../common.cuh"

namespace gbmoe {

// Stores `rows` rows of `columns` columns, which begin in row first_row and column n of tensors with size_n columns. All `threads` threads of
// those that store call this. rounded_sum(row, column) is a sum as it is stored; in a GLU those of g are `columns` columns after h's.
// out[0] gets the sums themselves, or with kActivates a = act(h) or act(h) * g, out[1] then h and out[2] g, unless they are null.
template <typename T, bool kActivates, bool kGlu, typename F>
__device__ __forceinline__ void store_few_rows(
    void* const (&out)[3], const ActivationOf& activation, int64_t first_row, int rows, int size_n, int n, int columns, int threads,
    const F& rounded_sum) {
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
      if (to(1)) to(1)[at] = h;
      if constexpr (kGlu) {
        const T g = rounded_sum(row, columns + column);
        if (to(2)) to(2)[at] = g;
        with_activation(activation.kind, [&](auto kind) { a *= gate_at<decltype(kind)::value>(widen(g), activation).value; });
      }
      to(0)[at] = narrow<T>(a);
    }
  }
}

}  // namespace gbmoe
