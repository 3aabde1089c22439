// Numbers of 16 bits to e4m3 with scales (float8.cuh): tokens on their way to padded rows, rows as they are, and weights.
//
// A tile of a row is 128 numbers, which 16 threads hold in vectors of 8. A weight's block is 128 x 128, which a CTA holds.
//
// Bytes at the least: gather 2TH + PH, rows 3PH, weights 3EFH in one orientation and 4EFH in both; 2EFH more where only every second
// element is one of theirs, as the others come with them.

#include "../../operators.h"
#include "../../permute/padded_rows.cuh"
#include "../../places_of.h"
#include "quantize.cuh"

namespace gbmoe {
namespace {

using hopper::Eight, hopper::kScaledColumns, hopper::kTileThreads, hopper::kVector, hopper::largest_magnitude, hopper::Numbers;
using hopper::quantize, hopper::scale_of_row, hopper::TileScale, hopper::tile_scale, hopper::zeros;

// Each token is read and quantised once, and stored to the rows of its slots, S at a time. shape.vectors are of 8 numbers.
template <typename T, int S> __global__ void __launch_bounds__(kThreads) quantize_gathered_kernel(
    const Numbers<T>* __restrict__ x_TH, const Slots slots, const int* __restrict__ slot_of_row, bool power_of_two,
    Eight* __restrict__ out_PH, float* __restrict__ scales_PC, const LaunchShape shape) {
  const PaddingRows padding(slot_of_row, shape);
  const int64_t token = shape.own_token();
  const int thread = threadIdx.x % shape.token_threads, tiles = ceil_div(shape.vectors, kTileThreads);
  const int in_use = token < shape.tokens ? slots.in_use(token) : 0;
  for (int first = 0; first < in_use; first += S) {
    const Pass<float, S, false> pass(slots, {}, token, first, in_use, shape.vectors);
    for (int v = thread; v < tiles * kTileThreads; v += shape.token_threads) {
      const bool exists = v < shape.vectors;
      const Numbers<T> numbers = exists ? x_TH[token * shape.vectors + v] : zeros<T>();
      const TileScale scale = scale_of_row(largest_magnitude<T>(numbers), power_of_two);
      const Eight out = quantize<T>(numbers, scale.encode);
#pragma unroll
      for (int j = 0; j < S; ++j) {
        if (!pass.has(j)) continue;
        if (exists) out_PH[pass.at[j] + v] = out;
        if (v % kTileThreads == 0) scales_PC[pass.at[j] / shape.vectors * tiles + v / kTileThreads] = scale.decode;
      }
    }
  }
  padding.clear(out_PH, slot_of_row, shape, [&](int64_t row) {
    for (int c = 0; c < tiles; ++c) scales_PC[row * tiles + c] = 1.0f;
  });
}

template <typename T> __global__ void __launch_bounds__(kThreads) quantize_rows_kernel(
    const Numbers<T>* __restrict__ x_PH, bool power_of_two, Eight* __restrict__ out_PH, float* __restrict__ scales_PC, int64_t rows,
    int vectors) {
  const int tiles = ceil_div(vectors, kTileThreads);
  const int64_t all = rows * tiles;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * (kThreads / kTileThreads); first < all;
       first += static_cast<int64_t>(gridDim.x) * (kThreads / kTileThreads)) {
    const int64_t tile = first + threadIdx.x / kTileThreads, row = tile / tiles;
    const int v = static_cast<int>(tile - row * tiles) * kTileThreads + threadIdx.x % kTileThreads;
    const bool exists = tile < all && v < vectors;
    const Numbers<T> numbers = exists ? x_PH[row * vectors + v] : zeros<T>();
    const TileScale scale = scale_of_row(largest_magnitude<T>(numbers), power_of_two);
    if (exists) out_PH[row * vectors + v] = quantize<T>(numbers, scale.encode);
    if (tile < all && v % kTileThreads == 0) scales_PC[tile] = scale.decode;
  }
}

// Where weights [E,lines,columns] lie: matrices and lines any multiple of 16 bytes apart, or the matrices in the places of a table.
template <typename T> struct WeightMemory {
  const T* first;  // aligned to 16 bytes
  int64_t matrix, line;  // elements from one to the next; with a table the distance of its places
  unsigned which_of_pairs;  // kStep 2: the selector by which __byte_perm takes this weight's elements of two pairs
  Places places;

  // Eight elements. kStep 2: every second one in memory, as where gate and up lie in turns.
  template <int kStep> __device__ __forceinline__ Numbers<T> load(int group, int line_number, int column) const {
    const T* const from = first + places.of(group) * matrix + line_number * line + kStep * column;
    if constexpr (kStep == 1) {
      return *reinterpret_cast<const Numbers<T>*>(from);
    } else {
      const uint4 one = reinterpret_cast<const uint4*>(from)[0], other = reinterpret_cast<const uint4*>(from)[1];
      const uint4 eight{
          __byte_perm(one.x, one.y, which_of_pairs), __byte_perm(one.z, one.w, which_of_pairs),
          __byte_perm(other.x, other.y, which_of_pairs), __byte_perm(other.z, other.w, which_of_pairs)};
      return reinterpret_cast<const Numbers<T>&>(eight);
    }
  }
};

// What is made of weights: e4m3 and scales of each orientation, or null.
struct ScaledWeights {
  uint8_t *out, *transposed;
  float *scales, *transposed_scales;
};

// One CTA for each block of 128 x 128 of w [E,lines,columns]. A thread holds eight numbers of lines 4i to 4i + 3, and of those 64 lines on.
//
// On the way to `transposed` the block passes through shared memory: four lines of a column are a word there, word w of column c in place
// w ^ (c / 8 * 2). So neither the writes of 16 threads, whose columns are 8 apart, nor the reads of words in pairs meet in a bank.
template <typename T, int kStep, bool kNatural, bool kTranspose>
__global__ void __launch_bounds__(kThreads) quantize_weights_kernel(
    const __grid_constant__ WeightMemory<T> weights, bool power_of_two, const ScaledWeights to, int lines, int columns) {
  constexpr int kLines = 8;  // of a thread
  __shared__ uint32_t largest_of_warp[kWarps];
  __shared__ uint32_t words[kTranspose ? kScaledColumns : 1][kScaledColumns / 4];
  const unsigned blocks_x = ceil_div(columns, kScaledColumns), blocks_y = ceil_div(lines, kScaledColumns);
  const unsigned block_x = blockIdx.x % blocks_x, block_y = blockIdx.x / blocks_x % blocks_y, group = blockIdx.x / blocks_x / blocks_y;
  const int64_t matrix = static_cast<int64_t>(group) * lines * columns;
  const int first_line = block_y * kScaledColumns, first_column = block_x * kScaledColumns;
  const int word = threadIdx.x / kTileThreads, vector = threadIdx.x % kTileThreads, column = first_column + vector * kVector;
  const auto line_of = [&](int i) { return i / 4 * 64 + word * 4 + i % 4; };
  Numbers<T> numbers[kLines];
#pragma unroll
  for (int i = 0; i < kLines; ++i) {
    const int line = first_line + line_of(i);
    const bool exists = line < lines && column < columns;
    numbers[i] = exists ? weights.template load<kStep>(group, line, column) : zeros<T>();
  }
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kLines; ++i) largest = max(largest, largest_magnitude<T>(numbers[i]));
  largest = __reduce_max_sync(kFullWarp, largest);
  if (threadIdx.x % 32 == 0) largest_of_warp[threadIdx.x / 32] = largest;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kWarps; ++i) largest = max(largest, largest_of_warp[i]);
  const TileScale scale = tile_scale(__uint_as_float(largest), power_of_two);
  if (threadIdx.x == 0) {
    const int64_t first_block = static_cast<int64_t>(group) * blocks_x * blocks_y;
    if constexpr (kNatural) to.scales[first_block + block_y * blocks_x + block_x] = scale.decode;
    if constexpr (kTranspose) to.transposed_scales[first_block + block_x * blocks_y + block_y] = scale.decode;
  }
  Eight quantized[kLines];
