// What a launch hands to the kernel: tensor maps for TMA, sizes, and where everything is.
//
// Legend: M, N, K as in out [M,N] = a [M,K] @ b [K,N]; E groups (experts); P rows of all groups; T tokens.

#pragma once

#include <cuda.h>

#include <cstdint>

#include "../common.cuh"

namespace gbmoe::hopper {

struct TensorMaps {
  // One for each pair of operands that is summed; b's second is v1 under EpilogueKind::kGlu.
  CUtensorMap a[2], b[2];
  // Under EpilogueKind::kActivationBackward those of h and g, which are prefetched.
  CUtensorMap out[3];
};

// A group as the schedule of a k-grouped GEMM lists it in the workspace.
struct alignas(16) ScheduledGroup {
  int group, first_row, rows;
  int split;               // of its first tile, packed as in Tile
};

// What balanced_schedule.cu leaves in the workspace ahead of a launch. A work item is a tile, or one split of a tile's sum.
struct BalancedSchedule {
  int next_item;           // that no cluster has taken
  // m-grouped: tiles that are summed at once, and behind them those whose sums are cut into `splits`.
  int whole_tiles, tail_tiles, splits;
};

struct Arguments {
  const void* sizes;       // [E], rows of each group
  bool sizes_are_int64;    // else int32
  int groups;
  int rows;                // P: no group reaches beyond it, whatever its size says
  int size_n;              // N of one output tensor
  int size_m;              // M, k-grouped
  int k_blocks;            // of one pair of operands, m-grouped
  int operand_pairs;       // that are summed
  int panel_tiles;         // the most tiles along M that are walked before the next along N
  // A group's tiles are divided evenly among its panels, rounded up; otherwise all panels but the last have panel_tiles.
  bool even_panels;
  int activation;
  bool save;               // whether h (and g) are stored
  // The workspace, null without one. Partial sums are [entry][CTA of the cluster][consumer warp][a warp's share of a tile].
  BalancedSchedule* schedule;
  ScheduledGroup* groups_by_length;  // [E], k-grouped
  int* arrivals;           // [entry][CTA][consumer warp]: partial sums that have come, counted at a tile's first entry
  float4* partial_sums;
  // The tensors behind TensorMaps::out, where rows are stored one by one; under EpilogueKind::kActivationBackward a, dh and dg.
  void* out[3];
  // Where a is gathered: its row r is row slot_of_row[r] / top_k of `tokens`, and zeros where that names no slot.
  const void* tokens;
  const int* slot_of_row;  // [P]; what is not in [0, slots) names no slot
  uint32_t slots;          // T * top_k
  int token_elements;
  uint32_t top_k_multiplier, top_k_shift;  // 2 * slot * top_k_multiplier >> 32 >> top_k_shift == slot / top_k
  // EpilogueKind::kActivationBackward, beside slot_of_row
  const void *h, *g;       // [P,N]; g null without a gate
  Scalars weights;         // [T,top_k], of at most four bytes each
  float* dots;             // [64 columns each, P]: partial sums of the weights' gradients
};

// Sizes come from a caller, who may have overwritten them. A size counts as one in [0, P], and a sum of sizes as at most P:
// groups that would reach beyond the last row end there, and the kernels stay inside of every tensor.
__device__ __forceinline__ int size_of_group(const Arguments& args, int group) {
  if (group >= args.groups) return 0;
  const int64_t size =
      args.sizes_are_int64 ? static_cast<const int64_t*>(args.sizes)[group] : static_cast<const int32_t*>(args.sizes)[group];
  return static_cast<int>(min(max(size, int64_t{0}), static_cast<int64_t>(args.rows)));
}
// The sum of two numbers of rows that are at most P each.
__device__ __forceinline__ int add_rows(const Arguments& args, int a, int b) {
  return static_cast<int>(min(static_cast<uint32_t>(a) + static_cast<uint32_t>(b), static_cast<uint32_t>(args.rows)));
}

}  // namespace gbmoe::hopper
