// The first GEMM of an expert with its activation. The two kinds of epilogue, kActivation and kGlu, are translation units of
// their own, which are compiled side by side.

#pragma once

#include "launch.cuh"

namespace gbmoe::hopper {

template <typename T, EpilogueKind kKind, typename Family>
void launch_up_clustered(const TensorMaps& maps, const Arguments& args, const Tiling& tiling, const Balancing& balancing,
                         const Tensor& on) {
  if (tiling.is(kWideTileN, 1, 2)) launch<UpSettings<T, kKind, Family, false, 2>>(maps, args, balancing, on);
  else if (tiling.is(kWideTileN, 1, 1)) launch<UpSettings<T, kKind, Family, false, 1>>(maps, args, balancing, on);
  else tiling.refuse("hopper_up");
}

// With the family that args.activation belongs to. Only the commonest one gathers. A CTA alone has no schedule then: the warp that would
// take tiles from the counter has rows to gather.
template <typename T, EpilogueKind kKind>
void launch_up_family(const TensorMaps& maps, const Arguments& args, const Tiling& tiling, const Balancing& balancing, const Tensor& on) {
  switch (args.activation) {
    case kSilu:
    case kGeluTanh:
      if (args.tokens && tiling.is(kWideTileN, 1, 2))
        return launch<UpSettings<T, kKind, SigmoidActivation, true, 2>>(maps, args, balancing, on);
      if (args.tokens && tiling.is(kWideTileN, 1, 1))
        return launch<UpSettings<T, kKind, SigmoidActivation, true, 1>>(maps, args, {}, on);
      if (args.tokens) tiling.refuse("hopper_up with a gather");
      return launch_up_clustered<T, kKind, SigmoidActivation>(maps, args, tiling, balancing, on);
    case kGelu: return launch_up_clustered<T, kKind, ErfActivation>(maps, args, tiling, balancing, on);
    default: return launch_up_clustered<T, kKind, PiecewiseActivation>(maps, args, tiling, balancing, on);
  }
}

template <EpilogueKind kKind>
void launch_up(const Tensor& x, const std::optional<Tensor>& slot_of_row, int64_t top_k, const Tensor& w1, const Tensor* v1,
               const Tensor& sizes, int64_t activation, const Tiling& tiling, const std::optional<Tensor>& workspace, const Tensor& a,
               const Tensor* h, const Tensor* g) {
  const OnDevice current(x);
  Arguments args = arguments(sizes, a.size(0), a.size(1), tiling);
  args.k_blocks = ceil_div(static_cast<int>(x.size(1)), kBlockK);
  args.activation = static_cast<int>(activation);
  args.save = h != nullptr;
  TensorMaps maps{};
  if (slot_of_row) {
    STD_TORCH_CHECK(activation == kSilu || activation == kGeluTanh, "hopper_up: only silu and gelu_tanh gather rows");
    gather_from(maps, args, x, *slot_of_row, top_k, tiling);
  } else {
    maps.a[0] = map_of_a(x, tiling);
  }
  maps.b[0] = tensor_map(w1, box_of_b(kWideTileN));
  if (v1) maps.b[1] = tensor_map(*v1, box_of_b(kWideTileN));
  const Tensor* outputs[3] = {&a, h, g};
  for (int i = 0; i < 3; ++i) {
    if (!outputs[i]) continue;
    maps.out[i] = tensor_map(*outputs[i], kBoxOut);
    args.out[i] = outputs[i]->data_ptr();
  }
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "hopper_up", (launch_up_family<T, kKind>(maps, args, tiling, {workspace, {}}, x)));
}

}  // namespace gbmoe::hopper
