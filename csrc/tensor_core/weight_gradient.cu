// k-grouped GEMMs, whose groups are summed over: the gradient of the weights.

#include "launch.cuh"

namespace gbmoe {
namespace {

template <typename T, typename Out, tensor_core::EpilogueKind kKind>
void launch_weights(const tensor_core::Arguments& args, const tensor_core::Tiling& tiling, const Tensor& on) {
  using namespace tensor_core;
  with_tile<WideTile, SquareTile>("tensor_core_weights", tiling, [&](auto tile) {
    launch<T, Out, decltype(tile), false, false, true, kKind>(args, on);
  });
}

}  // namespace

// out[e] = a[rows of e].T @ b[rows of e], in their dtype; with `accumulate` it is added to out, which is fp32
void tensor_core_weights(
    Tensor a, Tensor b, Tensor sizes, std::vector<int64_t> tiling, bool accumulate, std::vector<int64_t> places, Tensor out) {
  using namespace tensor_core;
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const Tiling tiles = tiling_of(tiling);
  Arguments args = arguments(sizes, a.size(0), out.size(2), tiles);
  args.size_m = static_cast<int>(out.size(1));
  args.a[0] = a.data_ptr();
  args.b[0] = b.data_ptr();
  args.out[0] = out.data_ptr();
  args.pitch_out = pitch_of("tensor_core_weights", out);
  args.places = places_of("tensor_core_weights", places, args.groups);
  if (args.places.count > 0) args.pitch_out.group = out.stride(0);
  check_output("tensor_core_weights", out, accumulate ? ScalarType::Float : a.scalar_type());
  GBMOE_DISPATCH_TENSOR_CORE(a.scalar_type(), "tensor_core_weights", {
    if (accumulate) launch_weights<T, float, EpilogueKind::kAccumulate>(args, tiles, a);
    else launch_weights<T, T, EpilogueKind::kStore>(args, tiles, a);
  });
}

GBMOE_OPERATOR(
    tensor_core_weights, "(Tensor a, Tensor b, Tensor sizes, int[] tiling, bool accumulate, int[] places, Tensor(a!) out) -> ()");

}  // namespace gbmoe
