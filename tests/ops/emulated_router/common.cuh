// Stands in for csrc/common.cuh and csrc/early_launch.cuh: what the emulated kernels of the router use of them. The emulation
// itself is that of tests/engines/emulated_gpu.

#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <climits>
#include <cmath>
#include <type_traits>

#include "emulated_gpu.h"

#define __noinline__
#define STD_TORCH_CHECK(...)

using __nv_bfloat16 = c10::BFloat16;
using __half = c10::Half;
struct __nv_bfloat162 { __nv_bfloat16 low, high; };
struct __half2 { __half low, high; };

template <typename To, typename From> inline To reinterpret(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}
inline uint32_t __float_as_uint(float x) { return reinterpret<uint32_t>(x); }
inline float __uint_as_float(uint32_t x) { return reinterpret<float>(x); }
inline float __logf(float x) { return std::log(x); }
using std::isinf;
inline float __low2float(__half2 pair) { return static_cast<float>(pair.low); }
inline float __high2float(__half2 pair) { return static_cast<float>(pair.high); }
inline __half __float2half_rd(float x) { return x; }  // of kernels for pairs of numbers, which are not emulated
inline __nv_bfloat16 __float2bfloat16_rd(float x) { return x; }
inline uint32_t __vmaxu2(uint32_t a, uint32_t b) {
  return std::max(a & 0xffffu, b & 0xffffu) | std::max(a & 0xffff0000u, b & 0xffff0000u);
}
inline uint32_t __vminu2(uint32_t a, uint32_t b) {
  return std::min(a & 0xffffu, b & 0xffffu) | std::min(a & 0xffff0000u, b & 0xffff0000u);
}
inline bool __any_sync(unsigned mask, bool vote) { return __ballot_sync(mask, vote) != 0; }

// Of numbers of 4 and 8 bytes, among groups of `width` lanes.
template <typename X> inline X shuffle_any(X x, int lane) {
  constexpr int kWords = sizeof(X) / 4;
  uint32_t words[kWords];
  std::memcpy(words, &x, sizeof(x));
  const auto all = emulated_gpu::exchange(words, kWords);
  std::memcpy(&x, all[lane], sizeof(x));
  return x;
}
inline float __shfl_xor_sync(unsigned, float x, int mask) { return shuffle_any(x, emulated_gpu::thread % 32 ^ mask); }
inline int __shfl_xor_sync(unsigned, int x, int mask) { return shuffle_any(x, emulated_gpu::thread % 32 ^ mask); }
inline uint64_t __shfl_xor_sync(unsigned, uint64_t x, int mask) { return shuffle_any(x, emulated_gpu::thread % 32 ^ mask); }
inline uint64_t __shfl_sync(unsigned, uint64_t x, int lane) { return shuffle_any(x, lane % 32); }
template <typename X> inline X __shfl_sync(unsigned, X x, int lane, int width) {
  return shuffle_any(x, emulated_gpu::thread % 32 / width * width + lane % width);
}

namespace gbmoe {

struct Tensor;
enum class ScalarType : int8_t { Half = 5, Float = 6, BFloat16 = 15 };

constexpr unsigned kFullWarp = 0xffffffffu;
template <typename A, typename B> constexpr std::common_type_t<A, B> ceil_div(A a, B b) { return (a + b - 1) / b; }
template <typename T> float widen(T value) { return static_cast<float>(value); }
template <typename T> T narrow(float value) { return static_cast<T>(value); }
template <typename T, int N> struct alignas(sizeof(T) * N) Vector { T element[N]; };
template <typename T> constexpr int kVectorLength = 16 / static_cast<int>(sizeof(T));

inline void wait_for_kernel_before() { emulated_gpu::wait_for_kernel_before(); }

}  // namespace gbmoe
