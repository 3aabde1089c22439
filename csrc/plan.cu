// The routing plan: a stable counting sort of the slots by expert, in two launches and without a host wait.
//
// The slots are cut into chunks of consecutive slots, one a block. The first launch counts each chunk's
// experts. In the second every block sums those counts over the chunks before it (and over all of them, for the offsets),
// so each chunk knows where its rows of each expert begin; inside a chunk, warps own consecutive slots, and a slot's rank
// is the number of slots of its expert in the warps before, plus those before it in its own warp. Order never depends on
// timing: the only atomics count integers.
//
// A mask [T,E], which sends a token to any number of experts, is placed in the same way, its tokens cut into chunks: there a
// lane owns an expert, and a warp visits consecutive tokens.

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
  int* padded_counts_E;
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

// Where the rows of each expert begin, for the whole block.
struct FirstRows {
  int before_E[kMaxExperts], total_E[kMaxExperts];  // rows in the chunks before this one, and in all
  int warp_sums[kWarps];

  // Writes offsets [E + 1], the exclusive sum of the padded totals, and this chunk's first row of each expert.
  __device__ __forceinline__ void find(const int* counts_CE, int E, int align, int* offsets, int* first_row) {
    for (int e = threadIdx.x; e < E; e += kThreads) before_E[e] = total_E[e] = 0;
    __syncthreads();
    // Threads walk the counts in memory order, so that loads coalesce.
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

// Turns the rows that each warp has of each expert into its first row; all threads call it.
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

// Shared memory of both kernels that place, in ints: [kWarps][E] rows of each expert in this chunk, by warp, then each warp's
// next row; [E + 1] offsets; [E] this chunk's first row of each expert.
int place_shared_ints(int64_t experts) { return static_cast<int>(kWarps * experts + 2 * experts + 1); }

__global__ void __launch_bounds__(kThreads) place_kernel(const Slots slots, const int* counts_CE, const PlanOutputs out) {
  extern __shared__ int shared[];
  __shared__ FirstRows rows;
  const int E = slots.experts, chunks = gridDim.x, here = blockIdx.x;
  int *next_WE = shared, *offsets = shared + kWarps * E, *first_row = offsets + E + 1;
  for (int i = threadIdx.x; i < kWarps * E; i += kThreads) next_WE[i] = 0;
  rows.find(counts_CE, E, out.align, offsets, first_row);

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
  hand_out_rows(next_WE, first_row, E);
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
    for (int row = offsets[e] + rows.total_E[e] + threadIdx.x; row < offsets[e + 1]; row += kThreads) out.slot_of_row[row] = -1;
  }
  const int64_t thread = static_cast<int64_t>(here) * kThreads + threadIdx.x, threads = static_cast<int64_t>(chunks) * kThreads;
  for (int64_t row = offsets[E] + thread; row < out.rows; row += threads) out.slot_of_row[row] = -2;
  if (here == 0) {
    for (int e = threadIdx.x; e < E; e += kThreads) {
      out.counts_E[e] = rows.total_E[e];
      out.padded_counts_E[e] = offsets[e + 1] - offsets[e];
    }
    for (int e = threadIdx.x; e <= E; e += kThreads) out.offsets_E1[e] = offsets[e];
  }
}

// ------------------------------------------------------------------------------------------------------------------- masks

// The shape of a mask [T,E], and which of its tokens are this block's.
struct Mask {
  int experts;
  int64_t tokens, per_chunk;

  __device__ __forceinline__ int64_t chunk_begin() const { return min(blockIdx.x * per_chunk, tokens); }
  __device__ __forceinline__ int64_t chunk_end() const { return min(chunk_begin() + per_chunk, tokens); }
};

// What the gather and the scatter read of a map: row_of_slot, -1 where a slot has no row, and slot_of_row, 0 for the rows that
// a slot has and kPadding, with which it comes filled, for the others. Nothing that a caller's map holds leads outside.
constexpr int kPadding = -1;
struct SlotOutputs {
  const int64_t* pad_offsets_E;  // added to the rows of an expert; nullptr for none
  int* row_of_slot_TK;           // nullptr where the slots are not asked for
  int* slot_of_row_P;
  int64_t rows;
  int slots, experts;

