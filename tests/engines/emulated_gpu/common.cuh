// Stands in for csrc/common.cuh: what the emulated kernels use of it.

#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <type_traits>

#include "emulated_gpu.h"

using __nv_bfloat16 = c10::BFloat16;
using __half = c10::Half;
struct __nv_bfloat162 { __nv_bfloat16 low, high; };
struct __half2 { __half low, high; };
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) { return {low, high}; }
inline __half2 __floats2half2_rn(float low, float high) { return {low, high}; }

namespace gbmoe {

constexpr unsigned kFullWarp = 0xffffffffu;
template <typename A, typename B> constexpr std::common_type_t<A, B> ceil_div(A a, B b) { return (a + b - 1) / b; }
template <typename T> float widen(T value) { return static_cast<float>(value); }
template <typename T> T narrow(float value) { return static_cast<T>(value); }

}  // namespace gbmoe
