// Numbers of 16 bits to e4m3 with scales (float8.cuh) for sums over rows: k-blocks of 128 rows, of which each column has a scale.
//
// The rows of each expert begin a k-block of their own, and zeros fill up its last one. A k-block is stored [column][row], because the
// tensor cores want both e4m3 operands contiguous along K. Rows are those of a matrix or, by slot, tokens: then a token is read once for
// each of its slots, and the padded rows are never in memory in 16 bits.
//
// Bytes at the least: rows 3PK; tokens 2TK + PK, where the L2 cache keeps them.

#include <climits>

#include "../group_sizes.cuh"
#include "../ops.h"
#include "float8.cuh"
#include "ptx.cuh"

namespace gbmoe {
namespace {

using hopper::kScaledColumns, hopper::pack_float8, hopper::TileScale, hopper::tile_scale, hopper::unpack;

constexpr int kThreads = 256;
constexpr int kBlockRows = 128, kColumns = kScaledColumns;  // what a CTA quantises

struct GroupSizes {  // as size_of_group takes them
  const void* sizes;
  bool sizes_are_int64;
  int groups, rows;
};

// Which rows a k-block has; none where it lies behind the last expert's.
struct KBlock { int first_row, rows; };

// In one warp, whose 32 lanes hold 32 consecutive groups. Unless it is null, filled_rows [E] gets each group's rows with those that
// fill up its last k-block.
[[maybe_unused]] __device__ __forceinline__ KBlock find_k_block(const GroupSizes& of, int k_block, int* filled_rows) {
  const int lane = threadIdx.x % 32;
  KBlock found{0, 0};
  int next_row = 0, next_block = 0;  // behind the groups so far
  for (int base = 0; base < of.groups && (filled_rows || next_block <= k_block); base += 32) {
    int row_end = size_of_group(of, base + lane);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, row_end, step);
      if (lane >= step) row_end = add_rows(of, row_end, before);
    }
    row_end = add_rows(of, row_end, next_row);
    const int row_before = __shfl_up_sync(kFullWarp, row_end, 1), row = lane == 0 ? next_row : row_before;
    const int blocks = ceil_div(row_end - row, kBlockRows);
    int block_end = blocks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, block_end, step);
      if (lane >= step) block_end += before;
    }
    block_end += next_block;
    if (filled_rows && base + lane < of.groups) filled_rows[base + lane] = blocks * kBlockRows;
    const unsigned owners = __ballot_sync(kFullWarp, block_end - blocks <= k_block && k_block < block_end);  // at most one
    if (owners) {
      const int owner = __ffs(owners) - 1, in_group = k_block - __shfl_sync(kFullWarp, block_end - blocks, owner);
      found.first_row = __shfl_sync(kFullWarp, row, owner) + in_group * kBlockRows;
      found.rows = min(kBlockRows, __shfl_sync(kFullWarp, row_end, owner) - found.first_row);
    }
    next_row = __shfl_sync(kFullWarp, row_end, 31);
    next_block = __shfl_sync(kFullWarp, block_end, 31);
  }
  return found;
}

// One CTA for 128 columns of a k-block; x [P,K], or [T,K] with kGather. A thread holds eight columns of rows 4i to 4i + 3, and of those 64
// rows on.
//
// The numbers pass through shared memory: four rows of a column are a word there, word w of column c in place w ^ (c / 8 * 2). So neither
// the writes of 16 threads, whose columns are 8 apart, nor the reads of words in pairs meet in a bank.
template <typename T, bool kGather> __global__ void __launch_bounds__(kThreads) quantize_k_blocks_kernel(
    const T* __restrict__ x, const int* __restrict__ slot_of_row, unsigned slots, unsigned top_k, const GroupSizes sizes,
    bool power_of_two, uint8_t* __restrict__ out, float* __restrict__ scales, int* __restrict__ filled_rows, int columns) {
#ifdef GBMOE_HOPPER  // set where this is compiled for sm_90a
  constexpr int kWarps = kThreads / 32;
  constexpr int kVector = 8, kRowThreads = kColumns / kVector;  // numbers of 16 bytes, and threads that hold a row
  constexpr int kThreadRows = kBlockRows / (kThreads / kRowThreads);  // of which a thread holds a vector each
  __shared__ KBlock found;
  __shared__ int token_of_row[kGather ? kBlockRows : 1];  // -1 where a row has no slot
  __shared__ __align__(16) uint32_t largest_of_warp[kWarps][kColumns / 2];  // magnitudes of two columns
  __shared__ __align__(16) float encode_of_column[kColumns];
  __shared__ __align__(8) uint32_t transposed[kColumns][kBlockRows / 4];
  const unsigned ctas_a_block = ceil_div(columns, kColumns);
  const int k_block = blockIdx.x / ctas_a_block, first_column = blockIdx.x % ctas_a_block * kColumns;
  if (threadIdx.x < 32) {
    const KBlock own = find_k_block(sizes, k_block, blockIdx.x == 0 ? filled_rows : nullptr);
    if (threadIdx.x == 0) found = own;
  }
  __syncthreads();
  const KBlock block = found;
  if (block.rows <= 0) return;
  if constexpr (kGather) {
    if (threadIdx.x < kBlockRows) {
      const bool exists = threadIdx.x < static_cast<unsigned>(block.rows);
      const auto slot = static_cast<unsigned>(exists ? slot_of_row[block.first_row + threadIdx.x] : -1);
      token_of_row[threadIdx.x] = slot < slots ? static_cast<int>(slot / top_k) : -1;
    }
    __syncthreads();
  }
  const int word = threadIdx.x / kRowThreads, vector = threadIdx.x % kRowThreads, column = first_column + vector * kVector;
  const int warp = threadIdx.x / 32;
  uint32_t pair[kThreadRows][kVector / 2];
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
    const int row = i / 4 * 64 + word * 4 + i % 4;
    int64_t from = row < block.rows ? block.first_row + row : -1;
    if constexpr (kGather) from = token_of_row[row];
    const bool exists = from >= 0 && column < columns;
    const int4 numbers = exists ? *reinterpret_cast<const int4*>(x + from * columns + column) : int4{0, 0, 0, 0};
    pair[i][0] = numbers.x, pair[i][1] = numbers.y, pair[i][2] = numbers.z, pair[i][3] = numbers.w;
  }
  // Magnitudes of 16 bits are in the order of their bits as integers, NaN above infinity.
  uint32_t largest[kVector / 2] = {};
