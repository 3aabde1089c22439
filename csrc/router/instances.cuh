// The router's kernels, as tables of what is compiled: how a token is laid out over lanes (rows.cuh), and for how many
// slots.
//
// gbmoe/tuning/router_kernels.py chooses one of them for each call. Nothing is chosen here; launches only check that the choice has a
// kernel, and that it serves the call. With fewer lanes each sorts more numbers, with more lanes they exchange more. A number of
// experts that is not a multiple of the vectors' length has kernels of its own, with shorter vectors or none.

#pragma once

#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "config.h"
#include "rows.cuh"

namespace gbmoe {
namespace {

// The instances that differ in nothing but their variant, from `first` to `last`: powers of two, or 0.
struct RouterInstances {
  int lanes, numbers_per_lane, longest_vector, first, last;

  constexpr bool has(int variant) const { return variant >= first && variant <= last; }
  bool is(const RouterConfig& config) const {
    return config.lanes == lanes && config.numbers_per_lane == numbers_per_lane && config.longest_vector == longest_vector;
  }
};

// Forward. The variant is the length of the sorted list that a token's lanes share (sorted_lists.cuh), or 0 where its warp
// ranks candidates (ranked_candidates.cuh). Logits in bfloat16 have kernels of their own, with vectors of eight, for the calls
// that models make; the others serve any logits.
template <typename T> struct ForwardInstances;
template <> struct ForwardInstances<__nv_bfloat16> {
  static constexpr RouterInstances kAll[] = {
      // lanes, numbers per lane, longest vector, variants from, to
      {2, 4, 8, 4, 4},  {4, 4, 8, 4, 4},   {4, 8, 8, 4, 8},  {4, 16, 8, 8, 8},   {4, 32, 8, 4, 8},  {4, 40, 8, 8, 8},
      {4, 48, 8, 8, 8}, {8, 32, 8, 8, 16}, {8, 48, 8, 8, 8}, {16, 32, 8, 8, 16}, {32, 32, 8, 0, 0},
  };
};
template <> struct ForwardInstances<float> {
  static constexpr RouterInstances kAll[] = {
      // lanes, numbers per lane, longest vector, variants from, to
      {2, 4, 4, 4, 4},   {4, 4, 4, 4, 8},     {8, 2, 1, 8, 16}, {4, 8, 4, 4, 8},   {4, 16, 4, 4, 8},  {8, 8, 1, 8, 16},
      {4, 32, 4, 4, 8},  {8, 16, 4, 16, 16},  {8, 20, 4, 8, 8}, {8, 24, 4, 8, 8},  {8, 32, 4, 8, 16}, {16, 24, 4, 8, 8},
      {32, 12, 4, 0, 0}, {16, 32, 4, 32, 32}, {32, 8, 1, 0, 0}, {32, 16, 4, 0, 0}, {32, 32, 4, 0, 0}, {32, 32, 1, 0, 0},
  };
};

// Backward. The variant is the most slots per lane.
struct BackwardInstances {
  static constexpr RouterInstances kAll[] = {
      // lanes, numbers per lane, longest vector, variants from, to
      {8, 2, 1, 2, 2},  {8, 4, 4, 2, 2},  {8, 8, 4, 2, 2},  {8, 8, 1, 2, 2},   {8, 16, 4, 2, 2},  {8, 32, 4, 2, 2},
      {32, 4, 4, 1, 1}, {32, 8, 4, 1, 1}, {32, 8, 1, 1, 1}, {32, 16, 4, 1, 1}, {32, 32, 4, 1, 1}, {32, 32, 1, 1, 1},
  };
};

// Forward of any RouterFunction; variants are those of the other forward.
struct FunctionInstances {
  static constexpr RouterInstances kAll[] = {
      // lanes, numbers per lane, longest vector, variants from, to
      {8, 8, 4, 8, 8},   {8, 8, 1, 8, 8},  {8, 16, 4, 8, 8},  {8, 32, 4, 8, 8},
      {16, 32, 4, 8, 8}, {32, 8, 1, 0, 0}, {32, 32, 4, 0, 0}, {32, 32, 1, 0, 0},
  };
};

// Launches the instance of this variant if it is the one that `config` names.
template <typename Table, size_t kIndex, int kVariant, typename Launch>
bool launch_variant(const RouterConfig& config, const Launch& launch) {
  constexpr RouterInstances instances = Table::kAll[kIndex];
  if constexpr (instances.has(kVariant)) {
    if (config.variant != kVariant) return false;
    launch(std::integral_constant<size_t, kIndex>(), std::integral_constant<int, kVariant>());
    return true;
  }
  return false;
}
template <typename Table, size_t kIndex, typename Launch> bool launch_instances(const RouterConfig& config, const Launch& launch) {
  return Table::kAll[kIndex].is(config) &&
         (launch_variant<Table, kIndex, 0>(config, launch) || launch_variant<Table, kIndex, 1>(config, launch) ||
          launch_variant<Table, kIndex, 2>(config, launch) || launch_variant<Table, kIndex, 4>(config, launch) ||
          launch_variant<Table, kIndex, 8>(config, launch) || launch_variant<Table, kIndex, 16>(config, launch) ||
          launch_variant<Table, kIndex, 32>(config, launch));
}
template <typename Table, typename Launch, size_t... kIndex>
bool launch_one(const RouterConfig& config, const Launch& launch, std::index_sequence<kIndex...>) {
  return (launch_instances<Table, kIndex>(config, launch) || ...);
}

// Calls launch(index, variant), both as constants, of the instance that `config` names; false where there is none.
template <typename Table, typename Launch> bool launch_from(const RouterConfig& config, const Launch& launch) {
  return launch_one<Table>(config, launch, std::make_index_sequence<std::size(Table::kAll)>());
}

// Ends a call that the instance named by `config`, with vectors of `vector` numbers and room for `slots`, does not serve.
inline void check_router_call(const char* name, const RouterConfig& config, const RouterShape& shape, int64_t vector, int64_t slots) {
  STD_TORCH_CHECK(shape.experts <= config.lanes * config.numbers_per_lane && shape.experts % vector == 0 && shape.slots <= slots, name,
                  ": ", config.lanes, " lanes of ", config.numbers_per_lane, " numbers in vectors of ", vector, " do not serve ",
                  shape.experts, " experts and ", shape.slots, " slots per token");
  STD_TORCH_CHECK(
      shape.p == 0 || shape.p == 1 || shape.p == 2 ||
          serves_any_norm(
              static_cast<int>(config.lanes), static_cast<int>(config.numbers_per_lane),
              config.longest_vector == 4 ? static_cast<int>(config.variant) : 0),
      name, ": ", config.lanes, " lanes of ", config.numbers_per_lane, " numbers serve no norm with p = ", shape.p);
}
inline void refuse_router_call(const char* name, const RouterConfig& config) {
  STD_TORCH_CHECK(false, name, ": no kernel has ", config.lanes, " lanes of ", config.numbers_per_lane, " numbers in vectors of up to ",
                  config.longest_vector, " in variant ", config.variant);
}

}  // namespace
}  // namespace gbmoe
