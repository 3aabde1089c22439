// The schedule of a balanced GEMM, made on the device ahead of it by one CTA: how its tiles are cut into work items.
//
// A work item is a tile, or one split of a tile's sum. Clusters take items in order: each takes the next one when it begins the
// one before.
//
// m-grouped: all sums have one length. The tiles that are left when all clusters have had equally many (the tail) are cut into
// the number of splits that ends soonest, if there is room for partial sums. Otherwise the schedule is only a counter of tiles.
//
// k-grouped (gradients of weights): a sum is as long as its group. If whole tiles would keep some clusters busy for too long, the
// tiles that take a large part of one cluster's share of the work are split. The longest items come first, so that the last ones
// are short.

#include "balanced_schedule.cuh"

#include <climits>

#include "../operators.h"
#include "device.cuh"
#include "tile.cuh"

namespace gbmoe::hopper {
namespace {

constexpr int kMaxThreads = 1024;  // up to so many groups are ordered by length and split; more are listed as they are

// Ways to add: numbers as they are, and rows, of which there are at most P.
struct Plus {
  __device__ __forceinline__ int operator()(int a, int b) const { return a + b; }
};
struct PlusRows {
  const Arguments& args;
  __device__ __forceinline__ int operator()(int a, int b) const { return add_rows(args, a, b); }
};

template <typename Add> __device__ __forceinline__ int warp_scan(int value, Add add) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int before = __shfl_up_sync(kFullWarp, value, step);
    if (threadIdx.x % 32 >= step) value = add(value, before);
  }
  return value;
}
__device__ __forceinline__ int warp_sum(int value) { return __shfl_sync(kFullWarp, warp_scan(value, Plus{}), 31); }
__device__ __forceinline__ int warp_max(int value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kFullWarp, value, step));
  return value;
}

// Gives lane l of every warp the value of warp l, or 0 if there is no such warp. All threads of the CTA must call it.
__device__ __forceinline__ int of_warps(int value, int (&shared)[32]) {
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  return threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0;
}
// The sums of the values of all threads before this one, of those and its own, and of all threads.
struct Sums { int begin, end, all; };
template <typename Add> __device__ __forceinline__ Sums sum_threads(int value, int (&shared)[32], Add add) {
  const int in_warp = warp_scan(value, add), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = warp_scan(of_warps(__shfl_sync(kFullWarp, in_warp, 31), shared), add);
  const int before_warp = warp > 0 ? __shfl_sync(kFullWarp, warps, warp - 1) : 0, before_lane = __shfl_up_sync(kFullWarp, in_warp, 1);
  return {lane > 0 ? add(before_warp, before_lane) : before_warp, add(before_warp, in_warp), __shfl_sync(kFullWarp, warps, 31)};
}

// Calls `take` with the number, the first row and the rows of each of this thread's groups, none of which reaches beyond row P. All threads
// of the CTA must call it.
template <typename Take> __device__ __forceinline__ void walk_groups(const Arguments& args, Take take) {
  __shared__ int shared[2][32];
  const PlusRows add{args};
  int first = 0;
  for (int base = 0; base < args.groups; base += blockDim.x) {
    const int group = base + threadIdx.x;
    const Sums rows = sum_threads(size_of_group(args, group), shared[base / blockDim.x % 2], add);
    const int row = add(first, rows.begin);
    if (group < args.groups) take(group, row, add(first, rows.end) - row);
    first = add(first, rows.all);
  }
}

// An item too many would name no tile and end the cluster that takes it, which may then be missing for the last splits: the tiles that are
// counted must be those that there are, also where the sizes' sum is more than P.
__device__ void schedule_m_grouped(const Arguments& args, const ScheduleShape& shape) {
  __shared__ int shared[32];
  int tiles = 0;
  walk_groups(args, [&](int, int, int rows) { tiles += ceil_div(rows, shape.tile_rows) * shape.tiles_n; });
  const int all = warp_sum(of_warps(warp_sum(tiles), shared));
  if (threadIdx.x > 0) return;
  const int tail = all % shape.clusters;
  int best = 1, best_cost = shape.k_blocks;
  const int most = min(shape.most_splits, shape.k_blocks / shape.min_k_blocks);
  for (int splits = 2; splits <= most && tail > 0 && tail * splits <= shape.entries; ++splits) {
    const int cost = ceil_div(tail * splits, shape.clusters) * ceil_div(shape.k_blocks, splits) + (splits + 2) * shape.split_cost;
    if (cost < best_cost) best = splits, best_cost = cost;
  }
  *args.schedule = {0, all - (best > 1 ? tail : 0), best > 1 ? tail : 0, best};
}

