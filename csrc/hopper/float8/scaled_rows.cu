// m-grouped GEMMs of e4m3 operands with scales: forward, and the gradient of the rows.

#include "scaled_operands.cuh"

namespace gbmoe {
namespace {

template <typename T>
void launch_rows(const hopper::TensorMaps& maps, const hopper::Arguments& args, const hopper::Tiling& tiling,
                 const hopper::Balancing& balancing, const Tensor& on) {
  using namespace hopper;
  constexpr EpilogueKind kStore = EpilogueKind::kStore;
  if (tiling.is(kNarrowTileN, 1, 1)) launch<ScaledSettings<T, kStore, void, kNarrowTileN, 1>>(maps, args, balancing, on);
  else if (tiling.is(kWideTileN, 1, 1)) launch<ScaledSettings<T, kStore, void, kWideTileN, 1>>(maps, args, balancing, on);
  else tiling.refuse("hopper_scaled_rows");
}

}  // namespace

// out[rows of e] = a[rows of e] @ b[e].T (+ a2[rows of e] @ b2[e].T), bf16 or fp16
void hopper_scaled_rows(
    Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, std::optional<Tensor> a2, std::optional<Tensor> scales_a2,
    std::optional<Tensor> b2, std::optional<Tensor> scales_b2, Tensor sizes, std::vector<int64_t> tiling,
    std::optional<Tensor> workspace, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiles = tiling_of(tiling);
  Arguments args = arguments(sizes, out.size(0), out.size(1), tiles);
  args.operand_pairs = a2 ? 2 : 1;
  args.out[0] = out.data_ptr();
  TensorMaps maps{};
  maps.out[0] = tensor_map(out, kBoxOut);
  set_rows(maps, args, 0, a, scales_a, tiles);
  set_columns(maps, args, 0, b, scales_b, tiles);
  if (a2) {
    set_rows(maps, args, 1, *a2, *scales_a2, tiles);
    set_columns(maps, args, 1, *b2, *scales_b2, tiles);
  }
  GBMOE_DISPATCH_16_BIT(out.scalar_type(), "hopper_scaled_rows", {
    const Balancing balancing{workspace, {}};
    launch_rows<T>(maps, args, tiles, balancing, a);
  });
}

GBMOE_OPERATOR(hopper_scaled_rows,
               "(Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, Tensor? a2, Tensor? scales_a2, Tensor? b2, Tensor? "
               "scales_b2, Tensor sizes, int[] tiling, Tensor(a!)? workspace, Tensor(b!) out) -> ()");

}  // namespace gbmoe
