// m-grouped GEMMs whose groups have few rows, on Hopper: what takes time is to read each group's weights once, as when a few tokens are
// generated. (few_rows.cuh has kernels for any GPU.)
//
// A CTA makes one tile, 64 columns of weights by up to 32 rows. The weights are the first operand of wgmma, which has 64 rows there, and
// the rows its second, so that no more is multiplied than needed. One warp loads the weights by TMA into a ring of stages, two k-blocks
// each, one warp the rows next to them, line by line, and a warpgroup multiplies. Several CTAs run on a multiprocessor: while one finds its
// rows, or stores, the others' loads keep the memory busy.
//
// All terms are added to a sum in the order of K, 16 at a time, so that its bits are those of every kernel in hopper/ that does not split
// sums, and on Hopper of those in tensor_core/ (docs/numerics.md).
//
// Shared memory: stages [k-block: weights, 64 lines, and rows, 32 lines], of which the first holds the results in the end; the rows' tokens;
// and the barriers of stages, full and empty. A line of weights has 64 elements under the 128-byte swizzle.
//
// Where w1 and v1 are two tensors that lie transposed, 32 columns of each would be lines of half as many bytes. So two CTAs of a cluster
// share 64 columns: one multiplies w1's, and one v1's. Then each sends the sums of 32 columns to the other, and stores the other 32.
//
// Legend: out [P,N] = x [P,K] @ b[e]; b[e] is [N,K], or [K,N] where kTransposed; E groups (experts), P rows of all groups.

#pragma once

#include "../early_launch.cuh"
#include "few_rows_schedule.cuh"

namespace gbmoe::hopper::few_rows {

// Whether two CTAs of a cluster have a tile together.
template <bool kTransposed, bool kGlu> __device__ __forceinline__ bool in_two_ctas(const Arguments& args) {
  return kTransposed && kGlu && !args.paired;
}
// Which of the two: it multiplies w1's columns (0) or v1's, and stores the first half of them or the second.
__device__ __forceinline__ int own_half() { return blockIdx.x % 2; }

// Loads the weights of columns n and those after it, without waiting for the kernel before this one.
template <bool kTransposed, bool kGlu>
__device__ __forceinline__ void load_weights(const Maps& maps, const Arguments& args, uint32_t shared, int group, int n) {
  if (!elect_one()) return;
  constexpr bool kTwo = kGlu && !kTransposed;
  const int which = in_two_ctas<kTransposed, kGlu>(args) ? own_half() : 0;
  const int place = args.places.of(group, which), place_of_v1 = kTwo ? args.places.of(group, 1) : 0;
  if (kTransposed && kGlu) n = args.paired ? 2 * n : n - which * kColumns / 2;
  PipelineState pipe;
#pragma unroll 1
  for (int begin = 0; begin < args.size_k; begin += kStageK) {
    const uint32_t full = shared + args.full_barriers() + pipe.stage * 8;
    mbarrier_wait(shared + args.empty_barriers() + pipe.stage * 8, pipe.parity ^ 1);
    const int blocks = blocks_of_stage(args, begin);
    mbarrier_expect_bytes(full, blocks * kSubtileBytes);
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      const uint32_t to = shared + pipe.stage * kStageBytes + i * kBlockBytes;
      const int k = begin + i * kBlockK;
      const int x = kTransposed ? n : k, y = kTransposed ? k : n;
      tma_load(&maps.weights[which], full, to, x, y, place);
      if (kTwo) tma_load(&maps.weights[1], full, to + kSubtileBytes / 2, x, y, place_of_v1);
    }
    pipe.advance(args.stages);
  }
}

