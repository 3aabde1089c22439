// split-K: a tile whose sum is cut into splits, which several CTAs sum up at the same time.
//
// Each leaves its partial sum in the workspace, and the last to come adds them up, always in the same order. No CTA waits for
// another, and results do not depend on who was last. (They do depend on where sums are cut, and so on the sizes of all groups.)

#pragma once

#include "arguments.cuh"
#include "tile.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct SplitK {
  static constexpr int kTileN = Traits::kTileN;

  // Leaves this warp's partial sum of a tile in the workspace. True in the warp that was the last to do so for these rows of the
  // tile: `sum` is the whole then, added up in the order of the splits.
  static __device__ __forceinline__ bool reduce(
      typename Traits::Accumulators& sum, const Arguments& args, const Tile& tile, uint32_t rank) {
    constexpr int kOfWarp = 16 * kTileN / 4;  // float4s of one warp
    const int lane = threadIdx.x % 32;
    const int warp = (first_entry(tile.split) * Traits::kClusterSize + rank) * kConsumerWarps + threadIdx.x / 32;
    float4* first = args.partial_sums + static_cast<int64_t>(warp) * kOfWarp + lane;
    constexpr int kDistance = Traits::kClusterSize * kConsumerWarps * kOfWarp;  // of two splits
    float4* own = first + split_index(tile.split) * kDistance;
#pragma unroll
    for (int i = 0; i < kTileN / 8; ++i) {
      __stcg(own + i * 32, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
    }
    __syncwarp();
    int before = 0;
    if (lane == 0) {
      __threadfence();
      before = atomicAdd(args.arrivals + warp, 1);
      __threadfence();
    }
    if (__shfl_sync(kFullWarp, before, 0) + 1 < split_count(tile.split)) return false;
    __syncwarp();
#pragma unroll
    for (int base = 0; base < kTileN / 2; base += 32) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sum[base + i] = 0.0f;
#pragma unroll 1
      for (int split = 0; split < split_count(tile.split); ++split) {
        float4 read[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) read[i] = __ldcg(first + split * kDistance + (base / 4 + i) * 32);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[base + 4 * i] += read[i].x, sum[base + 4 * i + 1] += read[i].y;
          sum[base + 4 * i + 2] += read[i].z, sum[base + 4 * i + 3] += read[i].w;
        }
      }
    }
    return true;
  }
};

}  // namespace gbmoe::hopper