// k-grouped, one thread a group.
__device__ void schedule_k_grouped(const Arguments& args, const ScheduleShape& shape) {
  __shared__ int shared[4][32], length_of[kMaxThreads];
  const int group = threadIdx.x;
  const Sums of_rows = sum_threads(size_of_group(args, group), shared[0], PlusRows{args});
  const int row = of_rows.begin, rows = of_rows.end - row, length = ceil_div(rows, kBlockK);
  const int k_blocks = warp_sum(of_warps(warp_sum(length), shared[1]));
  const int longest = warp_max(of_warps(warp_max(length), shared[2]));
  const int filled = __syncthreads_count(length > 0), tiles = shape.tiles_n * shape.tiles_m;
  const float fair = static_cast<float>(k_blocks) * tiles / shape.clusters;  // k-blocks of one cluster
  // All have ended after this many k-blocks if no tile is cut.
  const float uncut = static_cast<float>(longest) * ceil_div(filled * tiles, shape.clusters);
  // Cut into floor(length / of_split) splits, all groups together do not need more entries than there are.
  const int splits_a_cluster = shape.entries / shape.clusters;
  const float of_split = fmaxf(fair / max(splits_a_cluster, 1), shape.min_k_blocks);
  const bool cut = splits_a_cluster > 0 && uncut > shape.even * fair && length >= 2 * of_split;
  int splits = cut ? min(static_cast<int>(length / of_split), shape.most_splits) : 1;
  const int entries = splits > 1 ? splits * tiles : 0, entry = sum_threads(entries, shared[3], Plus{}).begin;
  if (entry + entries > shape.entries) splits = 1;
  const int item = ceil_div(length, splits);
  length_of[group] = item;
  __syncthreads();
  if (group >= args.groups) return;
  int place = 0;
  for (int other = 0; other < args.groups; ++other) {
    place += length_of[other] > item || (length_of[other] == item && other < group);
  }
  args.groups_by_length[place] = {args.places.of(group), row, rows, splits > 1 ? pack_split(splits, 0, entry) : 0};
}

// k-grouped, with more groups than threads.
__device__ void list_k_grouped(const Arguments& args) {
  walk_groups(args, [&](int group, int row, int rows) { args.groups_by_length[group] = {args.places.of(group), row, rows, 0}; });
}

__global__ void __launch_bounds__(kMaxThreads)
    balanced_schedule_kernel(const __grid_constant__ Arguments args, const ScheduleShape shape) {
  for (int i = threadIdx.x; i < shape.counters; i += blockDim.x) args.arrivals[i] = 0;
  if (!shape.grouped_k) return schedule_m_grouped(args, shape);
  if (threadIdx.x == 0) *args.schedule = {0, INT_MAX, 0, 1};
  if (args.groups <= static_cast<int>(blockDim.x)) schedule_k_grouped(args, shape);
  else list_k_grouped(args);
}

}  // namespace

void make_schedule(const Arguments& args, const ScheduleShape& shape, cudaStream_t stream) {
  const int threads = std::clamp(ceil_div(args.groups, 32) * 32, 256, kMaxThreads);
  balanced_schedule_kernel<<<1, threads, 0, stream>>>(args, shape);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe::hopper

namespace gbmoe {

// The bytes of a workspace, which may hold anything before it is used. `splits_per_sm`, 0 to 4: the number of tiles' partial sums
// that it has room for, for each multiprocessor; with 0 no sum is split, and clusters only take their tiles from its counter.
int64_t hopper_workspace(Tensor on, int64_t groups, int64_t splits_per_sm) {
  using namespace hopper;
  const int count = multiprocessors(on.get_device_index());
  return Workspace::head_bytes(static_cast<int>(groups), max_entries(count)) + splits_per_sm * count * Workspace::kEntryBytes;
}

GBMOE_OPERATOR(hopper_workspace, "(Tensor on, int groups, int splits_per_sm) -> int");

}  // namespace gbmoe
