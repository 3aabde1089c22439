// What a launch hands to the kernels for groups of few rows (few_rows_gemm.cuh, which has the legend), and how a CTA is laid out.

#pragma once

#include "../activation_formulas.cuh"
#include "../group_sizes.cuh"
#include "../places.cuh"
#include "../tensor_core/few_rows_store.cuh"
#include "shared_memory.cuh"

namespace gbmoe::hopper::few_rows {

// Of a tile. In a GLU half of the columns are w1's and half are v1's; where both lie transposed, two CTAs have these of two tiles.
constexpr int kRows = 32, kColumns = 64;
constexpr int kConsumers = 128, kThreads = kConsumers + 64;
constexpr int kBlocks = 2, kStageK = kBlocks * kBlockK;  // k-blocks of a stage, and their terms
constexpr uint32_t kBlockBytes = kSubtileBytes + kRows * kLineBytes, kStageBytes = kBlocks * kBlockBytes;
constexpr int kResultColumns = kColumns + 8;  // so that rows of results begin in different banks
static_assert(kRows * kResultColumns * 2 <= kStageBytes);
constexpr int kMostCtas = 4;  // that run on a multiprocessor

struct Maps {
  CUtensorMap weights[2];  // the second is that of v1 in a GLU whose gate and up are two tensors
  CUtensorMap rows;  // line by line
};

struct Arguments {
  const void* sizes;  // [E], rows of each group; null: one group has all rows
  bool sizes_are_int64;  // else int32
  int groups;
  int rows;  // P: no group reaches beyond it, whatever its size says
  const int* slot_of_row;  // [P]: row r is token slot_of_row[r] / top_k, or zeros where that names no token; null: row r of x
  int tokens, top_k;
  bool padded;  // rows without a token may end a group
  int size_n, size_k;
  int tiles_n;  // an even number where two CTAs have tiles together
  bool paired;  // where kTransposed, in a GLU: weights are [K,2N], columns of w1 and v1 in turns
  Bias bias[2];  // the second is v1's
  ActivationOf activation;
  void* out[3];  // [P,N]; with an activation a, h and g, of which h and g may be null
  int step;  // of h and g, as store_few_rows has it
  bool reads_early;  // weights and sizes were complete before the kernel before this one began: they are read before it has ended
  bool next_begins_early;  // the next kernel's CTAs take what room this one's last CTAs leave, rather than wait for them
  int stages;
  Places places;  // of both weights

  __host__ __device__ uint32_t row_tokens() const { return stages * kStageBytes; }
  __host__ __device__ uint32_t full_barriers() const { return row_tokens() + kRows * sizeof(int); }
  __host__ __device__ uint32_t empty_barriers() const { return full_barriers() + stages * 8; }
  __host__ __device__ uint32_t shared_bytes() const { return empty_barriers() + stages * 8; }
};

// k-blocks of the stage whose first term is `begin`. The last one may have fewer: TMA takes long for what lies outside of a tensor.
__device__ __forceinline__ int blocks_of_stage(const Arguments& args, int begin) {
  return min(ceil_div(args.size_k - begin, kBlockK), kBlocks);
}

}  // namespace gbmoe::hopper::few_rows
