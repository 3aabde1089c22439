// Publishes the ids and weights of this rank's slots with a header, and collects those of all ranks. See memory.cuh.

#include <climits>

#include "../operators.h"
#include "memory.cuh"

namespace gbmoe {
namespace {

constexpr int kNoExpert = -1;
constexpr int kHeaderNumbers = 4;
constexpr int kDigest = 1;  // the number of a header that is the same on all ranks where they make the same pass

struct Header {
  int number[kHeaderNumbers];
};

// Fills this rank's [capacity, K] of ids and weights and its header, which the other ranks read. Ids after the last token name no
// expert.
template <typename Id>
__global__ void __launch_bounds__(kThreads) publish_slots_kernel(
    const Id* __restrict__ ids_TK, const Scalars weights, const __grid_constant__ Header header, int64_t slots, int64_t room,
    int* __restrict__ ids_CK, float* __restrict__ weights_CK, int* __restrict__ header_N) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot < kHeaderNumbers) header_N[slot] = header.number[slot];
  if (slot >= room) return;
  const int64_t id = slot < slots ? static_cast<int64_t>(ids_TK[slot]) : kNoExpert;
  ids_CK[slot] = id < 0 || id > INT_MAX ? kNoExpert : static_cast<int>(id);
  if (weights_CK && slot < slots) weights_CK[slot] = static_cast<float>(weights.read(slot));
}

// Reads the ids and weights of all ranks. Ids are counted from this rank's first expert; those of other ranks' experts become
// kNoExpert. The first CTA reads the headers; where nobody waits for them, only those of ranks that differ are kept.
__global__ void __launch_bounds__(kThreads) collect_slots_kernel(
    const __grid_constant__ Peers id_peers, const __grid_constant__ Peers weight_peers, const __grid_constant__ Peers header_peers,
    int64_t slots_of_rank, int first_expert, int experts, bool only_differing, int* __restrict__ ids_SK, float* __restrict__ weights_SK,
    int* __restrict__ headers_WN) {
  static_assert(kThreads >= kMostPeers);
  if (blockIdx.x == 0) {
    const auto digest = [&](int rank) { return header_peers.region<const int>(rank)[kDigest]; };
    const int rank = threadIdx.x;
    const bool differs = only_differing && rank < header_peers.ranks && digest(rank) != digest(0);
    if (__syncthreads_or(differs) || !only_differing) {
      for (int i = threadIdx.x; i < header_peers.ranks * kHeaderNumbers; i += kThreads) {
        headers_WN[i] = header_peers.region<const int>(i / kHeaderNumbers)[i % kHeaderNumbers];
      }
    }
  }
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

// ids [T,K] int32 or int64, header int64 [4] on the CPU -> ids_out int32, weights_out float32 [capacity,K], header_out int32 [4]
void publish_slots(Tensor ids, std::optional<Tensor> weights, Tensor header, Tensor ids_out, std::optional<Tensor> weights_out,
                   Tensor header_out) {
  const torch::stable::accelerator::DeviceGuard guard(ids_out.get_device_index());
  const int64_t room = ids_out.numel();
  Header numbers{};
  for (int i = 0; i < kHeaderNumbers; ++i) numbers.number[i] = static_cast<int>(data<const int64_t>(header)[i]);
  const auto launch = [&](const auto* from) {
    publish_slots_kernel<<<ctas_of(std::max<int64_t>(room, kHeaderNumbers)), kThreads, 0, current_stream(ids_out)>>>(
        from, scalars(weights), numbers, ids.numel(), room, data<int>(ids_out), data<float>(weights_out), data<int>(header_out));
  };
  if (ids.scalar_type() == ScalarType::Int) launch(data<const int>(ids));
  else launch(data<const int64_t>(ids));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// -> ids int32 [S,K], counted from first_expert, -1 where they name none of `experts`; weights float32 [S,K]; headers int32
// [ranks,4], with only_differing not written where their second numbers are equal
void collect_slots(Tensor id_peers, std::optional<Tensor> weight_peers, Tensor header_peers, int64_t first_expert, int64_t experts,
                   bool only_differing, Tensor ids, std::optional<Tensor> weights, Tensor headers) {
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  const int64_t capacity = ids.size(0) / id_peers.numel();
  collect_slots_kernel<<<ctas_of(std::max<int64_t>(ids.numel(), 1)), kThreads, 0, current_stream(ids)>>>(
      make_peers(id_peers, 0, capacity), make_peers(weight_peers ? *weight_peers : id_peers, 0, capacity),
      make_peers(header_peers, 0, 1), capacity * ids.size(1), static_cast<int>(first_expert), static_cast<int>(experts), only_differing,
      data<int>(ids), data<float>(weights), data<int>(headers));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(publish_slots,
               "(Tensor ids, Tensor? weights, Tensor header, Tensor(a!) ids_out, Tensor(b!)? weights_out, Tensor(c!) "
               "header_out) -> ()");
GBMOE_OPERATOR(collect_slots,
               "(Tensor id_peers, Tensor? weight_peers, Tensor header_peers, int first_expert, int experts, bool "
               "only_differing, Tensor(a!) ids, Tensor(b!)? weights, Tensor(c!) headers) -> ()");

}  // namespace gbmoe
