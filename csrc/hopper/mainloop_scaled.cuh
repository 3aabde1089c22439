// The main loop for e4m3 operands with scales: a row of a has one for each k-block of 128 terms, b one for each 128 x 128 block.
//
// The tensor cores add the products of e4m3 in fewer bits than fp32 has. So a k-block's products are summed there alone, in
// registers of their own, and then added to the tile's sums in fp32, times both scales. For all 256 columns of a wide tile there are not
// registers for both: each warpgroup multiplies them in two parts, those of a narrow tile in one. While it adds, the tensor cores work
// for the other one.
//
// Both scales are multiplied first, once for all sums of a row that share them. Their product may leave float32's range where what they
// stand for does not: an infinite one makes NaN of a sum of 0, and a subnormal one has lost bits. Where a product of scales is not a
// normal number, the sum is multiplied by a's scale and then by b's.

#pragma once

#include <cfloat>

#include "epilogue_scaled.cuh"
#include "float8.cuh"
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
    const int k_blocks = args.k_blocks * args.operand_pairs;
    Tile tile = receive_tile<Traits>(shared, tiles);
    // The compiler keeps the operands' addresses in uniform registers, from where a product takes them, only if it sees that all lanes
    // have the same ones and go the same way: by votes, and by a copy of `pipe` for each tile.
    while (__any_sync(kFullWarp, tile.group >= 0)) {
      PipelineState of_tile = pipe;
      pipe.template skip<kStages>(k_blocks);
      const bool has_rows = warpgroup * 64 < __shfl_sync(kFullWarp, tile.rows, 0);
      typename Traits::Accumulators sum;
      if (has_rows) multiply_tile(sum, tile, warpgroup, shared, of_tile, k_blocks);
      else Mma::skip_tile(tile, shared, of_tile);
      const Tile upcoming = receive_tile<Traits>(shared, tiles);
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
  // One factor of each of a thread's sums: one number for each of its two rows and each of both runs of 128 columns, aligned to 128, that
  // a tile's columns lie in.
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
  // The scales of a thread's two rows and of both runs in a k-block, whose scales are at `from` and those of the thread's rows at `of_rows`
  // in shared memory.
  struct Scales {
    float of_row[2], of_run[2];

    __device__ __forceinline__ Scales(uint32_t from, uint32_t of_rows) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        of_row[i] = load_shared_float(of_rows + i * 8 * sizeof(float));
        of_run[i] = load_shared_float(from + (kTileM + i) * sizeof(float));
      }
    }
    __device__ __forceinline__ Factors products(bool begins_a_run) const {
      Factors products;
#pragma unroll
      for (int i = 0; i < 4; ++i) products.of_run[i / 2][i % 2] = of_row[i % 2] * of_run[i / 2];
      products.set_middle(begins_a_run);
      return products;
    }
  };
  // Whether all products of scales are normal numbers; NaN, of which every path makes NaN, may count as one.
  static __device__ __forceinline__ bool all_normal(const Factors& products) {
    const auto& p = products.of_run;
    const float least = fminf(fminf(fabsf(p[0][0]), fabsf(p[0][1])), fminf(fabsf(p[1][0]), fabsf(p[1][1])));
    const float most = fmaxf(fmaxf(fabsf(p[0][0]), fabsf(p[0][1])), fmaxf(fabsf(p[1][0]), fabsf(p[1][1])));
    return least >= FLT_MIN && most <= FLT_MAX;
  }
  // Where the product of a row's and a run's scale is not a normal number, multiplies the part's sums by the row's and leaves the run's in
  // `factors`; elsewhere sums and products stay what they are. Rare: the scales are read again, so that no register is held for it.
  static __device__ __forceinline__ void multiply_by_rows(
      float (&part)[kPartSums], int number, const Scales& scales, Factors& factors, bool begins_a_run) {
    factors = scales.products(begins_a_run);
    Factors before;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& product = factors.of_run[i / 2][i % 2];
      const bool normal = fabsf(product) >= FLT_MIN && fabsf(product) <= FLT_MAX;
      before.of_run[i / 2][i % 2] = normal ? 1.0f : scales.of_row[i % 2];
      if (!normal) product = scales.of_run[i / 2];
    }
    before.set_middle(begins_a_run);
    factors.set_middle(begins_a_run);
#pragma unroll
    for (int i = 0; i < kPartSums; ++i) part[i] *= before.of(number, i);
  }

  // The sums of a tile. Whatever follows the start of a part's products, up to the wait for them, is hidden behind them; what lies between
  // the last addition of a k-block and the first product of the next one is not.
  static __device__ __forceinline__ void multiply_tile(
      typename Traits::Accumulators& sum, const Tile& tile, int warpgroup, uint32_t shared, PipelineState pipe, int k_blocks) {
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    const uint32_t a = __shfl_sync(kFullWarp, wgmma_address(shared + warpgroup * kSubtileBytes), 0);
    const uint32_t b = __shfl_sync(kFullWarp, wgmma_address(shared + kStageBytesA), 0);
    const uint32_t row_bytes = kept_in_register((threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * sizeof(float));
    const bool begins_a_run = tile.n % kScaledColumns == 0;
#pragma unroll
    for (int i = 0; i < kParts * kPartSums; ++i) sum[i] = 0.0f;
    bool ready = mbarrier_test(full + pipe.stage * 8, pipe.parity);
#pragma unroll 1
    for (int k_block = 0; k_block < k_blocks; ++k_block) {
      const uint32_t stage = pipe.stage, of_stage = stage * (Traits::kStageBytes >> 4);
      if (!ready) mbarrier_wait(full + stage * 8, pipe.parity);
      const uint32_t of_k_block = Shared::scales(shared, stage);
      Factors factors;
      bool rare = false;  // in the warp
#pragma unroll
      for (int number = 0; number < kParts; ++number) {
        float part[kPartSums];
        start_part(part, a + of_stage, b + of_stage + number * 2 * (kSubtileBytes >> 4));
        if (number == 0) {
          factors = Scales(of_k_block, of_k_block + row_bytes).products(begins_a_run);
          rare = __any_sync(kFullWarp, !all_normal(factors));
        }
        if (number + 1 == kParts) pipe.template advance<kStages>();
        wgmma_wait<0>();
        fence_accumulators(part);
        if (rare) multiply_by_rows(part, number, Scales(of_k_block, of_k_block + row_bytes), factors, begins_a_run);
        if (number + 1 == kParts) {
          __syncwarp();  // all lanes have read the scales
          Mma::release(empty + stage * 8);
          ready = mbarrier_test(full + pipe.stage * 8, pipe.parity);
        }
#pragma unroll
        for (int i = 0; i < kPartSums; ++i) sum[number * kPartSums + i] += factors.of(number, i) * part[i];
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
