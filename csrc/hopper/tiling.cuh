// How a GEMM is divided among CTAs, as gbmoe/tuning/grouped_gemm.py chose it: nothing is chosen here, only that there is an instance
// for it is seen to at the launches.

#pragma once

#include "../common.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

// The fields of tuning.GemmConfig, under its names.
struct Tiling {
  int64_t tile_n;                  // kSquareTileN is made in ping-pong
  int64_t cluster_m, cluster_n;    // CTAs side by side: along N they share a's k-blocks, along M those of b
  int64_t panel;                   // tiles along M that are walked before the next along N, at most
  bool even_panels;                // a group's panels differ by one tile at most

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
  double even = 1.0;         // k-grouped: nothing is split where whole tiles take at most so many times what a perfectly even schedule does
};

}  // namespace gbmoe::hopper
