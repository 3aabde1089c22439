// The hardware's approximations that the router takes, and what it asks of the hardware's NaN. Unlike those of ../approximations.cuh they
// are not volatile: the compiler puts them where it likes among the instructions of other numbers.

#pragma once

namespace gbmoe {
namespace {

__device__ __forceinline__ float router_exp2(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float router_reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

__device__ __forceinline__ float router_square_root(float x) {
  float result;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Appends the sign of a sum as the lowest bit. A sum that is NaN has none: it is the hardware's own NaN, which is positive.
__device__ __forceinline__ unsigned router_push_sign(unsigned bits, float sum) {
  return __funnelshift_l(__float_as_uint(sum), bits, 1);
}

}  // namespace
}  // namespace gbmoe
