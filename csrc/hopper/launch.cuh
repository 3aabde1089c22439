// Host side of the grouped kernels: tensor maps and launches.

#pragma once

#include <cudaTypedefs.h>

#include <algorithm>

#include "../ops.h"
#include "grouped.cuh"

namespace gbmoe::hopper {

inline PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  static const PFN_cuTensorMapEncodeTiled_v12000 function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult status;
    STD_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &status));
    STD_TORCH_CHECK(status == cudaDriverEntryPointSuccess, "hopper: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return function;
}

// The map of a contiguous tensor [groups, lines, width] (groups absent from a matrix) in boxes of `box_lines` lines of 128 bytes, whose
// pieces change places, or of 32 bytes as they are.
inline CUtensorMap tensor_map(const Tensor& tensor, int box_lines, uint32_t box_bytes = kLine) {
  const int64_t rank = tensor.dim();
  const bool wide = tensor.scalar_type() == ScalarType::Float;
  const cuuint64_t bytes = wide ? 4 : 2;
  const cuuint64_t shape[3] = {static_cast<cuuint64_t>(tensor.size(rank - 1)), static_cast<cuuint64_t>(tensor.size(rank - 2)),
                               static_cast<cuuint64_t>(rank == 3 ? tensor.size(0) : 1)};
  const cuuint64_t strides[2] = {shape[0] * bytes, shape[0] * shape[1] * bytes};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_bytes / bytes), static_cast<cuuint32_t>(box_lines), 1}, steps[3] = {1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode_function()(
      &map,
      wide ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
           : tensor.scalar_type() == ScalarType::BFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      3,  // rank
      tensor.data_ptr(),
      shape,
      strides,
      box,
      steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE,
      box_bytes == kLine ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);  // zeros
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "hopper: cuTensorMapEncodeTiled returned ", static_cast<int>(result), " for a tensor [",
                  shape[2], ",", shape[1], ",", shape[0], "]");
  return map;
}

constexpr int kBoxTransposed = 64, kBoxOut = 16;
constexpr int box_of_b(int tile_n) { return tile_n / 2; }
// What clusters read at a time should fit the cache: measured, on mixtral's and olmoe's shapes. Of rows a few per cent better than 8,
// because b's tiles are read once for groups of up to 2048 rows, or 2560 with even panels. (Twice as many in pairs along M.)
constexpr int kPanelOfRows = 16, kEvenPanelOfRows = 20, kPanelOfWeights = 8;

inline Arguments arguments(const Tensor& sizes, int64_t rows, int64_t columns, int rows_a_panel) {
  Arguments args{};
  args.sizes = sizes.data_ptr();
  args.wide = sizes.scalar_type() == ScalarType::Long;
  args.groups = static_cast<int>(sizes.numel());
  args.rows = static_cast<int>(rows);
  args.columns = static_cast<int>(columns);
  args.pairs = 1;
  args.rows_a_panel = rows_a_panel;
  return args;
}

// Rows of an operand are picked from `lines` [tokens, width] by slot.
inline void gather_from(Arguments& args, const Tensor& lines, const Tensor& slot_of_row, int64_t top_k) {
  STD_TORCH_CHECK(lines.numel() < int64_t{1} << 35, "hopper: expected less than 64 GiB to gather from, got ", lines.numel(), " elements");
  args.lines = lines.data_ptr();
  args.slot_of_row = static_cast<const int*>(slot_of_row.data_ptr());
  args.slots = static_cast<uint32_t>(lines.size(0) * top_k);
  args.line_elements = static_cast<int>(lines.size(1));
  // With 2^(shift-1) < top_k <= 2^shift this is exact for every slot below 2^31.
  while (int64_t{1} << args.shift < top_k) ++args.shift;
  args.multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + args.shift)) + top_k - 1) / top_k);
}

// Whether two blocks work side by side along a side of `size`, and share what they both read: where its tiles come in pairs, or
// are so many that the one without a partner is worth less than what sharing saves.
inline bool in_pairs(int size, int tile) {
  const int tiles = divide_up(size, tile);
  return tiles % 2 == 0 || tiles >= 15;
}
// Blocks that work side by side: along N they share a's slices, along M those of b.
enum class Pairs { kNone, kAlongN, kAlongM };
inline Pairs pairs_along_n(int columns, int tile) { return in_pairs(columns, tile) ? Pairs::kAlongN : Pairs::kNone; }
// How the result is divided. Square tiles are made in ping-pong.
struct Tiling {
  int tile;  // columns
  Pairs pairs;
};

// Narrow tiles, in pairs, where they leave so much less of the result empty that they pay: a column of theirs is 2 to 5 % dearer, and
// they are to win clearly. Wide tiles of one block are some 7 % dearer than those of two, which share a's slices.
inline Tiling tiling(int columns) {
  constexpr double kDearer = 1.07;
  const auto padded = [&](int width) { return divide_up(columns, width) * width; };
  const Pairs pairs = pairs_along_n(columns, kWidest);
  const double wide = pairs == Pairs::kAlongN ? padded(2 * kWidest) : padded(kWidest) * kDearer;
  if (padded(2 * kNarrow) * kDearer < wide) return {kNarrow, Pairs::kAlongN};
  return {kWidest, pairs};
}

// The map of a, of rows; two blocks side by side along N load half of a tile's each.
inline CUtensorMap map_of_a(const Tensor& a, Pairs pairs) { return tensor_map(a, pairs == Pairs::kAlongN ? kTileM / 2 : kTileM); }

