// How a GEMM is divided among CTAs, as gbmoe/tuning/hopper_tiles.py chose it. Nothing is chosen here; launches only check that
// there is an instance for the choice.

#pragma once

#include "../common.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

// The fields of tuning.GemmConfig, under its names.
struct Tiling {
  int64_t tile_n;                  // kSquareTileN is made in ping-pong
  int64_t cluster_m, cluster_n;    // CTAs side by side: along N they share a's k-blocks, along M those of b
  int64_t panel;                   // tiles along M that are walked before the next along N, at most
  // A group's tiles are divided evenly among its panels, rounded up; otherwise all panels but the last have the most tiles.
  bool even_panels;
  // k-blocks that a cluster may be ahead of the mean of all (pacing.cuh); 0, or without a workspace: any number.
  int64_t most_ahead = 0;

  bool is(int n, int of_m, int of_n) const { return tile_n == n && cluster_m == of_m && cluster_n == of_n; }
  // Ends a launch that has no instance for this.
  void refuse(const char* name) const {
    STD_TORCH_CHECK(false, name, ": no kernel has tiles of ", tile_n, " columns in clusters of ", cluster_m, " x ", cluster_n);
  }
};

// When sums are split, where there is room for partial sums; the fields of tuning.SplitConfig, under its names.
struct Splitting {
  int64_t min_k_blocks = 1;  // of a split
  int64_t cost = 0;          // of leaving a partial sum, or adding one, in k-blocks; m-grouped
  int64_t most = 1;          // splits of one sum
  // k-grouped: no sum is split if whole tiles take at most this multiple of the time of a perfectly even schedule.
  double even = 1.0;
};

}  // namespace gbmoe::hopper
