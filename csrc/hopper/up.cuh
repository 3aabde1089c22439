// The first product of an expert with its activation: one finish, kActivate or kGlu, a translation unit, to compile side by side.

#pragma once

#include "launch.cuh"

namespace gbmoe::hopper {

template <typename T, Finish kFinish, typename Activation>
void launch_rows(const Maps& maps, const Arguments& args, Pairs pairs, const std::optional<Tensor>& workspace, const Tensor& on) {
  if (pairs == Pairs::kAlongN) launch<RowsKernel<T, false, false, kFinish, Activation, kWidest, 2>>(maps, args, workspace, on);
  else launch<RowsKernel<T, false, false, kFinish, Activation, kWidest, 1>>(maps, args, workspace, on);
}

// With the family that args.activation belongs to. Only the commonest one gathers, and has no workspace then: the warp that would take
// tiles from the counter has rows to gather.
template <typename T, Finish kFinish>
void launch_activation(const Maps& maps, const Arguments& args, Pairs pairs, const std::optional<Tensor>& workspace, const Tensor& on) {
  switch (args.activation) {
    case kSilu:
    case kGeluTanh:
      if (args.lines) {
        return launch<RowsKernel<T, false, true, kFinish, SigmoidActivation, kWidest, 1>>(maps, args, std::nullopt, on);
      }
      return launch_rows<T, kFinish, SigmoidActivation>(maps, args, pairs, workspace, on);
    case kGelu: return launch_rows<T, kFinish, ErfActivation>(maps, args, pairs, workspace, on);
    default: return launch_rows<T, kFinish, PiecewiseActivation>(maps, args, pairs, workspace, on);
  }
}

template <Finish kFinish>
void launch_up(const Tensor& x, const std::optional<Tensor>& slot_of_row, int64_t top_k, const Tensor& w1, const Tensor* v1,
               const Tensor& sizes, int64_t activation, const std::optional<Tensor>& workspace, const Tensor& a, const Tensor* h,
               const Tensor* g) {
  const OnDevice current(x);
  Arguments args = arguments(sizes, a.size(0), a.size(1), kPanelOfRows);
  args.slices = divide_up(static_cast<int>(x.size(1)), kTileK);
  args.activation = static_cast<int>(activation);
  args.save = h != nullptr;
  const int tile = kFinish == Finish::kGlu ? kWidest / 2 : kWidest;
  const Pairs pairs = pairs_along_n(args.columns, tile);
  // A panel of one or two tiles along M and so many along N would read all of b faster than memory can.
  if (divide_up(args.columns, tile) >= 64) args.rows_a_panel = kEvenPanelOfRows, args.even_panels = true;
  Maps maps{};
  if (slot_of_row) {
    STD_TORCH_CHECK(activation == kSilu || activation == kGeluTanh, "hopper_up: only silu and gelu_tanh gather rows");
    gather_from(args, x, *slot_of_row, top_k);
  } else {
    maps.a[0] = map_of_a(x, pairs);
  }
  maps.b[0] = tensor_map(w1, box_of_b(kWidest));
  if (v1) maps.b[1] = tensor_map(*v1, box_of_b(kWidest));
  const Tensor* outputs[3] = {&a, h, g};
  for (int i = 0; i < 3; ++i) {
    if (!outputs[i]) continue;
    maps.out[i] = tensor_map(*outputs[i], kBoxOut);
    args.out[i] = outputs[i]->data_ptr();
  }
  GBMOE_DISPATCH_HALF(x.scalar_type(), "hopper_up", (launch_activation<T, kFinish>(maps, args, pairs, workspace, x)));
}

}  // namespace gbmoe::hopper
