// Products whose groups are summed over: the gradient of the weights.

#include "launch.cuh"

namespace gbmoe {
namespace {

template <typename T, hopper::Finish kFinish>
void launch_weights(const hopper::Maps& maps, const hopper::Arguments& args, const Tensor& workspace, const Tensor& on) {
  using namespace hopper;
  // Two blocks share b's slices where tiles along M come in pairs, else a's where those along N do.
  if (in_pairs(args.features, kTileM)) launch<WeightsKernel<T, kFinish, 2, 1>>(maps, args, workspace, on);
  else if (in_pairs(args.columns, kWidest)) launch<WeightsKernel<T, kFinish, 1, 2>>(maps, args, workspace, on);
  else launch<WeightsKernel<T, kFinish, 1, 1>>(maps, args, workspace, on);
}

}  // namespace

// out[e] = a[rows of e].T @ b[rows of e], in their dtype; or out[e] += that, where out is fp32
void hopper_weights(Tensor a, Tensor b, Tensor sizes, Tensor workspace, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  Arguments args = arguments(sizes, a.size(0), out.size(2), kPanelOfWeights);
  args.features = static_cast<int>(out.size(1));
  Maps maps{};
  maps.a[0] = tensor_map(a, kBoxTransposed);
  maps.b[0] = tensor_map(b, kBoxTransposed);
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_HALF(a.scalar_type(), "hopper_weights", {
    if (out.scalar_type() == ScalarType::Float) launch_weights<T, Finish::kAdd>(maps, args, workspace, a);
    else launch_weights<T, Finish::kStore>(maps, args, workspace, a);
  });
}

// The same with b[r] = lines[slot_of_row[r] / top_k], or zeros where the slot is negative; in their dtype only.
void hopper_weights_gathered(Tensor a, Tensor lines, Tensor slot_of_row, int64_t top_k, Tensor sizes, Tensor workspace, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  Arguments args = arguments(sizes, a.size(0), out.size(1), kPanelOfWeights);
  args.features = static_cast<int>(out.size(2));
  gather_from(args, lines, slot_of_row, top_k);
  Maps maps{};
  maps.b[0] = tensor_map(a, kBoxTransposed);
  maps.out[0] = tensor_map(out, 64, 32);
  GBMOE_DISPATCH_HALF(a.scalar_type(), "hopper_weights_gathered", {
    if (in_pairs(args.features, kTileM)) launch<WeightsKernel<T, Finish::kStore, 2, 1, true>>(maps, args, workspace, a);
    else launch<WeightsKernel<T, Finish::kStore, 1, 1, true>>(maps, args, workspace, a);
  });
}

}  // namespace gbmoe
