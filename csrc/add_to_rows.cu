// A sum of two results of 16 bits, in the memory of the first. Torch's add_ gives the same bits, but has an argument that no program
// (program.cpp) can pass.

#include <algorithm>

#include "common.cuh"
#include "operators.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256, kCtasPerMultiprocessor = 16;

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) add_to_rows_kernel(Vector<T, N>* to, const Vector<T, N>* added, int64_t vectors) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t v = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; v < vectors; v += stride) {
    Vector<T, N> sum = to[v];
    const Vector<T, N> other = added[v];
#pragma unroll
    for (int i = 0; i < N; ++i) sum.element[i] = narrow<T>(widen(sum.element[i]) + widen(other.element[i]));
    to[v] = sum;
  }
}

}  // namespace

// to += added, contiguous tensors of one shape in bf16 or fp16, whose rows are multiples of 8 and aligned to 16 bytes
void add_to_rows(Tensor to, Tensor added) {
  const torch::stable::accelerator::DeviceGuard guard(to.get_device_index());
  if (to.numel() == 0) return;
  GBMOE_DISPATCH_16_BIT(to.scalar_type(), "add_to_rows", {
    constexpr int kLength = kVectorLength<T>;
    STD_TORCH_CHECK(
        to.numel() % kLength == 0 && to.numel() == added.numel() && to.scalar_type() == added.scalar_type() && aligned_16(to) &&
            aligned_16(added),
        "add_to_rows: expected two tensors of one dtype and shape, of whole vectors of 16 bytes");
    const int64_t vectors = to.numel() / kLength;
    const int64_t most = static_cast<int64_t>(multiprocessors(to.get_device_index())) * kCtasPerMultiprocessor;
    const auto ctas = static_cast<unsigned>(std::min(ceil_div(vectors, int64_t{kThreads}), most));
    add_to_rows_kernel<T, kLength>
        <<<ctas, kThreads, 0, current_stream(to)>>>(data<Vector<T, kLength>>(to), data<const Vector<T, kLength>>(added), vectors);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(add_to_rows, "(Tensor(a!) to, Tensor added) -> ()");

}  // namespace gbmoe
