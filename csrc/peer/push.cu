// Sums, rows and scalars pushed into the memory of the ranks that own the tokens. There sum.cu adds them up. See
// memory.cuh.

#include "../operators.h"
#include "../permute/weighted_row_sum.cuh"
#include "memory.cuh"

namespace gbmoe {
namespace {

// Writes the weighted sum of a token's rows here to [this rank, index of the token] of the owner's [ranks, capacity, H]; writes
// nothing for a token without rows.
template <typename T, int N, int S, bool kMany>
__global__ void __launch_bounds__(kThreads) push_sums_kernel(
    const Vector<T, N>* __restrict__ y_PH, const Slots slots, const Scalars weights, const __grid_constant__ Peers peers,
    const LaunchShape shape) {
  const int64_t i = shape.own_token();
  if (i >= shape.tokens) return;
  const Visited to(peers, i);
  // Tokens are skipped only if none of their slots has a row number: no expert of this rank is theirs, or their rows are those of another
  // window.
  bool any = false;
  for (int slot = threadIdx.x % 32; slot < slots.most; slot += 32) any = any || slots.row[to.token * slots.row_stride + slot] >= 0;
  if (!__any_sync(kFullWarp, any)) return;
  Vector<T, N>* out = peers.region<Vector<T, N>>(to.rank) + (peers.self * peers.capacity + to.index) * shape.vectors;
  store_weighted_sum<T, N, S, kMany>(y_PH, slots, weights, to.token, shape, out, 0);
}

// Writes each row to [its slot] of the owner's [capacity * K, H].
__global__ void __launch_bounds__(kThreads) push_slots_kernel(
    const uint4* __restrict__ y_PH, const int* __restrict__ slot_of_row, const __grid_constant__ Peers peers, int top_k, int64_t rows,
    int vectors) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (row >= rows) return;
  const int64_t slot = slot_of_row[row], slots_of_rank = peers.capacity * top_k;
  if (slot < 0 || slot >= slots_of_rank * peers.ranks) return;
  uint4* out = peers.region<uint4>(static_cast<int>(slot / slots_of_rank)) + slot % slots_of_rank * vectors;
  for (int v = threadIdx.x % 32; v < vectors; v += 32) out[v] = __ldcs(y_PH + row * vectors + v);
}

// Writes the scalar of each slot of this rank's experts to [this rank's shard, index, slot] of the owner's [shards, capacity, K];
// 0 if the slot's row lies beyond the bound of rows.
__global__ void __launch_bounds__(kThreads) push_scalars_kernel(
    const float* __restrict__ scalars_SK, const int* __restrict__ row_of_slot, const __grid_constant__ Peers peers, int64_t slots_of_rank,
    int shard, int64_t rows) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= slots_of_rank * peers.ranks) return;
  const int row = row_of_slot[slot];
  if (row < 0) return;
  peers.region<float>(static_cast<int>(slot / slots_of_rank))[shard * slots_of_rank + slot % slots_of_rank] =
      row < rows ? scalars_SK[slot] : 0.f;
}

}  // namespace

// Into [ranks, capacity, H] of each token's owner
void push_row_sums(Tensor y, Tensor row_of_slot, std::optional<Tensor> weights, Tensor peers, int64_t rank) {
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  const int64_t hidden = y.size(1), tokens = row_of_slot.size(0);
  if (hidden == 0 || tokens == 0) return;
  const Slots slots = make_slots(row_of_slot, std::nullopt, std::nullopt, y.size(0), {&weights});
  const Peers to = make_peers(peers, rank, tokens / peers.numel());
  GBMOE_DISPATCH_FLOATING(y.scalar_type(), "push_row_sums", {
    const bool fits = fits_16_bytes(hidden * sizeof(T), {&y});
    GBMOE_DISPATCH_VECTOR_AND_SLOTS(fits, slots.most, {
      const LaunchShape shape = make_launch_shape(tokens, slots.most, 0, hidden / N, few_threads(hidden / N), false);
      const auto kernel = slots.most > S ? push_sums_kernel<T, N, S, kMayTakeSeveralPasses<N, S>> : push_sums_kernel<T, N, S, false>;
      kernel<<<shape.ctas, shape.threads, 0, current_stream(y)>>>(data<Vector<T, N>>(y), slots, scalars(weights), to, shape);
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// Into [capacity * K, H] of each token's owner, without a sum
void push_slot_rows(Tensor y, Tensor slot_of_row, int64_t top_k, int64_t capacity, Tensor peers) {
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  const int64_t rows = y.size(0), vectors = y.size(1) * static_cast<int64_t>(y.element_size()) / 16;
  if (rows == 0) return;
  push_slots_kernel<<<static_cast<unsigned>(ceil_div(rows, kWarps)), kThreads, 0, current_stream(y)>>>(
      data<const uint4>(y), data<const int>(slot_of_row), make_peers(peers, 0, capacity), static_cast<int>(top_k), rows,
      static_cast<int>(vectors));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// float32 [S,K] into [Z, capacity, K] of each token's owner, 0 for slots whose row is not one of `rows`
void push_slot_scalars(Tensor slot_scalars, Tensor row_of_slot, int64_t rows, int64_t shard, Tensor peers) {
  const torch::stable::accelerator::DeviceGuard guard(slot_scalars.get_device_index());
  const int64_t slots = slot_scalars.numel();
  if (slots == 0) return;
  push_scalars_kernel<<<ctas_of(slots), kThreads, 0, current_stream(slot_scalars)>>>(
      data<const float>(slot_scalars), data<const int>(row_of_slot), make_peers(peers, 0, slot_scalars.size(0) / peers.numel()),
      slots / peers.numel(), static_cast<int>(shard), rows);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(push_row_sums, "(Tensor y, Tensor row_of_slot, Tensor? weights, Tensor peers, int rank) -> ()");
GBMOE_OPERATOR(push_slot_rows, "(Tensor y, Tensor slot_of_row, int top_k, int capacity, Tensor peers) -> ()");
GBMOE_OPERATOR(push_slot_scalars, "(Tensor slot_scalars, Tensor row_of_slot, int rows, int shard, Tensor peers) -> ()");

}  // namespace gbmoe
