// h = x @ w1[e].T and a = act(h).

#include "up_projection.cuh"

namespace gbmoe {

// h is stored where it is given. With slot_of_row, x is [tokens,H], and row r its line slot_of_row[r] / top_k.
void hopper_up(Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, Tensor sizes, int64_t activation,
               std::optional<Tensor> workspace, Tensor a, std::optional<Tensor> h) {
  using namespace hopper;
  launch_up<EpilogueKind::kActivation>(
      x, slot_of_row, top_k, w1, nullptr, sizes, activation, workspace, a, h ? &*h : nullptr, nullptr);
}

}  // namespace gbmoe