#pragma unroll
  for (int i = 0; i < kThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) largest[j] = __vmaxu2(largest[j], pair[i][j] & 0x7fff7fffu);
  }
#pragma unroll
  for (int j = 0; j < kVector / 2; ++j) largest[j] = __vmaxu2(largest[j], __shfl_xor_sync(kFullWarp, largest[j], kRowThreads));
  if (threadIdx.x % 32 < kRowThreads) {
    *reinterpret_cast<uint4*>(&largest_of_warp[warp][vector * (kVector / 2)]) =
        uint4{largest[0], largest[1], largest[2], largest[3]};
  }
  __syncthreads();
  if (threadIdx.x < kColumns) {
    uint32_t of_pair = 0;
#pragma unroll
    for (int i = 0; i < kWarps; ++i) of_pair = __vmaxu2(of_pair, largest_of_warp[i][threadIdx.x / 2]);
    const float2 magnitudes = unpack<T>(of_pair);
    const TileScale scale = tile_scale(threadIdx.x % 2 ? magnitudes.y : magnitudes.x, power_of_two);
    encode_of_column[threadIdx.x] = scale.encode;
    const int own = first_column + static_cast<int>(threadIdx.x);
    if (own < columns) scales[static_cast<int64_t>(k_block) * columns + own] = scale.decode;
  }
  __syncthreads();
  float encode[kVector];
#pragma unroll
  for (int i = 0; i < kVector; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(&encode_of_column[vector * kVector + i]);
    encode[i] = four.x, encode[i + 1] = four.y, encode[i + 2] = four.z, encode[i + 3] = four.w;
  }
#pragma unroll
  for (int i = 0; i < kThreadRows; i += 4) {
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) {
      uint32_t rows[4];  // two columns each
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 numbers = unpack<T>(pair[i + k][j]);
        rows[k] = pack_float8(numbers.x * encode[2 * j], numbers.y * encode[2 * j + 1]);
      }
      const uint32_t low = rows[0] | rows[1] << 16, high = rows[2] | rows[3] << 16;
      const int place = (i / 4 * 16 + word) ^ (vector * 2);
      transposed[vector * kVector + 2 * j][place] = __byte_perm(low, high, 0x6420);
      transposed[vector * kVector + 2 * j + 1][place] = __byte_perm(low, high, 0x7531);
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kColumns / (kThreads / 16); ++i) {
    const int c = i * (kThreads / 16) + threadIdx.x / 16, eight = threadIdx.x % 16;  // a column, and eight of its rows
    if (first_column + c >= columns) continue;
    const uint2 value = *reinterpret_cast<const uint2*>(&transposed[c][(eight * 2) ^ (c / 8 * 2)]);
    *reinterpret_cast<uint2*>(out + (static_cast<int64_t>(k_block) * columns + first_column + c) * kBlockRows + eight * 8) =
        value;
  }
#endif
}

}  // namespace

void quantize_k_blocks(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor sizes, bool power_of_two, Tensor out, Tensor scales,
    Tensor filled_rows) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  if (out.numel() == 0) return;
  const int64_t rows = slot_of_row ? slot_of_row->size(0) : x.size(0), slots = slot_of_row ? x.size(0) * top_k : 0;
  const auto columns = static_cast<int>(x.size(1));
  const int64_t ctas = out.size(0) * ceil_div(columns, kColumns);
  STD_TORCH_CHECK(ctas <= INT_MAX, "quantize_k_blocks: expected at most 2^31 - 1 blocks of 128 x 128, got ", ctas);
  const GroupSizes of{
      sizes.data_ptr(), sizes.scalar_type() == ScalarType::Long, static_cast<int>(sizes.numel()), static_cast<int>(rows)};
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "quantize_k_blocks", {
    const auto kernel = slot_of_row ? quantize_k_blocks_kernel<T, true> : quantize_k_blocks_kernel<T, false>;
    kernel<<<static_cast<unsigned>(ctas), kThreads, 0, current_stream(x)>>>(
        data<const T>(x), data<const int>(slot_of_row), static_cast<unsigned>(slots), static_cast<unsigned>(top_k), of,
        power_of_two, data<uint8_t>(out), data<float>(scales), data<int>(filled_rows), columns);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
