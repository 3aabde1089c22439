// The main loop: a warp multiplies its share of a k-block, with the fragments of the next step on their way from shared memory.

#pragma once

#include "shared_memory.cuh"

namespace gbmoe::tensor_core {

template <typename Traits> struct Accumulators {
  float sums[Traits::kFragmentsM][Traits::kFragmentsN][4];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (auto& row : sums)
#pragma unroll
      for (auto& fragment : row)
#pragma unroll
        for (float& sum : fragment) sum = 0.0f;
  }
};

// One step's fragments of a warp's tile.
template <typename Traits> struct Fragments {
  using T = typename Traits::T;
  uint32_t a[Traits::kFragmentsM][4], b[Traits::kFragmentsN / 2][4];

  __device__ __forceinline__ void load(uint32_t stage, int step) {
    const int warp = threadIdx.x / 32;
    const int first_m = warp % Traits::kWarpsM * Traits::kWarpTileM, first_n = warp / Traits::kWarpsM * Traits::kWarpTileN;
#pragma unroll
    for (int i = 0; i < Traits::kFragmentsM; ++i) {
      load_fragment_a<T, Traits::kTileM, Traits::kRowBytes, Traits::kKMajorA>(a[i], stage, first_m + 16 * i, step);
    }
#pragma unroll
    for (int j = 0; j < Traits::kFragmentsN / 2; ++j) {
      load_fragments_b<T, Traits::kTileN, Traits::kRowBytes, Traits::kKMajorB>(b[j], stage + Traits::kBytesA, first_n + 16 * j, step);
    }
  }

  // The products of the fragment of rows number `i` with all columns.
  __device__ __forceinline__ void multiply(int i, Accumulators<Traits>& accumulators) const {
#pragma unroll
    for (int j = 0; j < Traits::kFragmentsN; ++j) {
      mma<T>(accumulators.sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
};

}  // namespace gbmoe::tensor_core
