// h = x @ w1[e].T and a = act(h).

#include "up_projection.cuh"

namespace gbmoe {

void hopper_up(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, Tensor sizes, int64_t activation, std::vector<double> constants, int64_t cluster_n,
    int64_t panel, bool even_panels, int64_t most_ahead, std::optional<Tensor> workspace, Tensor a, std::optional<Tensor> h) {
  using namespace hopper;
  const Tiling tiling{kWideTileN, 1, cluster_n, panel, even_panels, most_ahead};
  launch_up<EpilogueKind::kActivation>(
      x, slot_of_row, top_k, w1, nullptr, sizes, activation, constants, tiling, workspace, a, h ? &*h : nullptr, nullptr);
}

}  // namespace gbmoe
