// The first GEMM of an expert with its activation. The two kinds of epilogue, kActivation and kGlu, are translation units of
// their own, which are compiled side by side.

#pragma once

#include "launch.cuh"

namespace gbmoe::hopper {

template <typename T, EpilogueKind kKind, typename Family>
void launch_up_clustered(const TensorMaps& maps, const Arguments& args, const Tiling& tiling, const Balancing& balancing,
                         const Tensor& on) {
  if (tiling.is(kWideTileN, 1, 2)) launch<UpSettings<T, kKind, Family, false, false, 2>>(maps, args, balancing, on);
  else if (tiling.is(kWideTileN, 1, 1)) launch<UpSettings<T, kKind, Family, false, false, 1>>(maps, args, balancing, on);
  else tiling.refuse("hopper_up");
}

// Of weights that lie contiguous along F, in pairs of CTAs. Only the commonest family gathers.
template <typename T, EpilogueKind kKind>
void launch_up_along_f(const TensorMaps& maps, const Arguments& args, const Tiling& tiling, const Balancing& balancing, const Tensor& on) {
  if (!tiling.is(kWideTileN, 1, 2)) tiling.refuse("hopper_up of weights along F");
  switch (args.activation.kind) {
    case kSilu:
    case kGeluTanh:
      if (args.tokens) return launch<UpSettings<T, kKind, SigmoidActivation, true, true, 2>>(maps, args, balancing, on);
      return launch<UpSettings<T, kKind, SigmoidActivation, true, false, 2>>(maps, args, balancing, on);
    case kClampedSilu:
    case kSitu: return launch<UpSettings<T, kKind, GatingActivation, true, false, 2>>(maps, args, balancing, on);
    default: STD_TORCH_CHECK(false, "hopper_up: no kernel for this activation reads weights along F");
  }
}

// With the family that args.activation belongs to. Only the commonest one gathers. A CTA alone has no schedule then: the warp that would
// take tiles from the counter has rows to gather.
template <typename T, EpilogueKind kKind>
void launch_up_family(const TensorMaps& maps, const Arguments& args, const Tiling& tiling, const Balancing& balancing, const Tensor& on) {
  switch (args.activation.kind) {
    case kSilu:
    case kGeluTanh:
      if (args.tokens && tiling.is(kWideTileN, 1, 2))
        return launch<UpSettings<T, kKind, SigmoidActivation, false, true, 2>>(maps, args, balancing, on);
      if (args.tokens && tiling.is(kWideTileN, 1, 1))
        return launch<UpSettings<T, kKind, SigmoidActivation, false, true, 1>>(maps, args, {}, on);
      if (args.tokens) tiling.refuse("hopper_up with a gather");
      return launch_up_clustered<T, kKind, SigmoidActivation>(maps, args, tiling, balancing, on);
    case kClampedSilu:
    case kSitu: return launch_up_clustered<T, kKind, GatingActivation>(maps, args, tiling, balancing, on);
    case kGelu: return launch_up_clustered<T, kKind, ErfActivation>(maps, args, tiling, balancing, on);
    default: return launch_up_clustered<T, kKind, PiecewiseActivation>(maps, args, tiling, balancing, on);
  }
}

template <EpilogueKind kKind>
void launch_up(
    const char* name, const Tensor& x, const std::optional<Tensor>& slot_of_row, int64_t top_k, const Tensor& w1,
    const Tensor* v1, const std::optional<Tensor>& a2, const std::optional<Tensor>& b2, const std::optional<Tensor>& v2,
    const std::vector<int64_t>& places, const Tensor& sizes, const std::vector<double>& activation, const Tiling& tiling,
    const std::optional<Tensor>& workspace, const Tensor& a, const Tensor* h, const Tensor* g) {
  const OnDevice current(x);
  Arguments args = arguments(sizes, a.size(0), a.size(1), tiling);
  args.k_blocks = ceil_div(static_cast<int>(x.size(1)), kBlockK);
  args.activation = activation_of(activation);
  args.save = h != nullptr;
  args.places = places_of(name, places, args.groups);
  TensorMaps maps{};
  if (slot_of_row) {
    STD_TORCH_CHECK(args.activation.kind == kSilu || args.activation.kind == kGeluTanh,
                    "hopper_up: only silu and gelu_tanh gather rows");
    gather_from(maps, args, x, *slot_of_row, top_k, tiling);
  } else {
    maps.a[0] = map_of_a(x, tiling);
  }
  STD_TORCH_CHECK(!v1 || v1->size(0) == w1.size(0), name, ": expected w1 and v1 both in the table of places, or neither");
  const bool along_f = contiguous_along_n(w1);
  STD_TORCH_CHECK(!v1 || contiguous_along_n(*v1) == along_f, name, ": expected w1 and v1 contiguous along the same dimension");
  maps.b[0] = weight_map(w1, kWideTileN, args.places);
  if (v1) maps.b[1] = weight_map(*v1, kWideTileN, args.places);
  STD_TORCH_CHECK(
      !a2 || (v1 && (!slot_of_row || tiling.cluster_n == 2)), name,
      ": expected v1, and rows in memory or CTAs in pairs, where there are a2, b2 and v2");
  FurtherPairs{name, 2, along_f, a.size(1), tiling}.add_second_of_glu(maps, args, a2, b2, v2);
  const Tensor* outputs[3] = {&a, h, g};
  for (int i = 0; i < 3; ++i) {
    if (!outputs[i]) continue;
    maps.out[i] = tensor_map(*outputs[i], kBoxOut);
    args.out[i] = outputs[i]->data_ptr();
  }
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "hopper_up", {
    if (along_f) launch_up_along_f<T, kKind>(maps, args, tiling, {workspace, {}}, x);
    else launch_up_family<T, kKind>(maps, args, tiling, {workspace, {}}, x);
  });
}

}  // namespace gbmoe::hopper
