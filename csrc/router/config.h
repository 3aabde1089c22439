// How one call of the router is laid out over lanes: tuning.router_kernels.RouterConfig.

#pragma once

#include <cstdint>

namespace gbmoe {

// What the router's kernels serve: brief keys hold experts below 1024, and a warp has a lane for each slot.
constexpr int kMaxRouterExperts = 1024, kMaxRouterSlots = 32;

// One of the kernels, under the names of tuning.router_kernels.RouterConfig.
struct RouterConfig {
  int64_t lanes;             // per token
  int64_t numbers_per_lane;
  int64_t longest_vector;    // 8 in kernels for bfloat16, 4 in those for any type, or 1 for no vectors
  int64_t variant;           // forward: the list's length, or 0 for ranked candidates; backward: the most slots per lane, or 0 for any function
};

}  // namespace gbmoe
