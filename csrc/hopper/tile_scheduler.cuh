// The tile scheduler: which tile a cluster makes next, and how all of its warps are told.
//
// Without a schedule in the workspace, tiles are dealt out to the clusters round-robin. With one (balanced_schedule.cu; k-grouped
// GEMMs always have one), whichever cluster is ready takes the next work item from a counter.

#pragma once

#include <climits>

#include "arguments.cuh"
#include "shared_memory.cuh"

namespace gbmoe::hopper {

// Finds the tiles of a cluster, one after the other; a warp's 32 lanes hold 32 consecutive groups.
template <typename Traits> struct TileScheduler {
  static constexpr bool kGroupedK = Traits::kGroupedK;
  static constexpr int kClusterM = Traits::kClusterM, kClusterN = Traits::kClusterN, kTileN = Traits::kOutputTileN;
  static constexpr int kBlockK = Traits::kBlockK;

  const Arguments& args;
  int lane, tiles_n, tiles_m_fixed;
  int upcoming;                         // work item to take next, without a counter
  int base = -32;                       // group of lane 0, or its place in groups_by_length
  int lane_group = 0, lane_rows = 0, lane_row = 0, lane_item = 0, lane_split = 0;  // of this lane's group: first row, first item
  int first_item = 0, next_row = 0, next_item = 0;                                 // of the 32 groups, and after them

  __device__ explicit TileScheduler(const Arguments& arguments) : args(arguments) {
    lane = threadIdx.x % 32;
    tiles_n = ceil_div(args.tiled_n, kTileN * kClusterN);
    tiles_m_fixed = ceil_div(args.size_m, kTileM * kClusterM);
    upcoming = blockIdx.x / (kClusterM * kClusterN);
  }

  // The next tile, as CTA 0 of the cluster sees it; its group is -1 after the last.
  __device__ Tile next() {
    Tile tile{};
    tile.k_blocks = args.sum_k_blocks;
    int item = take_item();
    if (!kGroupedK && args.schedule) item = split_tail(item, tile);
    if (item < first_item) base = -32, first_item = next_row = next_item = 0;
    while (item >= next_item) {
      if (base + 32 >= args.groups) {
        tile.group = -1;
        return tile;
      }
      advance();
    }
    const int owner = 31 - __clz(__ballot_sync(kFullWarp, lane_item <= item && base + lane < args.groups));
    tile.group = __shfl_sync(kFullWarp, lane_group, owner);
    tile.row = __shfl_sync(kFullWarp, lane_row, owner);
    tile.rows = __shfl_sync(kFullWarp, lane_rows, owner);
    int local = item - __shfl_sync(kFullWarp, lane_item, owner);
    const int along_m = tiles_m(tile.rows), most = args.panel_tiles;
    const int panel_tiles = !kGroupedK && args.even_panels ? ceil_div(along_m, ceil_div(along_m, most)) : most;
    const int tiles_of_panel = panel_tiles * tiles_n;
    if constexpr (kGroupedK) local = split_rows(local, along_m * tiles_n, __shfl_sync(kFullWarp, lane_split, owner), tile);
    const int panel = local / tiles_of_panel, first_m = panel * panel_tiles;
    const int height = min(panel_tiles, along_m - first_m), in_panel = local - panel * tiles_of_panel;
    tile.m = (first_m + in_panel % height) * kClusterM * kTileM;
    tile.n = in_panel / height * kClusterN * kTileN;
    if (!kGroupedK) tile.row += tile.m, tile.rows -= tile.m;
    return tile;
  }

  // The same tile as CTA `rank` of the cluster sees it.
  static __device__ __forceinline__ Tile seen_by(int rank, Tile tile) {
    const int m = kClusterM > 1 ? rank * kTileM : 0;
    tile.m += m;
    tile.n += kClusterN > 1 ? rank * kTileN : 0;
    if (!kGroupedK) tile.row += m, tile.rows -= m;
    return tile;
  }

 private:
  __device__ __forceinline__ int tiles_m(int rows) const {
    return kGroupedK ? tiles_m_fixed : ceil_div(rows, kTileM * kClusterM);
  }

  __device__ __forceinline__ int take_item() {
    int item = upcoming;
    if (!args.schedule) {
      upcoming += gridDim.x / (kClusterM * kClusterN);
      return item;
    }
    if (lane == 0) item = atomicAdd(&args.schedule->next_item, 1);
    return __shfl_sync(kFullWarp, item, 0);
  }

  // m-grouped: the tile of a work item, which is the whole tile or a split of it. Whole tiles come first, then the first splits
  // of all others, then their second ones, and so on.
  __device__ __forceinline__ int split_tail(int item, Tile& tile) const {
    const int whole = args.schedule->whole_tiles, tail = args.schedule->tail_tiles, splits = args.schedule->splits;
    const int k_blocks = tile.k_blocks;
    if (tail == 0 || item < whole) return item;
    const int index = (item - whole) / tail, of_tail = item - whole - index * tail;
    if (index >= splits) return INT_MAX;
    tile.k_block = index * k_blocks / splits;
    tile.k_blocks = (index + 1) * k_blocks / splits - tile.k_block;
    tile.split = pack_split(splits, index, of_tail * splits);
    return whole + of_tail;
  }

  // k-grouped: the same for one of a group's work items. A split is some of the rows that are summed over. The first splits of
  // all the group's tiles come first, then the second ones, and so on.
  static __device__ __forceinline__ int split_rows(int local, int tiles, int split, Tile& tile) {
    const int splits = split_count(split);
    if (splits <= 1) return local;
    const int index = local / tiles, of_group = local - index * tiles;
    const uint32_t k_blocks = ceil_div(tile.rows, kBlockK);  // at most 2^25, and kMaxSplits times that is below 2^32
    const int first = index * k_blocks / splits * kBlockK;
    const int last = min(static_cast<int>((index + 1) * k_blocks / splits) * kBlockK, tile.rows);
    tile.row += first;
    tile.rows = last - first;
    tile.split = pack_split(splits, index, first_entry(split) + of_group * splits);
    return of_group;
  }

  // On to the next 32 groups.
  __device__ void advance() {
    base += 32;
    const int place = base + lane;
    const bool exists = place < args.groups;
    lane_rows = 0;
    if (kGroupedK && exists) {
      const ScheduledGroup of = args.groups_by_length[place];
      lane_group = of.group, lane_row = of.first_row, lane_rows = of.rows, lane_split = of.split;
    } else if (!kGroupedK) {
      lane_group = place;
      int row_end = size_of_group(args, place);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int row = __shfl_up_sync(kFullWarp, row_end, step);
        if (lane >= step) row_end = add_rows(args, row_end, row);
      }
      row_end = add_rows(args, row_end, next_row);
      const int row_before = __shfl_up_sync(kFullWarp, row_end, 1);
      lane_row = lane == 0 ? next_row : row_before;
      lane_rows = row_end - lane_row;
      next_row = __shfl_sync(kFullWarp, row_end, 31);
    }
    const int items = exists ? tiles_m(lane_rows) * tiles_n * max(split_count(lane_split), 1) : 0;
    int item_end = items;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int item = __shfl_up_sync(kFullWarp, item_end, step);
      if (lane >= step) item_end += item;
    }
    lane_item = next_item + item_end - items;
    first_item = next_item;
    next_item += __shfl_sync(kFullWarp, item_end, 31);
  }
};

