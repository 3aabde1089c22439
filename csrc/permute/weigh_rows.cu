// weigh_rows: rows times the router's weight of their slot. They are adapters' rows, of few vectors of 16 bytes.

#include "../common.cuh"
#include "../operators.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256;

// A thread has one vector.
template <typename T, int N = kVectorLength<T>>
__global__ void __launch_bounds__(kThreads) weigh_rows_kernel(
    const Vector<T, N>* rows_PR, const int* slot_of_row, uint32_t slots, const Scalars weights, Vector<T, N>* out_PR, int64_t all,
    int vectors) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (at >= all) return;
  const int slot = slot_of_row[at / vectors];
  Vector<T, N> out{};
  if (static_cast<uint32_t>(slot) < slots) {
    const Vector<T, N> row = rows_PR[at];
    const accumulate_t<T> weight = weights.data ? accumulate_t<T>(weights.read(slot)) : accumulate_t<T>(1);
#pragma unroll
    for (int i = 0; i < N; ++i) out.element[i] = narrow<T>(weight * widen(row.element[i]));
  }
  out_PR[at] = out;
}

}  // namespace

// out[r] = rows[r] * weights[slot_of_row[r]], [P,R], rounded once, or rows[r] without weights; zeros where slot_of_row[r] names no slot.
// Rows are whole vectors of 16 bytes; weights have any floating dtype
void weigh_rows(Tensor rows, Tensor slot_of_row, std::optional<Tensor> weights, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(rows.get_device_index());
  if (rows.numel() == 0) return;
  const int64_t row_bytes = rows.size(1) * static_cast<int64_t>(rows.element_size()), vectors = row_bytes / 16;
  STD_TORCH_CHECK(fits_16_bytes(row_bytes, {&rows, &out}), "weigh_rows: expected rows of whole, aligned vectors of 16 bytes");
  const int64_t all = rows.size(0) * vectors, ctas = ceil_div(all, int64_t{kThreads});
  STD_TORCH_CHECK(ctas <= INT32_MAX, "weigh_rows: expected less than 2^39 vectors, got ", all);
  GBMOE_DISPATCH_FLOATING(rows.scalar_type(), "weigh_rows", {
    using V = Vector<T, kVectorLength<T>>;
    weigh_rows_kernel<T><<<static_cast<unsigned>(ctas), kThreads, 0, current_stream(rows)>>>(
        data<const V>(rows), data<const int>(slot_of_row), count_of_slots(weights), scalars(weights), data<V>(out), all,
        static_cast<int>(vectors));
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(weigh_rows, "(Tensor rows, Tensor slot_of_row, Tensor? weights, Tensor(a!) out) -> ()");

}  // namespace gbmoe
