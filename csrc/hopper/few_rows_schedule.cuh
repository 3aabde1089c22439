// Which rows a CTA of few_rows_gemm.cuh has: groups are cut into tiles of kRows rows, and a CTA finds its tile by its number.

#pragma once

#include "few_rows_arguments.cuh"

namespace gbmoe::hopper::few_rows {

// Rows that follow each other and belong to one group, kRows of them at the most; none where `count` is not positive.
struct Rows { int group, first, count; };

// How many rows some groups have, and in how many tiles of kRows. Sizes may be anything: both numbers are clamped.
struct Extent {
  int rows = 0, tiles = 0;

  static __device__ __forceinline__ Extent of(int size) { return {size, ceil_div(size, kRows)}; }
  __device__ __forceinline__ void add(const Arguments& args, const Extent& more) {
    rows = add_rows(args, rows, more.rows), tiles = min(tiles + more.tiles, 1 << 29);
  }
};
__device__ __forceinline__ Extent shuffled_up(const Extent& own, int lanes) {
  return {__shfl_up_sync(kFullWarp, own.rows, lanes), __shfl_up_sync(kFullWarp, own.tiles, lanes)};
}

// Tile `index` of the rows of all groups; without rows where there are not so many. All lanes of a warp call it together.
__device__ __forceinline__ Rows find_rows(const Arguments& args, int index) {
  if (!args.sizes) return {0, index * kRows, min(args.rows - index * kRows, kRows)};
  constexpr int kOfLane = 4;  // groups that follow each other
  const int lane = threadIdx.x % 32;
  Extent before;  // of the groups before `base`
  for (int base = 0; base < args.groups; base += 32 * kOfLane) {
    int sizes[kOfLane];
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) sizes[i] = size_of_group(args, base + lane * kOfLane + i);
    Extent through;  // the groups of the lanes up to this one
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) through.add(args, Extent::of(sizes[i]));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const Extent of_others = shuffled_up(through, step);
      if (lane >= step) through.add(args, of_others);
    }
    Extent at = before;  // of the groups before this lane's first one, then of those before the one that is looked for
    const Extent of_lanes_before = shuffled_up(through, 1);
    if (lane > 0) at.add(args, of_lanes_before);
    through.add(args, before);
    const unsigned reach = __ballot_sync(kFullWarp, through.tiles > index);
    if (reach) {
      int group = 0;
#pragma unroll
      for (int i = 0; i < kOfLane - 1; ++i) {
        Extent next = at;
        next.add(args, Extent::of(sizes[i]));
        if (group == i && next.tiles <= index) at = next, group = i + 1;
      }
      int size = sizes[0];
#pragma unroll
      for (int i = 1; i < kOfLane; ++i) size = group == i ? sizes[i] : size;
      const int skipped = (index - at.tiles) * kRows, left = min(size, args.rows - at.rows) - skipped;
      const int owner = __ffs(reach) - 1;
      return {
          __shfl_sync(kFullWarp, base + lane * kOfLane + group, owner), __shfl_sync(kFullWarp, at.rows + skipped, owner),
          __shfl_sync(kFullWarp, min(left, kRows), owner)};
    }
    before = {__shfl_sync(kFullWarp, through.rows, 31), __shfl_sync(kFullWarp, through.tiles, 31)};
  }
  return {};
}

// The token of a row, or -1: that is outside of the matrix, where TMA finds zeros, for which it takes long.
__device__ __forceinline__ int token_of(const Arguments& args, int row) {
  if (!args.slot_of_row) return row;
  const int slot = args.slot_of_row[row], token = slot / args.top_k;
  return slot < 0 || token >= args.tokens ? -1 : token;
}

// How many rows of a tile there are up to the last one that has a token. All lanes of a warp call it together.
__device__ __forceinline__ int rows_up_to_last_token(const Arguments& args, const Rows& rows) {
  const int lane = threadIdx.x % 32;
  return 32 - __clz(__ballot_sync(kFullWarp, lane < rows.count && token_of(args, rows.first + lane) >= 0));
}

}  // namespace gbmoe::hopper::few_rows
