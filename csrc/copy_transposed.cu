// A scaled copy of a tensor in another order of its dimensions and another dtype, where the dimension along which the copy is contiguous
// is another than the tensor's: adapters' factors, which lie as those who train them keep them. Tiles go through shared memory, so that both
// sides are read and written in lines of 128 bytes and more of 16 bits, or whole rows where these are shorter.

#include <utility>

#include "common.cuh"
#include "operators.h"

namespace gbmoe {
namespace {

// A thread reads runs of elements along M, and writes such along N, kAtOnce of each: all of a tile's are read before one is written.
constexpr int kThreads = 256, kRun = 4, kAtOnce = 4, kTile = kThreads * kRun * kAtOnce;
constexpr int kSide = 64, kShortSide = 16;  // of tiles 64 x 64, or 16 x 256 and 256 x 16 where M or N is short
static_assert(kTile == kSide * kSide && kTile % kShortSide == 0);

// Along M the tensor is contiguous, and along N the copy; B is the third dimension.
struct Sizes {
  int64_t b, m, n;
  int64_t from_b, from_n, to_b, to_m;  // elements from one index to the next
  bool from_runs = false, to_runs = false;  // whether runs are whole, and aligned
  int tile_m = kSide, tile_n = kSide, tiles_m = 0, tiles_n = 0;
};

template <typename T> __device__ __forceinline__ Vector<T, kRun> load_run(const T* from, int64_t left, bool whole) {
  if (whole) return *reinterpret_cast<const Vector<T, kRun>*>(from);
  Vector<T, kRun> run{};
#pragma unroll
  for (int i = 0; i < kRun; ++i)
    if (i < left) run.element[i] = from[i];
  return run;
}

template <typename T> __device__ __forceinline__ void store_run(T* to, const Vector<T, kRun>& run, int64_t left, bool whole) {
  if (whole) {
    *reinterpret_cast<Vector<T, kRun>*>(to) = run;
    return;
  }
#pragma unroll
  for (int i = 0; i < kRun; ++i)
    if (i < left) to[i] = run.element[i];
}

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads)
    copy_transposed_kernel(const From* __restrict__ from, To* __restrict__ to, float scale, const __grid_constant__ Sizes sizes) {
  // [N,M], with a column more than a tile has, so that lines along either side spread over the banks.
  __shared__ float tile[kTile + kTile / kShortSide];
  const int pitch = sizes.tile_m + 1;
  const int along_m = blockIdx.x % sizes.tiles_m, others = blockIdx.x / sizes.tiles_m;
  const int64_t b = others / sizes.tiles_n, first_m = int64_t{along_m} * sizes.tile_m;
  const int64_t first_n = int64_t{others % sizes.tiles_n} * sizes.tile_n;
  {
    const int runs = sizes.tile_m / kRun, lines = kThreads / runs, in_m = threadIdx.x % runs * kRun, in_n = threadIdx.x / runs;
    const int64_t left = sizes.m - first_m - in_m;
    Vector<From, kRun> held[kAtOnce]{};
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t n = first_n + in_n + i * lines;
      if (n < sizes.n && left > 0)
        held[i] = load_run(from + b * sizes.from_b + n * sizes.from_n + first_m + in_m, left, sizes.from_runs);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int k = 0; k < kRun; ++k) tile[(in_n + i * lines) * pitch + in_m + k] = widen(held[i].element[k]) * scale;
  }
  __syncthreads();
  const int runs = sizes.tile_n / kRun, lines = kThreads / runs, in_n = threadIdx.x % runs * kRun, in_m = threadIdx.x / runs;
  const int64_t left = sizes.n - first_n - in_n;
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
    const int64_t m = first_m + in_m + i * lines;
    if (m >= sizes.m || left <= 0) continue;
    Vector<To, kRun> run;
#pragma unroll
    for (int k = 0; k < kRun; ++k) run.element[k] = narrow<To>(tile[(in_n + k) * pitch + in_m + i * lines]);
    store_run(to + b * sizes.to_b + m * sizes.to_m + first_n + in_n, run, left, sizes.to_runs);
  }
}

template <typename From> void launch(const Tensor& from, const Tensor& to, float scale, const Sizes& sizes) {
  const auto ctas = sizes.b * sizes.tiles_m * sizes.tiles_n;
  const auto start = [&](auto* written) {
    copy_transposed_kernel<<<static_cast<unsigned>(ctas), kThreads, 0, current_stream(from)>>>(
        data<const From>(from), written, scale, sizes);
  };
  if (to.scalar_type() == ScalarType::Float) start(data<float>(to));
  else GBMOE_DISPATCH_16_BIT(to.scalar_type(), "copy_transposed", { start(data<T>(to)); });
}

// Whether runs of `length` elements that begin at multiples of the strides are whole, and aligned.
bool has_runs(const Tensor& tensor, int64_t length, int64_t stride, int64_t other) {
  const bool whole = length % kRun == 0 && stride % kRun == 0 && other % kRun == 0;
  return whole && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % (kRun * tensor.element_size()) == 0;
}

// Of a tensor and its copy, contiguous along their dimensions m and n. The third dimension becomes part of one of these where both lie so:
// of PEFT's factors [N, r * E], which are copied to [E,N,r], r is short, and N r is not.
Sizes sizes_of(const Tensor& from, const Tensor& to, int m, int n) {
  const int b = 3 - m - n;
  Sizes sizes{from.size(b), from.size(m), from.size(n), from.stride(b), from.stride(n), to.stride(b), to.stride(m)};
  if (sizes.from_b == sizes.n * sizes.from_n && sizes.to_b == sizes.n) sizes.n *= std::exchange(sizes.b, 1);
  else if (sizes.to_b == sizes.m * sizes.to_m && sizes.from_b == sizes.m) sizes.m *= std::exchange(sizes.b, 1);
  sizes.from_runs = has_runs(from, sizes.m, sizes.from_n, sizes.b > 1 ? sizes.from_b : 0);
  sizes.to_runs = has_runs(to, sizes.n, sizes.to_m, sizes.b > 1 ? sizes.to_b : 0);
  if (sizes.m <= kShortSide) sizes.tile_m = kShortSide, sizes.tile_n = kTile / kShortSide;
  else if (sizes.n <= kShortSide) sizes.tile_n = kShortSide, sizes.tile_m = kTile / kShortSide;
  const int64_t tiles_m = ceil_div(sizes.m, int64_t{sizes.tile_m}), tiles_n = ceil_div(sizes.n, int64_t{sizes.tile_n});
  STD_TORCH_CHECK(
      sizes.b * tiles_m * tiles_n <= INT32_MAX, "copy_transposed: expected at most 2^31 - 1 tiles, got ",
      sizes.b * tiles_m * tiles_n);
  sizes.tiles_m = static_cast<int>(tiles_m), sizes.tiles_n = static_cast<int>(tiles_n);
  return sizes;
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
  const int m = fastest(from, "from"), n = fastest(to, "to");
  STD_TORCH_CHECK(m != n, "copy_transposed: expected tensors contiguous along two dimensions, got one");
  const Sizes sizes = sizes_of(from, to, m, n);
  const auto factor = static_cast<float>(scale);
  if (from.scalar_type() == ScalarType::Float) launch<float>(from, to, factor, sizes);
  else GBMOE_DISPATCH_16_BIT(from.scalar_type(), "copy_transposed", { launch<T>(from, to, factor, sizes); });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(copy_transposed, "(Tensor from, float scale, Tensor(a!) to) -> ()");

}  // namespace gbmoe
