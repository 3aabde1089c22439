// Keys: how the router compares logits as integers, ties and NaN included.

#pragma once

#include <climits>

#include "rows.cuh"

namespace gbmoe {
namespace {

// A number that grows with the logit; NaN has the highest number, and -0 has that of 0.
__device__ __forceinline__ uint32_t order_of(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  const uint32_t order = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return logit != logit ? UINT_MAX : order;
}
__device__ __forceinline__ float logit_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

template <int G> __device__ __forceinline__ uint32_t group_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  if constexpr (G == 32) return __reduce_max_sync(kFullWarp, x);
  else
#endif
  {
#pragma unroll
    for (int step = G / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kFullWarp, x, step));
    return x;
  }
}
template <int G> __device__ __forceinline__ uint64_t group_max(uint64_t x) {
  const uint32_t high = group_max<G>(static_cast<uint32_t>(x >> 32));
  const uint32_t low = group_max<G>(static_cast<uint32_t>(x >> 32) == high ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}

// A key is a logit and its expert in one integer, so that the largest key is the highest logit and, among equals, the lowest
// expert. 0, which is below the key of -inf, stands for "none". A brief key has 32 bits: they hold a half-precision logit
// whole, but only the first 22 bits of a float.
template <typename T> struct Keys {
  using Key = uint32_t;
  static constexpr bool kBriefIsExact = true;

  // Two numbers that grow with the logits of a word; NaN has the highest number, and -0 has that of 0.
  static __device__ __forceinline__ uint32_t order(uint32_t word) {
    const auto canonical = __hadd2(Word<T>::numbers(word), Word<T>::numbers(0u));
    const uint32_t bits = reinterpret_cast<const uint32_t&>(canonical);
    uint32_t signs;  // the sign of each half, in all bits of that half
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(signs) : "r"(bits));
    return bits ^ (signs | 0x80008000u);
  }
  // The key of number i of the two.
  static __device__ __forceinline__ Key make(uint32_t order, int i, uint32_t complement) {
    return (i ? order & 0xffff0000u : order << 16) ^ complement;
  }
  static __device__ __forceinline__ Key brief(uint32_t order, int i, uint32_t complement) { return make(order, i, complement); }
  static __device__ __forceinline__ Key of(T logit, int expert) {
    return make(order(Word<T>::same(logit)), 0, complement(expert));
  }
  // What a key holds of its expert, so that lower experts have higher keys; complement(a | b) is complement(a) ^ b where a and b
  // share no bits.
  static __device__ __forceinline__ uint32_t complement(int expert) { return 0xffffu ^ expert; }
  static __device__ __forceinline__ int expert(Key key) { return 0xffffu ^ (key & 0xffffu); }
  static __device__ __forceinline__ float logit(Key key) {
    const uint32_t order = key >> 16;
    return Word<T>::get(order & 0x8000u ? order ^ 0x8000u : ~order, 0);
  }
};
template <> struct Keys<float> {
  using Key = uint64_t;
  static constexpr bool kBriefIsExact = false;
  static constexpr uint32_t kExperts = 1023;

  static __device__ __forceinline__ uint32_t order(uint32_t word) { return order_of(__uint_as_float(word)); }
  static __device__ __forceinline__ Key make(uint32_t order, int, uint32_t complement) {
    return static_cast<uint64_t>(order) << 32 | complement;
  }
  static __device__ __forceinline__ Key of(float logit, int expert) { return make(order_of(logit), 0, complement(expert)); }
  static __device__ __forceinline__ uint32_t brief(uint32_t order, int, uint32_t complement) {
    return (order & ~kExperts) ^ complement;
  }
  static __device__ __forceinline__ uint32_t complement(int expert) { return kExperts ^ expert; }
  static __device__ __forceinline__ int expert(Key key) { return kExperts ^ (static_cast<uint32_t>(key) & kExperts); }
  static __device__ __forceinline__ float logit(Key key) { return logit_of(key >> 32); }
  // Whether two keys' logits have the same first 22 bits.
  static __device__ __forceinline__ bool alike(Key a, Key b) { return ((a ^ b) >> 32 & ~kExperts) == 0; }
  // A key above all those whose logits have the same first 22 bits as this one.
  static __device__ __forceinline__ Key above(uint32_t order) { return static_cast<Key>(order | kExperts) << 32 | UINT_MAX; }
};

}  // namespace
}  // namespace gbmoe
