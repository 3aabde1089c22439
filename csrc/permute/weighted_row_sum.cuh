// The weighted sum of a token's rows, which padded_scatter writes for its tokens and push_row_sums for those of all ranks.

#pragma once

#include "padded_rows.cuh"

namespace gbmoe {
namespace {

// A load whose line is the first to leave the cache. With two to four rows per token it takes 3 % less time, with more as
// long as another.
template <typename V> __device__ __forceinline__ V load_streaming(const V* from) {
  if constexpr (sizeof(V) != 16) {
    return *from;
  } else {
    const uint4 value = __ldcs(reinterpret_cast<const uint4*>(from));
    return reinterpret_cast<const V&>(value);
  }
}

// out_rows[out_row] = the sum of weight * y[row] over the token's slots. All threads that own the token call it. Each thread sums U
// vectors at a time, with U * S loads in flight. With kMany the slots take several passes, each of which adds to the sums of those
// before.
template <typename T, int N, int S, bool kMany>
__device__ __forceinline__ void store_weighted_sum(
    const Vector<T, N>* __restrict__ y_PH, const Slots& slots, const Scalars& weights, int64_t token, const LaunchShape& shape,
    Vector<T, N>* __restrict__ out_rows, int64_t out_row) {
  using A = accumulate_t<T>;
  constexpr int U = S >= 8 ? 1 : S >= 4 ? 2 : 4;
  const int in_use = slots.in_use(token);
  const int thread = threadIdx.x % shape.token_threads;  // of those that own the token
  Vector<T, N>* out = out_rows + out_row * shape.vectors;
  const auto add = [&](const Pass<A, S>& pass, int v, A (&sum)[U][N]) {
    Vector<T, N> value[U][S];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = min(v + u * shape.token_threads, shape.vectors - 1);
#pragma unroll
      for (int j = 0; j < S; ++j) value[u][j] = S > 1 && S < 8 ? load_streaming(y_PH + pass.at[j] + at) : y_PH[pass.at[j] + at];
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int j = 0; j < S; ++j) {
        if (!pass.has(j)) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) sum[u][i] += pass.weight[j] * widen(value[u][j].element[i]);
      }
    }
  };
  const auto store = [&](int v, const A (&sum)[U][N]) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Vector<T, N> rounded;
#pragma unroll
      for (int i = 0; i < N; ++i) rounded.element[i] = narrow<T>(sum[u][i]);
      if (v + u * shape.token_threads < shape.vectors) out[v + u * shape.token_threads] = rounded;
    }
  };
  if constexpr (kMany) {
    for (int v = thread; v - thread < shape.vectors; v += U * shape.token_threads) {  // a warp's lanes stay together
      A sum[U][N] = {};
      for (int first = 0; first < in_use; first += S) {
        const Pass<A, S> pass(slots, weights, token, first, in_use, shape.vectors);
        if (pass.exists) add(pass, v, sum);
      }
      store(v, sum);
    }
  } else {
    const Pass<A, S> pass(slots, weights, token, 0, in_use, shape.vectors);
    for (int v = thread; v < shape.vectors; v += U * shape.token_threads) {
      A sum[U][N] = {};
      if (pass.exists) add(pass, v, sum);
      store(v, sum);
    }
  }
}

// Whether a kernel with GBMOE_DISPATCH_VECTOR_AND_SLOTS' N and S may be launched for more than S slots.
template <int N, int S> constexpr bool kMayTakeSeveralPasses = N == 1 || S == 8;

}  // namespace
}  // namespace gbmoe
