// What a launch hands to the kernel: tensor maps for TMA, sizes, and where everything is.
//
// Legend: M, N, K as in out [M,N] = a [M,K] @ b [K,N]; E groups (experts); P rows of all groups; T tokens.

#pragma once

#include <cuda.h>

#include <climits>
#include <cstdint>

#include "../activation_formulas.cuh"
#include "../common.cuh"
#include "../group_sizes.cuh"
#include "../pitch.cuh"
#include "../places.cuh"

namespace gbmoe::hopper {

struct TensorMaps {
  // One for each pair of operands that is summed. Under EpilogueKind::kGlu b's are w1, v1, and of the second pair what is added to h's
  // sums and to g's. Under kTransposedOut the second of b's is that of the second output. Of scaled operands, k-grouped, the second ones
  // are those of the scales.
  CUtensorMap a[3], b[4];
  // Under EpilogueKind::kActivationBackward those of h and g, or of their pairs, which are prefetched.
  CUtensorMap out[3];
};

// A group as the schedule of a k-grouped GEMM lists it in the workspace.
struct alignas(16) ScheduledGroup {
  int group;               // the number of its matrix in the output (places.cuh)
  int first_row, rows;
  int split;               // of its first tile, packed as in Tile
};

// What balanced_schedule.cu leaves in the workspace ahead of a launch. A work item is a tile, or one split of a tile's sum.
struct BalancedSchedule {
  int next_item;           // that no cluster has taken
  // m-grouped: tiles that are summed at once, and after them those whose sums are cut into `splits`.
  int whole_tiles, tail_tiles, splits;
  unsigned long long paced;  // what clusters that are kept together along K have counted (pacing.cuh)
};

struct Arguments {
  const void* sizes;       // [E], rows of each group; null: one group has all rows
  bool sizes_are_int64;    // else int32
  int groups;
  int rows;                // P: no group reaches beyond it, whatever its size says
  int size_n;              // N of one output tensor
  // tiled_n: the columns that tiles along N cover, which are size_n. Where kTransposedOut has two b side by side the second one's tiles
  // begin at second_n, else INT_MAX, and tiled_n is second_n + size_n.
  int tiled_n, second_n;
  bool out_along_n;        // kTransposedOut: whether out[e] lies contiguous along N, and tiles of out[e].T are stored as they are made
  int size_m;              // M, k-grouped
  Pitch out_pitch;  // scaled operands, k-grouped: of the output
  bool adds;  // k-grouped kStore: to what the output has, which groups without rows leave as it is
  // m-grouped: those of the first pair of operands, and of all pairs, which is 0 until the launch where each has k_blocks.
  int k_blocks, sum_k_blocks;
  int third_k_block;  // m-grouped: the number of the k-block with which the third pair begins, INT_MAX where there is none
  int operand_pairs;       // that are summed
  int panel_tiles;         // the most tiles along M that are walked before the next along N
  // A group's tiles are divided evenly among its panels, rounded up; otherwise all panels but the last have panel_tiles.
  bool even_panels;
  int most_ahead;  // k-blocks by which a cluster may be ahead of the mean of all, as far as it knows (pacing.cuh); 0: any number
  ActivationOf activation;
  bool save;               // whether h (and g) are stored
  // The workspace, null without one. Partial sums are [entry][CTA of the cluster][consumer warp][a warp's share of a tile].
  BalancedSchedule* schedule;
  ScheduledGroup* groups_by_length;  // [E], k-grouped
  int* arrivals;           // [entry][CTA][consumer warp]: partial sums that have come, counted at a tile's first entry
  float4* partial_sums;
  // The tensors of TensorMaps::out, where rows are stored one by one; under EpilogueKind::kActivationBackward a, dh and dg, or a and
  // the pairs of dh and dg.
  void* out[3];
  // Where a is gathered: its row r is row slot_of_row[r] / top_k of `tokens`, and zeros where that names no slot.
  const void* tokens;
  const int* slot_of_row;  // [P]; what is not in [0, slots) names no slot
  uint32_t slots;          // T * top_k
  int token_elements;
  uint32_t top_k_multiplier, top_k_shift;  // 2 * slot * top_k_multiplier >> 32 >> top_k_shift == slot / top_k
  // EpilogueKind::kActivationBackward, and slot_of_row
  const void *h, *g;       // [P,N]; g null without a gate, and under kGateInPairs, where h is [P,2N]
  Scalars weights;         // [T,top_k], of at most four bytes each
  float* dots;             // [64 columns each, P]: partial sums of the weights' gradients
  // Scaled operands: number [r][k_block] of a pair's a, and [group][n / 128][k_block] of its b. The second of b's is v1's under
  // EpilogueKind::kGlu.
  const float *scales_a[2], *scales_b[2];
  int scale_rows_b;        // ceil(N / 128)
  // EpilogueKind::kActivation and kGlu of scaled operands: a is stored in e4m3, with a scale for each row and 128 columns.
  float* scales_out;       // [P, ceil(N / 128)]
  bool power_of_two;       // whether these scales are powers of two
  const void* bias;        // kBias: [E,N], or null
  Places places;  // m-grouped: of both b; k-grouped: of the output
};

}  // namespace gbmoe::hopper
