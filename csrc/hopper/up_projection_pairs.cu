// The first GEMM of a gated expert whose gate and up lie column by column in one tensor, with its activation:
// pairs = x @ w[e].T (+ a2 @ b2[e].T) + bias[e], [P,2F], column 2 * j of which is h and 2 * j + 1 is g; a = act(h) * g, [P,F].

#include "launch.cuh"

namespace gbmoe {
namespace {

using namespace hopper;

// Only the commonest family gathers.
template <typename T>
void launch_pairs(
    const TensorMaps& maps, const Arguments& args, const Tiling& tiling, const Balancing& balancing, const Tensor& on) {
  if (!tiling.is(kWideTileN, 1, 2)) tiling.refuse("hopper_up_pairs");
  if (changes_gate(args.activation.kind)) launch<UpPairsSettings<T, GatingActivation, false>>(maps, args, balancing, on);
  else if (args.tokens) launch<UpPairsSettings<T, SigmoidActivation, true>>(maps, args, balancing, on);
  else launch<UpPairsSettings<T, SigmoidActivation, false>>(maps, args, balancing, on);
}

}  // namespace

// w [E,2F,H], and b2 [E,2F,K2], contiguous along 2F; pairs are written if they are given. bias [E,2F]. x [P,H], or where slot_of_row is
// given the tokens [T,H] from which rows are gathered.
void hopper_up_pairs(
    Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w, std::optional<Tensor> a2, std::optional<Tensor> b2,
    std::vector<int64_t> places, std::optional<Tensor> bias, Tensor sizes, std::vector<double> activation,
    std::vector<int64_t> tiling, std::optional<Tensor> workspace, Tensor a, std::optional<Tensor> pairs) {
  const OnDevice current(x);
  STD_TORCH_CHECK(contiguous_along_n(w), "hopper_up_pairs: expected w contiguous along F");
  const Tiling tiles = tiling_of(tiling);
  Arguments args = arguments(sizes, a.size(0), w.size(1), tiles);
  args.k_blocks = ceil_div(static_cast<int>(x.size(1)), kBlockK);
  args.activation = activation_of(activation);
  STD_TORCH_CHECK(has_pairs(args.activation.kind), "hopper_up_pairs: no kernel for this activation");
  args.save = pairs.has_value();
  args.bias = bias ? bias->data_ptr() : nullptr;
  TensorMaps maps{};
  if (slot_of_row) {
    STD_TORCH_CHECK(!changes_gate(args.activation.kind), "hopper_up_pairs: only silu and gelu_tanh gather rows");
    STD_TORCH_CHECK(!bias, "hopper_up_pairs: expected rows in memory where there is a bias");
    gather_from(maps, args, x, *slot_of_row, top_k, tiles);
  } else {
    maps.a[0] = map_of_a(x, tiles);
  }
  args.places = places_of("hopper_up_pairs", places, args.groups);
  maps.b[0] = weight_map(w, kWideTileN, args.places);
  FurtherPairs{"hopper_up_pairs", 2, true, w.size(1), tiles}.add_second(maps, args, a2, b2);
  maps.out[0] = tensor_map(a, kBoxOut);
  args.out[0] = a.data_ptr();
  if (pairs) {
    maps.out[1] = tensor_map(*pairs, kBoxOut);
    args.out[1] = pairs->data_ptr();
  }
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "hopper_up_pairs", launch_pairs<T>(maps, args, tiles, {workspace, {}}, x));
}

GBMOE_OPERATOR(
    hopper_up_pairs,
    "(Tensor x, Tensor? slot_of_row, int top_k, Tensor w, Tensor? a2, Tensor? b2, int[] places, Tensor? bias, Tensor sizes, "
    "float[] activation, int[] tiling, "
    "Tensor(a!)? "
    "workspace, Tensor(b!) a, Tensor(c!)? pairs) -> ()");

}  // namespace gbmoe