  __device__ __forceinline__ void put(int64_t token, int j, int64_t row, int expert) const {
    bool exists = row >= 0 && expert >= 0 && expert < experts;
    if (exists && pad_offsets_E) row += pad_offsets_E[expert];
    exists = exists && row >= 0 && row < rows;
    row_of_slot_TK[token * slots + j] = exists ? static_cast<int>(row) : -1;
    if (exists) slot_of_row_P[row] = 0;
  }
};

template <typename Entry>
__global__ void __launch_bounds__(kThreads) count_mask_kernel(
    const Entry* __restrict__ mask_TE, const Mask mask, int* counts_CE, const SlotOutputs out) {
  __shared__ int histogram[kMaxExperts];
  const int E = mask.experts;
  for (int e = threadIdx.x; e < E; e += kThreads) histogram[e] = 0;
  __syncthreads();
  // Threads walk the entries in memory order, each in the column of one expert.
  const int side_by_side = kThreads / E;
  if (static_cast<int>(threadIdx.x) < side_by_side * E) {
    const int e = threadIdx.x % E;
    int count = 0;
#pragma unroll 8
    for (int64_t token = mask.chunk_begin() + threadIdx.x / E; token < mask.chunk_end(); token += side_by_side) {
      count += mask_TE[token * E + e] != 0;
    }
    if (count > 0) atomicAdd(&histogram[e], count);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += kThreads) counts_CE[blockIdx.x * E + e] = histogram[e];
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (int64_t row = thread; row < out.rows; row += int64_t{kThreads} * gridDim.x) out.slot_of_row_P[row] = kPadding;
}

// Writes the map [T,M], M = 2 * E + 1: the rows of a token, their experts from column E on, and their number in the last.
template <typename Entry>
__global__ void __launch_bounds__(kThreads, 1) place_mask_kernel(
    const Entry* __restrict__ mask_TE, const Mask mask, const int* counts_CE, int* __restrict__ map_TM, const SlotOutputs out) {
  extern __shared__ int shared[];
  __shared__ FirstRows rows;
  const int E = mask.experts, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int *next_WE = shared, *offsets = shared + kWarps * E, *first_row = offsets + E + 1;
  const int64_t per_warp = (mask.per_chunk + kWarps - 1) / kWarps;
  const int64_t begin = min(mask.chunk_begin() + warp * per_warp, mask.chunk_end());
  const int64_t end = min(begin + per_warp, mask.chunk_end());
  int* next_E = next_WE + warp * E;
  for (int e = lane; e < E; e += 32) {
    int count = 0;
#pragma unroll 4
    for (int64_t token = begin; token < end; ++token) count += mask_TE[token * E + e] != 0;
    next_E[e] = count;
  }
  rows.find(counts_CE, E, 1, offsets, first_row);
  hand_out_rows(next_WE, first_row, E);
  for (int64_t token = begin; token < end; ++token) {
    int* map = map_TM + token * (2 * E + 1);
    int used = 0;
    for (int first = 0; first < E; first += 32) {
      const int e = first + lane;
      const bool routed = e < E && mask_TE[token * E + e] != 0;
      const unsigned lanes = __ballot_sync(kFull, routed);
      if (routed) {
        const int j = used + __popc(lanes & ((1u << lane) - 1)), row = next_E[e]++;
        map[j] = row;
        map[E + j] = e;
        if (out.row_of_slot_TK) out.put(token, j, row, e);
      }
      used += __popc(lanes);
    }
    for (int j = used + lane; j < E; j += 32) map[j] = map[E + j] = -1;
    if (lane == 0) map[2 * E] = used;
  }
}

// A map: dense, row [T,K], or ragged, where the first count[t] entries of row and column are in use.
struct Map {
  const int *row, *column, *count;
  int64_t row_stride, column_stride, count_stride, tokens;
  Scalars probs;  // [T,E], or [T,K] of a dense map: slots whose probability is 0 get no row
};
constexpr int kSlotThreads = 256;

// `group` threads, a power of two, read one token's slots.
__global__ void __launch_bounds__(kSlotThreads) map_slots_kernel(const Map map, const int group, const SlotOutputs out) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kSlotThreads / group) + threadIdx.x / group;
  if (token >= map.tokens) return;
  const int used = map.count ? min(map.count[token * map.count_stride], out.slots) : out.slots;
  for (int j = threadIdx.x % group; j < used; j += group) {
    const int expert = map.column ? map.column[token * map.column_stride + j] : j;
    int row = map.row[token * map.row_stride + j];
    const bool has_prob = map.probs.data && expert >= 0 && expert < out.experts;
    if (has_prob && map.probs.read(token * out.experts + expert) == 0.0) row = -1;
    out.put(token, j, row, expert);
  }
}

int* ints(const Tensor& tensor) { return static_cast<int*>(tensor.data_ptr()); }
int* ints(const std::optional<Tensor>& tensor) { return tensor ? ints(*tensor) : nullptr; }
const int64_t* longs(const std::optional<Tensor>& tensor) {
  return tensor ? static_cast<const int64_t*>(tensor->data_ptr()) : nullptr;
}
int64_t row_stride(const std::optional<Tensor>& tensor) { return tensor ? tensor->stride(0) : 0; }

