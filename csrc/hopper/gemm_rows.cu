// m-grouped GEMMs, whose groups are rows of the result: forward, and the gradient of the rows.

#include "launch.cuh"

namespace gbmoe {
namespace {

template <typename T, bool kTransposedB>
void launch_rows(const hopper::TensorMaps& maps, const hopper::Arguments& args, const hopper::Tiling& tiling,
                 const hopper::Balancing& balancing, const Tensor& on) {
  using namespace hopper;
  if (tiling.is(kSquareTileN, 1, 2)) launch<PingPongRowsSettings<T, kTransposedB, 1, 2>>(maps, args, balancing, on);
  else if (tiling.is(kSquareTileN, 2, 1)) launch<PingPongRowsSettings<T, kTransposedB, 2, 1>>(maps, args, balancing, on);
  else if (tiling.is(kSquareTileN, 1, 1)) launch<PingPongRowsSettings<T, kTransposedB, 1, 1>>(maps, args, balancing, on);
  else if (tiling.is(kNarrowTileN, 1, 2)) launch<RowsSettings<T, kTransposedB, kNarrowTileN, 2>>(maps, args, balancing, on);
  else if (tiling.is(kWideTileN, 1, 2)) launch<RowsSettings<T, kTransposedB, kWideTileN, 2>>(maps, args, balancing, on);
  else if (tiling.is(kWideTileN, 1, 1)) launch<RowsSettings<T, kTransposedB, kWideTileN, 1>>(maps, args, balancing, on);
  else tiling.refuse("hopper_rows");
}

template <typename T, bool kTransposedB>
void launch_biased_rows(const hopper::TensorMaps& maps, const hopper::Arguments& args, const hopper::Tiling& tiling,
                        const hopper::Balancing& balancing, const Tensor& on) {
  using namespace hopper;
  if (tiling.is(kSquareTileN, 1, 2)) launch<BiasedPingPongRowsSettings<T, kTransposedB>>(maps, args, balancing, on);
  else if (tiling.is(kWideTileN, 1, 2)) launch<BiasedRowsSettings<T, kTransposedB>>(maps, args, balancing, on);
  else tiling.refuse("hopper_rows_biased");
}

// The map of b [E,K,N], or [E,N,K] with trans_b.
CUtensorMap map_of_b(const Tensor& b, bool trans_b, int tile_n, const Places& places) {
  using namespace hopper;
  return tensor_map(b, trans_b ? box_of_b(tile_n) : kBoxContiguousMN, kLineBytes, kTwoLines, false, &places);
}

}  // namespace

// hopper_rows with b [E,N,K] and a[r] = tokens[slot_of_row[r] / top_k], or zeros where slot_of_row[r] names no slot
void hopper_rows_gathered(
    Tensor tokens, Tensor slot_of_row, int64_t top_k, Tensor b, std::vector<int64_t> places, Tensor sizes,
    std::vector<int64_t> tiling, Tensor out) {
  using namespace hopper;
  const OnDevice current(tokens);
  const Tiling tiles = tiling_of(tiling);
  Arguments args = arguments(sizes, out.size(0), out.size(1), tiles);
  args.k_blocks = ceil_div(static_cast<int>(tokens.size(1)), kBlockK);
  args.out[0] = out.data_ptr();
  TensorMaps maps{};
  gather_from(maps, args, tokens, slot_of_row, top_k, tiles);
  args.places = places_of("hopper_rows_gathered", places, args.groups);
  maps.b[0] = map_of_b(b, true, kWideTileN, args.places);
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_16_BIT(tokens.scalar_type(), "hopper_rows_gathered", {
    launch<GatheredRowsSettings<T>>(maps, args, {}, tokens);
  });
}

// out[rows of e] = a[rows of e] @ b[e] (+ a2[rows of e] @ b2[e] (+ a3[rows of e] @ b3[e])); b [E,K,N], or [E,N,K] with trans_b; without
// sizes one group has all rows; a2 and a3 have inner dimensions of their own. places are those of b, or of b and b2. out is of their dtype,
// or with trans_b, of at most two pairs, in square tiles and no cluster, fp32
void hopper_rows(
    Tensor a, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2, std::optional<Tensor> a3, std::optional<Tensor> b3,
    std::vector<int64_t> places, std::optional<Tensor> sizes, bool trans_b, std::vector<int64_t> tiling,
    std::optional<Tensor> workspace, std::vector<double> splitting, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiles = tiling_of(tiling);
  const Balancing balancing{workspace, splitting_of(splitting)};
  Arguments args = arguments(sizes, out.size(0), out.size(1), tiles);
  args.k_blocks = ceil_div(static_cast<int>(a.size(1)), kBlockK);
  args.out[0] = out.data_ptr();
  args.places = places_of("hopper_rows", places, args.groups);
  TensorMaps maps{};
  maps.a[0] = map_of_a(a, tiles);
  maps.b[0] = map_of_b(b, trans_b, static_cast<int>(tiles.tile_n), args.places);
  const FurtherPairs further{"hopper_rows", trans_b ? 2 : 1, !trans_b, out.size(1), tiles};
  further.add_second(maps, args, a2, b2);
  further.add_third(maps, args, a3, b3);
  const bool to_float = out.scalar_type() == ScalarType::Float;  // a router's logits, which are not rounded
  if (to_float && (a3 || !(trans_b && tiles.is(kSquareTileN, 1, 1)))) tiles.refuse("hopper_rows in fp32");
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "hopper_rows", {
    if (to_float) launch<FloatRowsSettings<T>>(maps, args, balancing, a);
    else if (trans_b) launch_rows<T, false>(maps, args, tiles, balancing, a);
    else launch_rows<T, true>(maps, args, tiles, balancing, a);
  });
}

