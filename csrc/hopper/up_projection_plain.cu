// h = x @ w1[e].T and a = act(h).

#include "up_projection.cuh"

namespace gbmoe {

// h = x @ w1[e].T and a = act(h), or with g = x @ v1[e].T a = act(h) * g; h and g are written if they are given, both or neither.
// With slot_of_row, for silu and gelu_tanh only, x is [tokens,H], and row r that of token slot_of_row[r] / top_k; where cluster_n is
// not 2 the workspace is not used then.
void hopper_up(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, std::vector<int64_t> places, Tensor sizes,
    std::vector<double> activation, std::vector<int64_t> tiling, std::optional<Tensor> workspace, Tensor a,
    std::optional<Tensor> h) {
  using namespace hopper;
  const Tiling tiles = tiling_of(tiling);
  launch_up<EpilogueKind::kActivation>(
      "hopper_up", x, slot_of_row, top_k, w1, nullptr, {}, {}, {}, places, sizes, activation, tiles, workspace, a,
      h ? &*h : nullptr, nullptr);
}

GBMOE_OPERATOR(
    hopper_up,
    "(Tensor x, Tensor? slot_of_row, int top_k, Tensor w1, int[] places, Tensor sizes, float[] activation, int[] tiling, "
    "Tensor(a!)? workspace, Tensor(b!) a, Tensor(c!)? h) -> ()");

}  // namespace gbmoe