inline int processors(int device) {
  int count = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// Makes a device and its context current: tensor maps are made by the driver, which, unlike the runtime, does not see to that
// itself, and the thread that runs backward may not have used the device before.
struct OnDevice {
  torch::stable::accelerator::DeviceGuard guard;
  explicit OnDevice(const Tensor& tensor) : guard(tensor.get_device_index()) { STD_CUDA_CHECK(cudaSetDevice(tensor.get_device_index())); }
};

// The workspace of a balanced product: its schedule, then as many slots as fit behind it.
struct Workspace {
  Balance* balance;
  int* arrived;
  Group* by_size;
  float4* parts;
  int slots;  // of one block: each holds the part of a tile's sums that its consumers have

  static constexpr int64_t kSlotBytes = kTileM * kWidest * sizeof(float), kHead = 256;
  // Where the parts begin; as many counters as there could be slots.
  static int64_t head_bytes(int groups, int most_slots) {
    return ceil_div(kHead + most_slots * kConsumerWarps * int64_t{4} + groups * static_cast<int64_t>(sizeof(Group)), kHead) * kHead;
  }
  Workspace(const Tensor& bytes, int groups, int most_slots) {
    char* at = static_cast<char*>(bytes.data_ptr());
    const int64_t head = head_bytes(groups, most_slots);
    STD_TORCH_CHECK(bytes.numel() >= head, "hopper: expected a workspace of at least ", head, " bytes, got ", bytes.numel());
    balance = reinterpret_cast<Balance*>(at);
    arrived = reinterpret_cast<int*>(at + kHead);
    by_size = reinterpret_cast<Group*>(at + kHead + most_slots * kConsumerWarps * int64_t{4});
    parts = reinterpret_cast<float4*>(at + head);
    slots = static_cast<int>(std::min<int64_t>((bytes.numel() - head) / kSlotBytes, most_slots));
  }
};
// Four for every multiprocessor: schedules use what they are given, up to this.
inline int most_slots(int processors) { return 4 * processors; }

// What a schedule is made for.
struct Shape {
  bool weights;
  int tiles_n, tiles_m;  // of clusters, tiles_m of weights
  int tile_rows;         // of a cluster's tile, forward
  int slices;            // of a tile's sum, forward
  int clusters, slots;   // the slots for parts of a cluster's tile
  int counters;          // to be cleared
};
void schedule(const Arguments& args, const Shape& shape, cudaStream_t stream);

// Has the product balanced with this workspace: makes its schedule, ahead of the launch.
template <typename K> void balance(Arguments& args, const Tensor& bytes, int blocks, cudaStream_t stream) {
  const Workspace workspace(bytes, args.groups, most_slots(blocks));
  args.balance = workspace.balance;
  args.by_size = workspace.by_size;
  args.arrived = workspace.arrived;
  args.parts = workspace.parts;
  Shape shape{};
  shape.weights = K::kSums;
  shape.tiles_n = divide_up(args.columns, K::kTileColumns * K::kColumns);
  shape.tiles_m = divide_up(args.features, kTileM * K::kRows);
  shape.tile_rows = kTileM * K::kRows;
  shape.slices = args.slices * args.pairs;
  shape.clusters = blocks / K::kCluster;
  shape.slots = K::kJoins ? workspace.slots / K::kCluster : 0;
  shape.counters = most_slots(blocks) * kConsumerWarps;
  schedule(args, shape, stream);
}

template <typename K> void launch(const Maps& maps, Arguments args, const std::optional<Tensor>& workspace, const Tensor& on) {
  const int blocks = processors(on.get_device_index()) / K::kCluster * K::kCluster;
  if (workspace) balance<K>(args, *workspace, blocks, current_stream(on));
  STD_CUDA_CHECK(cudaFuncSetAttribute(grouped_kernel<K>, cudaFuncAttributeMaxDynamicSharedMemorySize, K::kSharedBytes));
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {K::kCluster, 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = K::kSharedBytes;
  config.stream = current_stream(on);
  config.attrs = &cluster;
  config.numAttrs = 1;
  STD_CUDA_CHECK(cudaLaunchKernelEx(&config, grouped_kernel<K>, maps, args));
}

// Four slices ahead, or six of square tiles, and 32 KiB of staging are what 227 KiB hold.
constexpr int kStages = 4, kSquareStages = 6, kBuffers = 2;
template <typename T, bool kTransposedB, bool kGather, Finish kFinish, typename Activation, int kTileN, int kClusterN>
using RowsKernel = Kernel<T, false, kTransposedB, kGather, kFinish, Activation, kTileN, kStages, kBuffers, 1, kClusterN>;
template <typename T, bool kTransposedB, int kClusterM, int kClusterN>
using PingPongKernel =
    Kernel<T, false, kTransposedB, false, Finish::kStore, void, kSquare, kSquareStages, kBuffers, kClusterM, kClusterN, true>;
template <typename T, Finish kFinish, int kClusterM, int kClusterN, bool kGather = false>
using WeightsKernel = Kernel<T, true, true, kGather, kFinish, void, kWidest, kStages, kBuffers, kClusterM, kClusterN>;

// Runs body with T bound to the C++ type of `dtype`, one of those that the tensor cores are used for here.
#define GBMOE_DISPATCH_HALF(dtype, name, ...)                                              \
  do {                                                                                     \
    if (dtype == ScalarType::BFloat16) { using T = __nv_bfloat16; __VA_ARGS__; }           \
    else if (dtype == ScalarType::Half) { using T = __half; __VA_ARGS__; }                 \
    else STD_TORCH_CHECK(false, name, ": expected bfloat16 or float16");                   \
  } while (0)

}  // namespace gbmoe::hopper
