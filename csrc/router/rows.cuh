// What the router's kernels share: rows of E numbers in the registers of a lane group, sums over a lane group, norms.
//
// A lane group is G lanes, 2, 4, 8, 16 or a whole warp. It owns one token and keeps its E numbers in registers, N per lane in
// vectors of V: lane l has the experts [(c * G + l) * V, ... + V) for c = 0, 1, ..., so that loads and stores are coalesced and
// vectorised.
//
// The types of what is stored, and of logits but where a kernel is for those in bfloat16, are known at run time: to ask for one
// costs a branch that all threads take alike, and a kernel for each pair of types would be the same code several times.
//
// Legend of template parameters: T type of a row's numbers; G lanes per token, N numbers per lane, V numbers per vector, W words
// (registers) per lane; P places of a list, Q keys that a lane lists of its own, R slots per lane.

#pragma once

#include <algorithm>
#include <type_traits>

#include "../common.cuh"

namespace gbmoe {
namespace {

template <int G, typename X> __device__ __forceinline__ X group_sum(X x) {
#pragma unroll
  for (int step = G / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  return x;
}
// Whether the kernels of this layout serve norms other than those with p = 1 and 2: the code of a power is so long that few have it. list:
// the length of the list, of kernels that have one and are for logits of any type.
constexpr bool serves_any_norm(int lanes, int numbers_per_lane, int list = 0) {
  return (lanes == 32 && (numbers_per_lane == 8 || numbers_per_lane == 32)) ||
         (lanes == 8 && numbers_per_lane >= 16 && list == 16);
}

// Out of line: a copy for each of a lane's slots would be most of a kernel.
__device__ __noinline__ float any_power(float x, float p) { return powf(x, p); }
template <bool kAnyNorm> __device__ __forceinline__ float power(float x, float p) {
  return p == 1.0f ? x : !kAnyNorm || p == 2.0f ? x * x : any_power(x, p);
}
template <bool kAnyNorm> __device__ __forceinline__ float root(float x, float p) {
  if (p == 1.0f) return x;
  if (!kAnyNorm || p == 2.0f) return sqrtf(x);
  // The power is off by the rounding of 1 / p times log(x); one step of Newton's method takes that away.
  const float y = any_power(x, 1.0f / p);
  return y + y * (x / any_power(y, p) - 1.0f) / p;
}

struct RouterShape {
  int64_t tokens;
  int experts, slots;  // slots per token
  float p;             // of the norm that the weights are divided by; 0 for none
};

// A word is a register of logits: two half-precision numbers or one float.
template <typename T> struct Word {
  using Numbers = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  static constexpr int kNumbers = 2;

  static __device__ __forceinline__ Numbers numbers(uint32_t word) { return reinterpret_cast<const Numbers&>(word); }
  static __device__ __forceinline__ uint32_t make(T low, T high) {
    const Vector<T, 2> both{low, high};
    return reinterpret_cast<const uint32_t&>(both);
  }
  static __device__ __forceinline__ float get(uint32_t word, int i) {
    if constexpr (std::is_same_v<T, __half>) return i ? __high2float(numbers(word)) : __low2float(numbers(word));
    else return __uint_as_float(i ? word & 0xffff0000u : word << 16);
  }
  // NaN where either is NaN.
  static __device__ __forceinline__ uint32_t higher(uint32_t a, uint32_t b) {
    const Numbers result = __hmax2_nan(numbers(a), numbers(b));
    return reinterpret_cast<const uint32_t&>(result);
  }
  static __device__ __forceinline__ uint32_t same(T x) { return make(x, x); }
  static __device__ __forceinline__ uint32_t floor(float x) {
    if constexpr (std::is_same_v<T, __half>) return same(__float2half_rd(x));
    else return same(__float2bfloat16_rd(x));
  }
  // All bits set where a number is not below its bound. NaN is not below any bound, and no number is below a bound of NaN.
  static __device__ __forceinline__ uint32_t not_below(uint32_t word, uint32_t bound) {
    return __hgeu2_mask(numbers(word), numbers(bound));
  }
};
template <> struct Word<float> {
  static constexpr int kNumbers = 1;
  static __device__ __forceinline__ float get(uint32_t word, int) { return __uint_as_float(word); }
  static __device__ __forceinline__ uint32_t higher(uint32_t a, uint32_t b) {
    const float x = get(a, 0), y = get(b, 0);
#if __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
    return __float_as_uint(result);
#else
    return x > y || x != x ? a : b;
#endif
  }
  static __device__ __forceinline__ uint32_t same(float x) { return __float_as_uint(x); }
  static __device__ __forceinline__ uint32_t floor(float x) { return __float_as_uint(x); }
  static __device__ __forceinline__ uint32_t not_below(uint32_t word, uint32_t bound) {
    return get(word, 0) < get(bound, 0) ? 0u : kFullWarp;
  }
};

// One token's E numbers in a lane group, as the calling lane sees its N of them. V > 1 divides E.
template <typename T, int G, int N, int V> struct RowLayout {
  static constexpr int kNumbers = Word<T>::kNumbers, kWords = N / kNumbers;
  using Words = Vector<uint32_t, (V > kNumbers ? V : kNumbers) / kNumbers>;

  static __device__ __forceinline__ int expert(unsigned i, int lane) { return (i / V * G + lane) * V + i % V; }
  static __device__ __forceinline__ int lane_of(int expert) { return expert / V % G; }
  static __device__ __forceinline__ int index_of(int expert) { return expert / (G * V) * V + expert % V; }

  // What lies beyond the last expert reads as `fill`.
  static __device__ __forceinline__ void load(const T* row, int experts, int lane, float fill, uint32_t (&word)[kWords]) {
    if constexpr (V < kNumbers) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        T number[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          number[i] = expert(2 * w + i, lane) < experts ? row[expert(2 * w + i, lane)] : narrow<T>(fill);
        }
        word[w] = Word<T>::make(number[0], number[1]);
      }
    } else {
      const Words* vector = reinterpret_cast<const Words*>(row) + lane;
      Words loaded[N / V];
      if (experts == G * N) {
#pragma unroll
        for (int c = 0; c < N / V; ++c) loaded[c] = vector[c * G];
      } else {
#pragma unroll
        for (int c = 0; c < N / V; ++c) {
#pragma unroll
          for (int w = 0; w < V / kNumbers; ++w) loaded[c].element[w] = Word<T>::same(narrow<T>(fill));
          if (expert(c * V, lane) < experts) loaded[c] = vector[c * G];
        }
      }
#pragma unroll
      for (int w = 0; w < kWords; ++w) word[w] = loaded[w / (V / kNumbers)].element[w % (V / kNumbers)];
    }
  }
  static __device__ __forceinline__ float get(const uint32_t (&word)[kWords], int i) {
    return Word<T>::get(word[i / kNumbers], i % kNumbers);
  }
  static __device__ __forceinline__ void store(T* row, int experts, int lane, const float (&value)[N]) {
    Vector<T, V> narrowed[N / V];
#pragma unroll
    for (int i = 0; i < N; ++i) narrowed[i / V].element[i % V] = narrow<T>(value[i]);
    Vector<T, V>* vector = reinterpret_cast<Vector<T, V>*>(row) + lane;
    if (experts == G * N) {
#pragma unroll
      for (int c = 0; c < N / V; ++c) vector[c * G] = narrowed[c];
    } else {
#pragma unroll
      for (int c = 0; c < N / V; ++c) if (expert(c * V, lane) < experts) vector[c * G] = narrowed[c];
    }
  }
};

// How many numbers a vector has: as many as fit 16 bytes of T, but at most kMaxVector. A lane's experts
// are the same in rows of all types.
template <typename T, int N, int kMaxVector> constexpr int kVector = std::min({N, kMaxVector, kVectorLength<T>});

// Calls f with a number of the type that `dtype` names: bfloat16, float16 or float32.
template <typename F> __device__ __forceinline__ void with_type(ScalarType dtype, const F& f) {
  if (dtype == ScalarType::BFloat16) f(__nv_bfloat16());
  else if (dtype == ScalarType::Half) f(__half());
  else f(float());
}
// An array of such a type.
struct AnyNumbers {
  void* data;
  ScalarType dtype;

