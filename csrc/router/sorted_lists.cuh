// Selection by sorted lists, for tokens owned by 2 to 16 lanes: each lane sorts its own keys by networks in registers and lists
// some of them, and lanes merge what they have into one list of P >= K keys that they share. If a lane had more of the K
// highest than it listed, which is rare, they list again with whole lists.

#pragma once

#include "keys.cuh"

namespace gbmoe {
namespace {

// Sorts a list in descending order, by Batcher's odd-even merge.
template <int L> __device__ __forceinline__ void sort_list(uint32_t (&x)[L]) {
#pragma unroll
  for (int run = 1; run < L; run *= 2) {
#pragma unroll
    for (int step = run; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < L; ++i) {
        const int from = i - step % run;
        if (from < 0 || from / step % 2 != 0 || i + step >= L || i / (2 * run) != (i + step) / (2 * run)) continue;
        const uint32_t low = min(x[i], x[i + step]);
        x[i] = max(x[i], x[i + step]);
        x[i + step] = low;
      }
    }
  }
}
// The same for a bitonic list, whose numbers fall and then rise, or rise and then fall.
template <int L> __device__ __forceinline__ void sort_bitonic(uint32_t (&list)[L]) {
#pragma unroll
  for (int step = L / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < L; ++i) {
      if (i & step) continue;
      const uint32_t low = min(list[i], list[i + step]);
      list[i] = max(list[i], list[i + step]);
      list[i + step] = low;
    }
  }
}

// The P highest of two descending lists, descending.
template <int P> __device__ __forceinline__ void merge_lists(uint32_t (&list)[P], const uint32_t (&other)[P]) {
#pragma unroll
  for (int i = 0; i < P; ++i) list[i] = max(list[i], other[P - 1 - i]);
  sort_bitonic(list);
}

// A list that lanes share is dealt out to them: of G lanes the one of rank q has places q, q + G, q + 2 G and so on. Lanes are
// ranked by Gray's code, so that the lists of two sets of lanes can be dealt out to both sets while each lane keeps half of its
// own numbers. Lanes whose ranks differ in one bit are lane_of(bit) apart (xor).
__device__ __forceinline__ int rank_of(int lane) { return lane ^ lane >> 1 ^ lane >> 2 ^ lane >> 3; }
__device__ __forceinline__ int lane_of(int rank) { return rank ^ rank >> 1; }

// One step of a sort between two lanes whose ranks differ in `bit`: of the numbers in the same place of their lists, for the
// first M places, the lane without the bit keeps the higher, and the lane with it the lower.
template <int M, int L> __device__ __forceinline__ void sort_across(uint32_t (&list)[L], int rank, int bit) {
  const bool lower = rank & bit;
#pragma unroll
  for (int i = 0; i < M; ++i) {
    const uint32_t other = __shfl_xor_sync(kFullWarp, list[i], lane_of(bit));
    list[i] = (list[i] > other) != lower ? list[i] : other;
  }
}

// The P highest numbers of a group of G lanes, merged from lists of P numbers. Each list is shared by kLanes lanes, which hold L
// numbers each, and every kSet lanes have the same list; of a lane's L numbers only the first M are other than 0. In the end
// result[r] has place r * G + rank; where there are more lanes than places, lanes whose rank is P or more have copies.
template <int G, int P, int kLanes, int kSet, int M, int L, int R>
__device__ __forceinline__ void merge_lanes(const uint32_t (&list)[L], int lane, uint32_t (&result)[R]) {
  static_assert(kLanes * L == P && M <= L);
  // The P highest of two descending lists are the higher ones of the numbers in opposite places, and they form a bitonic list.
  if constexpr (kSet == G) {
    static_assert(L == R);
#pragma unroll
    for (int r = 0; r < R; ++r) result[r] = list[r];
  } else if constexpr (L == 1) {
    uint32_t highest[1] = {max(list[0], __shfl_xor_sync(kFullWarp, list[0], kSet | kLanes / 2))};
#pragma unroll
    for (int bit = kLanes / 2; bit > 0; bit /= 2) sort_across<1>(highest, rank_of(lane % kLanes), bit);
    merge_lanes<G, P, kLanes, kSet * 2, 1>(highest, lane, result);
  } else {
    uint32_t highest[L / 2];  // of the lane's own even places and the other lane's opposite ones
#pragma unroll
    for (int i = 0; i < L / 2; ++i) {
      const int own = 2 * i, others = L - 1 - own;
      highest[i] = own < M ? list[own] : 0;
      if (others < M) highest[i] = max(highest[i], __shfl_xor_sync(kFullWarp, list[others], lane_of(kLanes)));
    }
    sort_bitonic(highest);
    constexpr int kUsed = M < L / 2 ? M : L / 2;
#pragma unroll
    for (int bit = kLanes; bit > 0; bit /= 2) sort_across<kUsed>(highest, rank_of(lane % (2 * kLanes)), bit);
    merge_lanes<G, P, kLanes * 2, kSet * 2, kUsed>(highest, lane, result);
  }
}

