// The gradient of the experts' activation as in activation_kernels.cu, to the bit, and dh and dg in e4m3 as well (float8.cuh): what the
// products of rows that come next read. The gradients of weights read dh and dg in 16 bits, from which they are quantised.
//
// In 16 bits dh and dg may be pairs, element by element [P,2F]: of weights that have gate and up in turns, whose gradient is one product
// then. a' takes the place of d there, as dh does elsewhere, so that no more memory is needed.
//
// Bytes at the least, with g: 14PF, where dh and dg that are read once more to be quantised make 18PF.

#include <cstdint>

#include "../../activation_backward.cuh"
#include "../../operators.h"
#include "quantize.cuh"

namespace gbmoe {
namespace {

using hopper::Eight, hopper::kVector, hopper::Numbers, hopper::ScaledRows, hopper::store_scaled;

constexpr int kThreads = 256, kWarpsPerCta = kThreads / 32;

// Each warp owns two rows, and goes along them in steps of two tiles, one for each half of the warp. All lanes stay to the end of a row,
// because the shuffles need them: one after the row's end computes on zeros and stores nothing. Where the number of rows is odd, the last
// row is computed twice, with the same results. The activation is a template parameter, because one kernel for all of them takes 102
// registers, where no single one takes more than 80. Where a_PF is null dh and dg go to dg_PF in pairs. A lane's d has been read then
// before a' takes its place: no other lane reads it.
template <typename T, int kKind>
__global__ void __launch_bounds__(kThreads) activate_backward_scaled_kernel(
    const Numbers<T>* h_PF, const Numbers<T>* g_PF, Numbers<T>* d_PF, const int* slot_of_row, Scalars weights,
    const unsigned slots_in_all, bool power_of_two, Numbers<T>* a_PF, Numbers<T>* dg_PF, const ScaledRows scaled_dh,
    const ScaledRows scaled_dg, Scalars grad_weights, int64_t rows, int vectors, const __grid_constant__ ActivationOf activation) {
  using Operands = ActivationOperands<T, kVector>;
  const int64_t first_row = (static_cast<int64_t>(blockIdx.x) * kWarpsPerCta + threadIdx.x / 32) * 2;
  if (first_row >= rows) return;  // the whole warp
  const int lane = threadIdx.x % 32;
  const int64_t second_row = min(first_row + 1, rows - 1);
  const int slots[2] = {slot_of_row[first_row], slot_of_row[second_row]};
  Operands of_one{}, of_two{};
  if (lane < vectors) {  // loads are started before anything waits for the slots
    of_one = load_operands<T, kVector>(h_PF, g_PF, d_PF, first_row * vectors + lane);
    of_two = load_operands<T, kVector>(h_PF, g_PF, d_PF, second_row * vectors + lane);
  }
  Row<float> one = row_of<float>(first_row, vectors, slots[0], slots_in_all, weights);
  Row<float> two = row_of<float>(second_row, vectors, slots[1], slots_in_all, weights);
  const auto compute = [&](Row<float>& of, int64_t row, int v, const Operands& operands) {
    const auto result = activation_gradients<kKind, T, kVector>(of, operands, g_PF != nullptr, activation);
    if (v < vectors) {
      const bool in_pairs = a_PF == nullptr;
      (in_pairs ? d_PF : a_PF)[of.first + v] = result.a;
      if (in_pairs) {
        store_pairs(dg_PF, of.first + v, result.dh, result.dg);
      } else {
        d_PF[of.first + v] = result.dh;
        if (g_PF) dg_PF[of.first + v] = result.dg;
      }
    }
    __syncwarp();
    store_scaled<T>(scaled_dh, row, v, vectors, result.dh, power_of_two);
    if (g_PF) store_scaled<T>(scaled_dg, row, v, vectors, result.dg, power_of_two);
  };
  for (int v = lane; v - lane < vectors; v += 32) {
    compute(one, first_row, v, of_one);
    compute(two, second_row, v, of_two);
    of_one = of_two = Operands{};
    if (v + 32 < vectors) {
      of_one = load_operands<T, kVector>(h_PF, g_PF, d_PF, one.first + v + 32);
      of_two = load_operands<T, kVector>(h_PF, g_PF, d_PF, two.first + v + 32);
    }
  }
  if (grad_weights.data) write_dots(one, two, grad_weights);
}

}  // namespace

// activate_backward, and quantize_rows of dh and dg. Without `a`, which needs g: d becomes a', and dg is [P,2F], the pairs of dh and dg
void activate_backward_scaled(
    Tensor h, std::optional<Tensor> g, Tensor d, Tensor slot_of_row, std::optional<Tensor> weights,
    std::vector<double> activation, bool power_of_two, std::optional<Tensor> a, std::optional<Tensor> dg, Tensor scaled_dh,
    Tensor scales_dh, std::optional<Tensor> scaled_dg, std::optional<Tensor> scales_dg, std::optional<Tensor> grad_weights) {
  const ActivationOf of_activation = activation_of(activation);
  const torch::stable::accelerator::DeviceGuard guard(h.get_device_index());
  if (h.numel() == 0) return;
  STD_TORCH_CHECK(
      a || (g && dg && dg->size(1) == 2 * h.size(1)),
      "activate_backward_scaled: expected a, or g and dg with two columns for each of h");
  const uint32_t slots = count_of_slots(weights);
  const ScaledRows rows_dh{data<Eight>(scaled_dh), data<float>(scales_dh)}, rows_dg{data<Eight>(scaled_dg), data<float>(scales_dg)};
  GBMOE_DISPATCH_16_BIT(h.scalar_type(), "activate_backward_scaled", {
    using V = Numbers<T>;
    const unsigned ctas = static_cast<unsigned>(ceil_div(h.size(0), 2 * kWarpsPerCta));
    using Kernel = decltype(&activate_backward_scaled_kernel<T, kSilu>);
    constexpr Kernel kKernels[] = {  // in the order of Activation
        activate_backward_scaled_kernel<T, kSilu>, activate_backward_scaled_kernel<T, kGeluTanh>,
        activate_backward_scaled_kernel<T, kGelu>, activate_backward_scaled_kernel<T, kRelu>,
        activate_backward_scaled_kernel<T, kReluSquared>, activate_backward_scaled_kernel<T, kIdentity>,
        activate_backward_scaled_kernel<T, kClampedSilu>, activate_backward_scaled_kernel<T, kSitu>};
    kKernels[of_activation.kind]<<<ctas, kThreads, 0, current_stream(h)>>>(
        data<const V>(h), data<const V>(g), data<V>(d), data<const int>(slot_of_row), scalars(weights), slots, power_of_two, data<V>(a),
        data<V>(dg), rows_dh, rows_dg, scalars(grad_weights), h.size(0), static_cast<int>(h.size(1) / kVector),
        of_activation);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(
    activate_backward_scaled,
    "(Tensor h, Tensor? g, Tensor(a!) d, Tensor slot_of_row, Tensor? weights, float[] activation, bool "
    "power_of_two, Tensor(b!)? a, Tensor(c!)? dg, Tensor(d!) scaled_dh, Tensor(e!) scales_dh, Tensor(f!)? "
    "scaled_dg, Tensor(g!)? scales_dg, Tensor(h!)? grad_weights) -> ()");

}  // namespace gbmoe
