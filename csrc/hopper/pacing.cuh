// Keeps the clusters of a launch together along K.
//
// Clusters whose tiles are neighbours read the same k-blocks, and find them in the L2 cache if they do so at about the same time. Over long
// sums they drift apart, until each reads them from memory. So each counts the k-blocks that it loads, and waits where it is further ahead
// of the mean of all than Arguments::most_ahead, as after a tile of few rows, which takes half of the others' time.
//
// No cluster depends on another. One that is far behind, because its group has few rows or its multiprocessor other work, counts from then
// on as if it were nearer, so that a few of them do not hold up the others; one that has used up its waiting counts as if it were as far
// ahead as it may be. None waits before all have begun; if some do not run in time, because another kernel has their multiprocessors, the
// pacing of all ends, as it does with the first cluster that has no more tiles.

#pragma once

#include "arguments.cuh"
#include "ptx.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct Pacer {
  // Every kEvery k-blocks there is a look at the mean, which is reckoned to take about as long as a k-block. Where the cluster waits there
  // is one after the other: it may wait for kFreeLooks of them, and for at most one more with each kEvery k-blocks; when these are used up,
  // it goes on and looks once each time.
  static constexpr int kEvery = 8, kFreeLooks = 256;
  static constexpr int kMostBehind = 32;  // k-blocks
  static constexpr int kStarted = 64;  // k-blocks of a cluster's own after which all others should have begun
  // The counter that the clusters share: the sum of what they count as theirs, how many have ended the pacing, how many have begun.
  static constexpr unsigned long long kEnded = 1ull << 40, kBegun = 1ull << 52;

  BalancedSchedule* schedule = nullptr;  // null where this thread does not pace
  int clusters = gridDim.x / Traits::kClusterSize;
  long long own = 0;  // k-blocks that count as this cluster's
  int most_ahead, looks_left = kFreeLooks, loaded = 0;

  // In the one thread of a cluster that paces it, where `paces`.
  __device__ __forceinline__ Pacer(const Arguments& args, bool paces) : most_ahead(args.most_ahead) {
    if (!Traits::kPaced || !paces || most_ahead <= 0) return;
    schedule = args.schedule;
    atomicAdd(&schedule->paced, kBegun);
  }

  // Before each k-block is loaded.
  __device__ __forceinline__ void step() {
    if (!Traits::kPaced || !schedule || ++loaded % kEvery != 0) return;
    own += kEvery;
    unsigned long long seen = atomicAdd(&schedule->paced, kEvery) + kEvery;
    ++looks_left;
    for (;;) {
      const bool ended = seen >> 40 & 0xfff, begun = static_cast<int>(seen >> 52) == clusters;
      if (ended || (!begun && loaded >= kStarted)) return end();
      if (!begun) return;
      const long long ahead = own * clusters - static_cast<long long>(seen & (kEnded - 1));  // in k-blocks of all clusters
      if (ahead < -kMostBehind * clusters) return move(-ahead / clusters - kMostBehind);
      if (ahead <= most_ahead * clusters) return;
      if (--looks_left < 0) return move(most_ahead - ahead / clusters);
      __nanosleep(100);
      seen = load_relaxed(&schedule->paced);
    }
  }

  // Ends the pacing of all clusters. After the last tile, too.
  __device__ __forceinline__ void end() {
    if (Traits::kPaced && schedule) atomicAdd(&schedule->paced, kEnded);
    schedule = nullptr;
  }

 private:
  // Counts this cluster as if it had loaded that many k-blocks more, or fewer.
  __device__ __forceinline__ void move(long long k_blocks) {
    own += k_blocks;
    atomicAdd(&schedule->paced, static_cast<unsigned long long>(k_blocks));
  }
};

}  // namespace gbmoe::hopper
