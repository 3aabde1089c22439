// Rows pulled from the memory of the ranks that own the tokens. See memory.cuh.

#include "../operators.h"
#include "memory.cuh"

namespace gbmoe {
namespace {

// out[row] = the row of that row's token, read from its owner's memory. With kMany the slots take several passes, during which
// the token's vectors stay in registers.
template <int S, int U, bool kMany>
__global__ void __launch_bounds__(kThreads)
    pull_kernel(const __grid_constant__ Peers peers, const Slots slots, uint4* __restrict__ out_PH, const LaunchShape shape) {
  using UnweightedPass = Pass<float, S, false>;
  if (const int64_t i = shape.own_token(); i < shape.tokens) {
    const Visited from(peers, i);
    const int thread = threadIdx.x % shape.token_threads;  // of those that own the token
    const uint4* x = peers.region<const uint4>(from.rank) + from.index * shape.vectors;
    const auto copy = [&](auto&& store) {
      for (int v = thread; v - thread < shape.vectors; v += U * shape.token_threads) {  // a warp's lanes stay together
        uint4 value[U];
#pragma unroll
        for (int u = 0; u < U; ++u) value[u] = __ldcs(x + min(v + u * shape.token_threads, shape.vectors - 1));
        store(v, value);
      }
    };
    const auto put = [&](const UnweightedPass& pass, int v, const uint4(&value)[U]) {
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int at = v + u * shape.token_threads;
        if (at >= shape.vectors) continue;
#pragma unroll
        for (int j = 0; j < S; ++j) {
          if (pass.has(j)) store_streaming(out_PH + pass.at[j] + at, value[u]);
        }
      }
    };
    const UnweightedPass first(slots, {}, from.token, 0, slots.most, shape.vectors);
    if constexpr (kMany) {
      unsigned exists = first.exists;
      for (int base = S; base < slots.most; base += S) {
        exists |= UnweightedPass(slots, {}, from.token, base, slots.most, shape.vectors).exists;
      }
      if (exists) {
        copy([&](int v, const uint4 (&value)[U]) {
          for (int base = 0; base < slots.most; base += S) {
            put(UnweightedPass(slots, {}, from.token, base, slots.most, shape.vectors), v, value);
          }
        });
      }
    } else if (first.exists) {
      copy([&](int v, const uint4 (&value)[U]) { put(first, v, value); });
    }
  }
}

}  // namespace

// row_of_slot [S,K]; out [P,H], of any dtype, where rows without a slot stay as they are
void pull_rows(Tensor peers, int64_t rank, Tensor row_of_slot, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const int64_t vectors = out.size(1) * static_cast<int64_t>(out.element_size()) / 16, tokens = row_of_slot.size(0);
  if (out.numel() == 0 || tokens == 0) return;
  const Slots slots = make_slots(row_of_slot, std::nullopt, std::nullopt, out.size(0), {});
  const Peers from = make_peers(peers, rank, tokens / peers.numel());
  const auto launch = [&](auto kernel) {
    const int64_t warps = std::clamp<int64_t>(ceil_div(vectors, 32 * 4), 1, kWarps);
    const LaunchShape shape = make_launch_shape(tokens, slots.most, 0, vectors, 32 * static_cast<int>(warps), false);
    kernel<<<shape.ctas, shape.threads, 0, current_stream(out)>>>(from, slots, data<uint4>(out), shape);
  };
  if (slots.most <= 1) launch(pull_kernel<1, 4, false>);
  else if (slots.most <= 2) launch(pull_kernel<2, 4, false>);
  else if (slots.most <= 4) launch(pull_kernel<4, 4, false>);
  else if (slots.most <= 8) launch(pull_kernel<8, 4, false>);
  else launch(pull_kernel<8, 4, true>);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(pull_rows, "(Tensor peers, int rank, Tensor row_of_slot, Tensor(a!) out) -> ()");

}  // namespace gbmoe
