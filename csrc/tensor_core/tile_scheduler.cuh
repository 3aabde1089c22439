// The tile scheduler: tiles are dealt out to the CTAs in turns. Each warp finds its CTA's tiles by itself, from the sizes on the
// device.

#pragma once

#include "arguments.cuh"
#include "traits.cuh"

namespace gbmoe::tensor_core {

struct Tile {
  int group;      // -1 behind the last tile
  int row, rows;  // m-grouped: the tile's first row, and the rows of its group from there on; k-grouped: the rows to sum over
  int m, n;       // where it begins in its group's result
};

// The k-blocks of a tile's sum. A k-grouped group without rows has one, of zeros.
template <typename Traits> __device__ __forceinline__ int count_k_blocks(const Arguments& args, const Tile& tile) {
  if constexpr (Traits::kGroupedK) return max(1, ceil_div(tile.rows, Traits::kBlockK));
  else return ceil_div(args.size_k, Traits::kBlockK) * args.operand_pairs;
}

template <typename Traits> class TileScheduler {
 public:
  __device__ __forceinline__ explicit TileScheduler(const Arguments& args)
      : tiles_n_(ceil_div(args.size_n, Traits::kOutputTileN)), item_(blockIdx.x) {}

  // The CTA's next tile. All lanes of a warp call it together.
  __device__ __forceinline__ Tile next(const Arguments& args) {
    const int lane = threadIdx.x % 32;
    Tile tile{};
    tile.group = -1;
    while (item_ >= end_item_) {
      if (base_ + 32 >= args.groups) return tile;
      advance(args, lane);
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

 private:
  __device__ __forceinline__ int count_m(const Arguments& args, int rows) const {
    return ceil_div(Traits::kGroupedK ? args.size_m : rows, Traits::kTileM);
  }

  // On to the next 32 groups, one for each lane. m-grouped, an empty group has no items: its first item is the next group's. So the
  // owner of an item is the last lane whose first item is at most that one.
  __device__ __forceinline__ void advance(const Arguments& args, int lane) {
    base_ += 32;
    int end_row = size_of_group(args, base_ + lane);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, end_row, step);
      if (lane >= step) end_row = add_rows(args, end_row, before);
    }
    end_row = add_rows(args, end_row, next_row_);
    const int previous = __shfl_up_sync(kFullWarp, end_row, 1);
    lane_row_ = lane == 0 ? next_row_ : previous;
    lane_end_row_ = end_row;
    next_row_ = __shfl_sync(kFullWarp, end_row, 31);
    const int items = base_ + lane < args.groups ? count_m(args, end_row - lane_row_) * tiles_n_ : 0;
    int end_item = items;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, end_item, step);
      if (lane >= step) end_item += before;
    }
    end_item += end_item_;
    // A lane without a group owns nothing.
    lane_item_ = base_ + lane < args.groups ? end_item - items : INT32_MAX;
    end_item_ = __shfl_sync(kFullWarp, end_item, 31);
  }

  int tiles_n_;
  int item_;                                          // that this CTA takes next
  int base_ = -32, next_row_ = 0, end_item_ = 0;      // group of lane 0; the row and the item behind these 32 groups
  int lane_row_ = 0, lane_end_row_ = 0, lane_item_ = 0;  // of this lane's group: first row, row behind it, first item
};

}  // namespace gbmoe::tensor_core
