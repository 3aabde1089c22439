// The gradient of the experts' activation as in activation_kernels.cu, all of it in e4m3: dh and dg with a scale for each tile of a row,
// for the products of rows that come next, and a', dh and dg in k-blocks (k_blocks.cuh), for the gradients of weights. Nothing is stored
// in 16 bits. The numbers are those that quantize.cu and quantize_k_blocks.cu make of a', dh and dg in 16 bits.
//
// Bytes at the least, with g: 11PF, where activate_backward_scaled.cu and three passes that quantise k-blocks move 23PF.

#include <climits>
#include <cstdint>

#include "../../activation_backward.cuh"
#include "../../operators.h"
#include "../sum_dots.cuh"
#include "k_blocks.cuh"
#include "quantize.cuh"

namespace gbmoe {
namespace {

using hopper::Eight, hopper::k_block_of_cta, hopper::GroupSizes, hopper::KBlock, hopper::kKBlockColumns, hopper::KBlockNumbers;
using hopper::kKBlockRows, hopper::KBlocks, hopper::KBlockShared, hopper::KBlockThread, hopper::kKBlockThreadRows,
    hopper::kKBlockThreads;
using hopper::kKBlockRowThreads, hopper::kVector, hopper::pack, hopper::pack_float8, hopper::ScaledRows, hopper::store_k_block;
using hopper::sum_dots, hopper::TileScale, hopper::tile_scale, hopper::unpack;

constexpr int kRows = kKBlockThreadRows;  // of a thread; the 16 threads of half a warp have the same ones

// Combines numbers over the threads of half a warp, so that thread i gets number i of all. The order is fixed. Whole warps come here.
template <int kNumbers, typename N, typename Combine>
__device__ __forceinline__ N reduce_scatter(N (&number)[kNumbers], const Combine& combine) {
#pragma unroll
  for (int step = kKBlockRowThreads / 2; step > 0; step /= 2) {
    const bool upper = threadIdx.x & step;
#pragma unroll
    for (int i = 0; i < (step < kNumbers ? step : kNumbers); ++i) {
      const N other = number[step < kNumbers ? i + step : i];
      number[i] = combine(upper ? other : number[i], __shfl_xor_sync(kFullWarp, upper ? number[i] : other, step));
    }
  }
  return number[0];
}

// What the thread computes from its vectors of h, g and d, rounded to 16 bits; its rows' shares of <a, d> in `dot`.
template <typename T, int kKind>
__device__ __forceinline__ void differentiate(
    const uint4* __restrict__ h_PF, const uint4* __restrict__ g_PF, const uint4* __restrict__ d_PF,
    const Row<float>* rows_of_block, int v, bool inside, KBlockNumbers& a, KBlockNumbers& dh, KBlockNumbers& dg,
    float (&dot)[kRows], const ActivationOf& activation) {
  const KBlockThread own;
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    Row<float> of = rows_of_block[own.row(i)];
    const bool exists = inside && of.slot >= 0;
    const int64_t at = of.first + v;
    const uint4 zeros{0, 0, 0, 0}, h = exists ? h_PF[at] : zeros, g = exists && g_PF ? g_PF[at] : zeros,
                                   d = exists ? d_PF[at] : zeros;
    const uint32_t of_h[] = {h.x, h.y, h.z, h.w}, of_g[] = {g.x, g.y, g.z, g.w}, of_d[] = {d.x, d.y, d.z, d.w};
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) {
      const float2 h2 = unpack<T>(of_h[j]), g2 = unpack<T>(of_g[j]), d2 = unpack<T>(of_d[j]);
      const auto low = activation_gradient<kKind, T>(of, h2.x, g_PF != nullptr, g2.x, d2.x, activation),
                 high = activation_gradient<kKind, T>(of, h2.y, g_PF != nullptr, g2.y, d2.y, activation);
      a[i][j] = exists ? pack<T>(low.a, high.a) : 0;
      dh[i][j] = exists ? pack<T>(low.dh, high.dh) : 0;
      dg[i][j] = exists ? pack<T>(low.dg, high.dg) : 0;
    }
    dot[i] = of.dot;
  }
}

