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

// out[e] = a[rows of e].T @ b[rows of e], or with `add` out[e] += that; in their dtype, or with `add` in float32. In their dtype the product is
// rounded before it is added. `places` are those of out
void hopper_weights(
    Tensor a, Tensor b, Tensor sizes, std::vector<int64_t> tiling, Tensor workspace, std::vector<double> splitting,
    std::vector<int64_t> places, bool add, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiles = tiling_of(tiling);
  const Balancing balancing{workspace, splitting_of(splitting)};
  Arguments args = arguments(sizes, a.size(0), out.size(2), tiles);
  args.size_m = static_cast<int>(out.size(1));
  args.adds = add;
  const bool to_float = out.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(add || !to_float, "hopper_weights: expected out of the operands' dtype, or to add to float32");
  TensorMaps maps{};
  args.places = places_of("hopper_weights", places, args.groups);
  maps.a[0] = tensor_map(a, kBoxContiguousMN);
  maps.b[0] = tensor_map(b, kBoxContiguousMN);
  maps.out[0] = tensor_map(out, kBoxOut, kLineBytes, kTwoLines, false, &args.places);
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "hopper_weights", {
    if (to_float) launch_weights<T, EpilogueKind::kAccumulate>(maps, args, tiles, balancing, a);
    else launch_weights<T, EpilogueKind::kStore>(maps, args, tiles, balancing, a);
  });
}

// hopper_weights with b[r] = tokens[slot_of_row[r] / top_k], or zeros where slot_of_row[r] names no slot; in their dtype only. With a2
// and out2, which have the shapes of a and out, the same for these, too. Both outputs lie contiguous along their columns, or both along
// their rows.
//
// The kernel's a are the gathered rows and its b is `a`, or a and a2 side by side: it makes tiles of out[e].T, which it stores transposed
// where columns are contiguous.
void hopper_weights_gathered(
    Tensor a, std::optional<Tensor> a2, Tensor tokens, Tensor slot_of_row, int64_t top_k, Tensor sizes,
    std::vector<int64_t> tiling, Tensor workspace, std::vector<double> splitting, Tensor out, std::optional<Tensor> out2) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiles = tiling_of(tiling);
  const Balancing balancing{workspace, splitting_of(splitting)};
  Arguments args = arguments(sizes, a.size(0), out.size(1), tiles);
  args.size_m = static_cast<int>(out.size(2));
  TensorMaps maps{};
  gather_from(maps, args, tokens, slot_of_row, top_k, tiles);
  maps.b[0] = tensor_map(a, kBoxContiguousMN);
  args.out_along_n = contiguous_along_n(out);
  // Transposed, a chunk's columns are 64 rows of out[e], and a warp's 16 rows 32 bytes of each.
  const auto map_of_out = [&](const Tensor& to) {
    return args.out_along_n ? tensor_map(to, kBoxOut, kLineBytes, kTwoLines, true) : tensor_map(to, 64, 32);
  };
  maps.out[0] = map_of_out(out);
  if (a2) {
    args.second_n = ceil_div(args.size_n, kWideTileN) * kWideTileN;
    args.tiled_n = args.second_n + args.size_n;
    maps.b[1] = tensor_map(*a2, kBoxContiguousMN);
    STD_TORCH_CHECK(
        contiguous_along_n(*out2) == args.out_along_n, "hopper_weights_gathered: expected both outputs contiguous along the same dimension");
    maps.out[1] = map_of_out(*out2);
  }
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "hopper_weights_gathered", {
    if (tiles.is(kWideTileN, 2, 1)) launch<GatheredWeightsSettings<T, 2, 1>>(maps, args, balancing, a);
    else if (tiles.is(kWideTileN, 1, 2)) launch<GatheredWeightsSettings<T, 1, 2>>(maps, args, balancing, a);
    else if (tiles.is(kWideTileN, 1, 1)) launch<GatheredWeightsSettings<T, 1, 1>>(maps, args, balancing, a);
    else tiles.refuse("hopper_weights_gathered");
  });
}

GBMOE_OPERATOR(
    hopper_weights,
    "(Tensor a, Tensor b, Tensor sizes, int[] tiling, Tensor(a!) workspace, float[] splitting, int[] places, bool add, "
    "Tensor(b!) out) -> ()");
GBMOE_OPERATOR(hopper_weights_gathered,
               "(Tensor a, Tensor? a2, Tensor tokens, Tensor slot_of_row, int top_k, Tensor sizes, int[] tiling, Tensor(a!) "
               "workspace, float[] splitting, Tensor(b!) out, Tensor(c!)? out2) -> ()");

}  // namespace gbmoe
