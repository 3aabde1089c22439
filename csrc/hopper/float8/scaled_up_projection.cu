// h = x @ w1[e].T and a = act(h), or with g = x @ v1[e].T a = act(h) * g, of e4m3 operands with scales; a is e4m3 with scales, too.

#include "scaled_operands.cuh"

namespace gbmoe {
namespace {

template <typename T, hopper::EpilogueKind kKind>
void launch_family(const hopper::TensorMaps& maps, const hopper::Arguments& args, const hopper::Tiling& tiling,
                   const hopper::Balancing& balancing, const Tensor& on) {
  using namespace hopper;
  switch (args.activation.kind) {
    case kSilu:
    case kGeluTanh: return launch_scaled<T, kKind, SigmoidActivation>(maps, args, tiling, balancing, on);
    case kGelu: return launch_scaled<T, kKind, ErfActivation>(maps, args, tiling, balancing, on);
    case kClampedSilu:
    case kSitu: return launch_scaled<T, kKind, GatingActivation>(maps, args, tiling, balancing, on);
    default: return launch_scaled<T, kKind, PiecewiseActivation>(maps, args, tiling, balancing, on);
  }
}

}  // namespace

// hopper_up(_glu) with a in e4m3 and its scales, from a rounded to bf16 or, without `bfloat16`, fp16; h and g in that dtype
void hopper_scaled_up(
    Tensor x, Tensor scales_x, Tensor w1, Tensor scales_w1, std::optional<Tensor> v1, std::optional<Tensor> scales_v1, Tensor sizes,
    std::vector<double> activation, std::vector<int64_t> tiling, std::optional<Tensor> workspace, bool power_of_two,
    bool bfloat16, Tensor a, Tensor scales_a, std::optional<Tensor> h, std::optional<Tensor> g) {
  using namespace hopper;
  const OnDevice current(x);
  const Tiling tiles = tiling_of(tiling);
  Arguments args = arguments(sizes, a.size(0), a.size(1), tiles);
  args.activation = activation_of(activation);
  args.save = h.has_value();
  args.power_of_two = power_of_two;
  args.scales_out = data<float>(scales_a);
  args.out[0] = a.data_ptr();
  TensorMaps maps{};
  set_rows(maps, args, 0, x, scales_x, tiles);
  set_columns(maps, args, 0, w1, scales_w1, tiles);
  if (v1) set_columns(maps, args, 1, *v1, *scales_v1, tiles);
  const std::optional<Tensor>* saved[2] = {&h, &g};
  for (int i = 0; i < 2; ++i) {
    if (!*saved[i]) continue;
    maps.out[1 + i] = tensor_map(**saved[i], kBoxOut);
    args.out[1 + i] = (*saved[i])->data_ptr();
  }
  const Balancing balancing{workspace, {}};
  const ScalarType dtype = bfloat16 ? ScalarType::BFloat16 : ScalarType::Half;
  GBMOE_DISPATCH_16_BIT(dtype, "hopper_scaled_up", {
    if (v1) launch_family<T, EpilogueKind::kGlu>(maps, args, tiles, balancing, x);
    else launch_family<T, EpilogueKind::kActivation>(maps, args, tiles, balancing, x);
  });
}

GBMOE_OPERATOR(hopper_scaled_up,
               "(Tensor x, Tensor scales_x, Tensor w1, Tensor scales_w1, Tensor? v1, Tensor? scales_v1, Tensor sizes, "
               "float[] activation, int[] tiling, Tensor(a!)? workspace, bool power_of_two, bool bfloat16, Tensor(b!) a, "
               "Tensor(c!) scales_a, Tensor(d!)? h, Tensor(e!)? g) -> ()");

}  // namespace gbmoe
