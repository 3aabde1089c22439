// The gradient of the router of any RouterFunction, in one launch; the kernel is in any_function_backward.cuh.

#include "any_function_backward.cuh"
#include "function_calls.h"
#include "instances.cuh"
#include "numbers.h"

namespace gbmoe {
namespace {

// Launches the kernel if it is the one that `config` names.
template <int G, int V> bool launch_backward(
    const RouterConfig& config, const FunctionGradients& tensors, const RouterShape& shape, const RouterFunction& function,
    cudaStream_t stream) {
  if (config.lanes != G || config.longest_vector != V) return false;
  check_router_call("route_backward", config, shape, V, kMaxRouterSlots);
  STD_TORCH_CHECK(
      config.numbers_per_lane % V == 0 && config.numbers_per_lane <= kMaxNumbersPerLane, "route_backward: expected up to ",
      kMaxNumbersPerLane, " numbers per lane in vectors of ", V, ", got ", config.numbers_per_lane);
  const int numbers = static_cast<int>(config.numbers_per_lane);
  const size_t shared_bytes = sizeof(float) * kFunctionBackwardThreads * numbers;
  const unsigned ctas = static_cast<unsigned>(ceil_div(shape.tokens * G, kFunctionBackwardThreads));
  route_by_function_backward_kernel<G, V>
      <<<ctas, kFunctionBackwardThreads, shared_bytes, stream>>>(tensors, shape, function, numbers);
  return true;
}

}  // namespace

void route_by_function_backward(
    const Tensor& logits, const Tensor& ids, const std::optional<Tensor>& padding_mask, const std::optional<Tensor>& grad_scores,
    const std::optional<Tensor>& grad_weights, const std::optional<Tensor>& grad_logsumexp, const RouterFunction& function,
    const RouterConfig& config, const Tensor& grad) {
  const RouterShape shape{logits.size(0), static_cast<int>(logits.size(1)), static_cast<int>(ids.size(1)), 0.0f};
  const char* const name = "route_backward";
  const FunctionGradients tensors{
      any_numbers(name, logits),       data<int64_t>(ids),          data<bool>(padding_mask), any_numbers(name, grad_scores),
      any_numbers(name, grad_weights), data<float>(grad_logsumexp), any_numbers(name, grad)};
  const cudaStream_t stream = current_stream(logits);
  const bool served = launch_backward<8, 4>(config, tensors, shape, function, stream) ||
                      launch_backward<8, 1>(config, tensors, shape, function, stream) ||
                      launch_backward<16, 4>(config, tensors, shape, function, stream) ||
                      launch_backward<32, 4>(config, tensors, shape, function, stream) ||
                      launch_backward<32, 1>(config, tensors, shape, function, stream);
  if (!served) refuse_router_call(name, config);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
