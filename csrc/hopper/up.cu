// The first product of an expert with its activation.

#include "launch.cuh"

namespace gbmoe {

// With h = x[rows of e] @ w1[e].T and g = x[rows of e] @ v1[e].T:  a = act(h), or act(h) * g with v1.
// h, and g with v1, are stored where they are given. With slot_of_row, x is [tokens,H], and row r its line slot_of_row[r] / top_k;
// that must be where the results' tiles do not come in pairs.
void hopper_up(Tensor x, std::optional<Tensor> slot_of_row, int64_t top_k, Tensor w1, std::optional<Tensor> v1, Tensor sizes,
               int64_t activation, Tensor a, std::optional<Tensor> h, std::optional<Tensor> g) {
  using namespace hopper;
  const OnDevice current(x);
  Arguments args = arguments(sizes, a.size(1));
  args.slices = divide_up(static_cast<int>(x.size(1)), kTileK);
  args.activation = static_cast<int>(activation);
  args.save = h.has_value();
  const bool pairs = in_pairs(args.columns, v1 ? kTileN / 2 : kTileN);
  STD_TORCH_CHECK(slot_of_row || pairs, "hopper_up: expected slot_of_row for ", args.columns, " columns");
  Maps maps{};
  if (slot_of_row) gather_from(args, x, *slot_of_row, top_k);
  else maps.a[0] = map_of_a(x, pairs);
  maps.b[0] = tensor_map(w1, kBoxB);
  if (v1) maps.b[1] = tensor_map(*v1, kBoxB);
  const Tensor* outputs[3] = {&a, h ? &*h : nullptr, g ? &*g : nullptr};
  for (int i = 0; i < 3; ++i) {
    if (!outputs[i]) continue;
    maps.out[i] = tensor_map(*outputs[i], kBoxOut);
    args.out[i] = outputs[i]->data_ptr();
  }
  GBMOE_DISPATCH_HALF(x.scalar_type(), "hopper_up", {
    if (v1) launch_activation<T, Finish::kGlu>(maps, args, pairs, x);
    else launch_activation<T, Finish::kActivate>(maps, args, pairs, x);
  });
}

}  // namespace gbmoe
