// How the operators `route` and `route_backward` have a router of any RouterFunction computed.

#pragma once

#include <vector>

#include "config.h"
#include "function.cuh"

namespace gbmoe {

// Launches of any_function_forward.cu and any_function_backward.cu, for shapes with tokens; arguments are those of `route` and
// `route_backward`.
void route_by_function(
    const Tensor& logits, const std::optional<Tensor>& expert_bias, const std::optional<Tensor>& padding_mask,
    const std::optional<Tensor>& given, const RouterFunction& function, const RouterConfig& config, const Tensor& scores,
    const Tensor& weights, const Tensor& ids, const Tensor& logsumexp);
void route_by_function_backward(
    const Tensor& logits, const Tensor& ids, const std::optional<Tensor>& padding_mask, const std::optional<Tensor>& grad_scores,
    const std::optional<Tensor>& grad_weights, const std::optional<Tensor>& grad_logsumexp, const RouterFunction& function,
    const RouterConfig& config, const Tensor& grad);

// The operators' `function`, field by field as launch/router.py's `formula` makes it: [kind, groups, group_topk, group_best, p, epsilon, scale].
inline float norm_of(const std::vector<double>& function) { return static_cast<float>(function.at(4)); }
inline RouterFunction router_function(const char* name, const std::vector<double>& fields) {
  STD_TORCH_CHECK(fields.size() == 7, name, ": expected the 7 fields of a router's function, got ", fields.size());
  const auto kind = static_cast<int64_t>(fields[0]), groups = static_cast<int64_t>(fields[1]), group_topk = static_cast<int64_t>(fields[2]),
             group_best = static_cast<int64_t>(fields[3]);
  const double p = fields[4], epsilon = fields[5], scale = fields[6];
  STD_TORCH_CHECK(kind >= 0 && kind <= static_cast<int64_t>(RouterKind::kSoftmaxOfChosen), name, ": no kernel for kind ", kind);
  STD_TORCH_CHECK(kind == 0 || p == 0 || p == 1, name, ": expected no norm, or that with p = 1, got ", p);
  STD_TORCH_CHECK(
      groups >= 1 && groups <= kMaxRouterGroups && group_best >= 1 && group_best <= 2, name, ": expected 1 to ", kMaxRouterGroups,
      " groups that are judged by one or two experts, got ", groups, " and ", group_best);
  return {
      static_cast<RouterKind>(kind), static_cast<int>(groups), static_cast<int>(group_topk), static_cast<int>(group_best), p != 0,
      static_cast<float>(epsilon),   static_cast<float>(scale)};
}

// The operators' `config`: a tuning.router_kernels.RouterConfig, field by field.
inline RouterConfig router_config(const char* name, const std::vector<int64_t>& fields) {
  STD_TORCH_CHECK(fields.size() == 4, name, ": expected the 4 fields of a RouterConfig, got ", fields.size());
  return {fields[0], fields[1], fields[2], fields[3]};
}

}  // namespace gbmoe
