// Publishes the ids and weights of this rank's slots, and collects those of all ranks' slots. See peer_memory.cuh.

#include <climits>

#include "ops.h"
#include "peer_memory.cuh"

namespace gbmoe {
namespace {

constexpr int kNoExpert = -1;

// Fills this rank's [capacity, K] of ids and weights, which the other ranks read. Ids behind the last token name no expert.
template <typename Id>
__global__ void __launch_bounds__(kThreads) publish_slots_kernel(
    const Id* __restrict__ ids_TK, const Scalars weights, int64_t slots, int64_t room, int* __restrict__ ids_CK,
    float* __restrict__ weights_CK) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= room) return;
  const int64_t id = slot < slots ? static_cast<int64_t>(ids_TK[slot]) : kNoExpert;
  ids_CK[slot] = id < 0 || id > INT_MAX ? kNoExpert : static_cast<int>(id);
  if (weights_CK && slot < slots) weights_CK[slot] = static_cast<float>(weights.read(slot));
}

// Reads the ids and weights of all ranks. Ids are counted from this rank's first expert; those of other ranks' experts become
// kNoExpert.
__global__ void __launch_bounds__(kThreads) collect_slots_kernel(
    const __grid_constant__ Peers id_peers, const __grid_constant__ Peers weight_peers, int64_t slots_of_rank, int first_expert,
    int experts, int* __restrict__ ids_SK, float* __restrict__ weights_SK) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= slots_of_rank * id_peers.ranks) return;
  const int rank = static_cast<int>(slot / slots_of_rank);
  const int64_t at = slot % slots_of_rank;
  const int id = id_peers.region<const int>(rank)[at] - first_expert;
  const bool here = id >= 0 && id < experts;
  ids_SK[slot] = here ? id : kNoExpert;
  if (weights_SK) weights_SK[slot] = here ? weight_peers.region<const float>(rank)[at] : 0.f;
}

}  // namespace

void publish_slots(Tensor ids, std::optional<Tensor> weights, Tensor ids_out, std::optional<Tensor> weights_out) {
  const torch::stable::accelerator::DeviceGuard guard(ids_out.get_device_index());
  const int64_t room = ids_out.numel();
  if (room == 0) return;
  const auto launch = [&](const auto* from) {
    publish_slots_kernel<<<ctas_of(room), kThreads, 0, current_stream(ids_out)>>>(
        from, scalars(weights), ids.numel(), room, data<int>(ids_out), data<float>(weights_out));
  };
  if (ids.scalar_type() == ScalarType::Int) launch(data<const int>(ids));
  else launch(data<const int64_t>(ids));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void collect_slots(Tensor id_peers, std::optional<Tensor> weight_peers, int64_t first_expert, int64_t experts, Tensor ids,
                   std::optional<Tensor> weights) {
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  if (ids.numel() == 0) return;
  const int64_t capacity = ids.size(0) / id_peers.numel();
  collect_slots_kernel<<<ctas_of(ids.numel()), kThreads, 0, current_stream(ids)>>>(
      make_peers(id_peers, 0, capacity), make_peers(weight_peers ? *weight_peers : id_peers, 0, capacity), capacity * ids.size(1),
      static_cast<int>(first_expert), static_cast<int>(experts), data<int>(ids), data<float>(weights));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