// Loads the rows that exist; what is multiplied in place of others is whatever a stage holds, and not stored.
__device__ __forceinline__ void load_rows(const Maps& maps, const Arguments& args, uint32_t shared, const Rows& rows) {
  constexpr int kAtOnce = 4;  // tokens in registers
  const int lane = threadIdx.x % 32;
  const uint32_t tokens = shared + args.row_tokens();
  if (lane < rows.count) store_shared_int(tokens + lane * sizeof(int), token_of(args, rows.first + lane));
  __syncwarp();
  if (!elect_one()) return;
  PipelineState pipe;
#pragma unroll 1
  for (int begin = 0; begin < args.size_k; begin += kStageK) {
    const uint32_t full = shared + args.full_barriers() + pipe.stage * 8;
    mbarrier_wait(shared + args.empty_barriers() + pipe.stage * 8, pipe.parity ^ 1);
    const int blocks = blocks_of_stage(args, begin);
    mbarrier_expect_bytes(full, blocks * rows.count * kLineBytes);
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      const int k = begin + i * kBlockK;
      uint32_t to = shared + pipe.stage * kStageBytes + i * kBlockBytes + kSubtileBytes;
#pragma unroll 1
      for (int line = 0; line < rows.count; line += kAtOnce, to += kAtOnce * kLineBytes) {
        const int4 four = load_shared_16(tokens + line * sizeof(int));
        tma_load_line(&maps.rows, full, to, k, four.x);
        if (line + 1 < rows.count) tma_load_line(&maps.rows, full, to + kLineBytes, k, four.y);
        if (line + 2 < rows.count) tma_load_line(&maps.rows, full, to + 2 * kLineBytes, k, four.z);
        if (line + 3 < rows.count) tma_load_line(&maps.rows, full, to + 3 * kLineBytes, k, four.w);
      }
    }
    pipe.advance(args.stages);
  }
}

// The sums of a tile, of columns by rows, by one warpgroup. It waits for each k-block's products, because ptxas puts a wait after
// every wgmma of a loop that leaves some under way here; other CTAs use the time.
template <typename T, bool kTransposed>
__device__ __forceinline__ void multiply(const Arguments& args, uint32_t shared, float (&sums)[kRows / 2]) {
  constexpr uint32_t kRowStep = 32, kStep = kTransposed ? 16 * kLineBytes : 32;  // bytes from 16 terms to the next
  PipelineState pipe;
#pragma unroll 1
  for (int begin = 0; begin < args.size_k; begin += kStageK) {
    mbarrier_wait(shared + args.full_barriers() + pipe.stage * 8, pipe.parity);
    const int blocks = blocks_of_stage(args, begin);
#pragma unroll 1
    for (int i = 0; i < blocks; ++i) {
      const uint32_t block = shared + pipe.stage * kStageBytes + i * kBlockBytes;
      const uint64_t weights = wgmma_descriptor(block, kSubtileBytes, kSwizzleAtomBytes);
      const uint64_t rows = wgmma_descriptor(block + kSubtileBytes, kSubtileBytes, kSwizzleAtomBytes);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kBlockK / 16; ++step)
        wgmma<T, kTransposed, false>(
            sums, weights + (step * kStep >> 4), rows + (step * kRowStep >> 4), step > 0 || i > 0 || begin > 0);
      wgmma_commit();
      wgmma_wait<0>();
    }
    if (threadIdx.x % 32 == 0) mbarrier_arrive(shared + args.empty_barriers() + pipe.stage * 8);
    pipe.advance(args.stages);
  }
  fence_accumulators(sums);
}

// Leaves the sums with their biases in shared memory, rounded, a line for each row, in a GLU w1's columns before v1's; complete after a
// barrier of the consumers.
template <typename T, bool kTransposed, bool kGlu>
__device__ __forceinline__ void keep_sums(
    const Arguments& args, T (*results)[kResultColumns], const float (&sums)[kRows / 2], int group, int n) {
  // The fragment of wgmma: a lane has columns l / 4 and those 8 after it, and of every 8 rows two that follow each other.
  const int row = threadIdx.x % 4 * 2;
  int columns[2];
  float biases[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int multiplied = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i * 8, half = kColumns / 2;
    columns[i] = kTransposed && kGlu ? multiplied / 2 + multiplied % 2 * half : multiplied;
    const bool of_v1 = kGlu && columns[i] >= half;
    biases[i] = bias_at<T>(args.bias[of_v1], group, n + columns[i] - (of_v1 ? half : 0), args.size_n);
  }
  named_barrier_sync(1, kConsumers);  // until all warps have multiplied what lay there
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i)
    results[row + i / 4 * 8 + i % 2][columns[i / 2 % 2]] = narrow<T>(sums[i] + biases[i / 2 % 2]);
  named_barrier_sync(1, kConsumers);
}

