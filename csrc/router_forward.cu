// The router behind its linear layer: softmax over the experts, the K highest, their p-norm and the logsumexp of the z-loss, from
// the logits in one launch. Ties go to the lower expert; NaN ranks above every number, as in torch.topk.
//
// Here are the launches; the kernel is in router_forward.cuh, and router_tables.cuh chooses its template parameters.

#include "ops.h"
#include "router_forward.cuh"
#include "router_tables.cuh"

namespace gbmoe {
namespace {

// The arguments of one call.
template <typename T, typename S> struct Route {
  const T* logits;
  S *scores, *weights;
  int64_t* ids;
  float* logsumexp;
  RouterShape shape;
  cudaStream_t stream;

  void launch() const {
    using Table = ForwardTable<T>;
    const auto launch_row = [&](auto row_index, auto list) {
      constexpr KernelRow row = Table::kRows[row_index];
      static_assert(row.lanes * row.per_lane >= row.max_experts && row.lanes * row.per_lane <= kMaxRouterExperts);
      static_assert((row.lanes & (row.lanes - 1)) == 0, "a brief key holds lane and index in bits apart");
      static_assert(row.multiple % kVector<T, S, row.per_lane, row.max_vector> == 0, "vectors divide the number of experts");
      const unsigned ctas = static_cast<unsigned>(ceil_div(shape.tokens * row.lanes, kThreads));
      const auto kernel = route_kernel<T, S, row.lanes, row.per_lane, list, row.max_vector>;
      kernel<<<ctas, kThreads, 0, stream>>>(logits, scores, weights, ids, logsumexp, shape);
    };
    const bool served = shape.slots <= shape.experts && launch_from<Table>(shape.experts, shape.slots, launch_row);
    STD_TORCH_CHECK(served, "route: no kernel for ", shape.experts, " experts and ", shape.slots, " slots per token");
  }
};

}  // namespace

std::tuple<int64_t, int64_t> route_limits() { return {kMaxRouterExperts, kMaxRouterSlots}; }

void route(Tensor logits, double p, Tensor scores, Tensor weights, Tensor ids, Tensor logsumexp) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const RouterShape shape{
      logits.size(0), static_cast<int>(logits.size(1)), static_cast<int>(ids.size(1)), static_cast<float>(p)};
  if (shape.tokens == 0) return;
  GBMOE_DISPATCH_LOGITS(logits.scalar_type(), scores.scalar_type(), "route", {
    const Route<T, S> call{data<T>(logits), data<S>(scores), data<S>(weights), data<int64_t>(ids), data<float>(logsumexp), shape,
                           current_stream(logits)};
    call.launch();
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
