// The hardware's approximations that the router takes. Unlike those of ../approximations.cuh they are not volatile: the compiler
// puts them where it likes among the instructions of other numbers.

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

}  // namespace
}  // namespace gbmoe
