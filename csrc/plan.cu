// The routing plan: a stable counting sort of the slots by expert, in two launches and without a host wait.
//
// The slots are cut into chunks of consecutive slots, one a block. The first launch counts each chunk's
// experts. In the second every block sums those counts over the chunks before it (and over all of them, for the offsets),
// so each chunk knows where its rows of each expert begin; inside a chunk, warps own consecutive slots, and a slot's rank
// is the number of slots of its expert in the warps before, plus those before it in its own warp. Order never depends on
// timing: the only atomics count integers.

#include <algorithm>

#include <torch/csrc/stable/ops.h>

#include "common.cuh"
#include "ops.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 1024;  // one an expert, where all of them are summed
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMostChunks = 128;  // every block reads the counts of all chunks
constexpr int kMaxExperts = kThreads;  // _MAX_EXPERTS of gbmoe/routing.py
constexpr unsigned kFull = 0xffffffffu;

struct Slots {
  const void* ids;
  bool wide;          // int64 rather than int32
  int experts;
  int64_t count, per_chunk;

  // The expert of a slot, or -1 where its id names none.
  __device__ __forceinline__ int expert(int64_t slot) const {
    const int64_t id = wide ? static_cast<const int64_t*>(ids)[slot] : static_cast<const int32_t*>(ids)[slot];
    return id >= 0 && id < experts ? static_cast<int>(id) : -1;
  }
  __device__ __forceinline__ int64_t chunk_end(int64_t begin) const { return min(begin + per_chunk, count); }
};

__global__ void __launch_bounds__(kThreads) count_kernel(const Slots slots, int* counts_CE) {
  __shared__ int histogram[kMaxExperts];
  for (int e = threadIdx.x; e < slots.experts; e += kThreads) histogram[e] = 0;
  __syncthreads();
  const int64_t begin = blockIdx.x * slots.per_chunk;
  for (int64_t slot = begin + threadIdx.x; slot < slots.chunk_end(begin); slot += kThreads) {
    const int e = slots.expert(slot);
    if (e >= 0) atomicAdd(&histogram[e], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < slots.experts; e += kThreads) counts_CE[blockIdx.x * slots.experts + e] = histogram[e];
}

struct PlanOutputs {
  int* row_of_slot;
  int* slot_of_row;
  int* counts_E;
  int* offsets_E1;
  int* expert_of_tile;
  int64_t rows;
  int align;
};

// Exclusive sum over the block's threads; `total` receives the sum of all.
__device__ __forceinline__ int exclusive_sum(int value, int* warp_sums, int* total) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int below = __shfl_up_sync(kFull, sum, step);
    if (lane >= step) sum += below;
  }
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  if (warp == 0) {
    int warp_sum = warp_sums[lane];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int below = __shfl_up_sync(kFull, warp_sum, step);
      if (lane >= step) warp_sum += below;
    }
    warp_sums[lane] = warp_sum;
  }
  __syncthreads();
  *total = warp_sums[kWarps - 1];
  return sum - value + (warp > 0 ? warp_sums[warp - 1] : 0);
}

