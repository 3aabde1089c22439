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

void hopper_scaled_rows(
    Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, std::optional<Tensor> a2, std::optional<Tensor> scales_a2,
    std::optional<Tensor> b2, std::optional<Tensor> scales_b2, Tensor sizes, int64_t tile_n, int64_t cluster_n, int64_t panel,
    std::optional<Tensor> workspace, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiling{tile_n, 1, cluster_n, panel, false};
  Arguments args = arguments(sizes, out.size(0), out.size(1), tiling);
  args.operand_pairs = a2 ? 2 : 1;
  args.out[0] = out.data_ptr();
  TensorMaps maps{};
  maps.out[0] = tensor_map(out, kBoxOut);
  set_rows(maps, args, 0, a, scales_a, tiling);
  set_columns(maps, args, 0, b, scales_b, tiling);
  if (a2) {
    set_rows(maps, args, 1, *a2, *scales_a2, tiling);
    set_columns(maps, args, 1, *b2, *scales_b2, tiling);
  }
  GBMOE_DISPATCH_16_BIT(out.scalar_type(), "hopper_scaled_rows", {
    const Balancing balancing{workspace, {}};
    launch_rows<T>(maps, args, tiling, balancing, a);
  });
}

}  // namespace gbmoe