  __device__ __forceinline__ float read(int64_t i) const {
    float number = 0;
    with_type(dtype, [&](auto zero) { number = widen(static_cast<const decltype(zero)*>(data)[i]); });
    return number;
  }
  __device__ __forceinline__ void write(int64_t i, float number) const {
    with_type(dtype, [&](auto zero) { static_cast<decltype(zero)*>(data)[i] = narrow<decltype(zero)>(number); });
  }
  // The numbers of a lane in the row that begins at `first`, and `fill` for those beyond it.
  template <int G, int V, int N> __device__ __forceinline__ void load(
      int64_t first, int experts, int lane, float fill, float (&to)[N]) const {
    with_type(dtype, [&](auto zero) {
      using Layout = RowLayout<decltype(zero), G, N, V>;
      uint32_t word[Layout::kWords];
      Layout::load(static_cast<const decltype(zero)*>(data) + first, experts, lane, fill, word);
#pragma unroll
      for (int i = 0; i < N; ++i) to[i] = Layout::get(word, i);
    });
  }
  template <int G, int V, int N> __device__ __forceinline__ void store(
      int64_t first, int experts, int lane, const float (&value)[N]) const {
    with_type(dtype, [&](auto zero) {
      RowLayout<decltype(zero), G, N, V>::store(static_cast<decltype(zero)*>(data) + first, experts, lane, value);
    });
  }
};

}  // namespace
}  // namespace gbmoe
