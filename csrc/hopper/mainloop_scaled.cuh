// The main loop for e4m3 operands with scales: a row of a has one for each k-block of 128 terms, b one for each 128 x 128 block.
//
// The tensor cores add the products of e4m3 in fewer bits than fp32 has. So a k-block's products are summed there alone, in
// registers of their own, and then added to the tile's sums in fp32, times both scales. For all 256 columns of a wide tile there are not
// registers for both: each warpgroup multiplies them in two parts, those of a narrow tile in one. While it adds, the tensor cores work
// for the other one.

#pragma once

#include "epilogue_scaled.cuh"
#include "mma.cuh"
#include "tile_scheduler.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct ScaledMainLoop {
  using Shared = SharedMemory<Traits>;
  using Mma = hopper::Mma<Traits>;
  static constexpr int kStages = Traits::kStages;
  // Of a tile's columns, which are multiplied one after the other; a thread's sums of one.
  static constexpr int kParts = Traits::kTileN == kNarrowTileN ? 1 : 2, kPartSums = Traits::kTileN / 2 / kParts;

  // A consumer warp, from its first tile to its last.
  static __device__ void run(const TensorMaps& maps, const Arguments& args, uint32_t shared) {
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
    PipelineState pipe, tiles;
    Epilogue<Traits> epilogue(maps, args, shared);
    Tile tile = receive_tile<Traits>(shared, tiles);
    while (tile.group >= 0) {
      if (warpgroup * 64 >= tile.rows) {
        Mma::skip_tile(tile, shared, pipe);
        tile = receive_tile<Traits>(shared, tiles);
        continue;
      }
      typename Traits::Accumulators sum;
      multiply_tile(sum, args, tile, warpgroup, shared, pipe);
      const Tile upcoming = receive_tile<Traits>(shared, tiles);
      if (epilogue.row_in_tile < tile.rows && tile.n < args.size_n) {
        epilogue.hold(tile, sum);
        if constexpr (Traits::kEpilogue != EpilogueKind::kStore) store_activation_in_float8(epilogue);
        if (Traits::kEpilogue == EpilogueKind::kStore || args.save) epilogue.finish();
      }
      tile = upcoming;
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }

 private:
  // The scales of the k-block that is next: of a, for this thread's two rows of a tile; of b, for both runs of 128 columns, aligned
  // to 128, that its columns lie in. A narrow tile has the second half of one of them alone.
  struct Scales {
    const float *of_a, *of_b;  // those of the first row and of the first run
    int to_row, to_run;        // from there to the second's
    float a[2], b[2];

    __device__ __forceinline__ Scales(const Arguments& args, const Tile& tile) {
      // Rows and columns that do not exist take the last one's scales.
      const int in_tile = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, last_row = tile.rows - 1;
      const int columns = min(tile.n / kScaledColumns, args.scale_rows_b - 1);
      of_a = args.scales_a[0] + static_cast<int64_t>(tile.row + min(in_tile, last_row)) * args.k_blocks;
      of_b = args.scales_b[0] + (static_cast<int64_t>(tile.group) * args.scale_rows_b + columns) * args.k_blocks;
      to_row = (min(in_tile + 8, last_row) - min(in_tile, last_row)) * args.k_blocks;
      to_run = columns + 1 < args.scale_rows_b ? args.k_blocks : 0;
      load(args);
    }
    // From a place in the first tensor to the same place in the second.
    static __device__ __forceinline__ const float* in_second(const float* const (&tensors)[2], const float* place) {
      return tensors[1] + (place - tensors[0]);
    }
    __device__ __forceinline__ void load(const Arguments& args) {
      a[0] = __ldg(of_a), a[1] = __ldg(of_a + to_row);
      b[0] = __ldg(of_b), b[1] = __ldg(Traits::kGlu ? in_second(args.scales_b, of_b) : of_b + to_run);
    }
    // To k-block `number`, the one behind the last that was loaded.
    __device__ __forceinline__ void advance(const Arguments& args, int number) {
      ++of_a, ++of_b;
      if (number == args.k_blocks) {
        if (args.operand_pairs == 1) return;
        of_a = in_second(args.scales_a, of_a) - args.k_blocks, of_b = in_second(args.scales_b, of_b) - args.k_blocks;
      }
      if (number < args.k_blocks * args.operand_pairs) load(args);
    }
  };

  static __device__ __forceinline__ void multiply_tile(typename Traits::Accumulators& sum, const Arguments& args, const Tile& tile,
                                                       int warpgroup, uint32_t shared, PipelineState& pipe) {
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    const uint32_t a = wgmma_address(shared + warpgroup * kSubtileBytes), b = wgmma_address(shared + kStageBytesA);
#pragma unroll
    for (int i = 0; i < kParts * kPartSums; ++i) sum[i] = 0.0f;
    Scales scales(args, tile);
    const bool begins_a_run = tile.n % kScaledColumns == 0;
#pragma unroll 1
    for (int k_block = 0; k_block < tile.k_blocks; ++k_block) {
      const uint32_t stage = pipe.stage * (Traits::kStageBytes >> 4);
      float scale[2][2];
#pragma unroll
      for (int i = 0; i < 4; ++i) scale[i / 2][i % 2] = scales.a[i % 2] * scales.b[i / 2];
      // Of the middle 64 columns of a narrow tile.
      const float middle[2] = {begins_a_run ? scale[0][0] : scale[1][0], begins_a_run ? scale[0][1] : scale[1][1]};
      mbarrier_wait(full + pipe.stage * 8, pipe.parity);
#pragma unroll
      for (int number = 0; number < kParts; ++number) {
        float part[kPartSums];
        fence_accumulators(part);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < static_cast<int>(kLineBytes) / 32; ++step) {
          wgmma_float8(part, a + stage + step * 2, b + stage + number * 2 * (kSubtileBytes >> 4) + step * 2, step > 0);
        }
        wgmma_commit();
        if (number == 0) scales.advance(args, k_block + 1);  // whose loads have until the next k-block to come
        wgmma_wait<0>();
        fence_accumulators(part);
        if (number + 1 == kParts) Mma::release(empty + pipe.stage * 8);
#pragma unroll
        for (int i = 0; i < kPartSums; ++i) {
          const float factor = kParts == 2 ? scale[number][i / 2 % 2]
                               : i / 32 == 1 ? middle[i / 2 % 2] : scale[i / 64][i / 2 % 2];
          sum[number * kPartSums + i] += factor * part[i];
        }
      }
      pipe.template advance<kStages>();
    }
  }
};

}  // namespace gbmoe::hopper
