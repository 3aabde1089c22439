// The warp that copies the scales of m-grouped e4m3 operands to the stages, four bytes a cp.async: for each k-block those of the tile's
// 128 rows of a, and those of the two 128 x 128 blocks of b in which the tile's columns lie.
//
// In memory the scales of a row's k-blocks lie side by side, so that TMA, whose boxes have lines of at least 16 bytes, cannot bring one
// k-block's.

#pragma once

#include "../tile_scheduler.cuh"
#include "float8.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct ScaleLoader {
  using Shared = SharedMemory<Traits>;
  static constexpr int kRowsOfLane = kTileM / 32;

  static __device__ void run(const Arguments& args, uint32_t shared) {
    const int lane = threadIdx.x % 32;
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    PipelineState pipe, tiles;
    for (;;) {
      const Tile tile = receive_tile<Traits>(shared, tiles);
      if (tile.group < 0) break;
      // Rows and columns that do not exist take the last one's scales. Places in 32 bits, to spare registers: a has P * K bytes, and
      // P * K / 128 is below 2^32 in any memory there is.
      uint32_t of_a[kRowsOfLane];
#pragma unroll
      for (int i = 0; i < kRowsOfLane; ++i) {
        of_a[i] = static_cast<uint32_t>(tile.row + min(lane + i * 32, tile.rows - 1)) * args.k_blocks;
      }
      const int run = min(tile.n / kScaledColumns + (Traits::kGlu ? 0 : lane), args.scale_rows_b - 1);
      const uint32_t of_b = static_cast<uint32_t>(tile.group * args.scale_rows_b + run) * args.k_blocks;
#pragma unroll 1
      for (int pair = 0; pair < args.operand_pairs; ++pair) {
        const float *a = args.scales_a[pair], *b = args.scales_b[Traits::kGlu ? lane & 1 : pair];
#pragma unroll 1
        for (int k_block = 0; k_block < args.k_blocks; ++k_block, ++a, ++b) {
          mbarrier_wait(empty + pipe.stage * 8, pipe.parity ^ 1);
          const uint32_t to = Shared::scales(shared, pipe.stage) + lane * sizeof(float);
#pragma unroll
          for (int i = 0; i < kRowsOfLane; ++i) cp_async_4(to + i * 32 * sizeof(float), a + of_a[i]);
          if (lane < 2) cp_async_4(to + kTileM * sizeof(float), b + of_b);
          mbarrier_arrive_on_cp_async(full + pipe.stage * 8);
          pipe.template advance<Traits::kStages>();
        }
      }
    }
  }
};

}  // namespace gbmoe::hopper
