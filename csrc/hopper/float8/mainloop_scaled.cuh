// The main loop for e4m3 operands with scales: a row of a has one for each k-block of 128 terms, b one for each 128 x 128 block.
//
// The tensor cores add the products of e4m3 in fewer bits than fp32 has. So a k-block's products are summed there alone, in
// registers of their own, and then added to the tile's sums in fp32, times both scales. For all 256 columns of a wide tile there are not
// registers for both: each warpgroup multiplies them in two parts, those of a narrow tile in one. While it adds, the tensor cores work
// for the other one.
//
// There are two loops: a careful one for tiles in which a product of two scales may leave float32's range (scale_product.cuh).

#pragma once

#include "../mma.cuh"
#include "../tile_scheduler.cuh"
#include "epilogue_scaled.cuh"
#include "float8.cuh"
#include "scale_product.cuh"
#include "scale_scanner.cuh"

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
    const int k_blocks = args.k_blocks * args.operand_pairs;
    bool careful;
    Tile tile = receive_tile<Traits>(shared, tiles, &careful);
    careful = ScaleScanner<Traits>::scan_together(args, tile);
    // The compiler keeps the operands' addresses in uniform registers, from where a product takes them, only if it sees that all lanes
    // have the same ones and go the same way: by votes, and by a copy of `pipe` for each tile.
    while (__any_sync(kFullWarp, tile.group >= 0)) {
      PipelineState of_tile = pipe;
      pipe.template skip<kStages>(k_blocks);
      const bool has_rows = warpgroup * 64 < __shfl_sync(kFullWarp, tile.rows, 0);
      typename Traits::Accumulators sum;
      // By a ballot, for the reason of above: with a vote in its place the addresses would leave the uniform registers.
      if (!has_rows) Mma::skip_tile(tile, shared, of_tile);
      else if (__ballot_sync(kFullWarp, careful) != 0) multiply_tile<true>(sum, tile, warpgroup, shared, of_tile, k_blocks);
      else multiply_tile<false>(sum, tile, warpgroup, shared, of_tile, k_blocks);
      const Tile upcoming = receive_tile<Traits>(shared, tiles, &careful);
      if (has_rows && epilogue.row_in_tile < tile.rows && tile.n < args.size_n) {
        epilogue.hold(tile, sum);
        if constexpr (Traits::kEpilogue == EpilogueKind::kStore) epilogue.finish();
        else store_activation_in_float8(epilogue);
      }
      tile = upcoming;
    }
    if (threadIdx.x % 32 == 0) tma_store_wait<0>();
  }

 private:
  // The products of the scales of a thread's two rows and of both runs of 128 columns, aligned to 128, that a tile's columns lie in. Where
  // kCareful, what is left of them after sums were multiplied by the factors of `before`.
  struct Factors {
    float of_run[2][2], middle[2];  // [run][row]; those of the middle 64 columns of a narrow tile

    __device__ __forceinline__ void set_middle(bool begins_a_run) {
#pragma unroll
      for (int i = 0; i < 2; ++i) middle[i] = begins_a_run ? of_run[0][i] : of_run[1][i];
    }
    // Of sum `i` of part `number`.
    __device__ __forceinline__ float of(int number, int i) const {
      const int row = i / 2 % 2;
      return kParts == 2 ? of_run[number][row] : i / 32 == 1 ? middle[row] : of_run[i / 64][row];
    }
  };
  template <bool kCareful> struct Scales {
    Factors factors, before;

    // Of a k-block whose scales are at `from`, and those of the thread's rows at `of_rows`, in shared memory.
    __device__ __forceinline__ void load(uint32_t from, uint32_t of_rows, bool begins_a_run) {
      float of_row[2], of_run[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        of_row[i] = load_shared_float(of_rows + i * 8 * sizeof(float));
        of_run[i] = load_shared_float(from + (kTileM + i) * sizeof(float));
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& factor = factors.of_run[i / 2][i % 2];
        factor = of_row[i % 2] * of_run[i / 2];
        if constexpr (kCareful) {
          const ScaleFactors both(of_row[i % 2], of_run[i / 2]);
          factor = both.last;
          before.of_run[i / 2][i % 2] = both.first;
        }
      }
      factors.set_middle(begins_a_run);
      if constexpr (kCareful) before.set_middle(begins_a_run);
    }
    // Sum `i` of part `number`, times both scales, added to the tile's.
    __device__ __forceinline__ void add(float& sum, float part, int number, int i) const {
      sum += factors.of(number, i) * (kCareful ? before.of(number, i) * part : part);
    }
  };

  // The sums of a tile. Whatever follows the start of a part's products, up to the wait for them, is hidden behind them; what lies between
  // the last addition of a k-block and the first product of the next one is not.
  template <bool kCareful> static __device__ __forceinline__ void multiply_tile(
      typename Traits::Accumulators& sum, const Tile& tile, int warpgroup, uint32_t shared, PipelineState pipe, int k_blocks) {
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    const uint32_t a = __shfl_sync(kFullWarp, wgmma_address(shared + warpgroup * kSubtileBytes), 0);
    const uint32_t b = __shfl_sync(kFullWarp, wgmma_address(shared + kStageBytesA), 0);
    const uint32_t row_bytes = kept_in_register((threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * sizeof(float));
    const int lane = own_lane();
    const bool begins_a_run = tile.n % kScaledColumns == 0;
#pragma unroll
    for (int i = 0; i < kParts * kPartSums; ++i) sum[i] = 0.0f;
    bool ready = mbarrier_test(full + pipe.stage * 8, pipe.parity);
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      const uint32_t stage = pipe.stage, of_stage = stage * (Traits::kStageBytes >> 4);
      if (!ready) mbarrier_wait(full + stage * 8, pipe.parity);
      Scales<kCareful> scales;
#pragma unroll
      for (int number = 0; number < kParts; ++number) {
        float part[kPartSums];
        start_part(part, a + of_stage, b + of_stage + number * 2 * (kSubtileBytes >> 4));
        if (number == 0) scales.load(Shared::scales(shared, stage), Shared::scales(shared, stage) + row_bytes, begins_a_run);
        if (number + 1 == kParts) pipe.template advance<kStages>();
        wgmma_wait<0>();
        fence_accumulators(part);
        if (number + 1 == kParts) {
          __syncwarp();  // all lanes have read the scales
          Mma::release(empty + stage * 8, lane);
          ready = mbarrier_test(full + pipe.stage * 8, pipe.parity);
        }
#pragma unroll
        for (int i = 0; i < kPartSums; ++i) scales.add(sum[number * kPartSums + i], part[i], number, i);
      }
    }
  }

  // Starts the products of a k-block by a part of the columns: 64 rows from `a` on, and the part's columns from `b` on.
  static __device__ __forceinline__ void start_part(float (&part)[kPartSums], uint32_t a, uint32_t b) {
    fence_accumulators(part);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < static_cast<int>(kLineBytes) / 32; ++step) wgmma_float8(part, a + step * 2, b + step * 2, step > 0);
    wgmma_commit();
  }
};

}  // namespace gbmoe::hopper
