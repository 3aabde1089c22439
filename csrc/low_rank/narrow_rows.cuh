// What products and gradients of low rank have in common: the rows of a tile or of a group, where rows of R elements lie in shared memory,
// and the ring of stages.

#pragma once

#include "../group_sizes.cuh"
#include "../pitch.cuh"
#include "../tensor_core/epilogue.cuh"

namespace gbmoe::low_rank {

using tensor_core::kChunkBytes;

using Bits = uint16_t;  // an element in memory: to copy and to arrange it, its dtype need not be known

constexpr int kThreads = 128, kWarps = kThreads / 32;
constexpr int kMostBytes = 98 << 10;  // of shared memory: a CTA has at most 99 KiB on 8.6, 8.9 and 12.0
constexpr int kMostStages = 8;

// The rows of all groups, of every operand of a launch.
struct Rows {
  const void* sizes;  // [E], rows of each group
  bool sizes_are_int64;  // else int32
  int groups;
  int rows;  // P: no group reaches beyond it, whatever its size says
  bool is_half;  // fp16, else bf16
  int top_k;
  uint32_t slots;  // T * top_k: a row whose slot is none of these is zeros
  const int* slot_of_row;  // [P]: wide operands are tokens; or null: they have P rows
};

// The row of a wide operand that has this slot, or -1.
__device__ __forceinline__ int token_of_slot(const Rows& of, int slot) {
  return static_cast<uint32_t>(slot) < of.slots ? slot / of.top_k : -1;
}

// Rows in shared memory of kRanks elements of 16 bits, of which 32 to 128 bytes follow one another without a gap. Chunks are permuted
// within a row, so that eight rows' chunks of one number, which ldmatrix reads at a time, lie in different banks.
template <int kRanks> struct NarrowRows {
  static constexpr int kChunksOfRow = kRanks / 8, kPitch = kChunksOfRow * kChunkBytes;
  static_assert(kChunksOfRow == 2 || kChunksOfRow == 4 || kChunksOfRow == 8);

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kPitch + (chunk ^ (row / (8 / kChunksOfRow) & (kChunksOfRow - 1))) * kChunkBytes;
  }
};

__device__ __forceinline__ uint32_t pack(float low, float high, bool is_half) {
  return is_half ? tensor_core::pack(low, high, __half()) : tensor_core::pack(low, high, __nv_bfloat16());
}

struct TileOfRows {
  int group;      // -1: there are fewer tiles
  int row, rows;  // the tile's first row, and the rows of its group from there on
};

// Tile `number` of those that the groups' rows are cut into, kTileRows each; the last one of a group may have fewer. Each warp looks for
// itself, at 128 sizes at a time, four by each lane.
template <int kTileRows> __device__ __forceinline__ TileOfRows find_rows(const Rows& args, int number) {
  constexpr int kOfLane = 4;
  const int lane = threadIdx.x % 32;
  int next_row = 0, next_tile = 0;
  for (int base = 0; base < args.groups; base += 32 * kOfLane) {
    int end[kOfLane], row = 0;  // after each of the lane's groups
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) row = end[i] = add_rows(args, row, size_of_group(args, base + kOfLane * lane + i));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, row, step);
      if (lane >= step) row = add_rows(args, row, before);
    }
    const int previous = __shfl_up_sync(kFullWarp, row, 1);
    const int first_row = lane == 0 ? next_row : add_rows(args, next_row, previous);
    next_row = add_rows(args, next_row, __shfl_sync(kFullWarp, row, 31));
    int tiles[kOfLane], all = 0;
    row = first_row;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      end[i] = add_rows(args, first_row, end[i]);
      all += tiles[i] = ceil_div(end[i] - row, kTileRows);
      row = end[i];
    }
    int end_tile = all;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, end_tile, step);
      if (lane >= step) end_tile += before;
    }
    end_tile += next_tile;
    next_tile = __shfl_sync(kFullWarp, end_tile, 31);
    if (number >= next_tile) continue;
    // Lanes without tiles begin where the next one does, so that the last lane that does not begin after the tile has it.
    int before = number - (end_tile - all);
    const int owner = 31 - __clz(__ballot_sync(kFullWarp, before >= 0));
    TileOfRows found{-1, 0, 0};
    row = first_row;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (before >= 0 && before < tiles[i]) {
        const int from = row + before * kTileRows;
        found = {base + kOfLane * lane + i, from, end[i] - from};
      }
      before -= tiles[i];
      row = end[i];
    }
    found.group = __shfl_sync(kFullWarp, found.group, owner);
    found.row = __shfl_sync(kFullWarp, found.row, owner);
    found.rows = __shfl_sync(kFullWarp, found.rows, owner);
    return found;
  }
  return {-1, 0, 0};
}

// All rows of a group. Each warp adds up for itself.
__device__ __forceinline__ TileOfRows rows_of_group(const Rows& args, int group) {
  const int size = size_of_group(args, group);
  int first = 0;
#pragma unroll 4
  for (int g = threadIdx.x % 32; g < group; g += 32) first = add_rows(args, first, size_of_group(args, g));
#pragma unroll
  for (int step = 16; step > 0; step /= 2) first = add_rows(args, first, __shfl_xor_sync(kFullWarp, first, step));
  return {group, first, add_rows(args, first, size) - first};
}

// Waits for all copies but those of the last `stages` - 2 blocks, a number that the instruction has in itself.
__device__ __forceinline__ void wait_for_block(int stages) {
  switch (stages) {
    case 8: return tensor_core::cp_async_wait<6>();
    case 7: return tensor_core::cp_async_wait<5>();
    case 6: return tensor_core::cp_async_wait<4>();
    case 5: return tensor_core::cp_async_wait<3>();
    case 4: return tensor_core::cp_async_wait<2>();
    default: return tensor_core::cp_async_wait<1>();
  }
}

// The ring of 3 to 8 stages: `copy` starts the copies of a block to a stage, `multiply` reads them there. stages - 1 blocks are on their way
// while one is multiplied. All threads of the CTA together.
template <typename Copy, typename Multiply>
__device__ __forceinline__ void for_blocks(int stages, int blocks, const Copy& copy, const Multiply& multiply) {
  int stage = 0, free_stage = 0;  // of the block that is multiplied, and of the one that is copied
#pragma unroll 1
  for (int block = 1 - stages; block < blocks;
       ++block) {  // from the first block's copies on, so that there is one piece of code for all
    if (block >= 0) {
      wait_for_block(stages);
      __syncthreads();  // the block is there, and no warp reads the one before it any more
    }
    if (block + stages - 1 < blocks) copy(block + stages - 1, free_stage);
    tensor_core::cp_async_commit();
    free_stage = free_stage + 1 == stages ? 0 : free_stage + 1;
    if (block < 0) continue;
    multiply(stage);
    stage = stage + 1 == stages ? 0 : stage + 1;
  }
}

}  // namespace gbmoe::low_rank
