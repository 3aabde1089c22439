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

  static constexpr int kLoads = Traits::kFragmentsN / 2 + Traits::kFragmentsM;

  // Load number `i` of a step: first the fragments of b, two at a time, all of which the first products need, then those of a.
  __device__ __forceinline__ void load(int i, uint32_t stage, int step) {
    constexpr int kOfB = Traits::kFragmentsN / 2;
    const int warp = threadIdx.x / 32;
    if (i < kOfB) {
      const int first_n = warp / Traits::kWarpsM * Traits::kWarpTileN + 16 * i;
      load_fragments_b<T, Traits::kTileN, Traits::kRowBytes, Traits::kKMajorB>(b[i], stage + Traits::kBytesA, first_n, step);
    } else {
      const int first_m = warp % Traits::kWarpsM * Traits::kWarpTileM + 16 * (i - kOfB);
      load_fragment_a<T, Traits::kTileM, Traits::kRowBytes, Traits::kKMajorA>(a[i - kOfB], stage, first_m, step);
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
