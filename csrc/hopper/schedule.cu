// The schedule of a balanced product, made on the device ahead of it by one block: how its tiles are cut into items.
//
// An item is a tile, or a part of a tile's sum. Clusters take items in order, each the next when it begins with its last.
//
// Forward, all sums are of one length. What is left over after all clusters had equally many tiles, the tail, is cut into as
// many parts as end soonest, if there is room for parts; else the schedule is no more than a counter of tiles.
// Where rows are summed over (weights), the length is the group's: tiles that last longer than a good part of one cluster's share of
// all are cut into parts, and the longest items come first, so that what is left for the end is short.

#include <climits>

#include "launch.cuh"

namespace gbmoe::hopper {
namespace {

constexpr int kMostThreads = 1024;  // that many groups are ordered by length and cut, more are left as they are
constexpr int kShortest = 16;       // slices of a part, where rows are summed over
constexpr int kPartCost = 2;        // slices that leaving a part, or adding one, lasts as long as
constexpr float kEven = 1.05f;      // whole tiles that end so little later than they could are not cut

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
    const int before = __shfl_up_sync(kFull, value, step);
    if (threadIdx.x % 32 >= step) value = add(value, before);
  }
  return value;
}
__device__ __forceinline__ int warp_sum(int value) { return __shfl_sync(kFull, warp_scan(value, Plus{}), 31); }
__device__ __forceinline__ int warp_max(int value) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) value = max(value, __shfl_xor_sync(kFull, value, step));
  return value;
}

// One number of every warp, for all threads: thread l of each warp gets that of warp l. All threads of the block meet in it.
__device__ __forceinline__ int of_warps(int value, int (&shared)[32]) {
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  return threadIdx.x % 32 < blockDim.x / 32 ? shared[threadIdx.x % 32] : 0;
}
// The sums of the values of all threads before this one, of those and its own, and of all threads.
struct Sums { int begin, end, all; };
template <typename Add> __device__ __forceinline__ Sums sum_threads(int value, int (&shared)[32], Add add) {
  const int in_warp = warp_scan(value, add), lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warps = warp_scan(of_warps(__shfl_sync(kFull, in_warp, 31), shared), add);
  const int before_warp = warp > 0 ? __shfl_sync(kFull, warps, warp - 1) : 0, before_lane = __shfl_up_sync(kFull, in_warp, 1);
  return {lane > 0 ? add(before_warp, before_lane) : before_warp, add(before_warp, in_warp), __shfl_sync(kFull, warps, 31)};
}

__device__ void schedule_rows(const Arguments& args, const Shape& shape) {
  __shared__ int shared[32];
  int tiles = 0;
  for (int group = threadIdx.x; group < args.groups; group += blockDim.x) {
    tiles += divide_up(size_of_group(args, group), shape.tile_rows) * shape.tiles_n;
  }
  const int all = warp_sum(of_warps(warp_sum(tiles), shared));
  if (threadIdx.x > 0) return;
  const int tail = all % shape.clusters;
  int best = 1, best_cost = shape.slices;
  for (int parts = 2; parts <= 8 && tail > 0 && tail * parts <= shape.slots && parts * 4 <= shape.slices; ++parts) {
    const int cost = divide_up(tail * parts, shape.clusters) * divide_up(shape.slices, parts) + (parts + 2) * kPartCost;
    if (cost < best_cost) best = parts, best_cost = cost;
  }
  *args.balance = {0, all - (best > 1 ? tail : 0), best > 1 ? tail : 0, best};
}

// One thread a group.
__device__ void schedule_weights(const Arguments& args, const Shape& shape) {
  __shared__ int shared[4][32], length_of[kMostThreads];
  const int group = threadIdx.x;
  const Sums of_rows = sum_threads(size_of_group(args, group), shared[0], PlusRows{args});
  const int row = of_rows.begin, rows = of_rows.end - row, length = divide_up(rows, kTileK);
  const int slices = warp_sum(of_warps(warp_sum(length), shared[1]));
  const int longest = warp_max(of_warps(warp_max(length), shared[2]));
  const int filled = __syncthreads_count(length > 0), tiles = shape.tiles_n * shape.tiles_m;
  const float fair = static_cast<float>(slices) * tiles / shape.clusters;  // slices of one cluster
  // All have ended after this many slices if no tile is cut.
  const float uncut = static_cast<float>(longest) * divide_up(filled * tiles, shape.clusters);
  // Cut into floor(length / part) parts, all groups together do not need more slots than there are.
  const int parts_a_cluster = shape.slots / shape.clusters;
  const float part = fmaxf(fair / max(parts_a_cluster, 1), kShortest);
  const bool cut = parts_a_cluster > 0 && uncut > kEven * fair && length >= 2 * part;
  int parts = cut ? min(static_cast<int>(length / part), kMostParts) : 1;
  const int slots = parts > 1 ? parts * tiles : 0, slot = sum_threads(slots, shared[3], Plus{}).begin;
  if (slot + slots > shape.slots) parts = 1;
  const int item = divide_up(length, parts);
  length_of[group] = item;
  __syncthreads();
  if (group >= args.groups) return;
  int place = 0;
  for (int other = 0; other < args.groups; ++other) {
    place += length_of[other] > item || (length_of[other] == item && other < group);
  }
  args.by_size[place] = {group, row, rows, parts > 1 ? share_of(parts, 0, slot) : 0};
}

// More groups than threads.
__device__ void list_weights(const Arguments& args) {
  __shared__ int shared[2][32];
  const PlusRows add{args};
  int first = 0;
  for (int base = 0; base < args.groups; base += blockDim.x) {
    const int group = base + threadIdx.x;
    const Sums rows = sum_threads(size_of_group(args, group), shared[base / blockDim.x % 2], add);
    const int row = add(first, rows.begin);
    if (group < args.groups) args.by_size[group] = {group, row, add(first, rows.end) - row, 0};
    first = add(first, rows.all);
  }
}

__global__ void __launch_bounds__(kMostThreads) schedule_kernel(const Arguments args, const Shape shape) {
  for (int i = threadIdx.x; i < shape.counters; i += blockDim.x) args.arrived[i] = 0;
  if (!shape.weights) return schedule_rows(args, shape);
  if (threadIdx.x == 0) *args.balance = {0, INT_MAX, 0, 1};
  if (args.groups <= static_cast<int>(blockDim.x)) schedule_weights(args, shape);
  else list_weights(args);
}

}  // namespace

void schedule(const Arguments& args, const Shape& shape, cudaStream_t stream) {
  const int threads = std::clamp(divide_up(args.groups, 32) * 32, 256, kMostThreads);
  schedule_kernel<<<1, threads, 0, stream>>>(args, shape);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe::hopper

namespace gbmoe {

int64_t hopper_workspace(Tensor on, int64_t groups, int64_t parts) {
  using namespace hopper;
  const int count = processors(on.get_device_index());
  return Workspace::head_bytes(static_cast<int>(groups), most_slots(count)) + parts * count * Workspace::kSlotBytes;
}

}  // namespace gbmoe
