// h = x @ w1[e].T, g = x @ v1[e].T and a = act(h) * g.

#include "up_projection.cuh"

namespace gbmoe {

void hopper_up_glu(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, Tensor v1, std::vector<int64_t> places, Tensor sizes,
    std::vector<double> activation, std::vector<int64_t> tiling, std::optional<Tensor> workspace, Tensor a,
    std::optional<Tensor> h, std::optional<Tensor> g) {
  using namespace hopper;
  const Tiling tiles = tiling_of(tiling);
  launch_up<EpilogueKind::kGlu>(
      "hopper_up_glu", x, slot_of_row, top_k, w1, &v1, places, sizes, activation, tiles, workspace, a, h ? &*h : nullptr,
      g ? &*g : nullptr);
}

GBMOE_OPERATOR(
    hopper_up_glu,
    "(Tensor x, Tensor? slot_of_row, int top_k, Tensor w1, Tensor v1, int[] places, Tensor sizes, float[] activation, int[] "
    "tiling, Tensor(a!)? workspace, Tensor(b!) a, Tensor(c!)? h, Tensor(d!)? g) -> ()");

}  // namespace gbmoe
