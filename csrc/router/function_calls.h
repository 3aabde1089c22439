// How the operators `route` and `route_backward` have a router of any RouterFunction computed.

#pragma once

#include "config.h"
#include "function.cuh"

namespace gbmoe {

// Launches of function_forward.cu and function_backward.cu, for shapes with tokens; arguments are those of `route` and
// `route_backward`.
void route_by_function(
    const Tensor& logits, const std::optional<Tensor>& expert_bias, const std::optional<Tensor>& padding_mask,
    const std::optional<Tensor>& given, const RouterFunction& function, const RouterConfig& config, const Tensor& scores,
    const Tensor& weights, const Tensor& ids, const Tensor& logsumexp);
void route_by_function_backward(
    const Tensor& logits, const Tensor& ids, const std::optional<Tensor>& padding_mask, const std::optional<Tensor>& grad_scores,
    const std::optional<Tensor>& grad_weights, const std::optional<Tensor>& grad_logsumexp, const RouterFunction& function,
    const RouterConfig& config, const Tensor& grad);

// The function that these arguments of an operator describe.
inline RouterFunction router_function(
    const char* name, int64_t kind, int64_t groups, int64_t group_topk, int64_t group_best, double p, double epsilon,
    double scale) {
  STD_TORCH_CHECK(kind >= 0 && kind <= static_cast<int64_t>(RouterKind::kSoftmaxOfChosen), name, ": no kernel for kind ", kind);
  STD_TORCH_CHECK(kind == 0 || p == 0 || p == 1, name, ": expected no norm, or that with p = 1, got ", p);
  STD_TORCH_CHECK(
      groups >= 1 && groups <= kMaxRouterGroups && group_best >= 1 && group_best <= 2, name, ": expected 1 to ", kMaxRouterGroups,
      " groups that are judged by one or two experts, got ", groups, " and ", group_best);
  return {
      static_cast<RouterKind>(kind), static_cast<int>(groups), static_cast<int>(group_topk), static_cast<int>(group_best), p != 0,
      static_cast<float>(epsilon),   static_cast<float>(scale)};
}

}  // namespace gbmoe
