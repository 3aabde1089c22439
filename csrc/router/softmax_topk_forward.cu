// The router after its linear layer: softmax over the experts, the K highest, their p-norm and the logsumexp of the z-loss, from
// the logits in one launch. Ties go to the lower expert; NaN ranks above every number, as in torch.topk.
//
// Here are the launches; the kernel is in softmax_topk_forward.cuh, its instances are in instances.cuh. Any other function is
// computed by any_function_forward.cu.

#include "../operators.h"
#include "function_calls.h"
#include "instances.cuh"
#include "numbers.h"
#include "softmax_topk_forward.cuh"

namespace gbmoe {
namespace {

// The arguments of one call.
struct Route {
  AnyNumbers logits, scores, weights;
  int64_t* ids;
  float* logsumexp;
  RouterShape shape;
  const Tensor& on;

  template <typename T> bool launch(const RouterConfig& config) const {
    using Table = ForwardInstances<T>;
    return launch_from<Table>(config, [&](auto index, auto list) {
      constexpr RouterInstances instance = Table::kAll[index];
      static_assert(instance.lanes * instance.numbers_per_lane <= kMaxRouterExperts);
      static_assert((instance.lanes & (instance.lanes - 1)) == 0, "a brief key holds lane and index in bits apart");
      constexpr int kVectors = kVector<T, instance.numbers_per_lane, instance.longest_vector>;
      check_router_call("route", config, shape, kVectors, list ? static_cast<int>(list) : kMaxRouterSlots);
      const unsigned ctas = static_cast<unsigned>(ceil_div(shape.tokens * instance.lanes, kThreads));
      const auto kernel = route_kernel<T, instance.lanes, instance.numbers_per_lane, list, instance.longest_vector>;
      launch_early(shape.tokens <= kFewTokens, kernel, ctas, kThreads, 0, on, logits, scores, weights, ids, logsumexp, shape);
    });
  }
};

}  // namespace

// `kind` and what follows it are a RouterFunction (function.cuh), where p = 0 stands for no norm; lanes and what follows are a
// tuning.router_kernels.RouterConfig. ids and given are int64, logsumexp and expert_bias float32, padding_mask is bool; all other
// tensors are bfloat16, float16 or float32.
void route(
    Tensor logits, std::optional<Tensor> expert_bias, std::optional<Tensor> padding_mask, std::optional<Tensor> given,
    std::vector<double> of, std::vector<int64_t> fields, Tensor scores, Tensor weights, Tensor ids, Tensor logsumexp) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const RouterFunction function = router_function("route", of);
  const RouterConfig config = router_config("route", fields);
  const RouterShape shape{
      logits.size(0), static_cast<int>(logits.size(1)), static_cast<int>(ids.size(1)), norm_of(of)};
  STD_TORCH_CHECK(shape.slots <= shape.experts, "route: ", shape.slots, " slots per token of ", shape.experts, " experts");
  if (shape.tokens == 0) return;
  if (function.kind != RouterKind::kSoftmaxTopK) {
    return route_by_function(logits, expert_bias, padding_mask, given, function, config, scores, weights, ids, logsumexp);
  }
  const Route call{
      any_numbers("route", logits),
      any_numbers("route", scores),
      any_numbers("route", weights),
      data<int64_t>(ids),
      data<float>(logsumexp),
      shape,
      logits};
  if (logits.scalar_type() == ScalarType::BFloat16 && call.launch<__nv_bfloat16>(config)) return;
  if (!call.launch<float>(config)) refuse_router_call("route", config);
}

GBMOE_OPERATOR(route,
               "(Tensor logits, Tensor? expert_bias, Tensor? padding_mask, Tensor? given, float[] function, int[] config, "
               "Tensor(a!) scores, Tensor(b!) weights, Tensor(c!) ids, Tensor(d!) logsumexp) -> ()");

}  // namespace gbmoe
