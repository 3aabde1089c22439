// The matrices of experts that a rank lends to others for a pass, copied to its mapped memory, from where borrowers copy them.
//
// One launch copies all of them: the host, which has just learned which experts these are, has a first product to launch next. It reads and
// writes each byte once; a CTA copies a run of one matrix.

#include "../operators.h"
#include "memory.cuh"

namespace gbmoe {
namespace {

constexpr int kMostMatrices = 3;  // of an expert
constexpr int kMostExperts = 256;  // of a launch
constexpr int kInFlight = 4;  // loads of a thread

struct Stacks {
  const void* of_matrix[kMostMatrices];  // E matrices, one directly after the other
};
struct Experts { int of_launch[kMostExperts]; };

// blockIdx.y is the place of an expert in the launch, and blockIdx.z its matrix. lent_MLX has room for L experts, of which the first is that
// of the launch's first expert.
template <typename V>
__global__ void __launch_bounds__(kThreads) copy_experts_kernel(
    const __grid_constant__ Stacks stacks, const __grid_constant__ Experts experts, V* __restrict__ lent_MLX, int64_t room,
    int64_t vectors) {
  const V* from = static_cast<const V*>(stacks.of_matrix[blockIdx.z]) + experts.of_launch[blockIdx.y] * vectors;
  V* to = lent_MLX + (blockIdx.z * room + blockIdx.y) * vectors;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; first < vectors; first += kInFlight * step) {
    V loaded[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * step < vectors) loaded[i] = from[first + i * step];
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      if (first + i * step < vectors) to[first + i * step] = loaded[i];
    }
  }
}

}  // namespace

// lent[m,i] = the matrix of experts[i] in the m-th of the stacks w1, w2 and v1 [E,F,H]; lent [M,L,F,H], L at least as many as experts. All are
// contiguous.
void copy_experts(std::vector<int64_t> experts, Tensor w1, Tensor w2, std::optional<Tensor> v1, Tensor lent) {
  const torch::stable::accelerator::DeviceGuard guard(lent.get_device_index());
  const int64_t room = lent.size(1), matrix_bytes = lent.size(2) * lent.size(3) * static_cast<int64_t>(lent.element_size());
  const auto count = static_cast<int64_t>(experts.size()), matrices = lent.size(0);
  STD_TORCH_CHECK(count <= room, "copy_experts: expected at most ", room, " experts, got ", count);
  STD_TORCH_CHECK(matrices == (v1 ? 3 : 2), "copy_experts: expected lent of ", v1 ? 3 : 2, " matrices, got ", matrices);
  for (const int64_t expert : experts) {
    STD_TORCH_CHECK(expert >= 0 && expert < w1.size(0), "copy_experts: expected experts below ", w1.size(0), ", got ", expert);
  }
  if (matrix_bytes == 0) return;
  const Stacks stacks{{w1.data_ptr(), w2.data_ptr(), v1 ? v1->data_ptr() : nullptr}};
  const auto launch = [&](auto vector) {
    using V = decltype(vector);
    const int64_t vectors = matrix_bytes / static_cast<int64_t>(sizeof(V));
    for (int64_t first = 0; first < count; first += kMostExperts) {
      const int64_t together = std::min<int64_t>(kMostExperts, count - first);
      Experts of{};
      std::copy_n(experts.begin() + first, together, of.of_launch);
      // Some CTAs for each multiprocessor, of which each thread has something in flight.
      const int64_t most = ceil_div(int64_t{8} * multiprocessors(lent.get_device_index()), together * matrices);
      const dim3 grid(
          static_cast<unsigned>(std::clamp<int64_t>(ceil_div(vectors, kInFlight * kThreads), 1, most)),
          static_cast<unsigned>(together), static_cast<unsigned>(matrices));
      copy_experts_kernel<V>
          <<<grid, kThreads, 0, current_stream(lent)>>>(stacks, of, data<V>(lent) + first * vectors, room, vectors);
      STD_CUDA_KERNEL_LAUNCH_CHECK();
    }
  };
  const Tensor* third = v1 ? &*v1 : nullptr;
  if (fits_16_bytes(matrix_bytes, {&w1, &w2, third, &lent})) launch(uint4{});
  else if (lent.element_size() == 2) launch(uint16_t{});
  else launch(uint32_t{});
}

GBMOE_OPERATOR(copy_experts, "(int[] experts, Tensor w1, Tensor w2, Tensor? v1, Tensor(a!) lent) -> ()");

}  // namespace gbmoe
