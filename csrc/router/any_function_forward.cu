// The router of any RouterFunction, from the logits in one launch; the kernel is in any_function_forward.cuh.

#include "any_function_forward.cuh"
#include "function_calls.h"
#include "instances.cuh"
#include "numbers.h"

namespace gbmoe {

void route_by_function(
    const Tensor& logits, const std::optional<Tensor>& expert_bias, const std::optional<Tensor>& padding_mask,
    const std::optional<Tensor>& given, const RouterFunction& function, const RouterConfig& config, const Tensor& scores,
    const Tensor& weights, const Tensor& ids, const Tensor& logsumexp) {
  using Table = FunctionInstances;
  const RouterShape shape{logits.size(0), static_cast<int>(logits.size(1)), static_cast<int>(ids.size(1)), 0.0f};
  STD_TORCH_CHECK(
      function.groups == 1 ||
          (shape.experts % function.groups == 0 && function.group_topk * (shape.experts / function.groups) >= shape.slots),
      "route: ", shape.slots, " slots per token of ", function.group_topk, " of ", function.groups, " groups");
  const FunctionTensors tensors{any_numbers("route", logits), data<float>(expert_bias),     data<bool>(padding_mask),
                                data<int64_t>(given),         any_numbers("route", scores), any_numbers("route", weights),
                                data<int64_t>(ids),           data<float>(logsumexp)};
  const bool served = launch_from<Table>(config, [&](auto index, auto list) {
    constexpr RouterInstances instance = Table::kAll[index];
    constexpr int kVectors = kVector<float, instance.numbers_per_lane, instance.longest_vector>;
    check_router_call("route", config, shape, kVectors, list ? static_cast<int>(list) : kMaxRouterSlots);
    const unsigned ctas = static_cast<unsigned>(ceil_div(shape.tokens * instance.lanes, kFunctionThreads));
    const auto kernel = route_by_function_kernel<instance.lanes, instance.numbers_per_lane, list, instance.longest_vector>;
    launch_early(shape.tokens <= kFewTokens, kernel, ctas, kFunctionThreads, 0, logits, tensors, shape, function);
  });
  if (!served) refuse_router_call("route", config);
}

}  // namespace gbmoe