// The Q highest of a lane's own N brief keys, descending, by sorting networks over runs of Q.
template <typename T, typename Layout, int N, int Q, int W>
__device__ __forceinline__ void list_own(const uint32_t (&order)[W], uint32_t complement, uint32_t (&list)[Q]) {
#pragma unroll
  for (int first = 0; first < N; first += Q) {
    uint32_t run[Q];
#pragma unroll
    for (int i = 0; i < Q; ++i) {
      const int number = first + i;
      run[i] = number < N ? Keys<T>::brief(order[number / Layout::kNumbers], number % Layout::kNumbers,
                                           complement ^ Layout::expert(number, 0)) : 0;
    }
    sort_list(run);
    if (first > 0) {
      merge_lists(list, run);
    } else {
#pragma unroll
      for (int i = 0; i < Q; ++i) list[i] = run[i];
    }
  }
}

// How many of its own keys a lane lists where `places` are shared by `lanes`: a multiple of its share, so that it rarely has more
// of the highest keys than it lists (the larger the share, the less that number varies). With 4 or fewer places nothing is saved.
constexpr int listed(int lanes, int places) {
  const int share = places / lanes, enough = share >= 8 ? 2 * share : share > 0 ? 4 * share : 4;
  return places < 8 || enough > places ? places : enough;
}

// The P highest brief keys of a group, shared by its lanes; the first `slots` of them matter. A lane lists Q of its own keys at
// first.
template <typename T, typename Layout, int G, int N, int P, int Q, int W, int R>
__device__ __forceinline__ void list_highest(
    const uint32_t (&order)[W], uint32_t complement, int lane, int slots, uint32_t (&result)[R]) {
  uint32_t own[Q], list[P];
  list_own<T, Layout, N>(order, complement, own);
#pragma unroll
  for (int i = 0; i < P; ++i) list[i] = i < Q ? own[i] : 0;
  merge_lanes<G, P, 1, 1, (N < Q ? N : Q)>(list, lane, result);
  if constexpr (Q < P && Q < N) {
    // A lane whose last listed key is above the last one that matters may have more that matter: if so, the group lists again,
    // with lists that are long enough for any case.
    uint32_t last = UINT_MAX;
#pragma unroll
    for (int r = 0; r < R; ++r) if (r * G + rank_of(lane) < slots) last = min(last, result[r]);
    last = ~group_max<G>(~last);
    bool more = own[Q - 1] > last;
    // Where 16 lanes share 16 places, in three of ten warps some lane may have more than the four that it listed, and in one of
    // 18 a lane really has: there it pays to count. Elsewhere this is rarer, and counting would take registers.
    if (G == 16 && P == 16 && __any_sync(kFullWarp, more)) {
      int above = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        above += Keys<T>::brief(order[i / Layout::kNumbers], i % Layout::kNumbers, complement ^ Layout::expert(i, 0)) > last;
      }
      more = above > Q;
    }
    if (__any_sync(kFullWarp, more)) list_highest<T, Layout, G, N, P, P>(order, complement, lane, slots, result);
  }
}

// For the slots from `from` on, the highest of a group's keys below `top`, one after the other: each round takes a maximum over
// all keys, which are read again. It is rare, and not unrolled. chosen[r] of a lane has slot r * G + rank.
template <typename Layout, int G, int N, typename KeyOf, typename Key, int R>
__device__ __forceinline__ void choose_in_rounds(
    int experts, int lane, const KeyOf& key_of, Key top, int from, int slots, int rank, Key (&chosen)[R]) {
#pragma unroll 1
  for (int slot = from; __any_sync(kFullWarp, slot < slots); ++slot) {
    Key next = 0;
#pragma unroll 2
    for (int i = 0; i < N; ++i) {
      const int expert = Layout::expert(i, lane);
      const Key key = expert < experts ? key_of(expert) : 0;
      if (key < top && key > next) next = key;
    }
    top = group_max<G>(next);
#pragma unroll
    for (int r = 0; r < R; ++r) if (slot == r * G + rank && slot < slots) chosen[r] = top;
  }
}

