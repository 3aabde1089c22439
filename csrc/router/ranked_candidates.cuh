// Selection by ranking candidates, for tokens owned by a whole warp: a lower bound of the K-th highest logit leaves few
// candidates (about 10 of 1024 logits for K = 8, 43 for K = 32), and each candidate finds its place among the others.

#pragma once

#include "keys.cuh"

namespace gbmoe {
namespace {

// ------------------------------------------------------------------------------------ bitonic networks over a warp's lanes

// Two 16-bit numbers in one register; each half is sorted by itself.
struct Pair { uint32_t bits; };

template <typename X> __device__ __forceinline__ X higher(X a, X b) { return max(a, b); }
template <typename X> __device__ __forceinline__ X lower(X a, X b) { return min(a, b); }
template <> __device__ __forceinline__ Pair higher(Pair a, Pair b) { return {__vmaxu2(a.bits, b.bits)}; }
template <> __device__ __forceinline__ Pair lower(Pair a, Pair b) { return {__vminu2(a.bits, b.bits)}; }
template <typename X> __device__ __forceinline__ X across(X x, int step) { return __shfl_xor_sync(kFullWarp, x, step); }
template <> __device__ __forceinline__ Pair across(Pair x, int step) { return {__shfl_xor_sync(kFullWarp, x.bits, step)}; }

// The mask of the lanes whose number lacks `bit`, which may lie beyond the five bits that lanes have.
__device__ __forceinline__ constexpr unsigned lanes_without(int bit) {
  return bit < 32 ? kFullWarp / ((1u << bit) + 1) : kFullWarp;
}

// Sorts each run of `run` lanes, which holds a bitonic sequence: descending where the lane lacks the bit `run`, else ascending.
template <typename X> __device__ __forceinline__ void merge_runs(X& x, int run, unsigned lane_bit) {
#pragma unroll
  for (int step = run / 2; step > 0; step /= 2) {
    const X other = across(x, step);
    const bool takes_lower = (lane_bit & (lanes_without(step) ^ lanes_without(run))) != 0;
    x = takes_lower ? lower(x, other) : higher(x, other);
  }
}
template <typename X> __device__ __forceinline__ void sort_lanes(X& x, unsigned lane_bit) {
#pragma unroll
  for (int run = 2; run <= 32; run *= 2) merge_runs(x, run, lane_bit);
}

// -------------------------------------------------------------------------------------------------------------- candidates

// The highest of a warp's keys, in order. Keys, which are all different, wait in shared memory; each finds its place by
// counting those above it. When the shared memory is full, only the K highest stay, and a key that enters then must be higher
// than the last of these.
template <typename Key> class Ranking {
 public:
  static constexpr int kMost = 128;
  struct Memory {  // of one warp
    alignas(16) Key waiting[kMost];
    Key ranked[32];
  };

  __device__ __forceinline__ Ranking(Memory& memory, int lane, int slots) : memory_(memory), lane_(lane), slots_(slots) {}

  // One key of every lane, 0 for none.
  __device__ __forceinline__ void enter(Key key) {
    const unsigned entering = __ballot_sync(kFullWarp, key > lowest_);
    if (key > lowest_) memory_.waiting[count_ + __popc(entering & ((1u << lane_) - 1))] = key;
    count_ += __popc(entering);
    if (count_ <= kMost - 32) return;
    const Key kept = ranked();
    lowest_ = __shfl_sync(kFullWarp, kept, slots_ - 1);
    if (lane_ < slots_) memory_.waiting[lane_] = kept;
    count_ = slots_;
  }

  // The j-th highest in lane j, for j < slots; at least as many have entered.
  __device__ __forceinline__ Key ranked() {
    if (lane_ < kPerRead && count_ + lane_ < kMost) memory_.waiting[count_ + lane_] = 0;  // fills up the last vectorised read
    __syncwarp();
    if (count_ <= 32) place<1>();
    else if (count_ <= 64) place<2>();
    else place<4>();
    __syncwarp();
    return memory_.ranked[lane_];
  }

 private:
  static constexpr int kPerRead = 16 / sizeof(Key);
  using Read = Vector<Key, kPerRead>;

  // Each lane places M keys.
  template <int M> __device__ __forceinline__ void place() {
    Key key[M];
    int rank[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      key[m] = memory_.waiting[m * 32 + lane_];
      rank[m] = m * 32 + lane_ < count_ ? 0 : slots_;
    }
    constexpr int kUnrolled = M == 1 ? 4 : 1;  // few wait, nearly always
#pragma unroll kUnrolled
    for (int i = 0; i < count_; i += kPerRead) {
      const Read others = reinterpret_cast<const Read*>(memory_.waiting)[i / kPerRead];
#pragma unroll
      for (int k = 0; k < kPerRead; ++k) {
#pragma unroll
        for (int m = 0; m < M; ++m) rank[m] += others.element[k] > key[m];
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) if (rank[m] < slots_) memory_.ranked[rank[m]] = key[m];
  }

  Memory& memory_;
  int lane_, slots_, count_ = 0;
  Key lowest_ = 0;  // the lowest of the K highest, once memory has been full
};

// A lower bound of the K-th highest logit of a warp: at least K logits are not below it. NaN where all of them may have to be
// considered. The K-th highest of the maxima of 64 disjoint sets has that property, and so has the next lower number of 16 bits,
// two of which are sorted in one register.
__device__ __forceinline__ float lower_bound(const float (&best)[2], int slots, unsigned lane_bit) {
  // With one half complemented, a descending sort leaves that half ascending, so that both halves together are bitonic.
  Pair pair{order_of(best[0]) >> 16 | (~order_of(best[1]) & 0xffff0000u)};
  sort_lanes(pair, lane_bit);
  uint32_t high = max(pair.bits & 0xffffu, ~pair.bits >> 16);
  merge_runs(high, 32, lane_bit);
  return logit_of(__shfl_sync(kFullWarp, high, slots - 1) << 16);
}

// Which of a lane's numbers may be among the K highest of the warp, one bit each: of a pair in word w, bits w and 16 + w.
template <typename T, int W> __device__ __forceinline__ unsigned find_candidates(
    const uint32_t (&word)[W], const float (&best)[2], int slots, unsigned lane_bit) {
  const uint32_t bound = Word<T>::floor(lower_bound(best, slots, lane_bit));
  unsigned candidates = 0;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    candidates |= Word<T>::not_below(word[w], bound) & (Word<T>::kNumbers == 2 ? 0x10001u : 1u) << w;
  }
  return candidates;
}

}  // namespace
}  // namespace gbmoe
