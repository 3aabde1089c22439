// k-grouped GEMMs, whose groups are summed over: the gradient of the weights.

#include "launch.cuh"

namespace gbmoe {
namespace {

template <typename T, hopper::EpilogueKind kKind>
void launch_weights(const hopper::TensorMaps& maps, const hopper::Arguments& args, hopper::Cluster cluster, const Tensor& workspace,
                    const Tensor& on) {
  using namespace hopper;
  if (cluster == Cluster::kTwoAlongM) launch<WeightsSettings<T, kKind, 2, 1>>(maps, args, workspace, on);
  else if (cluster == Cluster::kTwoAlongN) launch<WeightsSettings<T, kKind, 1, 2>>(maps, args, workspace, on);
  else launch<WeightsSettings<T, kKind, 1, 1>>(maps, args, workspace, on);
}

}  // namespace

// out[e] = a[rows of e].T @ b[rows of e], in their dtype; or out[e] += that, where out is fp32
void hopper_weights(Tensor a, Tensor b, Tensor sizes, Tensor workspace, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  Arguments args = arguments(sizes, a.size(0), out.size(2), kPanelOfWeights);
  args.size_m = static_cast<int>(out.size(1));
  const Cluster cluster = cluster_of_weights(args.size_m, args.size_n, false);
  TensorMaps maps{};
  maps.a[0] = tensor_map(a, kBoxContiguousMN);
  maps.b[0] = tensor_map(b, kBoxContiguousMN);
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_HALF(a.scalar_type(), "hopper_weights", {
    if (out.scalar_type() == ScalarType::Float) launch_weights<T, EpilogueKind::kAccumulate>(maps, args, cluster, workspace, a);
    else launch_weights<T, EpilogueKind::kStore>(maps, args, cluster, workspace, a);
  });
}

// The same with b[r] = lines[slot_of_row[r] / top_k], or zeros where the slot is negative; in their dtype only. The kernel's a
// are the gathered rows and its b is `a`: it makes tiles of out[e].T, which it stores transposed.
void hopper_weights_gathered(Tensor a, Tensor lines, Tensor slot_of_row, int64_t top_k, Tensor sizes, Tensor workspace, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  Arguments args = arguments(sizes, a.size(0), out.size(1), kPanelOfWeights);
  args.size_m = static_cast<int>(out.size(2));
  gather_from(args, lines, slot_of_row, top_k);
  const Cluster cluster = cluster_of_weights(args.size_m, args.size_n, true);
  TensorMaps maps{};
  maps.b[0] = tensor_map(a, kBoxContiguousMN);
  maps.out[0] = tensor_map(out, 64, 32);  // a chunk's columns are lines, of the 16 rows that a warp has
  GBMOE_DISPATCH_HALF(a.scalar_type(), "hopper_weights_gathered", {
    if (cluster == Cluster::kTwoAlongM) launch<GatheredWeightsSettings<T, 2>>(maps, args, workspace, a);
    else launch<GatheredWeightsSettings<T, 1>>(maps, args, workspace, a);
  });
}

}  // namespace gbmoe
