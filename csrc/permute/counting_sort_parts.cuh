// The stable counting sort by expert that routing_plan.cu (ids) and row_map.cu (masks) share.
//
// What is sorted, slots or tokens, is cut into chunks of consecutive ones, one for each CTA. A first kernel counts each chunk's
// experts. In a second kernel every CTA sums those counts over the chunks before its own (and over all of them, for the offsets),
// so each chunk knows where its rows of each expert begin; inside a chunk, warps own consecutive slots or tokens, and what a warp
// has of an expert lies after what the warps before it have. Order never depends on timing: the only atomics count integers.

#pragma once

#include <algorithm>

#include "../common.cuh"

namespace gbmoe {
namespace {

constexpr int kThreads = 1024;         // one for each expert, where all experts are summed
constexpr int kWarps = kThreads / 32;
constexpr int kMaxExperts = kThreads;

// Exclusive sum over the CTA's threads; `total` receives the sum of all.
__device__ __forceinline__ int exclusive_sum(int value, int* warp_sums, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int warp_sum = warp_sums[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(kFullWarp, warp_sum, step);
      if (lane >= step) warp_sum += below;
    }
    warp_sums[lane] = warp_sum;
  }
  __syncthreads();
  *total = warp_sums[kWarps - 1];
  return sum - value + (warp > 0 ? warp_sums[warp - 1] : 0);
}

// Where the rows of each expert begin; in shared memory, all threads of the CTA find it together.
struct FirstRows {
  int before_E[kMaxExperts], total_E[kMaxExperts];  // rows in the chunks before this one, and in all
  int warp_sums[kWarps];

  __device__ __forceinline__ void clear(int E) {
    for (int e = threadIdx.x; e < E; e += kThreads) before_E[e] = total_E[e] = 0;
    __syncthreads();
  }
  // What the first kernel counted in each chunk, summed over the chunks.
  __device__ __forceinline__ void sum_counts(const int* counts_CE, int E) {
    clear(E);
    // Threads walk the counts in memory order, so that loads are coalesced.
    const int chunks = gridDim.x, here = blockIdx.x;
    const int side_by_side = kThreads / E;
    if (static_cast<int>(threadIdx.x) < side_by_side * E) {
      const int e = threadIdx.x % E;
      int before = 0, total = 0;
      for (int chunk = threadIdx.x / E; chunk < chunks; chunk += side_by_side) {
        const int count = counts_CE[chunk * E + e];
        total += count;
        if (chunk < here) before += count;
      }
      atomicAdd(&before_E[e], before);
      atomicAdd(&total_E[e], total);
    }
    __syncthreads();
  }
  // From those numbers: offsets [E + 1], the exclusive sum of the padded totals, and this chunk's first row of each expert.
  __device__ __forceinline__ void find(int E, int align, int* offsets, int* first_row) {
    const int e0 = threadIdx.x;  // E <= kThreads
    const int padded = e0 < E ? (total_E[e0] + align - 1) / align * align : 0;
    int end;
    const int offset = exclusive_sum(padded, warp_sums, &end);
    if (e0 < E) {
      offsets[e0] = offset;
      first_row[e0] = offset + before_E[e0];
    }
    if (e0 == 0) offsets[E] = end;
    __syncthreads();
  }
};

// Turns the number of rows that each warp has of each expert into the warp's first row of that expert; all threads call it.
__device__ __forceinline__ void hand_out_rows(int* next_WE, const int* first_row, int E) {
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += kThreads) {
    int row = first_row[e];
    for (int w = 0; w < kWarps; ++w) {
      const int count = next_WE[w * E + e];
      next_WE[w * E + e] = row;
      row += count;
    }
  }
  __syncthreads();
}

// Dynamic shared memory of the kernels that place rows, in ints: next_WE [kWarps,E], by warp, first the number of rows of each
// expert in this chunk and then the warp's next row; offsets [E + 1]; first_row [E], this chunk's first row of each expert.
constexpr int64_t place_shared_ints(int64_t experts) { return kWarps * experts + 2 * experts + 1; }
// The same turned round: for how many experts a CTA's shared memory is large enough, FirstRows (static) included.
constexpr int64_t max_experts_in(int64_t shared_bytes) {
  const int64_t ints = (shared_bytes - static_cast<int64_t>(sizeof(FirstRows))) / static_cast<int64_t>(sizeof(int));
  return std::clamp<int64_t>((ints - 1) / (kWarps + 2), 0, kMaxExperts);
}
static_assert(max_experts_in(sizeof(FirstRows) + place_shared_ints(100) * sizeof(int)) == 100);
static_assert(max_experts_in(sizeof(FirstRows) + place_shared_ints(100) * sizeof(int) - 1) == 99);

// The bytes of dynamic shared memory for a launch of kKernel on `device`, which is allowed to have them.
template <auto kKernel> int place_shared_bytes(int64_t experts, int device) {
  allow_dynamic_shared_memory<kKernel>(device);
  return static_cast<int>(place_shared_ints(experts) * sizeof(int));
}

}  // namespace
}  // namespace gbmoe
