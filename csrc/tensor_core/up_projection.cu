// The first GEMM of an expert with its activation. ops.h has the operator's arguments.

#include "launch.cuh"

namespace gbmoe {
namespace {

template <typename T, tensor_core::EpilogueKind kKind, typename Family>
void launch_up(const tensor_core::Arguments& args, const tensor_core::Tiling& tiling, const Tensor& on) {
  using namespace tensor_core;
  with_tile<WideTile, LowTile>("tensor_core_up", tiling, [&](auto tile) {
    launch<T, T, decltype(tile), true, true, false, kKind, Family>(args, on);
  });
}

// With the family that args.activation belongs to.
template <typename T, tensor_core::EpilogueKind kKind>
void launch_up_family(const tensor_core::Arguments& args, const tensor_core::Tiling& tiling, const Tensor& on) {
  switch (args.activation.kind) {
    case kSilu:
    case kGeluTanh: return launch_up<T, kKind, SigmoidActivation>(args, tiling, on);
    case kGelu: return launch_up<T, kKind, ErfActivation>(args, tiling, on);
    case kClampedSilu:
    case kSitu: return launch_up<T, kKind, GatingActivation>(args, tiling, on);
    default: return launch_up<T, kKind, PiecewiseActivation>(args, tiling, on);
  }
}

}  // namespace

void tensor_core_up(Tensor x, Tensor w1, std::optional<Tensor> v1, Tensor sizes, int64_t activation,
                    std::vector<double> constants, int64_t tile_m, int64_t tile_n,
                    int64_t panel, Tensor a, std::optional<Tensor> h, std::optional<Tensor> g) {
  using namespace tensor_core;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tiling tiling{tile_m, tile_n, panel};
  Arguments args = arguments(sizes, a.size(0), a.size(1), tiling);
  args.size_k = static_cast<int>(x.size(1));
  args.activation = activation_of(activation, constants);
  args.a[0] = x.data_ptr();
  set_b(args, "tensor_core_up", w1, v1);
  args.out[0] = a.data_ptr(), args.out[1] = pointer(h), args.out[2] = pointer(g);
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "tensor_core_up", {
    if (v1) launch_up_family<T, EpilogueKind::kGlu>(args, tiling, x);
    else launch_up_family<T, EpilogueKind::kActivation>(args, tiling, x);
  });
}

}  // namespace gbmoe
