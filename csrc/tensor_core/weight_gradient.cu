// k-grouped GEMMs, whose groups are summed over: the gradient of the weights. ops.h has the operator's arguments.

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

void tensor_core_weights(Tensor a, Tensor b, Tensor sizes, int64_t tile_m, int64_t tile_n, int64_t panel, bool accumulate, Tensor out) {
  using namespace tensor_core;
  const torch::stable::accelerator::DeviceGuard guard(a.get_device_index());
  const Tiling tiling{tile_m, tile_n, panel};
  Arguments args = arguments(sizes, a.size(0), out.size(2), tiling);
  args.size_m = static_cast<int>(out.size(1));
  args.a[0] = a.data_ptr();
  args.b[0] = b.data_ptr();
  args.out[0] = out.data_ptr();
  args.pitch_out = pitch_of("tensor_core_weights", out);
  check_output("tensor_core_weights", out, accumulate ? ScalarType::Float : a.scalar_type());
  GBMOE_DISPATCH_TENSOR_CORE(a.scalar_type(), "tensor_core_weights", {
    if (accumulate) launch_weights<T, float, EpilogueKind::kAccumulate>(args, tiling, a);
    else launch_weights<T, T, EpilogueKind::kStore>(args, tiling, a);
  });
}

}  // namespace gbmoe
