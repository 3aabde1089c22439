// A unit of work as the scheduler names it, and all warps of a CTA see it.

#pragma once

#include <cuda_runtime.h>

namespace gbmoe::hopper {

// One tile, or one split of its sum over K.
struct alignas(16) Tile {
  int group;              // k-grouped: the number of its matrix in the output; -1: there are no more tiles
  int row;                // m-grouped: first row in a; k-grouped: first row that is summed over
  int rows;               // m-grouped: rows of the group from `row` on; k-grouped: rows that are summed over
  int m, n;               // first row and column of the result; n is this CTA's
  int k_block, k_blocks;  // m-grouped: the first k-block, and how many
  int split;              // packed, see below; 0 where the tile is summed at once

  // As it travels through shared memory.
  __device__ __forceinline__ int4 low_half() const { return make_int4(group, row, rows, m); }
  __device__ __forceinline__ int4 high_half() const { return make_int4(n, k_block, k_blocks, split); }
  static __device__ __forceinline__ Tile of(int4 a, int4 b) { return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}; }
};

// Places in the ring through which the scheduler warp sends tiles; it is at most this many tiles ahead.
constexpr int kTileRing = 4;

// Three numbers packed into one: into how many splits a sum is cut, which of them this is, and the first one's workspace entry.
constexpr int kMaxSplits = 127;
__host__ __device__ __forceinline__ int pack_split(int splits, int index, int first_entry) {
  return splits << 24 | index << 16 | first_entry;
}
__device__ __forceinline__ int split_count(int split) { return split >> 24; }
__device__ __forceinline__ int split_index(int split) { return split >> 16 & 0xff; }
__device__ __forceinline__ int first_entry(int split) { return split & 0xffff; }

}  // namespace gbmoe::hopper
