// The producer: fills the ring of stages with k-blocks of both operands, by TMA, with multicast where the CTAs of a cluster share
// them. Where a is gathered by cp.async (gather_producer.cuh) TMA brings b only; where it is gathered by TMA, other warps load it
// (line_producer.cuh).

#pragma once

#include "gather_producer.cuh"
#include "pacing.cuh"
#include "tile_scheduler.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct Producer {
  using Shared = SharedMemory<Traits>;
  using Gather = GatherProducer<Traits>;
  static constexpr bool kGroupedK = Traits::kGroupedK, kCopies = Traits::kGatherCopies, kCopiesOfK = kCopies && kGroupedK;
  static constexpr int kClusterM = Traits::kClusterM, kClusterN = Traits::kClusterN, kClusterSize = Traits::kClusterSize;
  static constexpr uint32_t kStageBytesB = Traits::kStageBytesB;
  static constexpr int kBlockK = Traits::kBlockK;

  // k-blocks are loaded whole: at a group's end they reach into the next group, which is harmless. (A TMA load of half a k-block
  // under a condition was compiled by ptxas 13.0 to a load from a row number that was never set.)
  static __device__ void run(const TensorMaps& maps, const Arguments& args, uint32_t shared) {
    const uint32_t rank = kClusterSize > 1 ? cta_rank_in_cluster() : 0;
    const bool loads = threadIdx.x == kConsumerWarps * 32;
    const bool schedules = Traits::kProducerSchedules && threadIdx.x / 32 == Traits::kSchedulerWarp && rank == 0;
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    TileSender<Traits> sender(args);
    Pacer<Traits> pacer(args, loads && rank == 0);
    PipelineState pipe, tiles;
    if (schedules) sender.send(shared);
    for (;;) {
      const Tile tile = receive_tile<Traits>(shared, tiles);
      if (tile.group < 0) break;
      if (schedules && !kCopiesOfK) sender.send(shared);  // one ahead
      const int k_blocks = kGroupedK ? ceil_div(tile.rows, kBlockK) : tile.k_blocks;
      // Where the group's matrices of both b are: looked up once a tile, so that the loop is no longer for it.
      PlacesOfTile places{};
      if constexpr (!kGroupedK) places = {args.places.of(tile.group), args.places.of(tile.group, 1), tile.group};
      typename Gather::Rows rows;
      if constexpr (kCopies && !kGroupedK) rows = Gather::rows_of_tile(args, tile);
      int slot = kCopiesOfK ? Gather::slot_in_k_block(args, tile, 0) : 0;
      if (loads || kCopies) {
#pragma unroll 1
        for (int i = 0; i < k_blocks; ++i) {
          if constexpr (kCopiesOfK) {
            rows = Gather::rows_of_slots(args, slot);
            slot = Gather::slot_in_k_block(args, tile, i + 1);
          }
          pacer.step();
          mbarrier_wait(empty + pipe.stage * 8, pipe.parity ^ 1);
          const uint32_t arrived = full + pipe.stage * 8, a = shared + pipe.stage * Traits::kStageBytes, b = a + kStageBytesA;
          const int k_block = tile.k_block + i;
          int pair, k;
          if constexpr (kGroupedK) {
            pair = Traits::kTransposedOut && tile.n >= args.second_n;
            k = tile.row + i * kBlockK;
          } else {
            // Any pair may be the longest, so that a k-block says nothing of its pair but by where pairs begin.
            const bool second = k_block >= args.k_blocks, third = Traits::kThreePairs && k_block >= args.third_k_block;
            pair = second + third;
            k = (k_block - (third ? args.third_k_block : second ? args.k_blocks : 0)) * kBlockK;
          }
          if (loads) {
            mbarrier_expect_bytes(
                arrived, (kCopies ? 0 : kStageBytesA) + kStageBytesB + (Traits::kScaledK ? Traits::kScaleBytes : 0));
            if constexpr (Traits::kScaledK) {
              load_scaled(maps, tile, k / kBlockK, arrived, a, Shared::scales(shared, pipe.stage));
            } else {
              // Lines are the first pair's a; a second one lies in memory.
              const bool in_memory = !Traits::kGatherA || (Traits::kGatherLines && !kGroupedK && pair);
              if (in_memory) load_a(maps, tile, rank, pair, k, arrived, a);
              load_b(maps, rank, pair, tile.n - (kGroupedK && pair ? args.second_n : 0), k, places, arrived, b);
            }
          }
          if constexpr (kCopies) {
            Gather::copy(rows, args, kCopiesOfK ? tile.m + threadIdx.x % 128 / 64 * 64 : k, a);
            mbarrier_arrive_on_cp_async(arrived);
          }
          pipe.template advance<Traits::kStages>();
        }
      }
      // With a counter a tile is found only when the one before has been received, for which this warp must not wait before it
      // gathers.
      if (schedules && kCopiesOfK) sender.send(shared);
      __syncwarp();
    }
    pacer.end();
    if (kClusterSize > 1 && schedules) sender.drain(shared);
    if (kClusterSize > 1 && loads) {
      // The other CTA's consumers arrive at this one's barriers: stay until they have.
      for (int i = 0; i < Traits::kStages; ++i) {
        mbarrier_wait(empty + pipe.stage * 8, pipe.parity ^ 1);
        pipe.template advance<Traits::kStages>();
      }
    }
  }

 private:
  // Third coordinates of tensor maps: of the first two b, which a table may have, and of others, which are stacks.
  struct PlacesOfTile {
    int first, second, group;
    __device__ __forceinline__ int of(int b) const { return b == 0 ? first : b == 1 ? second : group; }
  };

  // k-grouped, of scaled operands, which lie in memory as k-blocks: both, b in halves of the tile's columns, and their scales.
  static __device__ __forceinline__ void load_scaled(
      const TensorMaps& maps, const Tile& tile, int k_block, uint32_t arrived, uint32_t a, uint32_t scales) {
    constexpr int kHalf = Traits::kTileN / 2;
    const uint32_t b = a + kStageBytesA;
    tma_load(&maps.a[0], arrived, a, 0, tile.m, k_block);
    tma_load(&maps.b[0], arrived, b, 0, tile.n, k_block);
    tma_load(&maps.b[0], arrived, b + kStageBytesB / 2, 0, tile.n + kHalf, k_block);
    tma_load(&maps.a[1], arrived, scales, tile.m, k_block, 0);
    tma_load(&maps.b[1], arrived, scales + kTileM * sizeof(float), tile.n, k_block, 0);
  }

  // Of a, CTAs that share it load half each, by multicast to both; a CTA on its own loads boxes of kTileM rows.
  static __device__ __forceinline__ void load_a(
      const TensorMaps& maps, const Tile& tile, uint32_t rank, int pair, int k, uint32_t arrived, uint32_t to) {
    const CUtensorMap* map = &maps.a[pair];
    if constexpr (kClusterN > 1) {
      if constexpr (kGroupedK) tma_load_multicast(map, arrived, to + rank * kSubtileBytes, tile.m + rank * 64, k, 0, 0b11);
      else tma_load_multicast(map, arrived, to + rank * kSubtileBytes, k, tile.row + rank * 64, 0, 0b11);
    } else if constexpr (kGroupedK) {
      tma_load(map, arrived, to, tile.m, k, 0);
      tma_load(map, arrived, to + kSubtileBytes, tile.m + 64, k, 0);
    } else {
      tma_load(map, arrived, to, k, tile.row, 0);
    }
  }

  // b is loaded from column n on, in boxes: 64 columns each where N is contiguous, else half of the tile's columns each. CTAs that share
  // b load some of the boxes each, by multicast to both.
  static __device__ __forceinline__ void load_b(
      const TensorMaps& maps, uint32_t rank, int pair, int n, int k, const PlacesOfTile& places, uint32_t arrived, uint32_t b) {
    constexpr bool kContiguousN = kGroupedK || Traits::kTransposedB;
    constexpr int kBoxes = kContiguousN ? Traits::kTileN / 64 : 2, kOwnBoxes = kBoxes / kClusterM;
    const int first = kClusterM > 1 ? rank * kOwnBoxes : 0;
#pragma unroll
    for (int i = 0; i < kOwnBoxes; ++i) {
      // Under kGlu the first half of the boxes is h's (w1's, or those of the second pair), and the second has the same columns of g's.
      constexpr int kBoxesOfOne = Traits::kGlu ? kBoxes / 2 : kBoxes;
      const int box = first + i, along_n = n + box % kBoxesOfOne * (Traits::kTileN / kBoxes);
      const uint32_t to = b + box * (kStageBytesB / kBoxes);
      const int number = Traits::kGlu ? box / kBoxesOfOne + (Traits::kGluOfTwoPairs ? 2 * pair : 0) : pair;
      const CUtensorMap* map = &maps.b[number];
      const int x = kContiguousN ? along_n : k, y = kContiguousN ? k : along_n;
      const int z = kGroupedK ? 0 : places.of(number);
      if constexpr (kClusterM > 1) tma_load_multicast(map, arrived, to, x, y, z, 0b11);
      else tma_load(map, arrived, to, x, y, z);
    }
  }
};

}  // namespace gbmoe::hopper
