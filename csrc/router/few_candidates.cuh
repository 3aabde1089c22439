// Selection by few candidates, for tokens owned by 8 or 16 lanes: the K-th highest of the maxima of 32 disjoint sets of numbers is not
// above the K-th highest of all, so that what is below it can be left out. Some K + 1 candidates remain of numbers that are all different
// (the K highest lie in nearly as many sets). Each finds its place by counting the candidates above it. Where more remain than there is
// room for, as among equal numbers, they are chosen in rounds.

#pragma once

#include "sorted_lists.cuh"

namespace gbmoe {
namespace {

constexpr int kCandidateSets = 32;  // of a token
constexpr int kByte = 8;  // bits

// The candidates of one token, and then the highest ones in order. One more than the most of them is read, as half of a vector.
struct FewCandidates {
  static constexpr int kMost = 16;
  alignas(16) uint64_t key[kMost + 2];
  uint64_t ranked[8];
};

// Bit i is set where number i of a lane is not below the bound, or is NaN; of a bound of NaN all bits are. The bound is +0 rather than -0.
template <int N> __device__ __forceinline__ unsigned not_below(const float (&number)[N], float bound) {
  const float minus_bound = 0.0f - bound;  // +0 where the bound is 0: the sum of -0 and it is +0
  unsigned below[N / kByte] = {}, all = 0;  // bytes, so that no chain of instructions is long
#pragma unroll
  for (int i = kByte - 1; i >= 0; --i) {
#pragma unroll
    for (int byte = 0; byte < N / kByte; ++byte) {
      below[byte] = router_push_sign(below[byte], number[byte * kByte + i] + minus_bound);
    }
  }
#pragma unroll
  for (int byte = 0; byte < N / kByte; ++byte) all |= below[byte] << byte * kByte;
  return ~all & (kFullWarp >> (32 - N));
}

// The keys of the highest of a group's candidates, whose keys are in `memory`: lane j gets the j-th highest, for j < slots <= 8.
template <int G> __device__ __forceinline__ uint64_t rank_candidates(FewCandidates& memory, int count, int lane, int slots) {
  constexpr int kOwn = FewCandidates::kMost / G;  // candidates that a lane places
  using Two = Vector<uint64_t, 2>;
  uint64_t key[kOwn];
  int place[kOwn];
#pragma unroll
  for (int m = 0; m < kOwn; ++m) {
    key[m] = memory.key[m * G + lane];
    place[m] = m * G + lane < count ? 0 : slots;
  }
#pragma unroll 2
  for (int i = 0; i < count; i += 2) {
    const Two others = reinterpret_cast<const Two*>(memory.key)[i / 2];
#pragma unroll
    for (int m = 0; m < kOwn; ++m) {
      if (others.element[0] > key[m]) ++place[m];
      if (others.element[1] > key[m]) ++place[m];
    }
  }
#pragma unroll
  for (int m = 0; m < kOwn; ++m)
    if (place[m] < slots) memory.ranked[place[m]] = key[m];
  __syncwarp();
  return lane < slots ? memory.ranked[lane] : 0;
}

// The j-th highest key of a token's experts in lane j, for j < slots <= 8. `number` are the lane's numbers that experts are ranked by, -inf
// where an expert cannot be chosen or does not exist. number_E are the same where all lanes can read them; key_of(expert) is an expert's
// key by them, but 0 where it cannot be chosen. Where `needed` is false, any keys may be returned.
template <typename Layout, int G, int N, typename KeyOf> __device__ __forceinline__ uint64_t choose_candidates(
    const float (&number)[N], int experts, int lane, int slots, bool needed, const float* number_E, const KeyOf& key_of,
    FewCandidates& memory) {
  constexpr int kSets = kCandidateSets / G;
  static_assert(N >= kSets && N <= 32);
  uint32_t highest[kSets];
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const uint32_t word = __float_as_uint(number[i]);
    highest[i % kSets] = i < kSets ? word : Word<float>::higher(highest[i % kSets], word);
  }
#pragma unroll
  for (int s = 0; s < kSets; ++s) highest[s] = order_of(__uint_as_float(highest[s]));
  sort_list(highest);
  uint32_t list[8], sorted[1];
#pragma unroll
  for (int i = 0; i < 8; ++i) list[i] = i < kSets ? highest[i] : 0;
  merge_lanes<G, 8, 1, 1, kSets>(list, lane, sorted);
  const float bound = logit_of(__shfl_sync(kFullWarp, sorted[0], lane_of(slots - 1), G));

  unsigned candidates = not_below(number, bound);
  int end = __popc(candidates);  // of the places of this lane's candidates
#pragma unroll
  for (int step = 1; step < G; step *= 2) {
    const int before = __shfl_sync(kFullWarp, end, lane >= step ? lane - step : lane, G);
    end += lane >= step ? before : 0;
  }
  int at = end - __popc(candidates);
  const int count = __shfl_sync(kFullWarp, end, G - 1, G);
  const bool crowded = count > FewCandidates::kMost;
  if (!crowded) {
    // Their bound is above -inf, which all numbers of the row would not be below: they can be chosen.
    while (candidates != 0) {
      const int expert = Layout::expert(__ffs(candidates) - 1, lane);
      memory.key[at++] = Keys<float>::of(number_E[expert], expert);
      candidates &= candidates - 1;
    }
    if (lane == 0) memory.key[count] = 0;
  }
  __syncwarp();
  uint64_t chosen[1] = {rank_candidates<G>(memory, crowded ? 0 : count, lane, slots)};
  if (__any_sync(kFullWarp, crowded && needed)) {
    choose_in_rounds<Layout, G, N>(experts, lane, key_of, ~uint64_t{0}, crowded && needed ? 0 : slots, slots, lane, chosen);
  }
  return chosen[0];
}

}  // namespace
}  // namespace gbmoe
