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
#include "../ptx.cuh"

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
// The other way round, exactly.
__device__ __forceinline__ float2 unpack_float8(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return unpack<__half>(halves);
}

// Rows in e4m3 in memory, which begin `pitch` bytes apart, with their scales, `scale_pitch` floats from row to row. Columns are multiples of 8.
struct Float8Rows {
  const uint8_t* __restrict__ values;
  const float* __restrict__ scales;
  int64_t pitch, scale_pitch;

  __device__ __forceinline__ uint2 eight(int64_t row, int column) const {
    return __ldg(reinterpret_cast<const uint2*>(values + row * pitch + column));
  }
  __device__ __forceinline__ float scale(int64_t row, int column) const {
    return __ldg(scales + row * scale_pitch + column / kScaledColumns);
  }
};
inline Float8Rows float8_rows(const Tensor& values, const Tensor& scales) {
  return {data<const uint8_t>(values), data<const float>(scales), values.stride(0), scales.stride(0)};
}

// What eight numbers stand for: each times the scale in float32, rounded once to T. Pairs of T.
template <typename T> __device__ __forceinline__ uint4 dequantize(uint2 eight, float scale) {
  const auto two = [&](uint32_t pair) {
    const float2 numbers = unpack_float8(static_cast<uint16_t>(pair));
    return pack<T>(numbers.x * scale, numbers.y * scale);
  };
  return {two(eight.x & 0xffff), two(eight.x >> 16), two(eight.y & 0xffff), two(eight.y >> 16)};
}

}  // namespace gbmoe::hopper