// Quantises the rows' tiles of dh and dg. Thread i of a half warp computes the scale of row i % 8, of dh or (i / 8) of dg.
template <typename T>
__device__ __forceinline__ void store_rows(
    const KBlockNumbers& dh, const KBlockNumbers& dg, const ScaledRows& out_dh, const ScaledRows& out_dg, int first_row, int rows,
    int tile, int vectors, bool power_of_two) {
  const KBlockThread own;
  const int v = tile * kKBlockRowThreads + own.vector, tiles = ceil_div(vectors, kKBlockRowThreads);
  uint32_t largest[2 * kRows];
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    const auto& pair = i < kRows ? dh[i] : dg[i - kRows];
    uint32_t of_pairs = 0;
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) of_pairs = __vmaxu2(of_pairs, pair[j] & 0x7fff7fffu);
    largest[i] =
        max(of_pairs & 0xffffu, of_pairs >> 16);  // magnitudes of 16 bits are in the order of their bits, NaN above infinity
  }
  const uint32_t of_row = reduce_scatter(largest, [](uint32_t one, uint32_t other) { return max(one, other); });
  const TileScale scale = tile_scale(unpack<T>(of_row).x, power_of_two);
  const ScaledRows& own_out = own.vector < kRows ? out_dh : out_dg;
  const int own_row = own.row(own.vector % kRows);
  if (own_out.values && own_row < rows) own_out.scales[static_cast<int64_t>(first_row + own_row) * tiles + tile] = scale.decode;
#pragma unroll
  for (int i = 0; i < 2 * kRows; ++i) {
    const float encode = __shfl_sync(kFullWarp, scale.encode, i, kKBlockRowThreads);
    const ScaledRows& out = i < kRows ? out_dh : out_dg;
    const auto& pair = i < kRows ? dh[i] : dg[i - kRows];
    const int row = own.row(i % kRows);
    if (!out.values || row >= rows || v >= vectors) continue;
    Eight eight;
#pragma unroll
    for (int j = 0; j < kVector / 2; ++j) {
      const float2 numbers = unpack<T>(pair[j]);
      eight.pair[j] = pack_float8(numbers.x * encode, numbers.y * encode);
    }
    out.values[static_cast<int64_t>(first_row + row) * vectors + v] = eight;
  }
}

// One CTA for 128 columns of a k-block. Rows after the last expert's, which no k-block has, are left as they are. `dots` [128 columns
// each, P] gets the shares of the rows' dot products <a, d>; it may be null, as dg's results are without g.
template <typename T, int kKind>
__global__ void __launch_bounds__(kKBlockThreads, 2) activate_backward_k_blocks_kernel(
    const uint4* __restrict__ h_PF, const uint4* __restrict__ g_PF, const uint4* __restrict__ d_PF,
    const int* __restrict__ slot_of_row, const Scalars weights, const unsigned slots_in_all, const GroupSizes sizes,
    const bool power_of_two, const ScaledRows out_dh, const ScaledRows out_dg, const KBlocks a_blocks, const KBlocks dh_blocks,
    const KBlocks dg_blocks, int* __restrict__ filled_rows, float* __restrict__ dots, const int columns,
    const __grid_constant__ ActivationOf activation) {
  __shared__ KBlock found;
  __shared__ Row<float> rows_of_block[kKBlockRows];
  __shared__ KBlockShared shared;
  const int vectors = columns / kVector, ctas_a_block = ceil_div(columns, kKBlockColumns);
  const int k_block = blockIdx.x / ctas_a_block, tile = blockIdx.x % ctas_a_block, first_column = tile * kKBlockColumns;
  const KBlock block = k_block_of_cta(sizes, k_block, filled_rows, found);
  if (block.rows <= 0) return;
  if (threadIdx.x < kKBlockRows) {
    const int row = block.first_row + static_cast<int>(threadIdx.x);
    const int slot = static_cast<int>(threadIdx.x) < block.rows ? slot_of_row[row] : -1;
    rows_of_block[threadIdx.x] = row_of<float>(row, vectors, slot, slots_in_all, weights);
  }
  __syncthreads();
  const KBlockThread own;
  KBlockNumbers a, dh, dg;
  float dot[kRows];
  const int v = tile * kKBlockRowThreads + own.vector;
  differentiate<T, kKind>(h_PF, g_PF, d_PF, rows_of_block, v, v < vectors, a, dh, dg, dot, activation);
  store_rows<T>(dh, dg, out_dh, out_dg, block.first_row, block.rows, tile, vectors, power_of_two);
  if (dots) {
    const float of_row = reduce_scatter(dot, [](float one, float other) { return one + other; });
    const int row = own.row(own.vector % kRows);
    if (own.vector < kRows && row < block.rows) dots[static_cast<int64_t>(tile) * sizes.rows + block.first_row + row] = of_row;
  }
  const auto store = [&](const KBlockNumbers& numbers, const KBlocks& to) {
    store_k_block<T>(numbers, shared, k_block, first_column, columns, power_of_two, to);
  };
  store(a, a_blocks);
  store(dh, dh_blocks);
  if (g_PF) store(dg, dg_blocks);
}