// The places of a group's P keys in descending order; keys of 0, which stand for none, get some place after all others.
template <int G, int P, typename Key, int R> __device__ __forceinline__ void find_places(const Key (&key)[R], int (&place)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) place[r] = 0;
#pragma unroll
  for (int of = 0; of < R; ++of) {
#pragma unroll 1
    for (int lane = 0; lane < G && of * G + lane < P; ++lane) {
      const Key other = __shfl_sync(kFullWarp, key[of], lane, G);
#pragma unroll
      for (int r = 0; r < R; ++r) place[r] += other > key[r];
    }
  }
}
// The same where keys are in order already except for neighbours that are alike; place[r] is r * G + rank at first.
template <int G, int P, int R>
__device__ __forceinline__ void exchange_neighbours(const uint64_t (&key)[R], int rank, int (&place)[R]) {
  uint64_t next[R + 1], previous[R + 1];  // next[r] is key[r] of rank + 1, previous[r + 1] is key[r] of rank - 1
  next[R] = previous[0] = 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    next[r] = __shfl_sync(kFullWarp, key[r], lane_of((rank + 1) % G), G);
    previous[r + 1] = __shfl_sync(kFullWarp, key[r], lane_of((rank + G - 1) % G), G);
  }
  bool crowded = false;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint64_t after = rank == G - 1 ? next[r + 1] : next[r], before = rank == 0 ? previous[r] : previous[r + 1];
    const bool like_next = Keys<float>::alike(key[r], after), like_previous = Keys<float>::alike(key[r], before);
    const bool below_next = like_next && after > key[r], above_previous = like_previous && key[r] > before;
    crowded |= like_next && like_previous && (below_next || above_previous);
    place[r] += below_next - above_previous;
  }
  if (__any_sync(kFullWarp, crowded)) find_places<G, P>(key, place);
}

// The keys of the `slots` highest of a group's numbers, whose orders the lanes hold: chosen[r] has slot[r], which is r * G + rank
// when this is called, and may then be exchanged with a neighbour's. key_of(expert) is an expert's key from where all lanes can
// read it. kListed: how many of its own keys a lane lists at first.
template <typename T, typename Layout, int G, int N, int kList, int kListed, int W, typename KeyOf, typename Key, int R>
__device__ __forceinline__ void choose_listed(
    const uint32_t (&order)[W], int experts, int lane, int slots, const KeyOf& key_of, Key (&chosen)[R], int (&slot)[R]) {
  const int rank = rank_of(lane);
  const uint32_t complement = Keys<T>::complement(Layout::expert(0, lane));
  uint32_t brief[R];
  list_highest<T, Layout, G, N, kList, kListed>(order, complement, lane, slots, brief);
  if constexpr (Keys<T>::kBriefIsExact) {
#pragma unroll
    for (int r = 0; r < R; ++r) chosen[r] = brief[r];
  } else {
#pragma unroll
    for (int r = 0; r < R; ++r) chosen[r] = slot[r] < slots ? key_of(Keys<T>::expert(brief[r])) : 0;
    // Among logits whose first 22 bits are alike, brief keys choose the lowest experts, not the highest logits. So it is
    // checked whether any logit that was not chosen is above the lowest one that was. Among logits equal to the lowest the
    // right ones were chosen, because their brief keys differ in the experts only.
    uint32_t lowest = UINT_MAX;
#pragma unroll
    for (int r = 0; r < R; ++r)
      if (slot[r] < slots) lowest = min(lowest, static_cast<uint32_t>(chosen[r] >> 32));
    lowest = ~group_max<G>(~lowest);
    int missed = 0;
#pragma unroll
    for (int w = 0; w < W; ++w) missed += order[w] > lowest;
#pragma unroll
    for (int r = 0; r < R; ++r) missed -= static_cast<uint32_t>(chosen[r] >> 32) > lowest;
    if (__any_sync(kFullWarp, group_sum<G>(missed) > 0)) {
      const Key above = Keys<T>::above(lowest);
      int certain = 0;
#pragma unroll
      for (int r = 0; r < R; ++r) certain += chosen[r] > above;
      choose_in_rounds<Layout, G, N>(experts, lane, key_of, above, group_sum<G>(certain), slots, rank, chosen);
    }
    exchange_neighbours<G, kList>(chosen, rank, slot);
  }
}

}  // namespace
}  // namespace gbmoe
