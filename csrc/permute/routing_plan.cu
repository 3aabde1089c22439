// The routing plan: a stable counting sort of the slots by expert (counting_sort_parts.cuh), in two launches and without a host wait; in one
// where one CTA sorts them all, as it does for a few tokens.
//
// Inside a warp, a slot's rank is the number of slots of its expert in the warps before, plus those before it in its own warp.

#include <torch/csrc/stable/ops.h>

#include "../early_launch.cuh"
#include "../operators.h"
#include "counting_sort_parts.cuh"

namespace gbmoe {
namespace {

struct SlotIds {
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

__global__ void __launch_bounds__(kThreads) count_experts_kernel(const SlotIds slots, int* counts_CE) {
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
// counts_CE is null where there is one chunk, which is then counted here.
__global__ void __launch_bounds__(kThreads) place_slots_kernel(const SlotIds slots, const int* counts_CE, const PlanOutputs out) {
  extern __shared__ int shared[];
  __shared__ FirstRows rows;
  const int E = slots.experts, chunks = gridDim.x, here = blockIdx.x;
  int *next_WE = shared, *offsets = shared + kWarps * E, *first_row = offsets + E + 1;
  for (int i = threadIdx.x; i < kWarps * E; i += kThreads) next_WE[i] = 0;
  wait_for_kernel_before();
  let_next_kernel_begin();
  if (counts_CE) {
    rows.sum_counts(counts_CE, E);
  } else {
    rows.clear(E);
    for (int64_t slot = threadIdx.x; slot < slots.count; slot += kThreads) {
      const int e = slots.expert(slot);
      if (e >= 0) atomicAdd(&rows.total_E[e], 1);
    }
    __syncthreads();
  }
  rows.find(E, out.align, offsets, first_row);

  // Each warp's share of the chunk: consecutive runs of whole 32 slots.
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t chunk_begin = here * slots.per_chunk, chunk_end = slots.chunk_end(chunk_begin);
  const int64_t per_warp = (slots.per_chunk + kThreads - 1) / kThreads * 32;
  const int64_t begin = min(chunk_begin + warp * per_warp, chunk_end), end = min(begin + per_warp, chunk_end);
  int* next_E = next_WE + warp * E;
  for (int64_t slot = begin + lane; slot < end; slot += 32) {
    const int e = slots.expert(slot);
    if (e >= 0) atomicAdd(&next_E[e], 1);
  }
  hand_out_rows(next_WE, first_row, E);
  for (int64_t base = begin; base < end; base += 32) {
    const int64_t slot = base + lane;
    const int e = slot < end ? slots.expert(slot) : -1;
    const unsigned peers = __match_any_sync(kFullWarp, e);
    int row = -1;
    if (e >= 0) row = next_E[e] + __popc(peers & ((1u << lane) - 1));
    __syncwarp();
    if (e >= 0 && lane == __ffs(peers) - 1) next_E[e] += __popc(peers);
    __syncwarp();
    if (slot < end) out.row_of_slot[slot] = row;
    if (row >= 0) out.slot_of_row[row] = static_cast<int>(slot);
  }

  // What no slot writes: padding, the rows after the last expert, and the tables. Divided over the warps of all CTAs.
  for (int e = here * kWarps + warp; e < E; e += chunks * kWarps) {
    for (int row = offsets[e] + rows.total_E[e] + lane; row < offsets[e + 1]; row += 32) out.slot_of_row[row] = kPadding;
  }
  const int64_t thread = static_cast<int64_t>(here) * kThreads + threadIdx.x, threads = static_cast<int64_t>(chunks) * kThreads;
  for (int64_t row = offsets[E] + thread; row < out.rows; row += threads) out.slot_of_row[row] = kBehindTheLast;
  if (here == 0) {
    for (int e = threadIdx.x; e < E; e += kThreads) {
      out.counts_E[e] = rows.total_E[e];
      out.padded_counts_E[e] = offsets[e + 1] - offsets[e];
    }
    for (int e = threadIdx.x; e <= E; e += kThreads) out.offsets_E1[e] = offsets[e];
  }
}

}  // namespace

// For how many experts routing_plan and mask_row_map have room in the shared memory of this device (its index)
int64_t routing_plan_max_experts(int64_t device) {
  return max_experts_in(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, static_cast<int>(device)));
}

// The exception that allocates: its outputs are small and many, and Python's overhead would outlast the kernels.
// ids int32 or int64 [T,K]; most_chunks is tuning.permute.most_chunks; returns row_of_slot, slot_of_row, counts, offsets,
// padded_counts
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> routing_plan(
    Tensor ids, int64_t num_experts, int64_t align, int64_t rows, int64_t most_chunks) {
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  STD_TORCH_CHECK(num_experts <= kMaxExperts, "routing_plan: expected at most ", kMaxExperts, " experts, got ", num_experts);
  const auto empty = [&](torch::headeronly::IntHeaderOnlyArrayRef shape) {
    return torch::stable::new_empty(ids, shape, ScalarType::Int);
  };
  const int64_t count = ids.numel();
  const int64_t chunks = std::min(most_chunks, std::max<int64_t>(1, ceil_div(count, kThreads)));
  Tensor row_of_slot = empty({ids.size(0), ids.size(1)}), slot_of_row = empty({rows}), counts = empty({num_experts});
  Tensor offsets = empty({num_experts + 1}), padded_counts = empty({num_experts});

  const SlotIds slots{ids.data_ptr(), ids.scalar_type() == ScalarType::Long, static_cast<int>(num_experts), count,
                      ceil_div(count, chunks)};
  const PlanOutputs out{data<int>(row_of_slot), data<int>(slot_of_row), data<int>(counts), data<int>(offsets),
                        data<int>(padded_counts), rows, static_cast<int>(align)};
  const cudaStream_t stream = current_stream(ids);
  const int shared_bytes = place_shared_bytes<place_slots_kernel>(num_experts, ids.get_device_index());
  const unsigned ctas = static_cast<unsigned>(chunks);
  std::optional<Tensor> counts_by_chunk;
  if (chunks > 1) {
    counts_by_chunk = empty({chunks, num_experts});
    count_experts_kernel<<<ctas, kThreads, 0, stream>>>(slots, data<int>(counts_by_chunk));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  launch_early(chunks == 1, place_slots_kernel, ctas, kThreads, shared_bytes, ids, slots, data<int>(counts_by_chunk), out);
  return {row_of_slot, slot_of_row, counts, offsets, padded_counts};
}

GBMOE_OPERATOR(routing_plan,
               "(Tensor ids, int num_experts, int align, int rows, int most_chunks) -> (Tensor, Tensor, Tensor, Tensor, "
               "Tensor)");
GBMOE_OPERATOR_WITHOUT_TENSORS(routing_plan_max_experts, "(int device) -> int");

}  // namespace gbmoe
