// The workspace of a balanced GEMM, and the launch that makes its schedule ahead of it.

#pragma once

#include <algorithm>

#include "arguments.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

// The schedule, then as many entries for partial sums as fit after it.
struct Workspace {
  BalancedSchedule* schedule;
  int* arrivals;
  ScheduledGroup* groups_by_length;
  float4* partial_sums;
  int entries;  // of one CTA: each holds the partial sum of a tile that its consumers have

  static constexpr int64_t kEntryBytes = kTileM * kWideTileN * sizeof(float), kHead = 256;
  // Where the partial sums begin; there are as many counters of arrivals as there could be entries.
  static int64_t head_bytes(int groups, int max_entries) {
    const int64_t bytes = kHead + max_entries * kConsumerWarps * int64_t{4} + groups * static_cast<int64_t>(sizeof(ScheduledGroup));
    return ceil_div(bytes, kHead) * kHead;
  }
  Workspace(const Tensor& bytes, int groups, int max_entries) {
    char* begin = static_cast<char*>(bytes.data_ptr());
    const int64_t head = head_bytes(groups, max_entries);
    STD_TORCH_CHECK(bytes.numel() >= head, "hopper: expected a workspace of at least ", head, " bytes, got ", bytes.numel());
    schedule = reinterpret_cast<BalancedSchedule*>(begin);
    arrivals = reinterpret_cast<int*>(begin + kHead);
    groups_by_length = reinterpret_cast<ScheduledGroup*>(begin + kHead + max_entries * kConsumerWarps * int64_t{4});
    partial_sums = reinterpret_cast<float4*>(begin + head);
    entries = static_cast<int>(std::min<int64_t>((bytes.numel() - head) / kEntryBytes, max_entries));
  }
};
// The most entries that a schedule uses: four for every multiprocessor.
inline int max_entries(int multiprocessors) { return 4 * multiprocessors; }

// What a schedule is made for.
struct ScheduleShape {
  bool grouped_k;
  int tiles_n, tiles_m;   // tiles of clusters along N and, k-grouped only, along M
  int tile_rows;          // rows of a cluster's tile; m-grouped only
  int k_blocks;           // k-blocks of a tile's sum; m-grouped only
  int clusters, entries;  // clusters of the whole device; the workspace's entries for partial sums of a cluster's tile
  int counters;           // the counters of arrivals, which the schedule's kernel clears
  int min_k_blocks, split_cost, most_splits;  // as in Splitting
  float even;
};
void make_schedule(const Arguments& args, const ScheduleShape& shape, cudaStream_t stream);

}  // namespace gbmoe::hopper
