// Numbers of 16 bits to k-blocks in e4m3 with scales (k_blocks.cuh). Rows are those of a matrix or, by slot, tokens: then a token is read
// once for each of its slots, and the padded rows are never in memory in 16 bits. Rows that are in e4m3 with scales along K already are
// rounded to 16 bits in registers, and then quantised like any others.
//
// Bytes at the least: rows 3PK; tokens 2TK + PK, where the L2 cache keeps them. From e4m3 2PK and TK + PK.

#include <climits>

#include "../../operators.h"
#include "k_blocks.cuh"

namespace gbmoe {
namespace {

using hopper::dequantize, hopper::Float8Rows, hopper::float8_rows;
using hopper::k_block_of_cta, hopper::GroupSizes, hopper::KBlock, hopper::kKBlockColumns, hopper::KBlockNumbers,
    hopper::kKBlockRows;
using hopper::KBlockShared, hopper::KBlockThread, hopper::kKBlockThreadRows, hopper::kKBlockThreads, hopper::store_k_block;

// Where the numbers come from. `load` starts a load of eight of a row, and `numbers` makes pairs of T of them.
template <typename T> struct Rows16Bits {
  const T* __restrict__ values;
  int64_t columns;

  struct Loaded { uint4 numbers; };
  __device__ __forceinline__ Loaded load(int64_t row, int column) const {
    return {__ldg(reinterpret_cast<const uint4*>(values + row * columns + column))};
  }
  static __device__ __forceinline__ uint4 numbers(const Loaded& loaded) { return loaded.numbers; }
};
template <typename T> struct RowsFloat8 {
  Float8Rows rows;

  struct Loaded {
    uint2 eight;
    float scale;
  };
  __device__ __forceinline__ Loaded load(int64_t row, int column) const {
    return {rows.eight(row, column), rows.scale(row, column)};
  }
  static __device__ __forceinline__ uint4 numbers(const Loaded& loaded) { return dequantize<T>(loaded.eight, loaded.scale); }
};

// One CTA for 128 columns of a k-block; of x [P,K], or of [T,K] where slot_of_row is not null.
template <typename T, typename Rows> __global__ void __launch_bounds__(kKBlockThreads) quantize_k_blocks_kernel(
    const Rows x, const int* __restrict__ slot_of_row, unsigned slots, unsigned top_k, const GroupSizes sizes, bool power_of_two,
    uint8_t* __restrict__ out, float* __restrict__ scales, int* __restrict__ filled_rows, int columns) {
  __shared__ KBlock found;
  __shared__ int token_of_row[kKBlockRows];  // -1 where a row has no slot
  __shared__ KBlockShared shared;
  const unsigned ctas_a_block = ceil_div(columns, kKBlockColumns);
  const int k_block = blockIdx.x / ctas_a_block, first_column = blockIdx.x % ctas_a_block * kKBlockColumns;
  const KBlock block = k_block_of_cta(sizes, k_block, filled_rows, found);
  if (block.rows <= 0) return;
  if (slot_of_row) {
    if (threadIdx.x < kKBlockRows) {
      const bool exists = threadIdx.x < static_cast<unsigned>(block.rows);
      const auto slot = static_cast<unsigned>(exists ? slot_of_row[block.first_row + threadIdx.x] : -1);
      token_of_row[threadIdx.x] = slot < slots ? static_cast<int>(slot / top_k) : -1;
    }
    __syncthreads();
  }
  const KBlockThread own;
  const int column = first_column + own.column();
  typename Rows::Loaded loaded[kKBlockThreadRows];  // all are under way before the first is used
#pragma unroll
  for (int i = 0; i < kKBlockThreadRows; ++i) {
    const int row = own.row(i);
    int64_t from = row < block.rows ? block.first_row + row : -1;
    if (slot_of_row) from = token_of_row[row];
    loaded[i] = {};
    if (from >= 0 && column < columns) loaded[i] = x.load(from, column);
  }
  KBlockNumbers pair;
#pragma unroll
  for (int i = 0; i < kKBlockThreadRows; ++i) {
    const uint4 numbers = Rows::numbers(loaded[i]);
    pair[i][0] = numbers.x, pair[i][1] = numbers.y, pair[i][2] = numbers.z, pair[i][3] = numbers.w;
  }
  store_k_block<T>(pair, shared, k_block, first_column, columns, power_of_two, {out, scales, 1});
}

// Rows: as the kernel reads `x`, in which the operators find no more than its sizes.
template <typename T, typename Rows> void launch(
    const Rows& rows, const Tensor& x, const std::optional<Tensor>& slot_of_row, int64_t top_k, const Tensor& sizes,
    bool power_of_two, const Tensor& out, const Tensor& scales, const Tensor& filled_rows) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  if (out.numel() == 0) return;
  const int64_t count = slot_of_row ? slot_of_row->size(0) : x.size(0), slots = slot_of_row ? x.size(0) * top_k : 0;
  const auto columns = static_cast<int>(x.size(1));
  const int64_t ctas = out.size(0) * ceil_div(columns, kKBlockColumns);
  STD_TORCH_CHECK(ctas <= INT_MAX, "quantize_k_blocks: expected at most 2^31 - 1 blocks of 128 x 128, got ", ctas);
  const GroupSizes of{
      sizes.data_ptr(), sizes.scalar_type() == ScalarType::Long, static_cast<int>(sizes.numel()), static_cast<int>(count)};
  quantize_k_blocks_kernel<T><<<static_cast<unsigned>(ctas), kKBlockThreads, 0, current_stream(x)>>>(
      rows, data<const int>(slot_of_row), count_of_slots(slots), static_cast<unsigned>(top_k), of, power_of_two,
      data<uint8_t>(out), data<float>(scales), data<int>(filled_rows), columns);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

// x [P,K] bf16 or fp16, K a multiple of 16; with slot_of_row [P] x is [T,K], and row r that of token slot_of_row[r] / top_k, or zeros where
// slot_of_row[r] names no slot. out e4m3 [B,K,128], scales [B,K], with room for B >= P / 128 + E k-blocks, of which those after the last
// expert's are left as they are. filled_rows int32 [E]: each expert's rows, rounded up to k-blocks
void quantize_k_blocks(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor sizes, bool power_of_two, Tensor out, Tensor scales,
    Tensor filled_rows) {
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "quantize_k_blocks", {
    launch<T>(Rows16Bits<T>{data<const T>(x), x.size(1)}, x, slot_of_row, top_k, sizes, power_of_two, out, scales, filled_rows);
  });
}

// The same of what dequantize_rows makes of values and row_scales, in bf16 or fp16, which is never in memory.
void requantize_k_blocks(
    Tensor values, Tensor row_scales, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor sizes, bool power_of_two,
    bool is_bfloat16, Tensor out, Tensor scales, Tensor filled_rows) {
  const ScalarType dtype = is_bfloat16 ? ScalarType::BFloat16 : ScalarType::Half;
  GBMOE_DISPATCH_16_BIT(dtype, "requantize_k_blocks", {
    launch<T>(
        RowsFloat8<T>{float8_rows(values, row_scales)}, values, slot_of_row, top_k, sizes, power_of_two, out, scales,
        filled_rows);
  });
}

GBMOE_OPERATOR(quantize_k_blocks,
               "(Tensor x, Tensor? slot_of_row, int top_k, Tensor sizes, bool power_of_two, Tensor(a!) out, Tensor(b!) "
               "scales, Tensor(c!) filled_rows) -> ()");
GBMOE_OPERATOR(
    requantize_k_blocks,
    "(Tensor values, Tensor row_scales, Tensor? slot_of_row, int top_k, Tensor sizes, bool power_of_two, bool "
    "is_bfloat16, Tensor(a!) out, Tensor(b!) scales, Tensor(c!) filled_rows) -> ()");

}  // namespace gbmoe
