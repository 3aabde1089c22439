// Sums, rows and scalars that the ranks have pushed into this rank's memory (push.cu), added up for the tokens that it owns.

#include "../operators.h"
#include "../permute/weighted_row_sum.cuh"
#include "memory.cuh"

namespace gbmoe {
namespace {

// Which ranks hold an expert. Where there are more ranks than experts, these are the ranks that hold a shard of it.
struct Holders {
  int experts, experts_per_rank, degree, shards;  // degree: the ranks that hold different experts; there are degree * shards ranks

  __device__ __forceinline__ bool valid(int64_t id) const { return id >= 0 && id < experts; }
  __device__ __forceinline__ unsigned long long mask(int64_t id) const {
    unsigned long long ranks = 0;
    if (valid(id)) {
      for (int shard = 0; shard < shards; ++shard) ranks |= 1ull << (shard * degree + static_cast<int>(id) / experts_per_rank);
    }
    return ranks;
  }
};

Holders make_holders(int64_t ranks, int64_t experts, int64_t experts_per_rank) {
  const int degree = static_cast<int>(experts / experts_per_rank);
  return {static_cast<int>(experts), static_cast<int>(experts_per_rank), degree, static_cast<int>(ranks) / degree};
}

// out[token] = scale * the sum, in rank order, of the rows that the holders of the token's experts have pushed here.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads) sum_ranks_kernel(
    const Vector<T, N>* __restrict__ pushed_WCH, const int64_t* __restrict__ ids_TK, int top_k, const Holders holders,
    int64_t capacity, accumulate_t<T> scale, Vector<T, N>* __restrict__ out_TH, const LaunchShape shape) {
  constexpr int kTogether = 4;
  const int64_t token = shape.own_token();
  if (token >= shape.tokens) return;
  unsigned long long ranks = 0;
  for (int slot = threadIdx.x % 32; slot < top_k; slot += 32) ranks |= holders.mask(ids_TK[token * top_k + slot]);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) ranks |= __shfl_xor_sync(kFullWarp, ranks, step);
  const Vector<T, N>* pushed = pushed_WCH + token * shape.vectors;
  const int64_t rank_stride = capacity * shape.vectors;
  for (int v = threadIdx.x % shape.token_threads; v < shape.vectors; v += shape.token_threads) {
    accumulate_t<T> sum[N] = {};
    for (unsigned long long left = ranks; left;) {
      Vector<T, N> value[kTogether];
      int count = 0;
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (!left) continue;
        value[j] = load_streaming(pushed + (__ffsll(static_cast<long long>(left)) - 1) * rank_stride + v);
        left &= left - 1, ++count;
      }
#pragma unroll
      for (int j = 0; j < kTogether; ++j) {
        if (j >= count) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) sum[i] += widen(value[j].element[i]);
      }
    }
    Vector<T, N> rounded;
#pragma unroll
    for (int i = 0; i < N; ++i) rounded.element[i] = narrow<T>(scale * sum[i]);
    out_TH[token * shape.vectors + v] = rounded;
  }
}

// out[slot] = the sum of the slot's scalars from all shards, in their order; 0 for a slot whose id names no expert.
__global__ void __launch_bounds__(kThreads) sum_shards_kernel(
    const float* __restrict__ pushed_ZCK, const int64_t* __restrict__ ids_TK, const Holders holders, int64_t slots, int64_t slots_of_rank,
    const Scalars out) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= slots) return;
  float sum = 0;
  if (holders.valid(ids_TK[slot])) {
    for (int shard = 0; shard < holders.shards; ++shard) sum += pushed_ZCK[shard * slots_of_rank + slot];
  }
  out.write(slot, sum);
}

}  // namespace

// pushed [ranks, capacity, H], int64 ids [T,K]; out [T,H], `scale` times the sums
void sum_pushed_rows(Tensor pushed, Tensor ids, int64_t experts, int64_t experts_per_rank, double scale, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const int64_t hidden = out.size(1), tokens = out.size(0), capacity = pushed.size(1);
  if (out.numel() == 0) return;
  const Holders holders = make_holders(pushed.size(0), experts, experts_per_rank);
  GBMOE_DISPATCH_FLOATING(out.scalar_type(), "sum_pushed_rows", {
    const auto launch = [&](auto vector_length) {
      constexpr int N = decltype(vector_length)::value;
      const LaunchShape shape = make_launch_shape(tokens, 1, 0, hidden / N, few_threads(hidden / N), false);
      sum_ranks_kernel<T, N><<<shape.ctas, shape.threads, 0, current_stream(out)>>>(
          data<const Vector<T, N>>(pushed), data<const int64_t>(ids), static_cast<int>(ids.size(1)), holders, capacity,
          static_cast<accumulate_t<T>>(scale), data<Vector<T, N>>(out), shape);
    };
    if (fits_16_bytes(hidden * sizeof(T), {&pushed, &out})) launch(std::integral_constant<int, kVectorLength<T>>());
    else launch(std::integral_constant<int, 1>());
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// pushed float32 [Z, capacity, K], int64 ids [T,K]; out [T,K], any floating dtype
void sum_pushed_scalars(Tensor pushed, Tensor ids, int64_t ranks, int64_t experts, int64_t experts_per_rank, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  if (out.numel() == 0) return;
  sum_shards_kernel<<<ctas_of(out.numel()), kThreads, 0, current_stream(out)>>>(
      data<const float>(pushed), data<const int64_t>(ids), make_holders(ranks, experts, experts_per_rank), out.numel(),
      pushed.size(1) * pushed.size(2), scalars(out));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(sum_pushed_rows,
               "(Tensor pushed, Tensor ids, int experts, int experts_per_rank, float scale, Tensor(a!) out) -> ()");
GBMOE_OPERATOR(sum_pushed_scalars,
               "(Tensor pushed, Tensor ids, int ranks, int experts, int experts_per_rank, Tensor(a!) out) -> ()");

}  // namespace gbmoe