#pragma unroll
  for (int i = 0; i < kLines; ++i) quantized[i] = quantize<T>(numbers[i], scale.encode);
  if constexpr (kNatural) {
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const int line = first_line + line_of(i);
      if (line < lines && column < columns) {
        *reinterpret_cast<Eight*>(to.out + matrix + static_cast<int64_t>(line) * columns + column) = quantized[i];
      }
    }
  }
  if constexpr (kTranspose) {
#pragma unroll
    for (int i = 0; i < kLines; i += 4) {
#pragma unroll
      for (int c = 0; c < kVector; ++c) {
        uint32_t four = 0;
#pragma unroll
        for (int j = 0; j < 4; ++j) four |= static_cast<uint32_t>(quantized[i + j].pair[c / 2] >> c % 2 * 8 & 0xff) << j * 8;
        words[vector * kVector + c][(i / 4 * 16 + word) ^ (vector * 2)] = four;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const int c = i * 16 + threadIdx.x / 16, eight = threadIdx.x % 16;  // a column, and eight of its lines
      const int line = first_line + eight * 8;
      if (first_column + c >= columns || line >= lines) continue;
      const uint2 value = *reinterpret_cast<const uint2*>(&words[c][(eight * 2) ^ (c / 8 * 2)]);
      *reinterpret_cast<uint2*>(to.transposed + matrix + static_cast<int64_t>(first_column + c) * lines + line) = value;
    }
  }
}

