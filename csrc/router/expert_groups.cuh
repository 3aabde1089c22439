// Routing that is limited to the best groups of experts: what a group is worth, and which groups are left out.

#pragma once

#include "function.cuh"
#include "keys.cuh"

namespace gbmoe {
namespace {

// The groups that experts are chosen from, a bit each.
struct KeptGroups {
  uint32_t bits[2] = {kFullWarp, kFullWarp};
  uint32_t inverse = 0;  // of a group's size, times 2^20; 0 where there is one group

  // Exact for numbers below 1024: the product's error is less than one part in the size of 2^20.
  __device__ __forceinline__ bool have(int expert) const {
    const uint32_t group = expert * inverse >> 20;
    return (group < 32 ? bits[0] : bits[1]) >> group % 32 & 1;
  }
};

// The best two of some numbers; the best is NaN where one of them is.
struct BestTwo {
  float best = -INFINITY, second = -INFINITY;

  __device__ __forceinline__ void add(float number) {
    second = fmaxf(second, fminf(best, number));
    best = __uint_as_float(Word<float>::higher(__float_as_uint(best), __float_as_uint(number)));
  }
  // Of `vectors` vectors of W numbers. Lanes of a warp begin at different ones, and so in different banks.
  template <int W> __device__ __forceinline__ void add_all(int vectors, const float* numbers) {
    const int begin = threadIdx.x % 32 % vectors;
#pragma unroll 2
    for (int i = 0; i < vectors; ++i) {
      const int at = begin + i < vectors ? begin + i : begin + i - vectors;
      const auto vector = reinterpret_cast<const Vector<float, W>*>(numbers)[at];
#pragma unroll
      for (int w = 0; w < W; ++w) add(vector.element[w]);
    }
  }
};

// Sets the numbers of all experts to -inf but those of the group_topk best groups, which are returned. A group is worth its best number, or
// the sum of its best two; lanes that are more than the groups share them. W divides a group's size.
template <int G, int W> __device__ __forceinline__ KeptGroups leave_groups_out(
    const RouterFunction& function, int experts, int lane, float* number_E, uint32_t* worth_of_group) {
  const int size = experts / function.groups;
  int log_of_parts = 0;
#pragma unroll
  for (int log = 1; G >> log > 0; ++log) if (function.groups << log <= G && (size / W) % (1 << log) == 0) log_of_parts = log;
  const int parts = 1 << log_of_parts, vectors = size / W >> log_of_parts;
#pragma unroll 1
  for (int first = 0; first < function.groups; first += G >> log_of_parts) {
    const int group = first + (lane >> log_of_parts);
    BestTwo two;
    if (group < function.groups) two.add_all<W>(vectors, number_E + group * size + lane % parts * (vectors * W));
#pragma unroll 1
    for (int step = 1; step < parts; step *= 2) {
      const float best = __shfl_xor_sync(kFullWarp, two.best, step), second = __shfl_xor_sync(kFullWarp, two.second, step);
      two.add(best);
      two.second = fmaxf(two.second, second);
    }
    if (group < function.groups && lane % parts == 0) {
      worth_of_group[group] = order_of(function.group_best == 1 ? two.best : two.best + two.second);
    }
  }
  __syncwarp();
  KeptGroups kept{{0, 0}, (1u << 20) / size + 1};
#pragma unroll 1
  for (int group = lane; group < function.groups; group += G) {
    const uint32_t worth = worth_of_group[group];
    int better = 0;
#pragma unroll 4
    for (int other = 0; other < function.groups; ++other) {
      const uint32_t of_other = worth_of_group[other];
      better += of_other > worth || (of_other == worth && other < group);
    }
    if (better < function.group_topk) kept.bits[group / 32] |= 1u << group % 32;
  }
#pragma unroll
  for (int step = G / 2; step > 0; step /= 2) {
    kept.bits[0] |= __shfl_xor_sync(kFullWarp, kept.bits[0], step);
    kept.bits[1] |= __shfl_xor_sync(kFullWarp, kept.bits[1], step);
  }
#pragma unroll 2
  for (int expert = lane * W; expert < experts; expert += G * W) {
    if (kept.have(expert)) continue;
    Vector<float, W> none;
#pragma unroll
    for (int w = 0; w < W; ++w) none.element[w] = -INFINITY;
    *reinterpret_cast<Vector<float, W>*>(number_E + expert) = none;
  }
  __syncwarp();
  return kept;
}

}  // namespace
}  // namespace gbmoe
