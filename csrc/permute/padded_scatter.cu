// padded_scatter: each token is the weighted sum of its slots' rows.

#include "../early_launch.cuh"
#include "../operators.h"
#include "weighted_row_sum.cuh"

namespace gbmoe {
namespace {

// out[token] = the sum of weight * y[row] over the token's slots.
template <typename T, int N, int S, bool kMany>
__global__ void __launch_bounds__(kThreads) scatter_kernel(
    const Vector<T, N>* __restrict__ y_PH, const Slots slots, const Scalars weights, Vector<T, N>* __restrict__ out_TH,
    const LaunchShape shape) {
  wait_for_kernel_before();
  const int64_t token = shape.own_token();
  if (token >= shape.tokens) return;
  store_weighted_sum<T, N, S, kMany>(y_PH, slots, weights, token, shape, out_TH, token);
}

}  // namespace

// row_of_slot, columns and counts may be views with a row stride
void padded_scatter(
    Tensor y, Tensor row_of_slot, std::optional<Tensor> columns, std::optional<Tensor> counts, std::optional<Tensor> weights,
    Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  const int64_t hidden = y.size(1);
  if (out.numel() == 0) return;
  const Slots slots = make_slots(row_of_slot, columns, counts, y.size(0), {&weights});
  GBMOE_DISPATCH_FLOATING(y.scalar_type(), "padded_scatter", {
    const bool fits = fits_16_bytes(hidden * sizeof(T), {&y, &out});
    GBMOE_DISPATCH_VECTOR_AND_SLOTS(fits, slots.most, {
      const bool few = out.size(0) <= kFewTokens;
      const int threads = few ? many_threads(hidden / N) : few_threads(hidden / N);
      const LaunchShape shape = make_launch_shape(out.size(0), slots.most, 0, hidden / N, threads, false);
      const auto kernel = slots.most > S ? scatter_kernel<T, N, S, kMayTakeSeveralPasses<N, S>> : scatter_kernel<T, N, S, false>;
      launch_early(
          few, kernel, shape.ctas, shape.threads, 0, y, data<Vector<T, N>>(y), slots, scalars(weights), data<Vector<T, N>>(out),
          shape);
    });
  });
}

GBMOE_OPERATOR(padded_scatter,
               "(Tensor y, Tensor row_of_slot, Tensor? columns, Tensor? counts, Tensor? weights, Tensor(a!) out) -> ()");

}  // namespace gbmoe