// Of all columns of a tensor [B,F,128], or of every second one of a tensor [B,2F,128].
KBlocks k_blocks(const std::optional<Tensor>& values, const std::optional<Tensor>& scales) {
  if (!values || !scales) return {nullptr, nullptr, 1};
  const auto step = static_cast<int>(scales->stride(1));
  const bool fits = (step == 1 || step == 2) && values->stride(1) == step * kKBlockRows && values->stride(2) == 1 &&
                    scales->stride(0) == step * scales->size(1) && values->stride(0) == scales->stride(0) * kKBlockRows;
  STD_TORCH_CHECK(fits, "activate_backward_k_blocks: expected k-blocks that are contiguous, or every second column of such");
  return {data<uint8_t>(values), data<float>(scales), step};
}

}  // namespace

// activate_backward, whose results leave in e4m3 alone: quantize_rows of dh and dg, except for rows after the last expert's, and
// quantize_k_blocks of a', dh and dg, which share filled_rows. Those of dh and dg may be every second column of k-blocks [B,2F,128] each. grad_weights of slots whose rows lie after the last expert is undefined. dots is scratch, fp32 [F / 128, P], rounded up; given with grad_weights
void activate_backward_k_blocks(
    Tensor h, std::optional<Tensor> g, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights, Tensor sizes,
    std::vector<double> activation, bool power_of_two, Tensor dh, Tensor scales_dh, std::optional<Tensor> dg,
    std::optional<Tensor> scales_dg, Tensor a_blocks, Tensor a_scales, Tensor dh_blocks, Tensor dh_scales,
    std::optional<Tensor> dg_blocks, std::optional<Tensor> dg_scales, Tensor filled_rows, std::optional<Tensor> dots,
    std::optional<Tensor> grad_weights) {
  const ActivationOf of_activation = activation_of(activation);
  const torch::stable::accelerator::DeviceGuard guard(h.get_device_index());
  if (a_blocks.numel() == 0) return;
  const uint32_t slots = count_of_slots(weights);
  const auto rows = static_cast<int>(h.size(0)), columns = static_cast<int>(h.size(1));
  const int64_t ctas = a_blocks.size(0) * ceil_div(columns, kKBlockColumns);
  STD_TORCH_CHECK(ctas <= INT_MAX, "activate_backward_k_blocks: expected at most 2^31 - 1 blocks of 128 x 128, got ", ctas);
  const GroupSizes of{sizes.data_ptr(), sizes.scalar_type() == ScalarType::Long, static_cast<int>(sizes.numel()), rows};
  const ScaledRows rows_dh{data<Eight>(dh), data<float>(scales_dh)}, rows_dg{data<Eight>(dg), data<float>(scales_dg)};
  const cudaStream_t stream = current_stream(h);
  GBMOE_DISPATCH_16_BIT(h.scalar_type(), "activate_backward_k_blocks", {
    using Kernel = decltype(&activate_backward_k_blocks_kernel<T, kSilu>);
    constexpr Kernel kKernels[] = {
        // in the order of Activation
        activate_backward_k_blocks_kernel<T, kSilu>,        activate_backward_k_blocks_kernel<T, kGeluTanh>,
        activate_backward_k_blocks_kernel<T, kGelu>,        activate_backward_k_blocks_kernel<T, kRelu>,
        activate_backward_k_blocks_kernel<T, kReluSquared>, activate_backward_k_blocks_kernel<T, kIdentity>,
        activate_backward_k_blocks_kernel<T, kClampedSilu>, activate_backward_k_blocks_kernel<T, kSitu>};
    kKernels[of_activation.kind]<<<static_cast<unsigned>(ctas), kKBlockThreads, 0, stream>>>(
        data<const uint4>(h), data<const uint4>(g), data<const uint4>(d), data<const int>(slot_of_row), scalars(weights), slots,
        of, power_of_two, rows_dh, rows_dg, k_blocks(a_blocks, a_scales), k_blocks(dh_blocks, dh_scales),
        k_blocks(dg_blocks, dg_scales), data<int>(filled_rows), data<float>(dots), columns, of_activation);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (!dots) return;
  const auto* slot = data<const int>(slot_of_row);
  sum_dots(data<float>(dots), ceil_div(columns, kKBlockColumns), rows, slot, slots, scalars(grad_weights), stream);
}

GBMOE_OPERATOR(activate_backward_k_blocks,
               "(Tensor h, Tensor? g, Tensor d, Tensor slot_of_row, Tensor? weights, Tensor sizes, float[] activation, bool "
               "power_of_two, Tensor(a!) dh, Tensor(b!) scales_dh, Tensor(c!)? dg, Tensor(d!)? scales_dg, Tensor(e!) "
               "a_blocks, Tensor(f!) a_scales, Tensor(g!) dh_blocks, Tensor(h!) dh_scales, Tensor(i!)? dg_blocks, "
               "Tensor(j!)? dg_scales, Tensor(k!) filled_rows, Tensor(l!)? dots, Tensor(m!)? grad_weights) -> ()");

}  // namespace gbmoe
