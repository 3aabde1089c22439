// Products whose groups are rows of the result: forward, and the gradient of the rows.

#include "launch.cuh"

namespace gbmoe {
namespace {

// Of a product in ping-pong.
inline hopper::Tiling square_tiling(int columns, int64_t rows, int groups) {
  using namespace hopper;
  if (in_pairs(columns, kSquare)) return {kSquare, Pairs::kAlongN};
  // Along M half a pair waits for the other where a group's tiles are odd in number, and of one tile always.
  return {kSquare, rows >= int64_t{kTileM} * groups ? Pairs::kAlongM : Pairs::kNone};
}

template <typename T, bool kTransposedB>
void launch_rows(const hopper::Maps& maps, const hopper::Arguments& args, hopper::Tiling tiling, const std::optional<Tensor>& workspace,
                 const Tensor& on) {
  using namespace hopper;
  constexpr Finish kStore = Finish::kStore;
  if (tiling.tile == kSquare) {
    if (tiling.pairs == Pairs::kAlongN) launch<PingPongKernel<T, kTransposedB, 1, 2>>(maps, args, workspace, on);
    else if (tiling.pairs == Pairs::kAlongM) launch<PingPongKernel<T, kTransposedB, 2, 1>>(maps, args, workspace, on);
    else launch<PingPongKernel<T, kTransposedB, 1, 1>>(maps, args, workspace, on);
    return;
  }
  if (tiling.tile == kNarrow) launch<RowsKernel<T, kTransposedB, false, kStore, void, kNarrow, 2>>(maps, args, workspace, on);
  else if (tiling.pairs == Pairs::kAlongN) launch<RowsKernel<T, kTransposedB, false, kStore, void, kWidest, 2>>(maps, args, workspace, on);
  else launch<RowsKernel<T, kTransposedB, false, kStore, void, kWidest, 1>>(maps, args, workspace, on);
}

}  // namespace

// out[rows of e] = a[rows of e] @ b[e].T with a[r] = lines[slot_of_row[r] / top_k], or zeros where the slot is negative; b [E,N,K]
void hopper_rows_gathered(Tensor lines, Tensor slot_of_row, int64_t top_k, Tensor b, Tensor sizes, Tensor out) {
  using namespace hopper;
  const OnDevice current(lines);
  Arguments args = arguments(sizes, out.size(0), out.size(1), kPanelOfRows);
  args.slices = divide_up(static_cast<int>(lines.size(1)), kTileK);
  args.out[0] = out.data_ptr();
  gather_from(args, lines, slot_of_row, top_k);
  Maps maps{};
  maps.b[0] = tensor_map(b, box_of_b(kWidest));
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_HALF(lines.scalar_type(), "hopper_rows_gathered", {
    launch<RowsKernel<T, false, true, Finish::kStore, void, kWidest, 1>>(maps, args, std::nullopt, lines);
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
  args.slices = divide_up(static_cast<int>(a.size(1)), kTileK);
  args.pairs = a2 ? 2 : 1;
  args.out[0] = out.data_ptr();
  const Tiling tiling = ping_pong ? square_tiling(args.columns, a.size(0), args.groups) : hopper::tiling(args.columns);
  const int box_b = trans_b ? box_of_b(tiling.tile) : kBoxTransposed;
  Maps maps{};
  maps.a[0] = map_of_a(a, tiling.pairs);
  maps.b[0] = tensor_map(b, box_b);
  if (a2) {
    maps.a[1] = map_of_a(*a2, tiling.pairs);
    maps.b[1] = tensor_map(*b2, box_b);
  }
  maps.out[0] = tensor_map(out, kBoxOut);
  GBMOE_DISPATCH_HALF(a.scalar_type(), "hopper_rows", {
    if (trans_b) launch_rows<T, false>(maps, args, tiling, workspace, a);
    else launch_rows<T, true>(maps, args, tiling, workspace, a);
  });
}

}  // namespace gbmoe
