// k-grouped GEMMs, whose groups are summed over: the gradient of the weights.

#include "launch.cuh"

namespace gbmoe {
namespace {

template <typename T, hopper::EpilogueKind kKind>
void launch_weights(const hopper::TensorMaps& maps, const hopper::Arguments& args, const hopper::Tiling& tiling,
                    const hopper::Balancing& balancing, const Tensor& on) {
  using namespace hopper;
  if (tiling.is(kWideTileN, 2, 1)) launch<WeightsSettings<T, kKind, 2, 1>>(maps, args, balancing, on);
  else if (tiling.is(kWideTileN, 1, 2)) launch<WeightsSettings<T, kKind, 1, 2>>(maps, args, balancing, on);
  else if (tiling.is(kWideTileN, 1, 1)) launch<WeightsSettings<T, kKind, 1, 1>>(maps, args, balancing, on);
  else tiling.refuse("hopper_weights");
}

}  // namespace

void hopper_weights(Tensor a, Tensor b, Tensor sizes, int64_t cluster_m, int64_t cluster_n, int64_t panel, Tensor workspace,
                    int64_t min_k_blocks, int64_t split_cost, int64_t most_splits, double even, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiling{kWideTileN, cluster_m, cluster_n, panel, false};
  const Balancing balancing{workspace, {min_k_blocks, split_cost, most_splits, even}};
  Arguments args = arguments(sizes, a.size(0), out.size(2), tiling);
  args.size_m = static_cast<int>(out.size(1));
  TensorMaps maps{};
  maps.a[0] = tensor_map(a, kBoxContiguousMN);
  maps.b[0] = tensor_map(b, kBoxContiguousMN);
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "hopper_weights", {
    if (out.scalar_type() == ScalarType::Float) launch_weights<T, EpilogueKind::kAccumulate>(maps, args, tiling, balancing, a);
    else launch_weights<T, EpilogueKind::kStore>(maps, args, tiling, balancing, a);
  });
}

// The kernel's a are the gathered rows and its b is `a`, or a and a2 side by side: it makes tiles of out[e].T, which it stores transposed.
void hopper_weights_gathered(
    Tensor a, std::optional<Tensor> a2, Tensor tokens, Tensor slot_of_row, int64_t top_k, Tensor sizes, int64_t cluster_m,
    int64_t cluster_n, int64_t panel, Tensor workspace, int64_t min_k_blocks, int64_t split_cost, int64_t most_splits,
    double even, Tensor out, std::optional<Tensor> out2) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiling{kWideTileN, cluster_m, cluster_n, panel, false};
  const Balancing balancing{workspace, {min_k_blocks, split_cost, most_splits, even}};
  Arguments args = arguments(sizes, a.size(0), out.size(1), tiling);
  args.size_m = static_cast<int>(out.size(2));
  TensorMaps maps{};
  gather_from(maps, args, tokens, slot_of_row, top_k, tiling);
  maps.b[0] = tensor_map(a, kBoxContiguousMN);
  maps.out[0] = tensor_map(out, 64, 32);  // a chunk's columns are 64 rows of out[e], a warp's 16 rows 32 bytes of each
  if (a2) {
    args.second_n = ceil_div(args.size_n, kWideTileN) * kWideTileN;
    args.tiled_n = args.second_n + args.size_n;
    maps.b[1] = tensor_map(*a2, kBoxContiguousMN);
    maps.out[1] = tensor_map(*out2, 64, 32);
  }
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "hopper_weights_gathered", {
    if (tiling.is(kWideTileN, 2, 1)) launch<GatheredWeightsSettings<T, 2, 1>>(maps, args, balancing, a);
    else if (tiling.is(kWideTileN, 1, 2)) launch<GatheredWeightsSettings<T, 1, 2>>(maps, args, balancing, a);
    else if (tiling.is(kWideTileN, 1, 1)) launch<GatheredWeightsSettings<T, 1, 1>>(maps, args, balancing, a);
    else tiling.refuse("hopper_weights_gathered");
  });
}

}  // namespace gbmoe