// The same of two CTAs, of which each has the sums of 64 columns of w1 or of v1, those from n on, of `rows` rows. The 32 columns that a CTA
// stores come from both, and are complete when this returns. The cluster's barrier waits for no warps that have ended, as those that load do.
template <typename T>
__device__ __forceinline__ void exchange_sums(
    const Arguments& args, uint32_t results, const float (&sums)[kRows / 2], int rows, int group, int n) {
  const int half = kColumns / 2, of_v1 = own_half(), row = threadIdx.x % 4 * 2;
  const int multiplied = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // and 8 after it, in the same half
  float biases[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) biases[i] = bias_at<T>(args.bias[of_v1], group, n + multiplied + i * 8, args.size_n);
  __syncwarp();
  cluster_sync();  // until both have multiplied what lay there
  const uint32_t line = shared_address_in_cta(results, multiplied / half) + (of_v1 * half + multiplied % half) * sizeof(T);
#pragma unroll
  for (int i = 0; i < kRows / 2; ++i) {
    const int of = row + i / 4 * 8 + i % 2;
    const uint32_t to = line + (of * kResultColumns + i / 2 % 2 * 8) * sizeof(T);
    if (of < rows) store_shared_of_cluster(to, narrow<T>(sums[i] + biases[i / 2 % 2]));
  }
  __syncwarp();
  cluster_sync();
}

// What one thread does ahead of all else.
template <bool kGlu> __device__ __forceinline__ void prepare(const Maps& maps, const Arguments& args, uint32_t shared) {
  tma_prefetch_map(&maps.weights[0]);
  if (kGlu && !args.paired) tma_prefetch_map(&maps.weights[1]);
  tma_prefetch_map(&maps.rows);
  for (int stage = 0; stage < args.stages; ++stage) {
    mbarrier_init(shared + args.full_barriers() + stage * 8, 2);  // the warps that load
    mbarrier_init(shared + args.empty_barriers() + stage * 8, kConsumers / 32);
  }
  fence_mbarrier_init();
}

// A CTA for each tile of columns of each tile of rows that there may be; the columns of the same rows follow each other.
template <typename T, bool kTransposed, EpilogueKind kEpilogue>
__global__ void __launch_bounds__(kThreads, kMostCtas)
    few_rows_kernel(const __grid_constant__ Maps maps, const __grid_constant__ Arguments args) {
  constexpr bool kGlu = kEpilogue == EpilogueKind::kGlu;
  constexpr int kTileN = kGlu ? kColumns / 2 : kColumns;  // columns of one output tensor
  extern __shared__ __align__(1024) unsigned char shared_bytes[];
  const uint32_t shared = shared_address(shared_bytes);
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
  if (threadIdx.x == 0) prepare<kGlu>(maps, args, shared);
  if (!args.reads_early) {
    wait_for_kernel_before();
    if (args.next_begins_early) let_next_kernel_begin();
  }
  const int n = blockIdx.x % args.tiles_n * kTileN;
  const Rows rows = find_rows(args, blockIdx.x / args.tiles_n);
  Rows summed = rows;  // without rows at the end that are zeros
  if (args.padded && rows.count > 0) summed.count = rows_up_to_last_token(args, rows);
  __syncthreads();
  if (warp == kConsumers / 32 && summed.count > 0) load_weights<kTransposed, kGlu>(maps, args, shared, rows.group, n);
  __syncwarp();
  wait_for_kernel_before();
  if (warp > kConsumers / 32) {
    if (summed.count > 0) load_rows(maps, args, shared, summed);
    let_next_kernel_begin();
  } else if (warp < kConsumers / 32 && rows.count > 0) {
    T(*results)[kResultColumns] = reinterpret_cast<T(*)[kResultColumns]>(shared_bytes);
    if (summed.count > 0) {
      float sums[kRows / 2];
      multiply<T, kTransposed>(args, shared, sums);
      if (in_two_ctas<kTransposed, kGlu>(args)) {
        exchange_sums<T>(args, shared, sums, summed.count, rows.group, n - own_half() * kTileN);
      } else {
        keep_sums<T, kTransposed, kGlu>(args, results, sums, rows.group, n);
      }
    }
    store_few_rows<T, kEpilogue != EpilogueKind::kStore, kGlu>(
        args.out, args.activation, rows.first, rows.count, args.size_n, n, kTileN, args.step, kConsumers,
        [&](int row, int column) { return row < summed.count ? results[row][column] : T(0.0f); });
  }
}

}  // namespace gbmoe::hopper::few_rows
