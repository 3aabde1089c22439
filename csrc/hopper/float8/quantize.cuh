// Rows of 16-bit numbers to e4m3 (float8.cuh) by threads that hold vectors of 8: a tile of 128 belongs to half a warp.

#pragma once

#include <cstdint>

#include "float8.cuh"

namespace gbmoe::hopper {

constexpr int kVector = 8, kTileThreads = kScaledColumns / kVector;

template <typename T> using Numbers = Vector<T, kVector>;
struct alignas(8) Eight { uint16_t pair[4]; };  // numbers in e4m3

// The bits of the largest magnitude, as an integer: NaN counts as larger than infinity.
template <typename T> __device__ __forceinline__ uint32_t largest_magnitude(const Numbers<T>& numbers) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) largest = max(largest, __float_as_uint(widen(numbers.element[i])) & 0x7fffffffu);
  return largest;
}
template <typename T> __device__ __forceinline__ Eight quantize(const Numbers<T>& numbers, float encode) {
  Eight out;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out.pair[i] = pack_float8(widen(numbers.element[2 * i]) * encode, widen(numbers.element[2 * i + 1]) * encode);
  }
  return out;
}
template <typename T> __device__ __forceinline__ Numbers<T> zeros() {
  Numbers<T> out;
#pragma unroll
  for (int i = 0; i < kVector; ++i) out.element[i] = narrow<T>(0.0f);
  return out;
}
// Of the 16 threads that hold a tile of a row: half a warp, whose other half need not come here.
__device__ __forceinline__ TileScale scale_of_row(uint32_t largest, bool power_of_two) {
  const unsigned half_warp = 0xffffu << (threadIdx.x & 16);
#pragma unroll
  for (int distance = 1; distance < kTileThreads; distance *= 2) largest = max(largest, __shfl_xor_sync(half_warp, largest, distance));
  return tile_scale(__uint_as_float(largest), power_of_two);
}

// Rows in e4m3 with their scales, [rows,vectors] and [rows,tiles].
struct ScaledRows {
  Eight* values;
  float* scales;
};

// Quantises and stores vector `v` of a row. The 16 threads of a tile come here together, also those after the row's end, which hold zeros.
template <typename T>
__device__ __forceinline__ void store_scaled(
    const ScaledRows& out, int64_t row, int v, int vectors, const Numbers<T>& numbers, bool power_of_two) {
  const TileScale scale = scale_of_row(v < vectors ? largest_magnitude<T>(numbers) : 0, power_of_two);
  if (v >= vectors) return;
  out.values[row * vectors + v] = quantize<T>(numbers, scale.encode);
  if (v % kTileThreads == 0) out.scales[row * ceil_div(vectors, kTileThreads) + v / kTileThreads] = scale.decode;
}

}  // namespace gbmoe::hopper
