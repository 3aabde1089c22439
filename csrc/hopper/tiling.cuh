// How a GEMM is divided among CTAs, as gbmoe/tuning/hopper_tiles.py chose it. Nothing is chosen here; launches only check that
// there is an instance for the choice.

#pragma once

#include <vector>

#include "../common.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

// tuning.hopper_tiles.GemmConfig.tiling, field by field.
struct Tiling {
  int64_t tile_n;                  // kSquareTileN is made in ping-pong
  int64_t cluster_m, cluster_n;    // CTAs side by side: along N they share a's k-blocks, along M those of b
  int64_t panel;                   // tiles along M that are walked before the next along N, at most
  // A group's tiles are divided evenly among its panels, rounded up; otherwise all panels but the last have the most tiles.
  bool even_panels;
  // k-blocks that a cluster may be ahead of the mean of all (pacing.cuh); 0, or without a workspace: any number.
  int64_t most_ahead;

  bool is(int n, int of_m, int of_n) const { return tile_n == n && cluster_m == of_m && cluster_n == of_n; }
  // Ends a launch that has no instance for this.
  void refuse(const char* name) const {
    STD_TORCH_CHECK(false, name, ": no kernel has tiles of ", tile_n, " columns in clusters of ", cluster_m, " x ", cluster_n);
  }
};

inline Tiling tiling_of(const std::vector<int64_t>& fields) {
  STD_TORCH_CHECK(fields.size() == 6, "tiling: expected the 6 fields of a Tiling, got ", fields.size());
  return {fields[0], fields[1], fields[2], fields[3], fields[4] != 0, fields[5]};
}

// When sums are split, where there is room for partial sums; tuning.hopper_tiles.SplitConfig.splitting, field by field.
struct Splitting {
  int64_t min_k_blocks = 1;  // of a split
  int64_t cost = 0;          // of leaving a partial sum, or adding one, in k-blocks; m-grouped
  int64_t most = 1;          // splits of one sum
  // k-grouped: no sum is split if whole tiles take at most this multiple of the time of a perfectly even schedule.
  double even = 1.0;
};

inline Splitting splitting_of(const std::vector<double>& fields) {
  STD_TORCH_CHECK(fields.size() == 4, "splitting: expected the 4 fields of a Splitting, got ", fields.size());
  return {static_cast<int64_t>(fields[0]), static_cast<int64_t>(fields[1]), static_cast<int64_t>(fields[2]), fields[3]};
}

}  // namespace gbmoe::hopper
