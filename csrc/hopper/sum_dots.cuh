// The gradients of the router's weights from partial dot products, which a kernel before left for each row and some of its columns.

#pragma once

#include <cstdint>

#include "../common.cuh"

namespace gbmoe::hopper {

constexpr int kSumRows = 32, kSumThreads = 8;  // of a CTA; of a row

static __global__ void __launch_bounds__(kSumRows* kSumThreads)
    sum_dots_kernel(const float* dots, int chunks, int64_t rows, const int* slot_of_row, uint32_t slots, Scalars grad_weights) {
  __shared__ float partial_sums[kSumThreads][kSumRows];
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSumRows + threadIdx.x;
  const int named = row < rows ? slot_of_row[row] : -1, slot = static_cast<uint32_t>(named) < slots ? named : -1;
  float sum = 0.0f;
  if (slot >= 0) {
#pragma unroll 4
    for (int chunk = threadIdx.y; chunk < chunks; chunk += kSumThreads) sum += dots[chunk * rows + row];
  }
  partial_sums[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y > 0 || slot < 0) return;
  for (int i = 1; i < kSumThreads; ++i) sum += partial_sums[i][threadIdx.x];
  grad_weights.write(slot, sum);
}

// grad_weights[slot of row r] = dots[0,r] + dots[1,r] + ..., in the same order for every row.
static inline void sum_dots(
    const float* dots, int chunks, int64_t rows, const int* slot_of_row, uint32_t slots, const Scalars& grad_weights,
    cudaStream_t stream) {
  if (rows == 0) return;
  const auto ctas = static_cast<unsigned>(ceil_div<int64_t>(rows, kSumRows));
  sum_dots_kernel<<<ctas, dim3(kSumRows, kSumThreads), 0, stream>>>(dots, chunks, rows, slot_of_row, slots, grad_weights);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe::hopper
