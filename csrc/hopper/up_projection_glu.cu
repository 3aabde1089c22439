// h = x @ w1[e].T (+ a2 @ b2[e].T), g = x @ v1[e].T (+ a2 @ v2[e].T) and a = act(h) * g.

#include "up_projection.cuh"

namespace gbmoe {

// a2 [P,K2], for rows that are gathered; b2 and v2 [E,F,K2] are stacks, contiguous along F where w1 and v1 are
void hopper_up_glu(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, Tensor v1, std::optional<Tensor> a2,
    std::optional<Tensor> b2, std::optional<Tensor> v2, std::vector<int64_t> places, Tensor sizes, std::vector<double> activation,
    std::vector<int64_t> tiling, std::optional<Tensor> workspace, Tensor a, std::optional<Tensor> h, std::optional<Tensor> g) {
  using namespace hopper;
  const Tiling tiles = tiling_of(tiling);
  launch_up<EpilogueKind::kGlu>(
      "hopper_up_glu", x, slot_of_row, top_k, w1, &v1, a2, b2, v2, places, sizes, activation, tiles, workspace, a,
      h ? &*h : nullptr, g ? &*g : nullptr);
}

GBMOE_OPERATOR(
    hopper_up_glu,
    "(Tensor x, Tensor? slot_of_row, int top_k, Tensor w1, Tensor v1, Tensor? a2, Tensor? b2, Tensor? v2, int[] places, "
    "Tensor sizes, float[] activation, int[] tiling, Tensor(a!)? workspace, Tensor(b!) a, Tensor(c!)? h, Tensor(d!)? g) -> ()");

}  // namespace gbmoe
