// k-grouped GEMMs of e4m3 operands with scales: the gradient of the weights.

#include "../launch.cuh"

namespace gbmoe {

// out[e] [M,N] = the sum over the rows of e of a's times b's, bf16 or fp16; both as quantize_k_blocks makes them of the same sizes, a
// [B,M,128] and b [B,N,128]. The rows of out and its matrices may lie any multiples of 16 bytes apart
void hopper_scaled_weights(
    Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, Tensor filled_rows, std::vector<int64_t> tiling, Tensor workspace, Tensor out) {
  using namespace hopper;
  const OnDevice current(a);
  const Tiling tiles = tiling_of(tiling);
  const int64_t rows = a.size(0) * kFloat8BlockK;
  STD_TORCH_CHECK(rows <= INT32_MAX, "hopper_scaled_weights: expected less than 2^31 rows in k-blocks, got ", rows);
  // With the rows that fill up k-blocks every group begins at a multiple of 128 rows.
  Arguments args = arguments(filled_rows, rows, out.size(2), tiles);
  args.size_m = static_cast<int>(out.size(1));
  args.out[0] = out.data_ptr();
  args.out_pitch = {
      static_cast<int>(out.stride(1)), out.size(0) > 1 ? out.stride(0) : 0};  // of a single matrix it may be anything
  STD_TORCH_CHECK(
      out.stride(2) == 1 && out.stride(1) % 8 == 0 && args.out_pitch.group % 8 == 0 && out.stride(1) <= INT32_MAX,
      "hopper_scaled_weights: expected out with rows at multiples of 16 bytes");
  TensorMaps maps{};
  maps.a[0] = tensor_map(a, kTileM);
  maps.b[0] = tensor_map(b, box_of_b(kWideTileN));
  maps.a[1] = tensor_map(scales_a, 1, kTileM * sizeof(float));
  maps.b[1] = tensor_map(scales_b, 1, kWideTileN * sizeof(float));
  args.scales_a[0] = data<const float>(scales_a);
  args.scales_b[0] = data<const float>(scales_b);
  GBMOE_DISPATCH_16_BIT(out.scalar_type(), "hopper_scaled_weights", {
    const Balancing balancing{workspace, {}};
    launch<ScaledWeightsSettings<T>>(maps, args, balancing, a);
  });
}

GBMOE_OPERATOR(hopper_scaled_weights,
               "(Tensor a, Tensor scales_a, Tensor b, Tensor scales_b, Tensor filled_rows, int[] tiling, Tensor(a!) "
               "workspace, Tensor(b!) out) -> ()");

}  // namespace gbmoe
