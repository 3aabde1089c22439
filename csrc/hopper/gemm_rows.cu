// m-grouped GEMMs, whose groups are rows of the result: forward, and the gradient of the rows.

#include "launch.cuh"

namespace gbmoe {
namespace {

template <typename T, bool kTransposedB>
void launch_rows(const hopper::TensorMaps& maps, const hopper::Arguments& args, hopper::Tiling tiling,
                 const std::optional<Tensor>& workspace, const Tensor& on) {
  using namespace hopper;
  if (tiling.tile_n == kSquareTileN) {
    if (tiling.cluster == Cluster::kTwoAlongN) launch<PingPongRowsSettings<T, kTransposedB, 1, 2>>(maps, args, workspace, on);
    else if (tiling.cluster == Cluster::kTwoAlongM) launch<PingPongRowsSettings<T, kTransposedB, 2, 1>>(maps, args, workspace, on);
    else launch<PingPongRowsSettings<T, kTransposedB, 1, 1>>(maps, args, workspace, on);
    return;
  }
  if (tiling.tile_n == kNarrowTileN) launch<RowsSettings<T, kTransposedB, kNarrowTileN, 2>>(maps, args, workspace, on);
  else if (tiling.cluster == Cluster::kTwoAlongN) launch<RowsSettings<T, kTransposedB, kWideTileN, 2>>(maps, args, workspace, on);
  else launch<RowsSettings<T, kTransposedB, kWideTileN, 1>>(maps, args, workspace, on);
}

}  // namespace

// out[rows of e] = a[rows of e] @ b[e].T with a[r] = lines[slot_of_row[r] / top_k], or zeros where the slot is negative; b
// [E,N,K]
void hopper_rows_gathered(Tensor lines, Tensor slot_of_row, int64_t top_k, Tensor b, Tensor sizes, Tensor out) {
  using namespace hopper;
  const OnDevice current(lines);
  Arguments args = arguments(sizes, out.size(0), out.size(1), kPanelOfRows);
  args.k_blocks = divide_up(static_cast<int>(lines.size(1)), kBlockK);
  args.out[0] = out.data_ptr();
  gather_from(args, lines, slot_of_row, top_k);
  TensorMaps maps{};
  maps.b[0] = tensor_map(b, box_of_b(kWideTileN));
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_HALF(lines.scalar_type(), "hopper_rows_gathered", {
    launch<GatheredRowsSettings<T>>(maps, args, std::nullopt, lines);
  });
}

bool hopper_built() {
#ifdef GBMOE_HOPPER
  return true;
#else
  return false;
#endif
}

// out[rows of e] = a[rows of e] @ b[e] (+ a2[rows of e] @ b2[e]); b [E,K,N], or [E,N,K] with trans_b
void hopper_rows(Tensor a, Tensor b, std::optional<Tensor> a2, std::optional<Tensor> b2, Tensor sizes, bool trans_b, bool ping_pong,
                 std::optional<Tensor> workspace, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  Arguments args = arguments(sizes, out.size(0), out.size(1), kPanelOfRows);
  args.k_blocks = divide_up(static_cast<int>(a.size(1)), kBlockK);
  args.operand_pairs = a2 ? 2 : 1;
  args.out[0] = out.data_ptr();
  const Tiling tiling = ping_pong ? tiling_of_rows_ping_pong(args.size_n, a.size(0), args.groups) : tiling_of_rows(args.size_n);
  const int box_b = trans_b ? box_of_b(tiling.tile_n) : kBoxContiguousMN;
  TensorMaps maps{};
  maps.a[0] = map_of_a(a, tiling.cluster);
  maps.b[0] = tensor_map(b, box_b);
  if (a2) {
    maps.a[1] = map_of_a(*a2, tiling.cluster);
    maps.b[1] = tensor_map(*b2, box_b);
  }
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_HALF(a.scalar_type(), "hopper_rows", {
    if (trans_b) launch_rows<T, false>(maps, args, tiling, workspace, a);
    else launch_rows<T, true>(maps, args, tiling, workspace, a);
  });
}

}  // namespace gbmoe
