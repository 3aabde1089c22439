// A scaled copy of a tensor in another order of its dimensions and another dtype, where the dimension along which the copy is contiguous
// is another than the tensor's: adapters' factors, which lie as those who train them keep them. Tiles of 32 x 32 go through shared memory, so that both
// sides are read and written line by line.

#include <utility>

#include "common.cuh"
#include "operators.h"

namespace gbmoe {
namespace {

constexpr int kTile = 32, kLines = 8;  // of a tile, at a time

// Along M the tensor is contiguous, and along N the copy; B is the third dimension.
struct Sizes {
  int64_t b, m, n;
  int64_t from_b, from_n, to_b, to_m;  // elements from one index to the next
};

template <typename From, typename To>
__global__ void __launch_bounds__(kTile* kLines)
    copy_transposed_kernel(const From* from, To* to, float scale, const __grid_constant__ Sizes sizes) {
  __shared__ float tile[kTile][kTile + 1];
  const int64_t tiles_m = ceil_div(sizes.m, int64_t{kTile}), tiles_n = ceil_div(sizes.n, int64_t{kTile});
  const int64_t in_batch = blockIdx.x % (tiles_m * tiles_n), b = blockIdx.x / (tiles_m * tiles_n);
  const int64_t first_m = in_batch % tiles_m * kTile, first_n = in_batch / tiles_m * kTile;
  const int lane = threadIdx.x % kTile, line = threadIdx.x / kTile;
#pragma unroll
  for (int i = line; i < kTile; i += kLines) {
    const int64_t m = first_m + lane, n = first_n + i;
    if (m < sizes.m && n < sizes.n) tile[i][lane] = widen(from[b * sizes.from_b + n * sizes.from_n + m]) * scale;
  }
  __syncthreads();
#pragma unroll
  for (int i = line; i < kTile; i += kLines) {
    const int64_t m = first_m + i, n = first_n + lane;
    if (m < sizes.m && n < sizes.n) to[b * sizes.to_b + m * sizes.to_m + n] = narrow<To>(tile[lane][i]);
  }
}

template <typename From> void launch(const Tensor& from, const Tensor& to, float scale, const Sizes& sizes) {
  const int64_t ctas = sizes.b * ceil_div(sizes.m, int64_t{kTile}) * ceil_div(sizes.n, int64_t{kTile});
  STD_TORCH_CHECK(ctas <= INT32_MAX, "copy_transposed: expected at most 2^31 - 1 tiles, got ", ctas);
  const auto start = [&](auto* written) {
    copy_transposed_kernel<<<static_cast<unsigned>(ctas), kTile * kLines, 0, current_stream(from)>>>(
        data<const From>(from), written, scale, sizes);
  };
  if (to.scalar_type() == ScalarType::Float) start(data<float>(to));
  else GBMOE_DISPATCH_16_BIT(to.scalar_type(), "copy_transposed", { start(data<T>(to)); });
}

// The dimension of [B,M,N], in any order, whose elements follow one another.
int fastest(const Tensor& tensor, const char* name) {
  for (int dim = 0; dim < 3; ++dim)
    if (tensor.stride(dim) == 1 && tensor.size(dim) > 1) return dim;
  STD_TORCH_CHECK(false, "copy_transposed: expected ", name, " contiguous along a dimension");
}

}  // namespace

// to = from * scale, of one shape of three dimensions, each contiguous along one that is not the other's; bf16, fp16 or fp32 both
void copy_transposed(Tensor from, double scale, Tensor to) {
  const torch::stable::accelerator::DeviceGuard guard(from.get_device_index());
  STD_TORCH_CHECK(
      from.dim() == 3 && to.dim() == 3 && from.size(0) == to.size(0) && from.size(1) == to.size(1) && from.size(2) == to.size(2),
      "copy_transposed: expected two tensors of one shape of three dimensions");
  if (from.numel() == 0) return;
  const int m = fastest(from, "from"), n = fastest(to, "to"), b = 3 - m - n;
  STD_TORCH_CHECK(m != n, "copy_transposed: expected tensors contiguous along two dimensions, got one");
  const Sizes sizes{from.size(b), from.size(m), from.size(n), from.stride(b), from.stride(n), to.stride(b), to.stride(m)};
  const auto factor = static_cast<float>(scale);
  if (from.scalar_type() == ScalarType::Float) launch<float>(from, to, factor, sizes);
  else GBMOE_DISPATCH_16_BIT(from.scalar_type(), "copy_transposed", { launch<T>(from, to, factor, sizes); });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(copy_transposed, "(Tensor from, float scale, Tensor(a!) to) -> ()");

}  // namespace gbmoe