__global__ void __launch_bounds__(kThreads) place_kernel(const Slots slots, const int* counts_CE, const PlanOutputs out) {
  extern __shared__ int shared[];
  const int E = slots.experts;
  int* next_WE = shared;                 // [kWarps][E]: rows of each expert in this chunk, by warp; then each warp's next row
  int* offsets = shared + kWarps * E;    // [E + 1]
  int* first_row = offsets + E + 1;      // [E]: this chunk's first row of each expert
  __shared__ int warp_sums[kWarps];
  __shared__ int before_E[kMaxExperts], total_E[kMaxExperts];

  for (int e = threadIdx.x; e < E; e += kThreads) before_E[e] = total_E[e] = 0;
  for (int i = threadIdx.x; i < kWarps * E; i += kThreads) next_WE[i] = 0;
  __syncthreads();

  // Sums over the chunks. Threads walk the counts in memory order, so that loads coalesce.
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

  // Offsets: the exclusive sum of the padded counts (E <= kThreads).
  const int e0 = threadIdx.x;
  const int padded = e0 < E ? (total_E[e0] + out.align - 1) / out.align * out.align : 0;
  int end;
  const int offset = exclusive_sum(padded, warp_sums, &end);
  if (e0 < E) {
    offsets[e0] = offset;
    first_row[e0] = offset + before_E[e0];
  }
  if (e0 == 0) offsets[E] = end;

  // Each warp's share of the chunk: consecutive runs of whole 32 slots.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t chunk_begin = here * slots.per_chunk, chunk_end = slots.chunk_end(chunk_begin);
  const int64_t per_warp = (slots.per_chunk + kThreads - 1) / kThreads * 32;
  const int64_t begin = min(chunk_begin + warp * per_warp, chunk_end), finish = min(begin + per_warp, chunk_end);
  int* next_E = next_WE + warp * E;
  for (int64_t slot = begin + lane; slot < finish; slot += 32) {
    const int e = slots.expert(slot);
    if (e >= 0) atomicAdd(&next_E[e], 1);
  }
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
  for (int64_t base = begin; base < finish; base += 32) {
    const int64_t slot = base + lane;
    const int e = slot < finish ? slots.expert(slot) : -1;
    const unsigned peers = __match_any_sync(kFull, e);
    int row = -1;
    if (e >= 0) row = next_E[e] + __popc(peers & ((1u << lane) - 1));
    __syncwarp();
    if (e >= 0 && lane == __ffs(peers) - 1) next_E[e] += __popc(peers);
    __syncwarp();
    if (slot < finish) out.row_of_slot[slot] = row;
    if (row >= 0) out.slot_of_row[row] = static_cast<int>(slot);
  }

  // What no slot writes: padding, the rows behind the last expert, and the tables. Divided over the blocks.
  for (int e = here; e < E; e += chunks) {
    for (int row = offsets[e] + total_E[e] + threadIdx.x; row < offsets[e + 1]; row += kThreads) out.slot_of_row[row] = -1;
  }
  const int64_t thread = static_cast<int64_t>(here) * kThreads + threadIdx.x, threads = static_cast<int64_t>(chunks) * kThreads;
  for (int64_t row = offsets[E] + thread; row < out.rows; row += threads) out.slot_of_row[row] = -2;
  for (int64_t tile = thread; tile < out.rows / out.align; tile += threads) {
    const int64_t row = tile * out.align;
    int low = 0, high = E;  // the last expert whose offset is at most row; empty ones share their offset with the next
    while (low < high) {
      const int middle = (low + high) / 2;
      if (offsets[middle + 1] <= row) low = middle + 1; else high = middle;
    }
    out.expert_of_tile[tile] = row < offsets[E] ? low : -1;
  }
  if (here == 0) {
    for (int e = threadIdx.x; e < E; e += kThreads) out.counts_E[e] = total_E[e];
    for (int e = threadIdx.x; e <= E; e += kThreads) out.offsets_E1[e] = offsets[e];
  }
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> routing_plan(Tensor ids, int64_t num_experts, int64_t align, int64_t rows) {
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  STD_TORCH_CHECK(num_experts <= kMaxExperts, "routing_plan: expected at most ", kMaxExperts, " experts, got ", num_experts);
  const auto empty = [&](torch::headeronly::IntHeaderOnlyArrayRef shape) {
    return torch::stable::new_empty(ids, shape, ScalarType::Int);
  };
  const int64_t count = ids.numel();
  const int64_t chunks = std::min(kMostChunks, std::max<int64_t>(1, ceil_div(count, kThreads)));
  Tensor row_of_slot = empty({ids.size(0), ids.size(1)}), slot_of_row = empty({rows}), counts = empty({num_experts});
  Tensor offsets = empty({num_experts + 1}), expert_of_tile = empty({rows / align}), counts_by_chunk = empty({chunks, num_experts});

  const Slots slots{ids.data_ptr(), ids.scalar_type() == ScalarType::Long, static_cast<int>(num_experts), count,
                    ceil_div(count, chunks)};
  const auto ints = [](const Tensor& tensor) { return static_cast<int*>(tensor.data_ptr()); };
  const PlanOutputs out{ints(row_of_slot), ints(slot_of_row), ints(counts), ints(offsets), ints(expert_of_tile), rows,
                        static_cast<int>(align)};
  const cudaStream_t stream = current_stream(ids);
  const int shared_bytes = static_cast<int>((kWarps * num_experts + 2 * num_experts + 1) * sizeof(int));
  if (shared_bytes > 32 * 1024) {
    STD_CUDA_CHECK(cudaFuncSetAttribute(place_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
  count_kernel<<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(slots, ints(counts_by_chunk));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  place_kernel<<<static_cast<unsigned>(chunks), kThreads, shared_bytes, stream>>>(slots, ints(counts_by_chunk), out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {row_of_slot, slot_of_row, counts, offsets, expert_of_tile};
}

}  // namespace gbmoe
