// Routing that is limited to the best groups of experts: what a group is worth, and which groups are left out.

#pragma once

#include "function.cuh"
#include "keys.cuh"

namespace gbmoe {
namespace {

// The best order of a group of experts, or the order of the sum of its best two scores. W: how many orders are read at once. Lanes of a
// warp begin at different vectors of their groups, and so in different banks.
template <int W> __device__ __forceinline__ uint32_t worth_of(const RouterFunction& function, int size, const uint32_t* order_E) {
  const int vectors = size / W, begin = threadIdx.x % 32 % vectors;
  uint32_t best = 0, second = 0;
#pragma unroll 2
  for (int i = 0; i < vectors; ++i) {
    const int at = begin + i < vectors ? begin + i : begin + i - vectors;
    const auto orders = reinterpret_cast<const Vector<uint32_t, W>*>(order_E)[at];
#pragma unroll
    for (int w = 0; w < W; ++w) {
      second = max(second, min(best, orders.element[w]));
      best = max(best, orders.element[w]);
    }
  }
  return function.group_best == 1 ? best : order_of(logit_of(best) + logit_of(second));
}

// Sets the orders of all experts to 0 but those of the group_topk best groups. 0 is below -inf. W divides a group's size.
template <int G, int W> __device__ __forceinline__ void leave_groups_out(
    const RouterFunction& function, int experts, int lane, uint32_t* order_E, uint32_t* worth_of_group) {
  const int size = experts / function.groups;
#pragma unroll 1
  for (int group = lane; group < function.groups; group += G) {
    worth_of_group[group] = worth_of<W>(function, size, order_E + group * size);
  }
  __syncwarp();
  uint32_t chosen[2] = {0, 0};
#pragma unroll 1
  for (int group = lane; group < function.groups; group += G) {
    const uint32_t worth = worth_of_group[group];
    int better = 0;
#pragma unroll 4
    for (int other = 0; other < function.groups; ++other) {
      const uint32_t of_other = worth_of_group[other];
      better += of_other > worth || (of_other == worth && other < group);
    }
    if (better < function.group_topk) chosen[group / 32] |= 1u << group % 32;
  }
#pragma unroll
  for (int step = G / 2; step > 0; step /= 2) {
    chosen[0] |= __shfl_xor_sync(kFullWarp, chosen[0], step);
    chosen[1] |= __shfl_xor_sync(kFullWarp, chosen[1], step);
  }
  // Exact for numbers below 1024: the product's error is less than one part in `size` of 2^20.
  const uint32_t inverse = (1u << 20) / size + 1;
#pragma unroll 2
  for (int expert = lane * W; expert < experts; expert += G * W) {
    const uint32_t group = expert * inverse >> 20;
    if (!((group < 32 ? chosen[0] : chosen[1]) >> group % 32 & 1)) {
      *reinterpret_cast<Vector<uint32_t, W>*>(order_E + expert) = Vector<uint32_t, W>{};
    }
  }
  __syncwarp();
}

}  // namespace
}  // namespace gbmoe
