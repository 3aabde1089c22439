// The main loop in ping-pong: tiles have 128 x 128 results, and each consumer warpgroup multiplies whole ones, in turns: while
// one multiplies, the other stores what it has summed up.
//
// So no results are held while the next tile is multiplied, and the tensor cores are not idle while the last products of a tile
// end. But tiles are smaller, so that every product reads more from the L2: ping-pong pays where sums are short.
//
// Each warpgroup has a barrier, at which the other's warps arrive once they have started the last products of their tile. Only
// then may it wait for stages of its own: until then the stages' barriers can be two phases behind, which a parity does not tell.

#pragma once

#include "epilogue.cuh"
#include "mma.cuh"
#include "tile_scheduler.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct PingPongMainLoop {
  using Shared = SharedMemory<Traits>;
  using Mma = hopper::Mma<Traits>;
  using Accumulators = typename Traits::Accumulators;
  static constexpr int kStages = Traits::kStages;

  // A consumer warp, from its first tile to its last.
  static __device__ void run(const TensorMaps& maps, const Arguments& args, uint32_t shared) {
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
    const int first_row = __shfl_sync(kFullWarp, threadIdx.x / 32 % 4, 0) * 16;
    const uint32_t own_turn = Shared::turn(shared, warpgroup), others_turn = Shared::turn(shared, 1 - warpgroup);
    PipelineState pipe, tiles;
    Epilogue<Traits> epilogue(maps, args, shared);
    uint32_t parity = warpgroup == 0;  // the first turn is there
    Tile tile = receive_tile<Traits>(shared, tiles);
    for (int number = 0; tile.group >= 0; ++number) {
      if (number % kConsumerWarpgroups != warpgroup) {
        pipe.template skip<kStages>(tile.k_blocks);
        tile = receive_tile<Traits>(shared, tiles);
        continue;
      }
      mbarrier_wait(own_turn, parity);
      parity ^= 1;
      Accumulators sum[2];
      typename Epilogue<Traits>::Bias bias;
      if constexpr (Traits::kBias) bias = epilogue.bias_of(tile);
      if (tile.rows > 64) multiply_tile<2>(sum, tile, shared, pipe, others_turn);
      else if (tile.rows > 0) multiply_tile<1>(sum, tile, shared, pipe, others_turn);
      else Mma::skip_tile(tile, shared, pipe), end_turn(others_turn);  // CTA 1 of a cluster along M
      const Tile upcoming = receive_tile<Traits>(shared, tiles);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        epilogue.row_in_tile = half * 64 + first_row;
        if (epilogue.row_in_tile >= tile.rows || tile.n >= args.tiled_n) continue;
        if constexpr (Traits::kEpilogue == EpilogueKind::kStoreFloat) {
          epilogue.store_float(tile, sum[half]);
        } else {
          if constexpr (Traits::kBias) epilogue.hold(tile, sum[half], bias);
          else epilogue.hold(tile, sum[half]);
          epilogue.finish();
        }
      }
      tile = upcoming;
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }

 private:
  // The sums of a tile's first kHalves * 64 rows.
  template <int kHalves>
  static __device__ __forceinline__ void multiply_tile(
      Accumulators (&sum)[2], const Tile& tile, uint32_t shared, PipelineState& pipe, uint32_t others_turn) {
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    uint32_t previous = 0;
#pragma unroll 1
    for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
      Mma::wait_full(full + pipe.stage * 8, pipe.parity);
      wgmma_fence();
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        Mma::multiply(sum[half], shared + pipe.stage * Traits::kStageBytes, half, k_block > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (k_block > 0) Mma::release(empty + previous * 8);
      previous = pipe.stage;
      pipe.template advance<kStages>();
    }
    end_turn(others_turn);
    wgmma_wait<0>();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) fence_accumulators(sum[half]);
    Mma::release(empty + previous * 8);
  }

  static __device__ __forceinline__ void end_turn(uint32_t others_turn) {
    if (threadIdx.x % 32 == 0) mbarrier_arrive(others_turn);
  }
};

}  // namespace gbmoe::hopper
