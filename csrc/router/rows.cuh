// What the router's kernels share: rows of E numbers in the registers of a lane group, sums over a lane group, norms.
//
// A lane group is G lanes, 2, 4, 8, 16 or a whole warp. It owns one token and keeps its E numbers in registers, N per lane in
// vectors of V: lane l has the experts [(c * G + l) * V, ... + V) for c = 0, 1, ..., so that loads and stores are coalesced and
// vectorised.
//
// Legend of template parameters: T type of the logits, S type of the scores and weights, or void for one that is known at run time; G
// lanes per token, N numbers per lane, V numbers per vector, W words (registers) per lane; P places of a list, Q keys that a lane lists of
// its own, R slots per lane.

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
// Out of line: a copy for each of a lane's slots would be most of a kernel.
__device__ __noinline__ float any_power(float x, float p) { return powf(x, p); }
__device__ __forceinline__ float power(float x, float p) { return p == 1.0f ? x : p == 2.0f ? x * x : any_power(x, p); }
__device__ __forceinline__ float root(float x, float p) {
  if (p == 1.0f) return x;
  if (p == 2.0f) return sqrtf(x);
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

// How many numbers a vector has: as many as fit 16 bytes of either type, but at most kMaxVector (16 is no limit, and 1 means no
// vectors). Logits and scores have vectors of the same length, so that a lane's experts are the same in both.
template <typename T, typename S, int N, int kMaxVector>
constexpr int kVector = std::min({N, kMaxVector, kVectorLength<T>, kVectorLength<std::conditional_t<std::is_void_v<S>, T, S>>});

// Calls f with a number of the scores' type: S, or where S is void the one that `dtype` names. To ask for it costs a branch that all
// threads take alike, and kernels for float32 logits are not compiled three times.
template <typename S, typename F> __device__ __forceinline__ void with_scores_type(ScalarType dtype, const F& f) {
  if constexpr (!std::is_void_v<S>) f(S());
  else if (dtype == ScalarType::BFloat16) f(__nv_bfloat16());
  else if (dtype == ScalarType::Half) f(__half());
  else f(float());
}

// Runs body with T bound to the logits' type and S to the scores': the same, or float, or void for any beside logits of float.
#define GBMOE_DISPATCH_LOGITS(logits, scores, name, ...)                                                              \
  do {                                                                                                                \
    STD_TORCH_CHECK(scores == logits || scores == ScalarType::Float || logits == ScalarType::Float, name,             \
                    ": expected scores in float32 or in the logits' dtype");                                          \
    if (logits == ScalarType::Float) { using T = float; using S = void; __VA_ARGS__; }                                \
    else if (logits == ScalarType::BFloat16 && scores == logits) { using T = __nv_bfloat16; using S = T; __VA_ARGS__; } \
    else if (logits == ScalarType::BFloat16) { using T = __nv_bfloat16; using S = float; __VA_ARGS__; }               \
    else if (logits == ScalarType::Half && scores == logits) { using T = __half; using S = T; __VA_ARGS__; }          \
    else if (logits == ScalarType::Half) { using T = __half; using S = float; __VA_ARGS__; }                          \
    else STD_TORCH_CHECK(false, name, ": expected bfloat16, float16 or float32");                                     \
  } while (0)

}  // namespace
}  // namespace gbmoe
