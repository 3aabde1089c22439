// Rows in e4m3 with their scales to what they stand for in 16 bits, in one pass: as they are or, by slot, tokens.
//
// A few warps own a row; each thread reads 8 bytes and stores 16, four at a time. Bytes at the least: 3.03 PH; tokens 1.03 TH + 2 PH, where
// the L2 cache keeps them.

#include "../../operators.h"
#include "../../permute/padded_rows.cuh"
#include "float8.cuh"

namespace gbmoe {
namespace {

using hopper::dequantize, hopper::Float8Rows, hopper::float8_rows;

constexpr int kInFlight = 4;  // loads of a thread

// out [rows,vectors] of 8 numbers. Without slot_of_row its rows are those of x.
template <typename T> __global__ void __launch_bounds__(kThreads) dequantize_rows_kernel(
    const Float8Rows x, const int* __restrict__ slot_of_row, unsigned slots, unsigned top_k, uint4* __restrict__ out,
    int64_t rows, int vectors, int row_threads) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (kThreads / row_threads) + threadIdx.x / row_threads;
  if (row >= rows) return;
  int64_t from = row;
  if (slot_of_row) {
    const int slot = slot_of_row[row];
    if (slot == kBehindTheLast) return;
    from = static_cast<unsigned>(slot) < slots ? static_cast<int64_t>(static_cast<unsigned>(slot) / top_k) : -1;
  }
  for (int first = threadIdx.x % row_threads; first < vectors; first += kInFlight * row_threads) {
    uint2 eight[kInFlight] = {};
    float scale[kInFlight] = {};
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int v = first + i * row_threads;
      if (from >= 0 && v < vectors) eight[i] = x.eight(from, v * 8), scale[i] = x.scale(from, v * 8);
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int v = first + i * row_threads;
      if (v < vectors) out[row * vectors + v] = dequantize<T>(eight[i], scale[i]);
    }
  }
}

}  // namespace

// values e4m3 [P,H] with scales fp32 [P, H / 128 rounded up], both contiguous or with rows that lie further apart, those of values a multiple
// of 8 bytes; out bf16 or fp16 [P,H], contiguous, H a multiple of 16. With slot_of_row [P] they have T rows, and row r of out is that of
// token slot_of_row[r] / top_k, or zeros where slot_of_row[r] names no slot; rows after the last expert are left as they are.
void dequantize_rows(Tensor values, Tensor scales, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  if (out.numel() == 0) return;
  const auto vectors = static_cast<int>(out.size(1) / 8);
  const int row_threads = few_threads(vectors);
  const int64_t ctas = ceil_div(out.size(0), static_cast<int64_t>(kThreads / row_threads));
  const int64_t slots = slot_of_row ? values.size(0) * top_k : 0;
  GBMOE_DISPATCH_16_BIT(out.scalar_type(), "dequantize_rows", {
    dequantize_rows_kernel<T><<<static_cast<unsigned>(ctas), kThreads, 0, current_stream(values)>>>(
        float8_rows(values, scales), data<const int>(slot_of_row), count_of_slots(slots), static_cast<unsigned>(top_k),
        data<uint4>(out), out.size(0), vectors, row_threads);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(dequantize_rows, "(Tensor values, Tensor scales, Tensor? slot_of_row, int top_k, Tensor(a!) out) -> ()");

}  // namespace gbmoe
