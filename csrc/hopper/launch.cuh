// Launches an instance of the grouped GEMM: its arguments, its schedule and its cluster.
//
// The operators of hopper/ need compute capability 9.0, bf16 or fp16, row lengths that are multiples of 8, and int32 or int64 sizes on the
// device. `tiling` is a GemmConfig.tiling, `splitting` a SplitConfig.splitting (tiling.cuh).

#pragma once

#include "../operators.h"
#include "../places_of.h"
#include "balanced_schedule.cuh"
#include "device.cuh"
#include "grouped_gemm.cuh"
#include "instances.cuh"
#include "tensor_map.cuh"
#include "tiling.cuh"

namespace gbmoe::hopper {

inline Arguments arguments(const std::optional<Tensor>& sizes, int64_t rows, int64_t columns, const Tiling& tiling) {
  Arguments args{};
  args.sizes = sizes ? sizes->data_ptr() : nullptr;
  args.sizes_are_int64 = sizes && sizes->scalar_type() == ScalarType::Long;
  args.groups = sizes ? static_cast<int>(sizes->numel()) : 1;
  args.rows = static_cast<int>(rows);
  args.size_n = args.tiled_n = static_cast<int>(columns);
  args.second_n = args.third_k_block = INT_MAX;
  args.operand_pairs = 1;
  args.panel_tiles = static_cast<int>(tiling.panel);
  args.even_panels = tiling.even_panels;
  args.most_ahead = static_cast<int>(tiling.most_ahead);
  return args;
}

// a's rows are gathered from `tokens` [T, width] by slot, in pairs of CTAs along N line by line.
inline void gather_from(
    TensorMaps& maps, Arguments& args, const Tensor& tokens, const Tensor& slot_of_row, int64_t top_k, const Tiling& tiling) {
  STD_TORCH_CHECK(tokens.numel() < int64_t{1} << 35, "hopper: expected less than 64 GiB to gather from, got ", tokens.numel(),
                  " elements");
  if (tiling.cluster_n == 2) maps.a[0] = line_map(tokens);
  args.tokens = tokens.data_ptr();
  args.slot_of_row = static_cast<const int*>(slot_of_row.data_ptr());
  args.slots = count_of_slots(tokens.size(0) * top_k);
  args.token_elements = static_cast<int>(tokens.size(1));
  // With 2^(shift-1) < top_k <= 2^shift this is exact for every slot below 2^31.
  while (int64_t{1} << args.top_k_shift < top_k) ++args.top_k_shift;
  args.top_k_multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + args.top_k_shift)) + top_k - 1) / top_k);
}

// The map of a, m-grouped; two CTAs side by side along N load half of a tile's k-block each.
inline CUtensorMap map_of_a(const Tensor& a, const Tiling& tiling) {
  return tensor_map(a, tiling.cluster_n == 2 ? kTileM / 2 : kTileM);
}

// Further pairs of operands, whose products are added to the first one's before the sum is rounded: a [P,K2] and b, [E,N,K2] where `k` is
// 2, or [E,K2,N] where it is 1, contiguous along N where the first b is. K2 is a length of its own: TMA fills what lies beyond it with
// zeros. `number` is 2 or 3, of arguments a2 and b2, or a3 and b3.
struct FurtherPairs {
  const char* name;
  int k;
  bool along_n;
  int64_t columns;
  const Tiling& tiling;

  // Takes a, and its k-blocks after those that args has.
  void add_a(TensorMaps& maps, Arguments& args, const Tensor& a, int number) const {
    STD_TORCH_CHECK(
        a.dim() == 2 && a.size(0) == args.rows, name, ": expected a", number, " with ", args.rows, " rows, got ", a.size(0));
    if (args.sum_k_blocks == 0) args.sum_k_blocks = args.k_blocks;
    if (number == 3) args.third_k_block = args.sum_k_blocks;
    args.sum_k_blocks += ceil_div(static_cast<int>(a.size(1)), kBlockK);
    args.operand_pairs = number;
    maps.a[number - 1] = map_of_a(a, tiling);
  }

  // The map of `b`, of which errors say `argument`. `places`: of a matrix of a list; of a stack null.
  CUtensorMap map_of(const Arguments& args, const Tensor& a, const Tensor& b, const char* argument, const Places* places) const {
    const bool fits = b.dim() == 3 && (places || b.size(0) == args.groups) && b.size(k) == a.size(1) && b.size(3 - k) == columns;
    STD_TORCH_CHECK(
        fits, name, ": expected ", argument, " with ", args.groups, " groups, ", columns, " columns and an inner dimension of ",
        a.size(1), ", got [", b.size(0), ",", b.size(1), ",", b.size(b.dim() - 1), "]");
    STD_TORCH_CHECK(
        b.stride(along_n ? 3 - k : k) == 1, name, ": expected ", argument, " contiguous along ", along_n ? "N" : "K",
        ", as b is");
    const int box = along_n ? kBoxContiguousMN : box_of_b(static_cast<int>(tiling.tile_n));
    return tensor_map(b, box, kLineBytes, kTwoLines, along_n == (k == 2), places);
  }

