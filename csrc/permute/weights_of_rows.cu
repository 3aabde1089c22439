// The router's weights as gradients of biases take them: by row, in the columns of a GEMM's operand; and their own gradient, of which a
// GEMM has made a part for each row.

#include "../common.cuh"
#include "../group_sizes.cuh"
#include "../operators.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256;
constexpr int kColumns = 8;  // of 16 bits: a vector of 16 bytes

// Row r's weight in the first column, and what it has lost by rounding in the second; a thread has one row.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    weights_in_columns_kernel(const int* slot_of_row, uint32_t slots, const Scalars weights, Vector<T, kColumns>* out, int rows) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= rows) return;
  const int slot = slot_of_row[row];
  Vector<T, kColumns> columns{};
  if (static_cast<uint32_t>(slot) < slots) {
    const double weight = weights.data ? weights.read(slot) : 1.0;
    columns.element[0] = narrow<T>(static_cast<float>(weight));
    columns.element[1] = narrow<T>(static_cast<float>(weight - widen(columns.element[0])));
  }
  out[row] = columns;
}

struct Rows {
  const void* sizes;
  bool sizes_are_int64;
  int groups, rows;
};

// A thread has one row. Each slot has at most one, so that no two threads add to one weight's gradient.
__global__ void __launch_bounds__(kThreads) add_dots_kernel(
    const float* dots, int pitch, const int* slot_of_row, uint32_t slots, const Rows of, const Scalars grad_weights) {
  __shared__ int sizes[kThreads];
  int size = 0;
  for (int group = threadIdx.x; group < of.groups; group += kThreads) size = add_rows(of, size, size_of_group(of, group));
  sizes[threadIdx.x] = size;
  for (int half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) sizes[threadIdx.x] = add_rows(of, sizes[threadIdx.x], sizes[threadIdx.x + half]);
  }
  __syncthreads();
  const int row = blockIdx.x * kThreads + threadIdx.x;
  if (row >= sizes[0]) return;
  const int slot = slot_of_row[row];
  if (static_cast<uint32_t>(slot) >= slots) return;
  grad_weights.write(slot, grad_weights.read(slot) + dots[static_cast<int64_t>(row) * pitch]);
}

unsigned ctas_of(int64_t rows) { return static_cast<unsigned>(ceil_div(rows, int64_t{kThreads})); }

}  // namespace

// out[r] = (weights[slot_of_row[r]], what that loses in out's dtype, 0, ...), [P,8] in bf16 or fp16; without weights 1. Zeros where
// slot_of_row[r] names no slot. Weights have any floating dtype
void weights_in_columns(Tensor slot_of_row, std::optional<Tensor> weights, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  if (out.numel() == 0) return;
  STD_TORCH_CHECK(out.size(1) == kColumns && aligned_16(out), "weights_in_columns: expected out [P,8] at a multiple of 16 bytes");
  const int64_t rows = out.size(0);
  GBMOE_DISPATCH_16_BIT(out.scalar_type(), "weights_in_columns", {
    weights_in_columns_kernel<T><<<ctas_of(rows), kThreads, 0, current_stream(out)>>>(
        data<const int>(slot_of_row), count_of_slots(weights), scalars(weights), data<Vector<T, kColumns>>(out),
        static_cast<int>(rows));
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// grad_weights[slot_of_row[r]] += dots[r,0], of dots [P,R] in fp32, for the rows of groups that a slot has; rounded once. grad_weights have
// any floating dtype
void add_dots(Tensor dots, Tensor slot_of_row, Tensor sizes, Tensor grad_weights) {
  const torch::stable::accelerator::DeviceGuard guard(dots.get_device_index());
  if (dots.numel() == 0 || grad_weights.numel() == 0) return;
  STD_TORCH_CHECK(dots.scalar_type() == ScalarType::Float, "add_dots: expected dots in float32");
  const int64_t rows = dots.size(0);
  const Rows of{
      sizes.data_ptr(), sizes.scalar_type() == ScalarType::Long, static_cast<int>(sizes.numel()), static_cast<int>(rows)};
  add_dots_kernel<<<ctas_of(rows), kThreads, 0, current_stream(dots)>>>(
      data<const float>(dots), static_cast<int>(dots.size(1)), data<const int>(slot_of_row), count_of_slots(grad_weights.numel()),
      of, scalars(grad_weights));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(weights_in_columns, "(Tensor slot_of_row, Tensor? weights, Tensor(a!) out) -> ()");
GBMOE_OPERATOR(add_dots, "(Tensor dots, Tensor slot_of_row, Tensor sizes, Tensor(a!) grad_weights) -> ()");

}  // namespace gbmoe
