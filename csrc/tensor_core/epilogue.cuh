// The epilogue: a warp stores its share of a tile straight from its registers, so that no barrier is needed and the copies of the
// next tile's k-blocks go on.

#pragma once

#include "mainloop.cuh"
#include "tile_scheduler.cuh"

namespace gbmoe::tensor_core {

// Lane t of four lanes side by side comes with word t of four quadruples, and leaves with all four words of quadruple t.
__device__ __forceinline__ void transpose_among_four_lanes(uint32_t (&words)[4]) {
  const bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
#pragma unroll
  for (int j = 0; j < 4; j += 2) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, odd ? words[j] : words[j + 1], 1), kept = odd ? words[j + 1] : words[j];
    words[j] = odd ? got : kept;
    words[j + 1] = odd ? kept : got;
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const uint32_t got = __shfl_xor_sync(kFullWarp, high ? words[j] : words[j + 2], 2), kept = high ? words[j + 2] : words[j];
    words[j] = high ? got : kept;
    words[j + 2] = high ? kept : got;
  }
}

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <typename Traits> class Epilogue {
  using T = typename Traits::T;
  using Out = typename Traits::Out;
  static constexpr EpilogueKind kKind = Traits::kEpilogue;

 public:
  static __device__ __forceinline__ void store(const Arguments& args, const Tile& tile, Accumulators<Traits>& accumulators) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // The first row and the first output column of the warp's share.
    const int warp_m = warp % Traits::kWarpsM * Traits::kWarpTileM;
    const int first_column = tile.n + warp / Traits::kWarpsM * (Traits::kGlu ? Traits::kWarpTileN / 2 : Traits::kWarpTileN);
    const int rows = Traits::kGroupedK ? args.size_m - tile.m : tile.rows;  // of the result from the tile's first on
    const int pitch = Traits::kGroupedK ? args.pitch_out.row : args.size_n;
    const int64_t first_row = Traits::kGroupedK ? tile.m : tile.row,
                  of_group = Traits::kGroupedK ? args.places.of(tile.group) * args.pitch_out.group : 0;
#pragma unroll
    for (int i = 0; i < Traits::kFragmentsM; ++i) {
      const int row = warp_m + 16 * i + lane / 4;
      store_row<0>(args, accumulators.sums[i], of_group + (first_row + row) * pitch, first_column, row < rows);
      store_row<1>(args, accumulators.sums[i], of_group + (first_row + row + 8) * pitch, first_column, row + 8 < rows);
    }
  }

 private:
  // The sums of one row: those of registers 2 * kHalf and 2 * kHalf + 1 in every fragment. The row begins at `begin`.
  template <int kHalf>
  static __device__ __forceinline__ void store_row(const Arguments& args, const float (&sums)[Traits::kFragmentsN][4], int64_t begin,
                                                   int first_column, bool exists) {
    if constexpr (kKind == EpilogueKind::kActivation || kKind == EpilogueKind::kGlu) {
      store_activated<kHalf>(args, sums, begin, first_column, exists);
    } else if constexpr (sizeof(Out) == 4) {
      store_float<kHalf>(static_cast<float*>(args.out[0]) + begin, sums, first_column, args.size_n, exists);
    } else {
#pragma unroll
      for (int j = 0; j < Traits::kFragmentsN; j += 4) {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) words[i] = pack(sums[j + i][2 * kHalf], sums[j + i][2 * kHalf + 1], Out());
        store_32_columns(args.out[0], words, begin, first_column + 8 * j, args.size_n, exists);
      }
    }
  }

  template <int kHalf>
  static __device__ __forceinline__ void store_float(float* row, const float (&sums)[Traits::kFragmentsN][4], int first_column, int size_n,
                                                     bool exists) {
#pragma unroll
    for (int j = 0; j < Traits::kFragmentsN; ++j) {
      const int column = first_column + 8 * j + 2 * (threadIdx.x % 4);
      if (!exists || column >= size_n) continue;
      float2* to = reinterpret_cast<float2*>(row + column);
      float2 pair = {sums[j][2 * kHalf], sums[j][2 * kHalf + 1]};
      if constexpr (kKind == EpilogueKind::kAccumulate) {
        const float2 before = *to;
        pair = {before.x + pair.x, before.y + pair.y};
      }
      *to = pair;
    }
  }

  // words: the lane's two columns of four fragments side by side. It stores eight columns of one of them.
  static __device__ __forceinline__ void store_32_columns(void* out, uint32_t (&words)[4], int64_t begin, int first_column, int size_n,
                                                          bool exists) {
    transpose_among_four_lanes(words);
    const int column = first_column + 8 * (threadIdx.x % 4);
    if (!exists || column >= size_n) return;
    *reinterpret_cast<uint4*>(static_cast<Out*>(out) + begin + column) = {words[0], words[1], words[2], words[3]};
  }

  // h and g are rounded for storage before a is computed from them.
  template <int kHalf>
  static __device__ __forceinline__ void store_activated(const Arguments& args, const float (&sums)[Traits::kFragmentsN][4],
                                                         int64_t begin, int first_column, bool exists) {
    const typename Traits::ActivationFamily activation(args.activation);
    constexpr int kOfH = Traits::kGlu ? Traits::kFragmentsN / 2 : Traits::kFragmentsN;
#pragma unroll
    for (int j = 0; j < kOfH; j += 4) {
      uint32_t a[4], h[4], g[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&of_h)[4] = sums[j + i];
        const T low = narrow<T>(of_h[2 * kHalf]), high = narrow<T>(of_h[2 * kHalf + 1]);
        float a_low = activation.value(widen(low)), a_high = activation.value(widen(high));
        h[i] = pack(widen(low), widen(high), T());
        if constexpr (Traits::kGlu) {
          const float(&of_g)[4] = sums[kOfH + j + i];
          const T g_low = narrow<T>(of_g[2 * kHalf]), g_high = narrow<T>(of_g[2 * kHalf + 1]);
          a_low *= activation.gate(widen(g_low)), a_high *= activation.gate(widen(g_high));
          g[i] = pack(widen(g_low), widen(g_high), T());
        }
        a[i] = pack(a_low, a_high, T());
      }
      store_32_columns(args.out[0], a, begin, first_column + 8 * j, args.size_n, exists);
      if (args.out[1]) store_32_columns(args.out[1], h, begin, first_column + 8 * j, args.size_n, exists);
      if constexpr (Traits::kGlu) {
        if (args.out[2]) store_32_columns(args.out[2], g, begin, first_column + 8 * j, args.size_n, exists);
      }
    }
  }
};

}  // namespace gbmoe::tensor_core
