// What launches of GEMMs of scaled e4m3 operands share.
//
// Operands are a, x [P,K] with fp32 scales [P, K / 128], and b [E,N,K] with fp32 [E, N / 128, K / 128], rounded up; contiguous along K, which
// is a multiple of 16.

#pragma once

#include "../launch.cuh"

namespace gbmoe::hopper {

// Pair `pair` of a [P,K], with scales [P, K / 128], and of b [E,N,K], with scales [E, N / 128, K / 128]; all rounded up.
inline void set_rows(TensorMaps& maps, Arguments& args, int pair, const Tensor& a, const Tensor& scales, const Tiling& tiling) {
  maps.a[pair] = map_of_a(a, tiling);
  args.scales_a[pair] = data<const float>(scales);
  args.k_blocks = static_cast<int>(scales.size(1));
}
inline void set_columns(TensorMaps& maps, Arguments& args, int pair, const Tensor& b, const Tensor& scales, const Tiling& tiling) {
  maps.b[pair] = tensor_map(b, box_of_b(static_cast<int>(tiling.tile_n)));
  args.scales_b[pair] = data<const float>(scales);
  args.scale_rows_b = static_cast<int>(scales.size(1));
}

template <typename T, EpilogueKind kKind, typename Family>
void launch_scaled(const TensorMaps& maps, const Arguments& args, const Tiling& tiling, const Balancing& balancing, const Tensor& on) {
  if (tiling.is(kWideTileN, 1, 2)) launch<ScaledSettings<T, kKind, Family, kWideTileN, 2>>(maps, args, balancing, on);
  else if (tiling.is(kWideTileN, 1, 1)) launch<ScaledSettings<T, kKind, Family, kWideTileN, 1>>(maps, args, balancing, on);
  else tiling.refuse("hopper_scaled");
}

}  // namespace gbmoe::hopper