  // A table holds b2 as well where it is a matrix of a list, as b is. A stack is no part of it.
  void add_second(TensorMaps& maps, Arguments& args, const std::optional<Tensor>& a2, const std::optional<Tensor>& b2) const {
    STD_TORCH_CHECK(a2.has_value() == b2.has_value(), name, ": expected a2 and b2, or neither");
    if (!a2) return;
    add_a(maps, args, *a2, 2);
    const bool of_table = args.places.count > 0 && args.groups > 1 && b2->dim() == 3 && b2->size(0) == 1;
    if (!of_table) args.places.second = kStack;
    maps.b[1] = map_of(args, *a2, *b2, "b2", of_table ? &args.places : nullptr);
  }

  // After add_second; b3 is a stack. For instances with kThreePairs.
  void add_third(TensorMaps& maps, Arguments& args, const std::optional<Tensor>& a3, const std::optional<Tensor>& b3) const {
    STD_TORCH_CHECK(a3.has_value() == b3.has_value(), name, ": expected a3 and b3, or neither");
    if (!a3) return;
    STD_TORCH_CHECK(args.operand_pairs == 2, name, ": expected a2 and b2 where there are a3 and b3");
    add_a(maps, args, *a3, 3);
    maps.b[2] = map_of(args, *a3, *b3, "b3", nullptr);
  }

  // Of kGlu, where h's sums and g's have a b each, both stacks. For instances with kGluOfTwoPairs.
  void add_second_of_glu(
      TensorMaps& maps, Arguments& args, const std::optional<Tensor>& a2, const std::optional<Tensor>& b2,
      const std::optional<Tensor>& v2) const {
    STD_TORCH_CHECK(
        a2.has_value() == b2.has_value() && a2.has_value() == v2.has_value(), name, ": expected a2, b2 and v2, or none of them");
    if (!a2) return;
    add_a(maps, args, *a2, 2);
    maps.b[2] = map_of(args, *a2, *b2, "b2", nullptr);
    maps.b[3] = map_of(args, *a2, *v2, "v2", nullptr);
  }
};

// Makes the GEMM's balanced schedule in this workspace, ahead of the launch.
template <typename Traits>
void balance(Arguments& args, const Tensor& bytes, const Splitting& splitting, int ctas, cudaStream_t stream) {
  const Workspace workspace(bytes, args.groups, max_entries(ctas));
  args.schedule = workspace.schedule;
  args.groups_by_length = workspace.groups_by_length;
  args.arrivals = workspace.arrivals;
  args.partial_sums = workspace.partial_sums;
  ScheduleShape shape{};
  shape.grouped_k = Traits::kGroupedK;
  shape.tiles_n = ceil_div(args.tiled_n, Traits::kOutputTileN * Traits::kClusterN);
  shape.tiles_m = ceil_div(args.size_m, kTileM * Traits::kClusterM);
  shape.tile_rows = kTileM * Traits::kClusterM;
  shape.k_blocks = args.sum_k_blocks;
  shape.clusters = ctas / Traits::kClusterSize;
  shape.entries = Traits::kSplitK ? workspace.entries / Traits::kClusterSize : 0;
  shape.counters = max_entries(ctas) * kConsumerWarps;
  shape.min_k_blocks = static_cast<int>(splitting.min_k_blocks);
  shape.split_cost = static_cast<int>(splitting.cost);
  shape.most_splits = static_cast<int>(std::min<int64_t>(splitting.most, kMaxSplits));
  shape.even = static_cast<float>(splitting.even);
  make_schedule(args, shape, stream);
}

// The workspace of a balanced schedule, or none where tiles are dealt out in fixed shares; and the rule by which sums are split.
struct Balancing {
  std::optional<Tensor> workspace;
  Splitting splitting;
};

// One CTA for each multiprocessor that it may take, in clusters. A schedule is made for those of the whole device: its work items are what
// decides where sums are split, and any number of clusters takes them from its counter.
template <typename Settings> void launch(const TensorMaps& maps, Arguments args, const Balancing& balancing, const Tensor& on) {
  using Traits = GemmTraits<Settings>;
  constexpr uint32_t kSharedBytes = SharedMemory<Traits>::kBytes;
  const int device = on.get_device_index();
  const auto in_clusters = [](int ctas) { return ctas / Traits::kClusterSize * Traits::kClusterSize; };
  if (args.sum_k_blocks == 0) args.sum_k_blocks = args.k_blocks * args.operand_pairs;
  const int all = in_clusters(multiprocessors(device));
  if (balancing.workspace) balance<Traits>(args, *balancing.workspace, balancing.splitting, all, current_stream(on));
  else args.most_ahead = 0;  // the counter that it needs lies in the workspace
  allow_dynamic_shared_memory<grouped_gemm_kernel<Traits>>(device);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {Traits::kClusterSize, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(in_clusters(multiprocessors_to_take(device)));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = current_stream(on);
  config.attrs = &cluster;
  config.numAttrs = 1;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, grouped_gemm_kernel<Traits>, maps, args));
}

}  // namespace gbmoe::hopper
