// The router behind its linear layer: softmax over the experts, the K highest, their p-norm and the logsumexp of the z-loss, from
// the logits in one launch. Ties go to the lower expert; NaN ranks above every number, as in torch.topk.
//
// Here are the launches; the kernel is in forward.cuh, its instances are in instances.cuh.

#include "../operators.h"
#include "forward.cuh"
#include "instances.cuh"

namespace gbmoe {
namespace {

// The arguments of one call.
template <typename T, typename S> struct Route {
  const T* logits;
  S *scores, *weights;
  ScalarType scores_dtype;
  int64_t* ids;
  float* logsumexp;
  RouterShape shape;
  const Tensor& on;

  void launch(const RouterConfig& config) const {
    using Table = ForwardInstances<T>;
    const auto launch_kernel = [&](auto index, auto list) {
      constexpr RouterInstances instance = Table::kAll[index];
      static_assert(instance.lanes * instance.numbers_per_lane <= kMaxRouterExperts);
      static_assert((instance.lanes & (instance.lanes - 1)) == 0, "a brief key holds lane and index in bits apart");
      constexpr int kVectors = kVector<T, S, instance.numbers_per_lane, instance.longest_vector>;
      check_router_call("route", config, shape, kVectors, list ? static_cast<int>(list) : kMaxRouterSlots);
      const unsigned ctas = static_cast<unsigned>(ceil_div(shape.tokens * instance.lanes, kThreads));
      const auto kernel = route_kernel<T, S, instance.lanes, instance.numbers_per_lane, list, instance.longest_vector>;
      launch_early(shape.tokens <= kFewTokens, kernel, ctas, kThreads, 0, on, logits, scores, weights, scores_dtype, ids,
                   logsumexp, shape);
    };
    STD_TORCH_CHECK(shape.slots <= shape.experts, "route: ", shape.slots, " slots per token of ", shape.experts, " experts");
    if (!launch_from<Table>(config, launch_kernel)) refuse_router_call("route", config);
  }
};

}  // namespace

// p = 0 stands for no norm, ids are int64, logsumexp is float32; lanes and what follows are a tuning.router.RouterConfig. Scores and weights
// have one dtype. It is float32 or that of the logits, or 16 bits where these are float32.
void route(Tensor logits, double p, int64_t lanes, int64_t numbers_per_lane, int64_t longest_vector, int64_t list_length, Tensor scores,
           Tensor weights, Tensor ids, Tensor logsumexp) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const RouterShape shape{
      logits.size(0), static_cast<int>(logits.size(1)), static_cast<int>(ids.size(1)), static_cast<float>(p)};
  if (shape.tokens == 0) return;
  GBMOE_DISPATCH_LOGITS(logits.scalar_type(), scores.scalar_type(), "route", {
    const Route<T, S> call{data<T>(logits),  data<S>(scores),        data<S>(weights), scores.scalar_type(),
                           data<int64_t>(ids), data<float>(logsumexp), shape,            logits};
    call.launch({lanes, numbers_per_lane, longest_vector, list_length});
  });
}

GBMOE_OPERATOR(route,
               "(Tensor logits, float p, int lanes, int numbers_per_lane, int longest_vector, int list_length, "
               "Tensor(a!) scores, Tensor(b!) weights, Tensor(c!) ids, Tensor(d!) logsumexp) -> ()");

}  // namespace gbmoe
