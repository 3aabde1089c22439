// The warps that gather a by TMA where CTAs of a cluster share it: each line comes from the tokens' matrix by a load of its own, of 64
// columns. (A CTA alone gathers by cp.async, gather_producer.cuh: it would need twice as many of these loads as TMA has time for.)
//
// TMA puts a box of one line where the swizzle of the whole stage has it, because the swizzle depends on the address in shared memory
// alone. So the CTAs load half of the lines each, by multicast to both, as where a is in memory. A line without a slot is read from
// outside the matrix, where TMA finds zeros. The producer says how many bytes come, and loads b, and the a of a second pair of operands.
//
// m-grouped, a line is a row of the tile, the same for all k-blocks, and each CTA has half of the tile's rows. k-grouped, where a tile of
// out[e].T is made, every k-block has 64 lines of its own, of 128 columns, and each CTA has half of the columns.

#pragma once

#include "tile_scheduler.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct LineProducer {
  using Shared = SharedMemory<Traits>;
  static constexpr bool kGroupedK = Traits::kGroupedK;
  static constexpr int kLines = 64, kWarpLines = kLines / Traits::kLineWarps;  // of a k-block, that this CTA and a warp load
  static_assert(kWarpLines == 32, "each lane has the slot of one line");

  const TensorMaps& maps;
  const Arguments& args;
  const int first_line, lane = threadIdx.x % 32;  // first_line: of the warp's
  const uint32_t rank = cta_rank_in_cluster(), tokens;  // tokens: of the warp's lines, in shared memory

  // One of kLineWarps warps, from its first tile to its last.
  static __device__ void run(const TensorMaps& maps, const Arguments& args, uint32_t shared) {
    LineProducer(maps, args, shared, __shfl_sync(kFullWarp, threadIdx.x / 32 - kConsumerWarps - Traits::kProducerWarps, 0)).run(shared);
  }

 private:
  __device__ LineProducer(const TensorMaps& maps_, const Arguments& args_, uint32_t shared, int warp)
      : maps(maps_), args(args_), first_line(warp * kWarpLines), tokens(Shared::tokens(shared) + warp * kWarpLines * sizeof(int)) {}

  __device__ __forceinline__ void run(uint32_t shared) {
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    PipelineState pipe, tiles;
    Tile upcoming = receive_tile<Traits>(shared, tiles);
    int slot = slot_of_line(upcoming, 0);
    for (;;) {
      const Tile tile = upcoming;
      if (tile.group < 0) break;
      const int k_blocks = kGroupedK ? ceil_div(tile.rows, kBlockK) : tile.k_blocks;
      if (!kGroupedK) keep_token(slot);
      if (k_blocks == 0) upcoming = receive_tile<Traits>(shared, tiles), slot = slot_of_line(upcoming, 0);
#pragma unroll 1
      for (int i = 0; i < k_blocks; ++i) {
        if (kGroupedK) {
          keep_token(slot);
          slot = slot_of_line(tile, i + 1);
        }
        // The next tile's slots come while the last k-blocks of this one are loaded.
        if (i == max(k_blocks - 2, 0)) {
          upcoming = receive_tile<Traits>(shared, tiles);
          if (!kGroupedK) slot = slot_of_line(upcoming, 0);
        }
        if (kGroupedK && i == k_blocks - 1) slot = slot_of_line(upcoming, 0);
        mbarrier_wait(empty + pipe.stage * 8, pipe.parity ^ 1);
        const int k_block = tile.k_block + i;
        // The k-blocks of a second pair come from the producer. This warp waits for their stages all the same: one parity of a barrier
        // tells of the last two of its phases only.
        if (kGroupedK || k_block < args.k_blocks) {
          const int column = kGroupedK ? column_of_tile(tile) : k_block * kBlockK;
          load(full + pipe.stage * 8, shared + pipe.stage * Traits::kStageBytes, column);
        }
        pipe.template advance<Traits::kStages>();
      }
    }
  }

  // The slot of this lane's line of a tile, k-grouped of its k-block `k_block`. Lines after the group's last row are not used, but are
  // loaded: from any token, because TMA takes nine times as long for a line from outside the matrix as for one from inside, and not all
  // from the same one, for which it takes longer, too.
  __device__ __forceinline__ int slot_of_line(const Tile& tile, int k_block) const {
    const int line = (kGroupedK ? k_block * kBlockK : rank * kLines) + first_line + lane, row = tile.row + line;
    if (line < tile.rows) return args.slot_of_row[row];
    return static_cast<uint32_t>(row) < args.slots ? row : row - static_cast<int>(args.slots);
  }

  // k-grouped: the first of this CTA's 64 columns of a tile. Where the tile has no such columns, others are loaded, for the same reason.
  __device__ __forceinline__ int column_of_tile(const Tile& tile) const {
    const int column = tile.m + rank * 64;
    return column < args.size_m ? column : tile.m;
  }

  // Leaves the token of this lane's line in shared memory, for `load`.
  __device__ __forceinline__ void keep_token(int slot) const {
    const int token = __umulhi(2 * static_cast<uint32_t>(slot), args.top_k_multiplier) >> args.top_k_shift;
    store_shared_int(tokens + lane * sizeof(int), static_cast<uint32_t>(slot) < args.slots ? token : -1);
    __syncwarp();
  }

  // Starts loading the warp's lines of a k-block, from `column` of the tokens on, into a stage. One thread runs through all of them
  // without a branch: only so are there few enough instructions for each to keep TMA busy.
  __device__ __forceinline__ void load(uint32_t arrived, uint32_t stage, int column) const {
    constexpr int kAtOnce = 16;  // tokens in registers
    const uint32_t to = stage + rank * kSubtileBytes + first_line * kLineBytes;
    if (elect_one()) {
#pragma unroll
      for (int first = 0; first < kWarpLines; first += kAtOnce) {
        int4 four[kAtOnce / 4];
#pragma unroll
        for (int i = 0; i < kAtOnce / 4; ++i) four[i] = load_shared_16(tokens + (first + i * 4) * sizeof(int));
#pragma unroll
        for (int i = 0; i < kAtOnce / 4; ++i) {
          const uint32_t line = to + (first + i * 4) * kLineBytes;
          tma_load_line_multicast(&maps.a[0], arrived, line, column, four[i].x, 0b11);
          tma_load_line_multicast(&maps.a[0], arrived, line + kLineBytes, column, four[i].y, 0b11);
          tma_load_line_multicast(&maps.a[0], arrived, line + 2 * kLineBytes, column, four[i].z, 0b11);
          tma_load_line_multicast(&maps.a[0], arrived, line + 3 * kLineBytes, column, four[i].w, 0b11);
        }
      }
    }
    __syncwarp();
  }
};

}  // namespace gbmoe::hopper
