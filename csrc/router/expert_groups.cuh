// Routing that is limited to the best groups of experts: what a group is worth, and which groups are left out.

#pragma once

#include "function.cuh"
#include "keys.cuh"

namespace gbmoe {
namespace {

// What does not depend on the token: how G lanes share its groups. Each lane looks at a part of one group, or of one after the other.
struct GroupLayout {
  int size, log_of_parts, vectors;  // experts of a group; parts that it has; vectors of a part, or single experts
  bool whole_vectors;               // whether vectors divide a group
  uint32_t inverse;                 // of the size, times 2^20

  static GroupLayout of(int experts, int groups, int lanes, int vector) {
    const int size = experts / groups;
    const bool whole = size % vector == 0;
    const int vectors = whole ? size / vector : size;
    int log = 0;
    while (groups << (log + 1) <= lanes && (vectors >> log) % 2 == 0) ++log;
    return {size, log, vectors >> log, whole, (1u << 20) / size + 1};
  }
};

// The groups that experts are chosen from, a bit each.
struct KeptGroups {
  uint32_t bits[2] = {kFullWarp, kFullWarp};
  uint32_t inverse = 0;  // of a group's size, as above; 0 where there is one group

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
  // Of vectors of W numbers. Lanes of a warp begin at different ones, and so in different banks, where they are a power of two.
  template <int W> __device__ __forceinline__ void add_all(int vectors, const float* numbers) {
    int at = (vectors & (vectors - 1)) == 0 ? threadIdx.x & (vectors - 1) : 0;
#pragma unroll(W > 1 ? 2 : 1)
    for (int i = 0; i < vectors; ++i) {
      const auto vector = reinterpret_cast<const Vector<float, W>*>(numbers)[at];
      at = at + 1 < vectors ? at + 1 : 0;
#pragma unroll
      for (int w = 0; w < W; ++w) add(vector.element[w]);
    }
  }
};

// Sets the numbers of all experts to -inf but those of the group_topk best groups, which are returned. A group is worth its best number, or
// the sum of its best two.
template <int G, int V> __device__ __forceinline__ KeptGroups leave_groups_out(
    const RouterFunction& function, const GroupLayout& layout, int experts, int lane, float* number_E, uint32_t* worth_of_group) {
  const int parts = 1 << layout.log_of_parts;
#pragma unroll 1
  for (int first = 0; first < function.groups; first += G >> layout.log_of_parts) {
    const int group = first + (lane >> layout.log_of_parts);
    BestTwo two;
    if (group < function.groups) {
      const float* const own = number_E + group * layout.size + (lane & (parts - 1)) * (layout.size >> layout.log_of_parts);
      if (layout.whole_vectors) two.add_all<V>(layout.vectors, own);
      else two.add_all<1>(layout.vectors, own);
    }
#pragma unroll 1
    for (int step = 1; step < parts; step *= 2) {
      const float best = __shfl_xor_sync(kFullWarp, two.best, step), second = __shfl_xor_sync(kFullWarp, two.second, step);
      two.add(best);
      two.second = fmaxf(two.second, second);
    }
    if (group < function.groups) worth_of_group[group] = order_of(function.group_best == 1 ? two.best : two.best + two.second);
  }
  __syncwarp();
  KeptGroups kept{{0, 0}, layout.inverse};
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
  Vector<float, V> none;
#pragma unroll
  for (int v = 0; v < V; ++v) none.element[v] = -INFINITY;
#pragma unroll 2
  for (int expert = lane * V; expert < experts; expert += G * V) {
    if (layout.whole_vectors) {
      if (!kept.have(expert)) *reinterpret_cast<Vector<float, V>*>(number_E + expert) = none;
    } else {
#pragma unroll 1
      for (int v = 0; v < V; ++v)
        if (!kept.have(expert + v)) number_E[expert + v] = -INFINITY;
    }
  }
  __syncwarp();
  return kept;
}

}  // namespace
}  // namespace gbmoe