template <typename T, int kStep>
void launch_weights(const Tensor& weights, const Places& places, unsigned grid, bool power_of_two, const ScaledWeights& to) {
  const auto address = reinterpret_cast<uintptr_t>(weights.data_ptr());
  const bool second_of_pairs = address % 16 != 0;
  const WeightMemory<T> memory{
      reinterpret_cast<const T*>(address - address % 16), weights.stride(0), weights.stride(1),
      second_of_pairs ? 0x7632u : 0x5410u, places};
  const auto kernel = !to.transposed ? quantize_weights_kernel<T, kStep, true, false>
                      : to.out       ? quantize_weights_kernel<T, kStep, true, true>
                                     : quantize_weights_kernel<T, kStep, false, true>;
  kernel<<<grid, kThreads, 0, current_stream(weights)>>>(
      memory, power_of_two, to, static_cast<int>(weights.size(1)), static_cast<int>(weights.size(2)));
}

}  // namespace

// x bf16 or fp16, out e4m3; rows of multiples of 16 elements. As padded_gather, rows after the last expert are left
// as they are; out [P,H], scales [P, H / 128 rounded up].
void quantize_gathered(Tensor x, Tensor row_of_slot, Tensor slot_of_row, bool power_of_two, Tensor out, Tensor scales) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t rows = out.size(0), vectors = x.size(1) / kVector;
  if (out.numel() == 0) return;
  const Slots slots = make_slots(row_of_slot, {}, {}, rows, {});
  const int token_threads = few_threads(vectors);
  const LaunchShape shape = make_launch_shape(x.size(0), slots.most, rows, vectors, token_threads, false);
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "quantize_gathered", {
    const auto kernel = slots.most <= 1 ? quantize_gathered_kernel<T, 1>
                        : slots.most <= 2 ? quantize_gathered_kernel<T, 2> : quantize_gathered_kernel<T, 8>;
    kernel<<<shape.ctas, shape.threads, 0, current_stream(x)>>>(
        data<const Numbers<T>>(x), slots, data<const int>(slot_of_row), power_of_two, data<Eight>(out), data<float>(scales), shape);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void quantize_rows(Tensor x, bool power_of_two, Tensor out, Tensor scales) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  if (out.numel() == 0) return;
  const int64_t ctas = ceil_div(scales.numel(), kThreads / kTileThreads);
  const auto grid = static_cast<unsigned>(std::min<int64_t>(ctas, 32 * multiprocessors(x.get_device_index())));
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "quantize_rows", {
    quantize_rows_kernel<T><<<grid, kThreads, 0, current_stream(x)>>>(
        data<const Numbers<T>>(x), power_of_two, data<Eight>(out), data<float>(scales), x.size(0), static_cast<int>(x.size(1) / kVector));
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// weights [E,F,H], whose rows lie as WeightMemory has it, with a stride of 1 or 2 along H: out [E,F,H] with scales [E, F / 128, H / 128],
// transposed [E,H,F] with [E, H / 128, F / 128], rounded up; what is given of the two is written, from one read
void quantize_weights(
    Tensor weights, std::vector<int64_t> places, bool power_of_two, std::optional<Tensor> out, std::optional<Tensor> scales,
    std::optional<Tensor> transposed, std::optional<Tensor> transposed_scales) {
  const torch::stable::accelerator::DeviceGuard guard(weights.get_device_index());
  if (weights.numel() == 0 || (!out && !transposed)) return;
  const int64_t groups = places.empty() ? weights.size(0) : static_cast<int64_t>(places.size());
  const int64_t blocks = groups * ceil_div(weights.size(1), kScaledColumns) * ceil_div(weights.size(2), kScaledColumns);
  STD_TORCH_CHECK(blocks <= INT32_MAX, "quantize_weights: expected at most 2^31 - 1 blocks of 128 x 128, got ", blocks);
  const auto grid = static_cast<unsigned>(blocks);
  const Places table = places_of("quantize_weights", places, groups);
  const ScaledWeights to{data<uint8_t>(out), data<uint8_t>(transposed), data<float>(scales), data<float>(transposed_scales)};
  GBMOE_DISPATCH_16_BIT(weights.scalar_type(), "quantize_weights", {
    if (weights.stride(2) == 2) launch_weights<T, 2>(weights, table, grid, power_of_two, to);
    else launch_weights<T, 1>(weights, table, grid, power_of_two, to);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(quantize_gathered,
               "(Tensor x, Tensor row_of_slot, Tensor slot_of_row, bool power_of_two, Tensor(a!) out, Tensor(b!) scales) -> "
               "()");
GBMOE_OPERATOR(quantize_rows, "(Tensor x, bool power_of_two, Tensor(a!) out, Tensor(b!) scales) -> ()");
GBMOE_OPERATOR(
    quantize_weights,
    "(Tensor weights, int[] places, bool power_of_two, Tensor(a!)? out, Tensor(b!)? scales, "
    "Tensor(c!)? transposed, Tensor(d!)? transposed_scales) -> ()");

}  // namespace gbmoe
