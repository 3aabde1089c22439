// The router's kernels that are emulated, by their RouterConfig; tests/ops/emulated_router/__init__.py calls them.

#include "csrc/router/softmax_topk_backward.cuh"
#include "csrc/router/softmax_topk_forward.cuh"
#include "csrc/router/any_function_backward.cuh"
#include "csrc/router/any_function_forward.cuh"
#include "csrc/router/instances.cuh"

namespace gbmoe {
namespace {

// What kernels declare as extern.
thread_local Vector<float, 4> function_rows[emulated_gpu::kSharedBytes / 16];
thread_local float chosen_grads[emulated_gpu::kSharedBytes / 4];
unsigned char unused[emulated_gpu::kSharedBytes];

template <typename Kernel> void launch(emulated_gpu::Run run, int64_t tokens, int lanes, int threads, const Kernel& kernel) {
  run.ctas = static_cast<int>(ceil_div(tokens * lanes, threads));
  emulated_gpu::launch(run, threads, unused, kernel);
}

template <int G, int V> bool launch_backward(
    const RouterConfig& config, const FunctionGradients& tensors, const RouterShape& shape, const RouterFunction& function,
    const emulated_gpu::Run& run) {
  if (config.lanes != G || config.longest_vector != V) return false;
  launch(run, shape.tokens, G, kFunctionBackwardThreads, [&] {
    route_by_function_backward_kernel<G, V>(tensors, shape, function, static_cast<int>(config.numbers_per_lane));
  });
  return true;
}

}  // namespace
}  // namespace gbmoe

extern "C" {

using namespace gbmoe;

// What the kernel that was launched last did wrong, or null.
const char* failure() { return emulated_gpu::failure; }

// Each returns whether there is an instance.
bool forward(const RouterConfig* config, const AnyNumbers* logits, const AnyNumbers* scores, const AnyNumbers* weights, int64_t* ids,
             float* logsumexp, const RouterShape* shape, const emulated_gpu::Run* run) {
  using Table = ForwardInstances<float>;
  return launch_from<Table>(*config, [&](auto index, auto list) {
    constexpr RouterInstances instance = Table::kAll[decltype(index)::value];
    launch(*run, shape->tokens, instance.lanes, kThreads, [&] {
      route_kernel<float, instance.lanes, instance.numbers_per_lane, decltype(list)::value, instance.longest_vector>(
          *logits, *scores, *weights, ids, logsumexp, *shape);
    });
  });
}
bool backward(const RouterConfig* config, const AnyNumbers* scores, const int64_t* ids, const AnyNumbers* grad_scores,
              const AnyNumbers* grad_weights, const float* grad_logsumexp, const AnyNumbers* grad, const RouterShape* shape,
              const emulated_gpu::Run* run) {
  using Table = BackwardInstances;
  return launch_from<Table>(*config, [&](auto index, auto slots) {
    constexpr RouterInstances instance = Table::kAll[decltype(index)::value];
    launch(*run, shape->tokens, instance.lanes, kBackwardThreads, [&] {
      route_backward_kernel<instance.lanes, instance.numbers_per_lane, decltype(slots)::value, instance.longest_vector>(
          *scores, ids, *grad_scores, *grad_weights, grad_logsumexp, *grad, *shape);
    });
  });
}
bool function_forward(const RouterConfig* config, const FunctionTensors* tensors, const RouterShape* shape, const RouterFunction* function,
                      const emulated_gpu::Run* run) {
  using Table = FunctionInstances;
  return launch_from<Table>(*config, [&](auto index, auto list) {
    constexpr RouterInstances instance = Table::kAll[decltype(index)::value];
    launch(*run, shape->tokens, instance.lanes, kFunctionThreads, [&] {
      route_by_function_kernel<instance.lanes, instance.numbers_per_lane, decltype(list)::value, instance.longest_vector>(
          *tensors, *shape, *function);
    });
  });
}
bool function_backward(const RouterConfig* config, const FunctionGradients* tensors, const RouterShape* shape, const RouterFunction* function,
                       const emulated_gpu::Run* run) {
  return launch_backward<8, 4>(*config, *tensors, *shape, *function, *run) || launch_backward<8, 1>(*config, *tensors, *shape, *function, *run) ||
         launch_backward<16, 4>(*config, *tensors, *shape, *function, *run) ||
         launch_backward<32, 4>(*config, *tensors, *shape, *function, *run) || launch_backward<32, 1>(*config, *tensors, *shape, *function, *run);
}
}
