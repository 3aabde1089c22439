// k-blocks of scaled e4m3 operands (float8.cuh) for sums over rows: 128 rows of an expert, of which each column has a scale.
//
// The rows of each expert begin a k-block of their own, and zeros fill up its last one. A k-block is stored [column][row], because the
// tensor cores want both e4m3 operands contiguous along K. A CTA of kKBlockThreads makes 128 columns of one: a thread holds eight columns
// of rows 4i to 4i + 3, and of those 64 rows on.

#pragma once

#include <cstdint>

#include "../../group_sizes.cuh"
#include "../ptx.cuh"
#include "float8.cuh"

namespace gbmoe::hopper {

constexpr int kKBlockRows = 128, kKBlockColumns = kScaledColumns, kKBlockThreads = 256;
constexpr int kKBlockVector = 8,
              kKBlockRowThreads = kKBlockColumns / kKBlockVector;  // numbers in 16 bytes; threads that hold a row
constexpr int kKBlockThreadRows = kKBlockRows / (kKBlockThreads / kKBlockRowThreads);  // of which a thread holds a vector each

struct GroupSizes {  // as size_of_group takes them
  const void* sizes;
  bool sizes_are_int64;
  int groups, rows;
};

// Which rows a k-block has; none where it lies after the last expert's.
struct KBlock { int first_row, rows; };

// In one warp, whose 32 lanes hold 32 consecutive groups. Unless it is null, filled_rows [E] gets each group's rows with those that
// fill up its last k-block.
__device__ __forceinline__ KBlock find_k_block(const GroupSizes& of, int k_block, int* filled_rows) {
  const int lane = threadIdx.x % 32;
  KBlock found{0, 0};
  int next_row = 0, next_block = 0;  // after the groups so far
  for (int base = 0; base < of.groups && (filled_rows || next_block <= k_block); base += 32) {
    int row_end = size_of_group(of, base + lane);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, row_end, step);
      if (lane >= step) row_end = add_rows(of, row_end, before);
    }
    row_end = add_rows(of, row_end, next_row);
    const int row_before = __shfl_up_sync(kFullWarp, row_end, 1), row = lane == 0 ? next_row : row_before;
    const int blocks = ceil_div(row_end - row, kKBlockRows);
    int block_end = blocks;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(kFullWarp, block_end, step);
      if (lane >= step) block_end += before;
    }
    block_end += next_block;
    if (filled_rows && base + lane < of.groups) filled_rows[base + lane] = blocks * kKBlockRows;
    const unsigned owners = __ballot_sync(kFullWarp, block_end - blocks <= k_block && k_block < block_end);  // at most one
    if (owners) {
      const int owner = __ffs(owners) - 1, in_group = k_block - __shfl_sync(kFullWarp, block_end - blocks, owner);
      found.first_row = __shfl_sync(kFullWarp, row, owner) + in_group * kKBlockRows;
      found.rows = min(kKBlockRows, __shfl_sync(kFullWarp, row_end, owner) - found.first_row);
    }
    next_row = __shfl_sync(kFullWarp, row_end, 31);
    next_block = __shfl_sync(kFullWarp, block_end, 31);
  }
  return found;
}

// The same for all threads of a CTA, through `found` in shared memory. The grid's first CTA writes filled_rows.
__device__ __forceinline__ KBlock k_block_of_cta(const GroupSizes& sizes, int k_block, int* filled_rows, KBlock& found) {
  if (threadIdx.x < 32) {
    const KBlock own = find_k_block(sizes, k_block, blockIdx.x == 0 ? filled_rows : nullptr);
    if (threadIdx.x == 0) found = own;
  }
  __syncthreads();
  return found;
}

// Where this thread's numbers are in the CTA's share of a k-block.
struct KBlockThread {
  int word = threadIdx.x / kKBlockRowThreads, vector = threadIdx.x % kKBlockRowThreads;

  // The row of its vector number `i`, and the first of its columns.
  __device__ __forceinline__ int row(int i) const { return i / 4 * 64 + word * 4 + i % 4; }
  __device__ __forceinline__ int column() const { return vector * kKBlockVector; }
};

// A thread's numbers, pairs of 16 bits: [row][two columns].
using KBlockNumbers = uint32_t[kKBlockThreadRows][kKBlockVector / 2];

// What the threads of a CTA exchange. Four rows of a column are a word of `transposed`: word w of column c in place w ^ (c / 8 * 2), so that
// neither the writes of 16 threads, whose columns are 8 apart, nor the reads of words in pairs meet in a bank.
struct KBlockShared {
  alignas(16) uint32_t largest_of_warp[kKBlockThreads / 32][kKBlockColumns / 2];  // magnitudes of two columns
  alignas(16) float encode_of_column[kKBlockColumns];
  alignas(8) uint32_t transposed[kKBlockColumns][kKBlockRows / 4];
};

