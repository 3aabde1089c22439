// The first product of an expert with its activation.

#include "launch.cuh"

namespace gbmoe {

// With h = x[rows of e] @ w1[e].T and g = x[rows of e] @ v1[e].T:  a = act(h), or act(h) * g with v1.
// h, and g with v1, are stored where they are given.
void hopper_up(Tensor x, Tensor w1, std::optional<Tensor> v1, Tensor sizes, int64_t activation, Tensor a, std::optional<Tensor> h,
               std::optional<Tensor> g) {
  using namespace hopper;
  Arguments args = arguments(sizes, x.size(0), a.size(1));
  args.slices = divide_up(static_cast<int>(x.size(1)), kTileK);
  args.activation = static_cast<int>(activation);
  args.save = h.has_value();
  Maps maps{};
  maps.a[0] = tensor_map(x, kBoxA);
  maps.b[0] = tensor_map(w1, kBoxB);
  if (v1) maps.b[1] = tensor_map(*v1, kBoxB);
  const Tensor* outputs[3] = {&a, h ? &*h : nullptr, g ? &*g : nullptr};
  for (int i = 0; i < 3; ++i) {
    if (!outputs[i]) continue;
    maps.out[i] = tensor_map(*outputs[i], kBoxOut);
    args.out[i] = outputs[i]->data_ptr();
  }
  GBMOE_DISPATCH_HALF(x.scalar_type(), "hopper_up", {
    if (v1) launch_activation<T, Finish::kGlu>(maps, args, x);
    else launch_activation<T, Finish::kActivate>(maps, args, x);
  });
}

}  // namespace gbmoe
