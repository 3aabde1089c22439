// From the gradient of the experts' results back through w2 and the activation.

#include "launch.cuh"
#include "sum_dots.cuh"

namespace gbmoe {
namespace {

using namespace hopper;

template <typename T, bool kTransposedB, bool kGate>
void launch_tiled(const TensorMaps& maps, const Arguments& args, const Tiling& tiling, const Tensor& on) {
  if (tiling.is(kNarrowTileN, 1, 2)) launch<DownBackwardSettings<T, kTransposedB, kGate, kNarrowTileN, 2>>(maps, args, {}, on);
  else if (tiling.is(kWideTileN, 1, 2)) launch<DownBackwardSettings<T, kTransposedB, kGate, kWideTileN, 2>>(maps, args, {}, on);
  else if (tiling.is(kWideTileN, 1, 1)) launch<DownBackwardSettings<T, kTransposedB, kGate, kWideTileN, 1>>(maps, args, {}, on);
  else tiling.refuse("hopper_down_backward");
}

template <typename T>
void launch_pairs(const TensorMaps& maps, const Arguments& args, const Tiling& tiling, const Tensor& on) {
  if (tiling.is(kNarrowTileN, 1, 2)) launch<DownBackwardPairsSettings<T, kNarrowTileN>>(maps, args, {}, on);
  else if (tiling.is(kWideTileN, 1, 2)) launch<DownBackwardPairsSettings<T, kWideTileN>>(maps, args, {}, on);
  else tiling.refuse("hopper_down_backward_pairs");
}

// What both operators have in common; h is [P,F], or pairs [P,2F].
struct DownBackward {
  TensorMaps maps{};
  Arguments args;
  Tiling tiles;

  DownBackward(
      const char* name, const Tensor& dz, const Tensor& w2, const std::optional<Tensor>& a2, const std::optional<Tensor>& b2,
      const std::vector<int64_t>& places, const Tensor& sizes, const Tensor& h, const Tensor& slot_of_row,
      const std::optional<Tensor>& weights, const std::vector<double>& activation, const std::vector<int64_t>& tiling,
      const Tensor& a, const Tensor& dh, const std::optional<Tensor>& dots)
      : tiles(tiling_of(tiling)) {
    args = arguments(sizes, a.size(0), a.size(1), tiles);
    args.k_blocks = ceil_div(static_cast<int>(dz.size(1)), kBlockK);
    args.activation = activation_of(activation);
    args.slot_of_row = static_cast<const int*>(slot_of_row.data_ptr());
    args.slots = count_of_slots(weights);
    args.h = h.data_ptr();
    args.weights = scalars(weights);
    args.dots = dots ? static_cast<float*>(dots->data_ptr()) : nullptr;
    args.out[0] = a.data_ptr();
    args.out[1] = dh.data_ptr();
    maps.a[0] = map_of_a(dz, tiles);
    args.places = places_of(name, places, args.groups);
    maps.b[0] = weight_map(w2, static_cast<int>(tiles.tile_n), args.places);
    FurtherPairs{name, 2, contiguous_along_n(w2), a.size(1), tiles}.add_second(maps, args, a2, b2);
    maps.out[0] = tensor_map(h, kBoxOut);
  }

  void sum(const std::optional<Tensor>& grad_weights, const Tensor& on) const {
    if (args.dots)
      sum_dots(args.dots, ceil_div(args.size_n, 64), args.rows, args.slot_of_row, args.slots, scalars(grad_weights), current_stream(on));
  }
};

template <typename T, bool kGate>
void launch_down_backward(
    const TensorMaps& maps, const Arguments& args, const Tiling& tiling, bool along_f, const Tensor& on) {
  if (along_f) launch_tiled<T, true, kGate>(maps, args, tiling, on);
  else launch_tiled<T, false, kGate>(maps, args, tiling, on);
}

}  // namespace

// d = dz[rows of e] @ w2[e].T (+ a2[rows of e] @ b2[e].T) and what activate_backward makes of it; b2 [E,F,K2] is contiguous along F where
// w2 is; places are w2's; dots: float32 [F / 64 rounded up, P], to work in, given where grad_weights is
void hopper_down_backward(
    Tensor dz, Tensor w2, std::optional<Tensor> a2, std::optional<Tensor> b2, std::vector<int64_t> places, Tensor sizes, Tensor h,
    std::optional<Tensor> g, Tensor slot_of_row, std::optional<Tensor> weights, std::vector<double> activation,
    std::vector<int64_t> tiling, Tensor a, Tensor dh, std::optional<Tensor> dg, std::optional<Tensor> dots,
    std::optional<Tensor> grad_weights) {
  const OnDevice current(dz);
  DownBackward of(
      "hopper_down_backward", dz, w2, a2, b2, places, sizes, h, slot_of_row, weights, activation, tiling, a, dh, dots);
  of.args.g = g ? g->data_ptr() : nullptr;
  of.args.out[2] = dg ? dg->data_ptr() : nullptr;
  if (g) of.maps.out[1] = tensor_map(*g, kBoxOut);
  GBMOE_DISPATCH_16_BIT(dz.scalar_type(), "hopper_down_backward", {
    if (g) launch_down_backward<T, true>(of.maps, of.args, of.tiles, contiguous_along_n(w2), dz);
    else launch_down_backward<T, false>(of.maps, of.args, of.tiles, contiguous_along_n(w2), dz);
  });
  of.sum(grad_weights, dz);
}

// The same of pairs [P,2F] of h and g, whose gradients are dpairs; for w2 that lies contiguous along H
void hopper_down_backward_pairs(
    Tensor dz, Tensor w2, std::optional<Tensor> a2, std::optional<Tensor> b2, std::vector<int64_t> places, Tensor sizes,
    Tensor pairs, Tensor slot_of_row, std::optional<Tensor> weights, std::vector<double> activation, std::vector<int64_t> tiling,
    Tensor a, Tensor dpairs, std::optional<Tensor> dots, std::optional<Tensor> grad_weights) {
  const OnDevice current(dz);
  STD_TORCH_CHECK(!contiguous_along_n(w2), "hopper_down_backward_pairs: expected w2 contiguous along H");
  const DownBackward of(
      "hopper_down_backward_pairs", dz, w2, a2, b2, places, sizes, pairs, slot_of_row, weights, activation, tiling, a, dpairs,
      dots);
  STD_TORCH_CHECK(has_pairs(of.args.activation.kind), "hopper_down_backward_pairs: no kernel for this activation");
  GBMOE_DISPATCH_16_BIT(dz.scalar_type(), "hopper_down_backward_pairs", { launch_pairs<T>(of.maps, of.args, of.tiles, dz); });
  of.sum(grad_weights, dz);
}

GBMOE_OPERATOR(
    hopper_down_backward,
    "(Tensor dz, Tensor w2, Tensor? a2, Tensor? b2, int[] places, Tensor sizes, Tensor h, Tensor? g, Tensor slot_of_row, "
    "Tensor? weights, float[] activation, int[] tiling, Tensor(a!) a, Tensor(b!) dh, Tensor(c!)? dg, Tensor(d!)? dots, Tensor(e!)? "
    "grad_weights) -> ()");
GBMOE_OPERATOR(
    hopper_down_backward_pairs,
    "(Tensor dz, Tensor w2, Tensor? a2, Tensor? b2, int[] places, Tensor sizes, Tensor pairs, Tensor slot_of_row, "
    "Tensor? weights, float[] activation, int[] tiling, Tensor(a!) a, Tensor(b!) dpairs, Tensor(c!)? dots, Tensor(d!)? "
    "grad_weights) -> ()");

}  // namespace gbmoe
