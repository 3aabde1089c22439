// The gradient of the router's softmax, choice, p-norm and logsumexp, in one launch.
//
// Here are the launches; the kernel is in softmax_topk_backward.cuh, its instances are in instances.cuh. That of any other
// function is computed by any_function_backward.cu.

#include "../operators.h"
#include "function_calls.h"
#include "instances.cuh"
#include "numbers.h"
#include "softmax_topk_backward.cuh"

namespace gbmoe {

// As route has them. `saved` are the scores where kind is 0, and the logits of any other function.
void route_backward(
    Tensor saved, Tensor ids, std::optional<Tensor> padding_mask, std::optional<Tensor> grad_scores,
    std::optional<Tensor> grad_weights, std::optional<Tensor> grad_logsumexp, std::vector<double> of, std::vector<int64_t> fields,
    Tensor grad) {
  const torch::stable::accelerator::DeviceGuard guard(saved.get_device_index());
  using Table = BackwardInstances;
  const char* const name = "route_backward";
  const RouterFunction function = router_function(name, of);
  const RouterConfig config = router_config(name, fields);
  const RouterShape shape{saved.size(0), static_cast<int>(saved.size(1)), static_cast<int>(ids.size(1)), norm_of(of)};
  if (shape.tokens == 0) return;
  if (function.kind != RouterKind::kSoftmaxTopK) {
    return route_by_function_backward(
        saved, ids, padding_mask, grad_scores, grad_weights, grad_logsumexp, function, config, grad);
  }
  const AnyNumbers from = any_numbers(name, saved), of_scores = any_numbers(name, grad_scores),
                   of_weights = any_numbers(name, grad_weights), to = any_numbers(name, grad);
  const int64_t* const chosen = data<int64_t>(ids);
  const float* const of_logsumexp = data<float>(grad_logsumexp);
  const cudaStream_t stream = current_stream(saved);
  const bool served = launch_from<Table>(config, [&](auto index, auto most_slots) {
    constexpr RouterInstances instance = Table::kAll[index];
    constexpr int kVectors = kVector<float, instance.numbers_per_lane, instance.longest_vector>;
    check_router_call(name, config, shape, kVectors, most_slots * instance.lanes);
    const unsigned ctas = static_cast<unsigned>(ceil_div(shape.tokens * instance.lanes, kBackwardThreads));
    constexpr int kSharedBytes = kBackwardThreads * instance.numbers_per_lane * static_cast<int>(sizeof(float));
    route_backward_kernel<instance.lanes, instance.numbers_per_lane, most_slots, instance.longest_vector>
        <<<ctas, kBackwardThreads, kSharedBytes, stream>>>(from, chosen, of_scores, of_weights, of_logsumexp, to, shape);
  });
  if (!served) refuse_router_call(name, config);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(route_backward,
               "(Tensor saved, Tensor ids, Tensor? padding_mask, Tensor? grad_scores, Tensor? grad_weights, "
               "Tensor? grad_logsumexp, float[] function, int[] config, Tensor(a!) grad) -> ()");

}  // namespace gbmoe