// Where k-blocks go: values [k_block][column][row], scales [k_block][column]. `step` is from a column to the next: 1, or 2 where every
// second one belongs to other numbers.
struct KBlocks {
  uint8_t* values;
  float* scales;
  int step;
};

// The scale of every column of the CTA's share, from `first_column` on: to `out.scales`, and to the shared memory that all
// threads see when this returns.
template <typename T>
__device__ __forceinline__ void scale_columns(
    const KBlockNumbers& pair, KBlockShared& shared, int k_block, int first_column, int columns, bool power_of_two,
    const KBlocks& out) {
  // Magnitudes of 16 bits are in the order of their bits as integers, NaN above infinity.
  uint32_t largest[kKBlockVector / 2] = {};
#pragma unroll
  for (int i = 0; i < kKBlockThreadRows; ++i) {
#pragma unroll
    for (int j = 0; j < kKBlockVector / 2; ++j) largest[j] = __vmaxu2(largest[j], pair[i][j] & 0x7fff7fffu);
  }
#pragma unroll
  for (int j = 0; j < kKBlockVector / 2; ++j) {
    largest[j] = __vmaxu2(largest[j], __shfl_xor_sync(kFullWarp, largest[j], kKBlockRowThreads));
  }
  if (threadIdx.x % 32 < kKBlockRowThreads) {
    *reinterpret_cast<uint4*>(&shared.largest_of_warp[threadIdx.x / 32][threadIdx.x % kKBlockRowThreads * (kKBlockVector / 2)]) =
        uint4{largest[0], largest[1], largest[2], largest[3]};
  }
  __syncthreads();
  if (threadIdx.x < kKBlockColumns) {
    uint32_t of_pair = 0;
#pragma unroll
    for (int i = 0; i < kKBlockThreads / 32; ++i) of_pair = __vmaxu2(of_pair, shared.largest_of_warp[i][threadIdx.x / 2]);
    const float2 magnitudes = unpack<T>(of_pair);
    const TileScale scale = tile_scale(threadIdx.x % 2 ? magnitudes.y : magnitudes.x, power_of_two);
    shared.encode_of_column[threadIdx.x] = scale.encode;
    const int own = first_column + static_cast<int>(threadIdx.x);
    if (own < columns) out.scales[(static_cast<int64_t>(k_block) * columns + own) * out.step] = scale.decode;
  }
  __syncthreads();
}

// Quantises the CTA's share of a k-block, and stores it to `out`. All threads come here; `shared` is free again for
// the next call.
template <typename T>
__device__ __forceinline__ void store_k_block(
    const KBlockNumbers& pair, KBlockShared& shared, int k_block, int first_column, int columns, bool power_of_two,
    const KBlocks& out) {
  scale_columns<T>(pair, shared, k_block, first_column, columns, power_of_two, out);
  const KBlockThread own;
  float encode[kKBlockVector];
#pragma unroll
  for (int i = 0; i < kKBlockVector; i += 4) {
    const float4 four = *reinterpret_cast<const float4*>(&shared.encode_of_column[own.column() + i]);
    encode[i] = four.x, encode[i + 1] = four.y, encode[i + 2] = four.z, encode[i + 3] = four.w;
  }
#pragma unroll
  for (int i = 0; i < kKBlockThreadRows; i += 4) {
#pragma unroll
    for (int j = 0; j < kKBlockVector / 2; ++j) {
      uint32_t rows[4];  // two columns each
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float2 numbers = unpack<T>(pair[i + k][j]);
        rows[k] = pack_float8(numbers.x * encode[2 * j], numbers.y * encode[2 * j + 1]);
      }
      const uint32_t low = rows[0] | rows[1] << 16, high = rows[2] | rows[3] << 16;
      const int place = (i / 4 * 16 + own.word) ^ (own.vector * 2);
      shared.transposed[own.column() + 2 * j][place] = __byte_perm(low, high, 0x6420);
      shared.transposed[own.column() + 2 * j + 1][place] = __byte_perm(low, high, 0x7531);
    }
  }
  __syncthreads();
  constexpr int kAtOnce = kKBlockThreads / 16;  // columns
  const int64_t first = static_cast<int64_t>(k_block) * columns + first_column + threadIdx.x / 16;
  uint8_t* to = out.values + first * (out.step * kKBlockRows) + threadIdx.x % 16 * 8;
#pragma unroll
  for (int i = 0; i < kKBlockColumns / kAtOnce; ++i, to += kAtOnce * kKBlockRows * out.step) {
    const int c = i * kAtOnce + threadIdx.x / 16, eight = threadIdx.x % 16;  // a column, and eight of its rows
    if (first_column + c >= columns) continue;
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(&shared.transposed[c][(eight * 2) ^ (c / 8 * 2)]);
  }
}

}  // namespace gbmoe::hopper
