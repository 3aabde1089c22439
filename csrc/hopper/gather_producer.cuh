// The part of the producer that gathers where a CTA is alone: four warps copy rows of a from the tokens' matrix to a stage, 16 bytes a
// cp.async. (Pairs of CTAs along N share them, and gather by TMA, line_producer.cuh.)
//
// m-grouped, a tile's 128 rows are the same for all k-blocks, and each warp has 32 of them. k-grouped, where a tile of out[e].T
// is made, every k-block has 64 rows of its own, and two warps each have those of 64 columns.

#pragma once

#include "arguments.cuh"
#include "shared_memory.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct GatherProducer {
  using Element = typename Traits::Element;

  // What a thread copies of every k-block: one 16-byte vector of eight rows, four rows apart. A row is named by its distance from
  // the first token's in vectors of 16 bytes (of which 64 GiB of tokens have 2^32), and is kNoRow where there is none.
  static constexpr uint32_t kNoRow = ~0u;
  struct Rows {
    uint32_t vector[8];
    bool all_exist;  // none of the warp's rows is kNoRow
  };

  // m-grouped: the rows of a tile.
  static __device__ __forceinline__ Rows rows_of_tile(const Arguments& args, const Tile& tile) {
    const int row = threadIdx.x % 128;
    return rows_of_slots(args, row < tile.rows ? args.slot_of_row[tile.row + row] : -1);
  }
  // k-grouped: the slot of this lane's row of a k-block.
  static __device__ __forceinline__ int slot_in_k_block(const Arguments& args, const Tile& tile, int k_block) {
    const int row = k_block * kBlockK + threadIdx.x % 64;
    return row < tile.rows ? args.slot_of_row[tile.row + row] : -1;
  }
  // Of the warp's 32 rows, of which each lane has the slot of one.
  static __device__ __forceinline__ Rows rows_of_slots(const Arguments& args, int slot) {
    const int lane = threadIdx.x % 32;
    const uint32_t token = __umulhi(2 * static_cast<uint32_t>(slot), args.top_k_multiplier) >> args.top_k_shift;
    const bool exists = static_cast<uint32_t>(slot) < args.slots;
    const uint32_t vector = exists ? token * static_cast<uint32_t>(args.token_elements / 8) : kNoRow;
    Rows rows;
    rows.all_exist = __all_sync(kFullWarp, exists);
#pragma unroll
    for (int i = 0; i < 8; ++i) rows.vector[i] = __shfl_sync(kFullWarp, vector, i * 4 + lane / 8);
    return rows;
  }

  // Starts copying 64 columns, from `column` on.
  static __device__ __forceinline__ void copy(const Rows& rows, const Arguments& args, int column, uint32_t to) {
    const int lane = threadIdx.x % 32, vector = lane % 8, line = lane / 8;
    const char* from = reinterpret_cast<const char*>(static_cast<const Element*>(args.tokens) + column + vector * 8);
    to += (threadIdx.x % 128 / 32 * 32 + line) * kLineBytes;
    // Where the swizzle puts this vector of lines 0-3 and 4-7 of a swizzle atom.
    const uint32_t low = to + ((vector ^ line) << 4), high = to + 4 * kLineBytes + ((vector ^ (line + 4)) << 4);
    if (rows.all_exist && column + 64 <= args.token_elements) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        cp_async_16((i % 2 ? high : low) + i / 2 * 8 * kLineBytes, from + static_cast<uint64_t>(rows.vector[i]) * 16);
      }
    } else {
      const bool inside = column + vector * 8 < args.token_elements;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool exists = inside && rows.vector[i] != kNoRow;
        cp_async_16_or_zeros((i % 2 ? high : low) + i / 2 * 8 * kLineBytes,
                             exists ? from + static_cast<uint64_t>(rows.vector[i]) * 16 : args.tokens, exists);
      }
    }
  }
};

}  // namespace gbmoe::hopper
