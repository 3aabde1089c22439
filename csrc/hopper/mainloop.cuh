// The cooperative main loop: two consumer warpgroups share each tile, 64 rows each.
//
// The epilogue of a tile, which each warp does for its own rows, happens while the tensor cores work on the next one: the sums
// are rounded to 16 bits, which halves their registers, and leave step by step after the products that were started last. Where
// a group has 64 rows or fewer left, the second warpgroup has nothing to multiply, so what is wasted of its time is less than 64
// rows a group.

#pragma once

#include <type_traits>

#include "epilogue.cuh"
#include "mma.cuh"
#include "split_k.cuh"
#include "tile_scheduler.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct GradientSender;  // epilogue_backward.cuh

template <typename Traits> struct MainLoop {
  using Shared = SharedMemory<Traits>;
  using Mma = hopper::Mma<Traits>;
  using Accumulators = typename Traits::Accumulators;
  static constexpr bool kGroupedK = Traits::kGroupedK;
  static constexpr int kStages = Traits::kStages;

  // A consumer warp, from its first tile to its last.
  static __device__ void run(const TensorMaps& maps, const Arguments& args, uint32_t shared) {
    const uint32_t rank = Traits::kClusterSize > 1 ? cta_rank_in_cluster() : 0;
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0), warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    PipelineState pipe, tiles;
    Epilogue<Traits> epilogue(maps, args, shared);
    std::conditional_t<Traits::kActivationBackward, GradientSender<Traits>, int> gradient(shared);
    Tile upcoming = receive_tile<Traits>(shared, tiles);
    for (;;) {
      const Tile tile = upcoming;
      const bool skips = !kGroupedK && warpgroup * 64 >= tile.rows;
      // Where the tile before does not leave step by step: in one place, as the code of all steps is long.
      if (tile.group < 0 || skips || k_blocks_of(tile) < Epilogue<Traits>::kTileSteps) epilogue.finish();
      if (tile.group < 0) break;
      if (skips) {
        Mma::skip_tile(tile, shared, pipe);
        upcoming = receive_tile<Traits>(shared, tiles);
        continue;
      }
      Accumulators sum;
      typename Epilogue<Traits>::Bias bias;
      if constexpr (Traits::kBias) bias = epilogue.bias_of(tile);
      multiply_tile(sum, epilogue, tile, warpgroup, shared, pipe, upcoming, tiles);
      const bool results = warp * 16 < (kGroupedK ? args.size_m - tile.m : tile.rows) && tile.n < args.tiled_n;
      if (!results) continue;
      if constexpr (Traits::kSplitK) {
        if (split_count(tile.split) > 1 && !SplitK<Traits>::reduce(sum, args, tile, rank)) continue;
      }
      if constexpr (Traits::kActivationBackward) gradient.send(sum, args.size_n - tile.n);
      else if constexpr (Traits::kBias) epilogue.hold(tile, sum, bias);
      else if (kGroupedK && tile.rows == 0 && (Traits::kEpilogue == EpilogueKind::kAccumulate || args.adds)) continue;
      else if constexpr (Traits::kEpilogue == EpilogueKind::kAccumulate) epilogue.accumulate(tile, sum);
      else epilogue.hold(tile, sum);
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }

 private:
  // The whole k-blocks of a tile.
  static __device__ __forceinline__ int k_blocks_of(const Tile& tile) { return kGroupedK ? tile.rows / kBlockK : tile.k_blocks; }

  // The sums of a tile, which are undefined where nothing is summed. Meanwhile the epilogue works on what it holds of the tile
  // before.
  static __device__ __forceinline__ void multiply_tile(
      Accumulators& sum, Epilogue<Traits>& epilogue, const Tile& tile, int warpgroup, uint32_t shared, PipelineState& pipe,
      Tile& upcoming, PipelineState& tiles) {
    constexpr int kTileSteps = Epilogue<Traits>::kTileSteps, kChunkSteps = Epilogue<Traits>::kChunkSteps;
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    const int k_blocks = k_blocks_of(tile);
    uint32_t previous = 0;
    int k_block = 0;
    if (k_blocks >= kTileSteps) {
#pragma unroll 1
      for (int chunk = 0; chunk < kTileSteps / kChunkSteps; ++chunk) {
#pragma unroll
        for (int step = 0; step < kChunkSteps; ++step, ++k_block) {
          Mma::wait_full(full + pipe.stage * 8, pipe.parity);
          start_k_block(sum, shared + pipe.stage * Traits::kStageBytes, warpgroup, k_block > 0);
          epilogue.step(step);
          wgmma_wait<1>();
          if (k_block > 0) Mma::release(empty + previous * 8);
          previous = pipe.stage;
          pipe.template advance<kStages>();
        }
        epilogue.end_chunk();
      }
    }
#pragma unroll 1
    for (; k_block < k_blocks; ++k_block) {
      Mma::wait_full(full + pipe.stage * 8, pipe.parity);
      start_k_block(sum, shared + pipe.stage * Traits::kStageBytes, warpgroup, k_block > 0);
      wgmma_wait<1>();
      if (k_block > 0) Mma::release(empty + previous * 8);
      previous = pipe.stage;
      pipe.template advance<kStages>();
    }
    if constexpr (kGroupedK) {
      const int valid = tile.rows % kBlockK;
      if (valid > 0) {
        Mma::wait_full(full + pipe.stage * 8, pipe.parity);
        clear_lines(shared + pipe.stage * Traits::kStageBytes, valid);
        start_k_block(sum, shared + pipe.stage * Traits::kStageBytes, warpgroup, k_blocks > 0);
        wgmma_wait<1>();
        if (k_blocks > 0) Mma::release(empty + previous * 8);
        previous = pipe.stage;
        pipe.template advance<kStages>();
      }
    }
    upcoming = receive_tile<Traits>(shared, tiles);
    wgmma_wait<0>();
    fence_accumulators(sum);
    if (!kGroupedK || tile.rows > 0) Mma::release(empty + previous * 8);
  }

  // Starts the products of a k-block by this warpgroup's rows.
  static __device__ __forceinline__ void start_k_block(Accumulators& sum, uint32_t stage, int warpgroup, bool add) {
    wgmma_fence();
    Mma::multiply(sum, stage, warpgroup, add);
    wgmma_commit();
  }

  // k-grouped: lines of a k-block from `valid` on belong to the next group. They become zero in both operands (one would do, were
  // there no NaN).
  static __device__ void clear_lines(uint32_t stage, int valid) {
    const int warpgroup = threadIdx.x / 128;
    constexpr int kSubtilesB = Traits::kTileN / 64 / kConsumerWarpgroups;
    for (int subtile = 0; subtile < 1 + kSubtilesB; ++subtile) {
      const uint32_t base = subtile == 0 ? stage + warpgroup * kSubtileBytes
                                         : stage + kStageBytesA + (warpgroup * kSubtilesB + subtile - 1) * kSubtileBytes;
      for (uint32_t byte = valid * kLineBytes + threadIdx.x % 128 * 16; byte < kSubtileBytes; byte += 128 * 16) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(base + byte), "r"(0) : "memory");
      }
    }
    fence_proxy_async();
    named_barrier_sync(1, kConsumerWarpgroups * 128);
  }
};

}  // namespace gbmoe::hopper
