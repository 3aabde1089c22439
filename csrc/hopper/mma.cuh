// What both main loops share: one k-block in shared memory, multiplied on the tensor cores by a warpgroup.

#pragma once

#include "shared_memory.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct Mma {
  using Shared = SharedMemory<Traits>;
  using Accumulators = typename Traits::Accumulators;

  // Waits until a stage is full. What was gathered by a CTA alone came by cp.async, whose results the tensor cores see after a fence.
  static __device__ __forceinline__ void wait_full(uint32_t full, uint32_t parity) {
    mbarrier_wait(full, parity);
    if constexpr (Traits::kGatherCopies) fence_proxy_async();
  }

  // Tells the producers of all CTAs that write to it that this warp has read a stage.
  static __device__ __forceinline__ void release(uint32_t empty, int lane = threadIdx.x % 32) {
    if constexpr (Traits::kClusterSize == 1) {
      if (lane == 0) mbarrier_arrive(empty);
    } else {
      if (lane < Traits::kClusterSize) mbarrier_arrive_remote(empty, lane);
    }
  }

  // The products of one k-block: 64 rows, the first or the second of a tile's two halves, by all columns. The caller fences and
  // commits.
  static __device__ __forceinline__ void multiply(Accumulators& sum, uint32_t stage, int half, bool add) {
    constexpr bool kTransposedA = Traits::kGroupedK, kTransposedB = Traits::kGroupedK || Traits::kTransposedB;
    constexpr uint32_t kStepA = kTransposedA ? 16 * kLineBytes : 32, kStepB = kTransposedB ? 16 * kLineBytes : 32;
    const uint64_t a = wgmma_descriptor(stage + half * kSubtileBytes, kSubtileBytes, kSwizzleAtomBytes);
    const uint64_t b = wgmma_descriptor(stage + kStageBytesA, kSubtileBytes, kSwizzleAtomBytes);
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      wgmma<typename Traits::Element, kTransposedA, kTransposedB>(
          sum, a + (step * kStepA >> 4), b + (step * kStepB >> 4), step > 0 || add);
    }
  }

  // Where a warpgroup has no rows in a tile: releases its k-blocks unread.
  static __device__ __forceinline__ void skip_tile(const Tile& tile, uint32_t shared, PipelineState& pipe) {
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
#pragma unroll 1
    for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
      mbarrier_wait(full + pipe.stage * 8, pipe.parity);
      release(empty + pipe.stage * 8);
      pipe.template advance<Traits::kStages>();
    }
  }
};

}  // namespace gbmoe::hopper
