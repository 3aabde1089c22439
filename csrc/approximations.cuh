// The hardware's approximations of functions in fp32. They are volatile, which keeps several of them in the order in which they are
// written: all are started one after the other before the first result is waited for.

#pragma once

namespace gbmoe {

__device__ __forceinline__ float fast_exp2(float x) {
  float result;
  asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
__device__ __forceinline__ float fast_reciprocal(float x) {
  float result;
  asm volatile("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace gbmoe
