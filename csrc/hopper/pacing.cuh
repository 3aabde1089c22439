// Keeps the clusters of a launch together along K.
//
// Clusters whose tiles are neighbours read the same k-blocks, and find them in the L2 cache if they do so at about the same time. Over long
// sums they drift apart, until each reads them from memory. So each counts the k-blocks that it loads, and waits where it is further ahead
// of the mean of all than Arguments::most_ahead.
//
// No cluster depends on another: it waits for a short time only, and no more after it has waited in vain, as where some do not run because
// another kernel has their multiprocessors. Where one cluster has ended, no other waits.

#pragma once

#include "arguments.cuh"
#include "ptx.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct Pacer {
  static constexpr int kEvery = 8;  // k-blocks from one look at the mean to the next
  static constexpr int kMostPolls = 40;  // some 30 us
  static constexpr unsigned long long kEnded = 1ull << 40;  // more than all clusters load

  BalancedSchedule* schedule = nullptr;  // null where this thread does not pace
  long long clusters = gridDim.x / Traits::kClusterSize, own = 0;
  int most_ahead;

  // In the one thread of a cluster that paces it, where `paces`.
  __device__ __forceinline__ Pacer(const Arguments& args, bool paces) : most_ahead(args.most_ahead) {
    if (Traits::kPaced && paces && most_ahead > 0) schedule = args.schedule;
  }

  // Before each k-block is loaded.
  __device__ __forceinline__ void step() {
    if (!Traits::kPaced || !schedule || ++own % kEvery != 0) return;
    unsigned long long all = atomicAdd(&schedule->loaded, kEvery) + kEvery;
    for (int polls = 0; (own - most_ahead) * clusters > static_cast<long long>(all); ++polls) {
      if (polls == kMostPolls) {
        schedule = nullptr;
        return;
      }
      __nanosleep(100);
      all = load_relaxed(&schedule->loaded);
    }
  }

  // Behind the last tile.
  __device__ __forceinline__ void end() {
    if (Traits::kPaced && schedule) atomicAdd(&schedule->loaded, kEnded);
  }
};

}  // namespace gbmoe::hopper