// More than 32 KB of dynamic shared memory beside the static must be asked for.
template <typename Kernel> void allow_shared(Kernel kernel, int bytes) {
  if (bytes > 32 * 1024) STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
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
  Tensor offsets = empty({num_experts + 1}), padded_counts = empty({num_experts}), counts_by_chunk = empty({chunks, num_experts});

  const Slots slots{ids.data_ptr(), ids.scalar_type() == ScalarType::Long, static_cast<int>(num_experts), count,
                    ceil_div(count, chunks)};
  const PlanOutputs out{ints(row_of_slot), ints(slot_of_row), ints(counts), ints(offsets), ints(padded_counts), rows,
                        static_cast<int>(align)};
  const cudaStream_t stream = current_stream(ids);
  const int shared_bytes = place_shared_ints(num_experts) * static_cast<int>(sizeof(int));
  allow_shared(place_kernel, shared_bytes);
  count_kernel<<<static_cast<unsigned>(chunks), kThreads, 0, stream>>>(slots, ints(counts_by_chunk));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  place_kernel<<<static_cast<unsigned>(chunks), kThreads, shared_bytes, stream>>>(slots, ints(counts_by_chunk), out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {row_of_slot, slot_of_row, counts, offsets, padded_counts};
}

void mask_row_map(Tensor mask, std::optional<Tensor> pad_offsets, Tensor counts_by_chunk, Tensor row_map,
                  std::optional<Tensor> row_of_slot, std::optional<Tensor> slot_of_row) {
  const torch::stable::accelerator::DeviceGuard guard(mask.get_device_index());
  const int64_t tokens = mask.size(0), experts = mask.size(1), chunks = counts_by_chunk.size(0);
  const Mask shape{static_cast<int>(experts), tokens, ceil_div(tokens, chunks)};
  const SlotOutputs out{longs(pad_offsets), ints(row_of_slot), ints(slot_of_row), slot_of_row ? slot_of_row->size(0) : 0,
                        static_cast<int>(experts), static_cast<int>(experts)};
  const cudaStream_t stream = current_stream(mask);
  const int shared_bytes = place_shared_ints(experts) * static_cast<int>(sizeof(int));
  const auto launch = [&](auto entry) {
    using Entry = decltype(entry);
    const Entry* entries = static_cast<const Entry*>(mask.data_ptr());
    const unsigned blocks = static_cast<unsigned>(chunks);
    allow_shared(place_mask_kernel<Entry>, shared_bytes);
    count_mask_kernel<Entry><<<blocks, kThreads, 0, stream>>>(entries, shape, ints(counts_by_chunk), out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    place_mask_kernel<Entry><<<blocks, kThreads, shared_bytes, stream>>>(
        entries, shape, ints(counts_by_chunk), ints(row_map), out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  switch (mask.element_size()) {
    case 1: launch(uint8_t{}); break;
    case 2: launch(uint16_t{}); break;
    case 4: launch(uint32_t{}); break;
    default: launch(uint64_t{});
  }
}

void map_slots(Tensor row, std::optional<Tensor> column, std::optional<Tensor> count, std::optional<Tensor> pad_offsets,
               std::optional<Tensor> probs, Tensor row_of_slot, Tensor slot_of_row) {
  const torch::stable::accelerator::DeviceGuard guard(row.get_device_index());
  const cudaStream_t stream = current_stream(row);
  if (slot_of_row.numel() > 0) {
    static_assert(kPadding == -1);  // all bytes of which are the same
    STD_CUDA_CHECK(cudaMemsetAsync(slot_of_row.data_ptr(), 0xff, slot_of_row.numel() * sizeof(int), stream));
  }
  if (row_of_slot.numel() == 0) return;
  const int64_t tokens = row.size(0), slots = row.size(1);
  const int64_t experts = pad_offsets ? pad_offsets->size(0) : probs ? probs->size(1) : slots;
  const Map map{ints(row), ints(column), ints(count), row.stride(0), row_stride(column), row_stride(count), tokens,
                scalars(probs)};
  const SlotOutputs out{longs(pad_offsets), ints(row_of_slot), ints(slot_of_row), slot_of_row.size(0), static_cast<int>(slots),
                        static_cast<int>(experts)};
  int group = 1;
  while (group < 32 && group < slots) group *= 2;
  const unsigned blocks = static_cast<unsigned>(ceil_div(tokens * group, kSlotThreads));
  map_slots_kernel<<<blocks, kSlotThreads, 0, stream>>>(map, group, out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
