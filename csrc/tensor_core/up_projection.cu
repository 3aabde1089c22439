// The first GEMM of an expert with its activation.

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

// h = x[rows of e] @ w1[e].T, a = act(h); with v1 g = x[rows of e] @ v1[e].T, a = act(h) * g; h and g are stored where they are given;
// bf16 and fp16
void tensor_core_up(
    Tensor x, Tensor w1, std::optional<Tensor> v1, std::vector<int64_t> places, Tensor sizes, std::vector<double> activation,
    std::vector<int64_t> tiling, Tensor a, std::optional<Tensor> h, std::optional<Tensor> g) {
  using namespace tensor_core;
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const Tiling tiles = tiling_of(tiling);
  Arguments args = arguments(sizes, a.size(0), a.size(1), tiles);
  args.size_k = static_cast<int>(x.size(1));
  args.activation = activation_of(activation);
  args.a[0] = x.data_ptr();
  set_b(args, "tensor_core_up", w1, v1, places);
  args.out[0] = a.data_ptr(), args.out[1] = pointer(h), args.out[2] = pointer(g);
  GBMOE_DISPATCH_16_BIT(x.scalar_type(), "tensor_core_up", {
    if (v1) launch_up_family<T, EpilogueKind::kGlu>(args, tiles, x);
    else launch_up_family<T, EpilogueKind::kActivation>(args, tiles, x);
  });
}

GBMOE_OPERATOR(
    tensor_core_up,
    "(Tensor x, Tensor w1, Tensor? v1, int[] places, Tensor sizes, float[] activation, int[] tiling, Tensor(a!) a, "
    "Tensor(b!)? h, Tensor(c!)? g) -> ()");

}  // namespace gbmoe
