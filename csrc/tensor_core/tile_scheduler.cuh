// The tile scheduler: tiles are dealt out to the CTAs in turns, and warp 0 of a CTA finds its tiles, from the sizes on the device.

#pragma once

#include "arguments.cuh"
#include "traits.cuh"

namespace gbmoe::tensor_core {

struct Tile {
  int group;      // -1 after the last tile
  int row, rows;  // m-grouped: the tile's first row, and the rows of its group from there on; k-grouped: the rows to sum over
  int m, n;       // where it begins in its group's result
};

// The k-blocks of a tile's sum. A k-grouped group without rows has one, of zeros.
template <typename Traits> __device__ __forceinline__ int count_k_blocks(const Arguments& args, const Tile& tile) {
  if constexpr (Traits::kGroupedK) return max(1, ceil_div(tile.rows, Traits::kBlockK));
  else return ceil_div(args.size_k, Traits::kBlockK) * args.operand_pairs;
}

// Where a CTA is in the list of tiles. Warp 0 alone uses it. It is in shared memory because registers are needed for sums.
struct SchedulerState {
  int item;                              // that this CTA takes next
  int base, next_row, end_item;          // group of lane 0; the row and the item after these 32 groups
  int row[32], end_row[32], first_item[32];  // of each lane's group: first row, row after it, first item
};

// One lane's view of the state, for as long as it looks for a tile.
template <typename Traits> class TileScheduler {
 public:
  static __device__ __forceinline__ void begin(SchedulerState& state) {
    if (threadIdx.x == 0) state.item = blockIdx.x, state.base = -32, state.next_row = 0, state.end_item = 0;
    __syncwarp();
  }

  // The CTA's next tile, to all lanes of warp 0, which call it together.
  static __device__ __forceinline__ Tile next(const Arguments& args, SchedulerState& state) {
    TileScheduler scheduler(args, state);
    const Tile tile = scheduler.find(args);
    __syncwarp();
    scheduler.save(state);
    __syncwarp();
    return tile;
  }

 private:
  __device__ __forceinline__ TileScheduler(const Arguments& args, const SchedulerState& state)
      : tiles_n_(ceil_div(args.size_n, Traits::kOutputTileN)), item_(state.item), base_(state.base), next_row_(state.next_row),
        end_item_(state.end_item), lane_row_(state.row[lane()]), lane_end_row_(state.end_row[lane()]),
        lane_item_(state.first_item[lane()]) {}

  __device__ __forceinline__ void save(SchedulerState& state) const {
    if (lane() == 0) state.item = item_, state.base = base_, state.next_row = next_row_, state.end_item = end_item_;
    state.row[lane()] = lane_row_, state.end_row[lane()] = lane_end_row_, state.first_item[lane()] = lane_item_;
  }

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  __device__ __forceinline__ Tile find(const Arguments& args) {
    Tile tile{};
    tile.group = -1;
    while (item_ >= end_item_) {
      if (base_ + 32 >= args.groups) return tile;
      advance(args);
    }
    const int owner = 31 - __clz(__ballot_sync(kFullWarp, lane_item_ <= item_));
    tile.group = base_ + owner;
    const int first_row = __shfl_sync(kFullWarp, lane_row_, owner), end_row = __shfl_sync(kFullWarp, lane_end_row_, owner);
    const int local = item_ - __shfl_sync(kFullWarp, lane_item_, owner);
    const int tiles_m = count_m(args, end_row - first_row), panel = local / (args.panel_tiles * tiles_n_);
    const int in_panel = local - panel * args.panel_tiles * tiles_n_, first_m = panel * args.panel_tiles;
    const int height = min(args.panel_tiles, tiles_m - first_m);
    tile.m = (first_m + in_panel % height) * Traits::kTileM;
    tile.n = in_panel / height * Traits::kOutputTileN;
    tile.row = Traits::kGroupedK ? first_row : first_row + tile.m;
    tile.rows = end_row - tile.row;
    item_ += gridDim.x;
    return tile;
  }

  __device__ __forceinline__ int count_m(const Arguments& args, int rows) const {
    return ceil_div(Traits::kGroupedK ? args.size_m : rows, Traits::kTileM);
  }

  // On to the next 32 groups, one for each lane. m-grouped, an empty group has no items: its first item is the next group's. So the
  // owner of an item is the last lane whose first item is at most that one.
  __device__ __forceinline__ void advance(const Arguments& args) {
    base_ += 32;
    int end_row = size_of_group(args, base_ + lane());
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, end_row, step);
      if (lane() >= step) end_row = add_rows(args, end_row, before);
    }
    end_row = add_rows(args, end_row, next_row_);
    const int previous = __shfl_up_sync(kFullWarp, end_row, 1);
    lane_row_ = lane() == 0 ? next_row_ : previous;
    lane_end_row_ = end_row;
    next_row_ = __shfl_sync(kFullWarp, end_row, 31);
    const int items = base_ + lane() < args.groups ? count_m(args, end_row - lane_row_) * tiles_n_ : 0;
    int end_item = items;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, end_item, step);
      if (lane() >= step) end_item += before;
    }
    end_item += end_item_;
    // A lane without a group owns nothing.
    lane_item_ = base_ + lane() < args.groups ? end_item - items : INT32_MAX;
    end_item_ = __shfl_sync(kFullWarp, end_item, 31);
  }

  int tiles_n_, item_, base_, next_row_, end_item_, lane_row_, lane_end_row_, lane_item_;
};

}  // namespace gbmoe::tensor_core