// out[rows of e] = a[rows of e] @ b[e] (+ a2[rows of e] @ b2[e]) + bias[e], whose sum is rounded once; operands as in hopper_rows,
// bias [E,N]
void hopper_rows_biased(
    Tensor a, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2, std::vector<int64_t> places, Tensor bias,
    Tensor sizes, bool trans_b, std::vector<int64_t> tiling, std::optional<Tensor> workspace, std::vector<double> splitting,
    Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiles = tiling_of(tiling);
  Arguments args = arguments(sizes, out.size(0), out.size(1), tiles);
  args.k_blocks = ceil_div(static_cast<int>(a.size(1)), kBlockK);
  args.bias = bias.data_ptr();
  args.out[0] = out.data_ptr();
  TensorMaps maps{};
  maps.a[0] = map_of_a(a, tiles);
  args.places = places_of("hopper_rows_biased", places, args.groups);
  maps.b[0] = map_of_b(b, trans_b, static_cast<int>(tiles.tile_n), args.places);
  FurtherPairs{"hopper_rows_biased", trans_b ? 2 : 1, !trans_b, out.size(1), tiles}.add_second(maps, args, a2, b2);
  maps.out[0] = tensor_map(out, kBoxOut);
  const Balancing balancing{workspace, splitting_of(splitting)};
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "hopper_rows_biased", {
    if (trans_b) launch_biased_rows<T, false>(maps, args, tiles, balancing, a);
    else launch_biased_rows<T, true>(maps, args, tiles, balancing, a);
  });
}

GBMOE_OPERATOR(
    hopper_rows,
    "(Tensor a, Tensor b, Tensor? a2, Tensor? b2, Tensor? a3, Tensor? b3, int[] places, Tensor? sizes, bool trans_b, "
    "int[] tiling, Tensor(a!)? workspace, float[] splitting, Tensor(b!) out) -> ()");
GBMOE_OPERATOR(
    hopper_rows_biased,
    "(Tensor a, Tensor b, Tensor? a2, Tensor? b2, int[] places, Tensor bias, Tensor sizes, bool trans_b, int[] tiling, "
    "Tensor(a!)? "
    "workspace, float[] splitting, Tensor(b!) out) -> ()");
GBMOE_OPERATOR(
    hopper_rows_gathered,
    "(Tensor tokens, Tensor slot_of_row, int top_k, Tensor b, int[] places, Tensor sizes, int[] tiling, Tensor(a!) out) "
    "-> ()");

}  // namespace gbmoe
