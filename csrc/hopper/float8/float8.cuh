// How numbers become e4m3 with a scale, for every kernel that quantises; gbmoe/plain/plain_quantize.py is the same, to the bit.
//
// The numbers of a tile (128 of a row, or 128 x 128 of a weight) share a scale. With the largest magnitude m among them each
// becomes e4m3(number * encode), encode = 448 / m or the power of two below, and stands for that times decode = 1 / encode. A tile
// of zeros has scales of one. A tile that holds NaN or infinity has a decoding scale of NaN, so that all that is computed from it is
// NaN; of its numbers those that are not finite are stored as a NaN, whose sign may differ from plain PyTorch's.

#pragma once

#include <cfloat>
#include <cstdint>

#include "../../common.cuh"

namespace gbmoe::hopper {

constexpr int kScaledColumns = 128;  // of a row that have one scale

struct TileScale { float encode, decode; };

__device__ __forceinline__ TileScale tile_scale(float largest, bool power_of_two) {
  if (!(largest <= FLT_MAX)) return {0.0f, __int_as_float(0x7fc00000)};
  if (largest == 0.0f) return {1.0f, 1.0f};
  float encode = fminf(__fdiv_rn(448.0f, largest), FLT_MAX);
  if (power_of_two) encode = __uint_as_float(__float_as_uint(encode) & 0x7f800000u);
  return {encode, __fdiv_rn(1.0f, encode)};
}

// Two numbers in e4m3, `low` in the lower byte, rounded to nearest even.
__device__ __forceinline__ uint16_t pack_float8(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

}  // namespace gbmoe::hopper
