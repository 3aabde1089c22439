// The product of two decoding scales where it may leave float32's range, as what they stand for need not.
//
// A sum of 128 products of e4m3 is multiplied by a scale of a and one of b. It takes one step less to multiply the scales first, and that
// is right wherever their product is a normal number. An infinite product makes NaN of a sum of 0, and a subnormal one, or 0, has lost
// bits. There the sum is multiplied by one scale after the other. So a tile is computed by one of two main loops: a careful one, which asks
// for each product of scales, and one that does not, for tiles whose scales all multiply to normal numbers (scale_scanner.cuh). Where a
// product is a normal number both compute the same bits.

#pragma once

#include <cfloat>

#include "../../common.cuh"

namespace gbmoe::hopper {

// What a sum is multiplied by: by `first`, which is 1 where the product is a normal number, and then by `last`.
//
// The scale of the larger magnitude comes first. Where the product is too small, the sum, which is 0 or 2^-18 to 2^26, then stays where
// float32 keeps all bits, unless the result is 0; where it is too large, both are larger than 1, so that what leaves the range after the
// first one does so in the end. A scale of 0 would meet infinity there, and needs no care: its product with a finite one is exactly 0.
struct ScaleFactors {
  float first = 1.0f, last;

  __device__ __forceinline__ ScaleFactors(float a, float b) : last(a * b) {
    const float magnitude = fabsf(last);
    // Of NaN neither is true: it stays the product.
    if ((magnitude < FLT_MIN && a != 0.0f && b != 0.0f) || magnitude > FLT_MAX) {
      const bool larger = fabsf(a) > fabsf(b);
      first = larger ? a : b;
      last = larger ? b : a;
    }
  }
};

}  // namespace gbmoe::hopper
