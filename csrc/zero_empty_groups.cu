// The gradients of groups without rows: no GEMM writes them, so they are set to zero here, with the sizes on the device.

#include "common.cuh"
#include "operators.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerGroup = 16;

// The grid has one dimension, because the others end at 65,535.
template <typename Size>
__global__ void __launch_bounds__(kThreads) zero_empty_groups_kernel(uint32_t* out, const Size* sizes, int64_t words) {
  const unsigned number = blockIdx.x / kCtasPerGroup, cta = blockIdx.x % kCtasPerGroup;
  if (sizes[number] > 0) return;
  uint32_t* group = out + number * words;
  for (int64_t i = cta * kThreads + threadIdx.x; i < words; i += kCtasPerGroup * kThreads) group[i] = 0;
}

}  // namespace

// out[e] = 0 where sizes[e] is 0, or negative, which counts as 0; other groups are not touched. A group is a whole number of
// 4-byte words.
void zero_empty_groups(Tensor sizes, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(out.get_device_index());
  const int64_t groups = sizes.numel();
  if (out.numel() == 0) return;
  const int64_t bytes = out.numel() / groups * static_cast<int64_t>(out.element_size());
  STD_TORCH_CHECK(bytes % 4 == 0, "zero_empty_groups: expected groups of whole 4-byte words, got ", bytes, " bytes");
  STD_TORCH_CHECK(groups <= INT32_MAX / kCtasPerGroup, "zero_empty_groups: expected at most ", INT32_MAX / kCtasPerGroup, " groups, got ",
                  groups);
  const unsigned grid = static_cast<unsigned>(groups) * kCtasPerGroup;
  uint32_t* words = static_cast<uint32_t*>(out.data_ptr());
  if (sizes.scalar_type() == ScalarType::Long) {
    zero_empty_groups_kernel<<<grid, kThreads, 0, current_stream(out)>>>(
        words, static_cast<const int64_t*>(sizes.data_ptr()), bytes / 4);
  } else {
    zero_empty_groups_kernel<<<grid, kThreads, 0, current_stream(out)>>>(
        words, static_cast<const int32_t*>(sizes.data_ptr()), bytes / 4);
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(zero_empty_groups, "(Tensor sizes, Tensor(a!) out) -> ()");

}  // namespace gbmoe