// Sends the tiles, one after the other, to all warps of the cluster that receive them. In one warp of CTA 0,
// Traits::kSchedulerWarp.
template <typename Traits> struct TileSender {
  using Shared = SharedMemory<Traits>;
  using Scheduler = TileScheduler<Traits>;

  Scheduler scheduler;
  int sent = 0;  // tiles
  // Whether the last tile is so short that the next may be late if it is found only when that one is received.
  bool more_ahead = true;

  __device__ explicit TileSender(const Arguments& args) : scheduler(args) {}

  // False after the last tile.
  __device__ __forceinline__ bool send(uint32_t shared) {
    const uint32_t full = Shared::tiles_full(shared), empty = Shared::tiles_empty(shared);
    const int lane = threadIdx.x % 32, place = sent % kTileRing;
    // An item that is taken from the counter is out of reach for other clusters. So with a counter no item is taken sooner than
    // it is needed: else the longest items would not come first.
    const int received = sent - (scheduler.args.schedule && !more_ahead ? 1 : kTileRing);
    if (received >= 0) mbarrier_wait(empty + received % kTileRing * 8, received / kTileRing & 1);
    const Tile tile = scheduler.next();
    if (lane == 0) {
      const uint32_t to = Shared::tile(shared, place), barrier = full + place * 8;
      if constexpr (Traits::kClusterSize == 1) {
        store_shared_16(to, tile.low_half());
        store_shared_16(to + 16, tile.high_half());
        mbarrier_arrive(barrier);
      } else {
#pragma unroll
        for (int rank = 0; rank < Traits::kClusterSize; ++rank) {
          const Tile theirs = Scheduler::seen_by(rank, tile);
          mbarrier_expect_bytes_remote(barrier, sizeof(Tile), rank);
          store_shared_16_remote(to, theirs.low_half(), barrier, rank);
          store_shared_16_remote(to + 16, theirs.high_half(), barrier, rank);
        }
      }
    }
    __syncwarp();
    ++sent;
    more_ahead = (Traits::kGroupedK ? ceil_div(tile.rows, Traits::kBlockK) : tile.k_blocks) < 12;
    return tile.group >= 0;
  }

  // Waits until the other CTA's warps, which arrive at this CTA's barriers, have received all tiles but the last: no warp arrives
  // for that one.
  __device__ __forceinline__ void drain(uint32_t shared) const {
    for (int received = max(sent - kTileRing, 0); received < sent - 1; ++received) {
      mbarrier_wait(Shared::tiles_empty(shared) + received % kTileRing * 8, received / kTileRing & 1);
    }
  }
};

// From a place of the ring.
__device__ __forceinline__ Tile load_tile(uint32_t from) { return Tile::of(load_shared_16(from), load_shared_16(from + 16)); }

// The next tile, in every warp that receives tiles. The consumers of scaled operands pass `careful`, and wait until scale_scanner.cuh has
// written whether the tile takes the careful main loop.
template <typename Traits> __device__ __forceinline__ Tile receive_tile(uint32_t shared, PipelineState& ring, bool* careful = nullptr) {
  using Shared = SharedMemory<Traits>;
  const uint32_t full = Shared::tiles_full(shared) + ring.stage * 8, from = Shared::tile(shared, ring.stage);
  mbarrier_wait(careful ? Shared::tiles_scanned(shared) + ring.stage * 8 : full, ring.parity);
  const Tile tile = load_tile(from);
  if (careful) *careful = load_shared_int(Shared::careful(shared, ring.stage)) != 0;
  __syncwarp();
  // No warp waits for arrivals for the last tile, and CTA 0 may have ended by then.
  if (threadIdx.x % 32 == 0 && tile.group >= 0) {
    if constexpr (Traits::kClusterSize == 1) mbarrier_arrive(full + kTileRing * 8);
    else mbarrier_arrive_remote(full + kTileRing * 8, 0);
  }
  ring.template advance<kTileRing>();
  return tile;
}

}  // namespace gbmoe::hopper
