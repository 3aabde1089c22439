// Row maps, which send a token to any number of experts. They are made from a mask [T,E] by the counting sort of
// counting_sort_parts.cuh, and turned into the maps that the gather and the scatter read.
//
// The mask's tokens are divided into chunks, one for each CTA. A lane owns an expert, and a warp visits consecutive tokens.

#include "../operators.h"
#include "counting_sort_parts.cuh"

namespace gbmoe {
namespace {

// The shape of a mask [T,E], and the tokens that are this CTA's chunk.
struct Mask {
  int experts;
  int64_t tokens, per_chunk;

  __device__ __forceinline__ int64_t chunk_begin() const { return min(blockIdx.x * per_chunk, tokens); }
  __device__ __forceinline__ int64_t chunk_end() const { return min(chunk_begin() + per_chunk, tokens); }
};

// The tensors of a map that the gather and the scatter read: row_of_slot, -1 where a slot has no row; and slot_of_row, which is
// filled with kPadding before, and gets 0 for the rows that have a slot. No entry of a caller's map leads outside the tensors.
struct SlotOutputs {
  const int64_t* pad_offsets_E;  // added to the rows of an expert; nullptr to add nothing
  int* row_of_slot_TK;           // nullptr where this tensor is not wanted
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

// Writes the map [T,M] with M = 2 * E + 1: a token's rows, from column E on the experts of these rows, and their number in the
// last column.
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
  rows.sum_counts(counts_CE, E);
  rows.find(E, 1, offsets, first_row);
  hand_out_rows(next_WE, first_row, E);
  for (int64_t token = begin; token < end; ++token) {
    int* map = map_TM + token * (2 * E + 1);
    int used = 0;
    for (int first = 0; first < E; first += 32) {
      const int e = first + lane;
      const bool routed = e < E && mask_TE[token * E + e] != 0;
      const unsigned lanes = __ballot_sync(kFullWarp, routed);
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

// A caller's map. A dense one has row [T,K]; in a ragged one the first count[t] entries of row and column are in use.
struct Map {
  const int *row, *column, *count;
  int64_t row_stride, column_stride, count_stride, tokens;
  Scalars probs;  // [T,E], or [T,K] for a dense map: slots whose probability is 0 get no row
};
constexpr int kSlotThreads = 256;

// token_lanes, a power of two, is the number of lanes that read one token's slots.
__global__ void __launch_bounds__(kSlotThreads) map_slots_kernel(const Map map, const int token_lanes, const SlotOutputs out) {
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kSlotThreads / token_lanes) + threadIdx.x / token_lanes;
  if (token >= map.tokens) return;
  const int used = map.count ? min(map.count[token * map.count_stride], out.slots) : out.slots;
  for (int j = threadIdx.x % token_lanes; j < used; j += token_lanes) {
    const int expert = map.column ? map.column[token * map.column_stride + j] : j;
    int row = map.row[token * map.row_stride + j];
    const bool has_prob = map.probs.data && expert >= 0 && expert < out.experts;
    if (has_prob && map.probs.read(token * out.experts + expert) == 0.0) row = -1;
    out.put(token, j, row, expert);
  }
}

int64_t row_stride(const std::optional<Tensor>& tensor) { return tensor ? tensor->stride(0) : 0; }

}  // namespace

// mask [T,E] of any integer type or bool, int64 pad_offsets [E], counts_by_chunk int32 [chunks,E] to work in,
// row_map int32 [T,2E+1]; with row_of_slot [T,E] and slot_of_row [P], both or neither, also what map_slots makes of the map
void mask_row_map(Tensor mask, std::optional<Tensor> pad_offsets, Tensor counts_by_chunk, Tensor row_map,
                  std::optional<Tensor> row_of_slot, std::optional<Tensor> slot_of_row) {
  const torch::stable::accelerator::DeviceGuard guard(mask.get_device_index());
  const int64_t tokens = mask.size(0), experts = mask.size(1), chunks = counts_by_chunk.size(0);
  const Mask shape{static_cast<int>(experts), tokens, ceil_div(tokens, chunks)};
  const SlotOutputs out{data<const int64_t>(pad_offsets), data<int>(row_of_slot), data<int>(slot_of_row),
                        slot_of_row ? slot_of_row->size(0) : 0, static_cast<int>(experts), static_cast<int>(experts)};
  const cudaStream_t stream = current_stream(mask);
  const auto launch = [&](auto entry) {
    using Entry = decltype(entry);
    const Entry* entries = static_cast<const Entry*>(mask.data_ptr());
    const unsigned ctas = static_cast<unsigned>(chunks);
    const int shared_bytes = place_shared_bytes<place_mask_kernel<Entry>>(experts, mask.get_device_index());
    count_mask_kernel<Entry><<<ctas, kThreads, 0, stream>>>(entries, shape, data<int>(counts_by_chunk), out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    place_mask_kernel<Entry><<<ctas, kThreads, shared_bytes, stream>>>(
        entries, shape, data<int>(counts_by_chunk), data<int>(row_map), out);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  };
  switch (mask.element_size()) {
    case 1: launch(uint8_t{}); break;
    case 2: launch(uint16_t{}); break;
    case 4: launch(uint32_t{}); break;
    default: launch(uint64_t{});
  }
}

// row, column and count may be views with a row stride; of row_of_slot the entries in use are written
void map_slots(Tensor row, std::optional<Tensor> column, std::optional<Tensor> count, std::optional<Tensor> pad_offsets,
               std::optional<Tensor> probs, Tensor row_of_slot, Tensor slot_of_row) {
  const torch::stable::accelerator::DeviceGuard guard(row.get_device_index());
  const cudaStream_t stream = current_stream(row);
  if (slot_of_row.numel() > 0) {
    static_assert(kPadding == -1);  // all its bytes are 0xff
    STD_CUDA_CHECK(cudaMemsetAsync(slot_of_row.data_ptr(), 0xff, slot_of_row.numel() * sizeof(int), stream));
  }
  if (row_of_slot.numel() == 0) return;
  const int64_t tokens = row.size(0), slots = row.size(1);
  const int64_t experts = pad_offsets ? pad_offsets->size(0) : probs ? probs->size(1) : slots;
  const Map map{data<int>(row), data<int>(column), data<int>(count), row.stride(0), row_stride(column), row_stride(count), tokens,
                scalars(probs)};
  const SlotOutputs out{data<const int64_t>(pad_offsets), data<int>(row_of_slot), data<int>(slot_of_row), slot_of_row.size(0),
                        static_cast<int>(slots), static_cast<int>(experts)};
  int token_lanes = 1;
  while (token_lanes < 32 && token_lanes < slots) token_lanes *= 2;
  const unsigned ctas = static_cast<unsigned>(ceil_div(tokens * token_lanes, kSlotThreads));
  map_slots_kernel<<<ctas, kSlotThreads, 0, stream>>>(map, token_lanes, out);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(mask_row_map,
               "(Tensor mask, Tensor? pad_offsets, Tensor(a!) counts_by_chunk, Tensor(b!) row_map, Tensor(c!)? row_of_slot, "
               "Tensor(d!)? slot_of_row) -> ()");
GBMOE_OPERATOR(map_slots,
               "(Tensor row, Tensor? column, Tensor? count, Tensor? pad_offsets, Tensor? probs, Tensor(a!) row_of_slot, "
               "Tensor(b!) slot_of_row) -> ()");

}  // namespace gbmoe
