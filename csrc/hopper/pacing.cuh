// Keeps the clusters of a launch together along K.
//
// Clusters whose tiles are neighbours read the same k-blocks, and find them in the L2 cache if they do so at about the same time. Over long
// sums they drift apart, until each reads them from memory. So each counts the k-blocks that it loads, and waits where it is further ahead
// of the mean of all than Arguments::most_ahead.
//
// No cluster depends on another. One that has waited for more than about a seventh of its time ends the pacing of all, as where some do not
// run because another kernel has their multiprocessors, or where some are slower for long. So does one that has no more tiles.

#pragma once

#include "arguments.cuh"
#include "ptx.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct Pacer {
  // Every kEvery k-blocks there is a look at the mean, which is reckoned to take about as long as a k-block. Where the cluster waits there
  // is one after the other: it may wait for kFreeLooks of them, and for one more with each kEvery k-blocks.
  static constexpr int kEvery = 8, kFreeLooks = 40;
  static constexpr unsigned long long kEnded = 1ull << 40;  // more than all clusters load

  BalancedSchedule* schedule = nullptr;  // null where this thread does not pace
  long long clusters = gridDim.x / Traits::kClusterSize, own = 0;
  int most_ahead, looks_left = kFreeLooks;

  // In the one thread of a cluster that paces it, where `paces`.
  __device__ __forceinline__ Pacer(const Arguments& args, bool paces) : most_ahead(args.most_ahead) {
    if (Traits::kPaced && paces && most_ahead > 0) schedule = args.schedule;
  }

  // Before each k-block is loaded.
  __device__ __forceinline__ void step() {
    if (!Traits::kPaced || !schedule || ++own % kEvery != 0) return;
    unsigned long long all = atomicAdd(&schedule->loaded, kEvery) + kEvery;
    ++looks_left;
    while ((own - most_ahead) * clusters > static_cast<long long>(all)) {
      if (--looks_left < 0) return end();
      __nanosleep(100);
      all = load_relaxed(&schedule->loaded);
    }
  }

  // Ends the pacing of all clusters. Behind the last tile, too.
  __device__ __forceinline__ void end() {
    if (Traits::kPaced && schedule) atomicAdd(&schedule->loaded, kEnded);
    schedule = nullptr;
  }
};

}  // namespace gbmoe::hopper
