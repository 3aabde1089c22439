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

}  // namespace

void hopper_rows_gathered(Tensor tokens, Tensor slot_of_row, int64_t top_k, Tensor b, Tensor sizes, int64_t panel, Tensor out) {
  using namespace hopper;
  const OnDevice current(tokens);
  const Tiling tiling{kWideTileN, 1, 1, panel, false};
  Arguments args = arguments(sizes, out.size(0), out.size(1), tiling);
  args.k_blocks = ceil_div(static_cast<int>(tokens.size(1)), kBlockK);
  args.out[0] = out.data_ptr();
  TensorMaps maps{};
  gather_from(maps, args, tokens, slot_of_row, top_k, tiling);
  maps.b[0] = tensor_map(b, box_of_b(kWideTileN));
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_16_BIT(tokens.scalar_type(), "hopper_rows_gathered", {
    launch<GatheredRowsSettings<T>>(maps, args, {}, tokens);
  });
}

bool hopper_built() {
#ifdef GBMOE_HOPPER
  return true;
#else
  return false;
#endif
}

void hopper_rows(
    Tensor a, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2, std::optional<Tensor> sizes, bool trans_b,
    int64_t tile_n, int64_t cluster_m, int64_t cluster_n, int64_t panel, int64_t most_ahead, std::optional<Tensor> workspace,
    int64_t min_k_blocks, int64_t split_cost, int64_t most_splits, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiling{tile_n, cluster_m, cluster_n, panel, false, most_ahead};
  const Balancing balancing{workspace, {min_k_blocks, split_cost, most_splits, 1.0}};
  Arguments args = arguments(sizes, out.size(0), out.size(1), tiling);
  args.k_blocks = ceil_div(static_cast<int>(a.size(1)), kBlockK);
  args.operand_pairs = a2 ? 2 : 1;
  args.out[0] = out.data_ptr();
  const int box_b = trans_b ? box_of_b(static_cast<int>(tile_n)) : kBoxContiguousMN;
  TensorMaps maps{};
  maps.a[0] = map_of_a(a, tiling);
  maps.b[0] = tensor_map(b, box_b);
  if (a2) {
    maps.a[1] = map_of_a(*a2, tiling);
    maps.b[1] = tensor_map(*b2, box_b);
  }
  const bool to_float = out.scalar_type() == ScalarType::Float;  // a router's logits, which are not rounded
  if (to_float && !(trans_b && tiling.is(kSquareTileN, 1, 1))) tiling.refuse("hopper_rows in fp32");
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_16_BIT(a.scalar_type(), "hopper_rows", {
    if (to_float) launch<FloatRowsSettings<T>>(maps, args, balancing, a);
    else if (trans_b) launch_rows<T, false>(maps, args, tiling, balancing, a);
    else launch_rows<T, true>(maps, args, tiling, balancing, a);
  });
}

}  // namespace gbmoe
