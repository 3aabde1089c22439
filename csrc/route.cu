// The router behind its linear layer: softmax over the experts, the K highest, their p-norm and the logsumexp of the z-loss,
// from the logits in one launch; and the gradient of all of that in another.
//
// A group of G lanes, 8 or a whole warp, owns one token and keeps its E logits in registers, N a lane in vectors of V: lane l
// has the experts [(c * G + l) * V, ... + V) of every chunk c. Ties go to the lower expert; NaN ranks above every number, as in
// torch.topk.
//
// Groups of 8 lanes choose in K rounds of a maximum each. Warps count: a lower bound of the K-th highest logit leaves few
// candidates (about 10 of 1024 for K = 8, 43 for K = 32), and each of them finds its place among the others. What a group does
// once costs a warp four times what it costs 8 lanes.

#include <climits>
#include <type_traits>

#include "common.cuh"
#include "ops.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr unsigned kFull = 0xffffffffu;

// A number that grows with the logit; NaN has the highest, and -0 that of 0.
__device__ __forceinline__ uint32_t order_of(float logit) {
  const uint32_t bits = __float_as_uint(logit + 0.0f);
  const uint32_t order = bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
  return logit != logit ? UINT_MAX : order;
}
__device__ __forceinline__ float logit_of(uint32_t order) {
  return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}

// A logit and its expert in one integer, so that the largest key is the highest logit and, among equals, the lowest expert; 0,
// below -inf, stands for "none". 32 bits are enough for a half-precision logit, whose last bits as a float are zero.
template <typename T> struct Keys {
  using Key = uint32_t;
  static constexpr uint32_t kExperts = 1023;  // the bits that hold 1023 - expert
  // The order's bits above those, in a form that takes one operation less.
  static __device__ __forceinline__ Key make(float logit, int expert) {
    const uint32_t bits = logit != logit ? 0x7fffffffu & ~kExperts : __float_as_uint(logit + 0.0f);
    const uint32_t sign = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);
    return bits ^ (sign & 0x7fffffffu & ~kExperts) ^ (0x80000000u | (kExperts ^ expert));
  }
  static __device__ __forceinline__ int expert(Key key) { return kExperts ^ (key & kExperts); }
  static __device__ __forceinline__ float logit(Key key) {
    return logit_of(key & 0x80000000u ? key & ~kExperts : key | kExperts);
  }
};
template <> struct Keys<float> {
  using Key = uint64_t;
  static __device__ __forceinline__ Key make(float logit, int expert) {
    return static_cast<uint64_t>(order_of(logit)) << 32 | (UINT_MAX - expert);
  }
  static __device__ __forceinline__ int expert(Key key) { return UINT_MAX - static_cast<unsigned>(key); }
  static __device__ __forceinline__ float logit(Key key) { return logit_of(key >> 32); }
};

template <int G> __device__ __forceinline__ uint32_t group_max(uint32_t x) {
#if __CUDA_ARCH__ >= 800
  if constexpr (G == 32) return __reduce_max_sync(kFull, x);
  else
#endif
  {
#pragma unroll
    for (int step = G / 2; step > 0; step /= 2) x = max(x, __shfl_xor_sync(kFull, x, step));
    return x;
  }
}
template <int G> __device__ __forceinline__ uint64_t group_max(uint64_t x) {
  const uint32_t high = group_max<G>(static_cast<uint32_t>(x >> 32));
  const uint32_t low = group_max<G>(static_cast<uint32_t>(x >> 32) == high ? static_cast<uint32_t>(x) : 0u);
  return static_cast<uint64_t>(high) << 32 | low;
}
template <int G> __device__ __forceinline__ float group_sum(float x) {
#pragma unroll
  for (int step = G / 2; step > 0; step /= 2) x += __shfl_xor_sync(kFull, x, step);
  return x;
}
__device__ __forceinline__ float power(float x, float p) { return p == 1.0f ? x : p == 2.0f ? x * x : powf(x, p); }
__device__ __forceinline__ float root(float x, float p) {
  if (p == 1.0f) return x;
  if (p == 2.0f) return sqrtf(x);
  const float y = powf(x, 1.0f / p);  // off by the rounding of 1 / p times log(x); one step of Newton's takes that away
  return y + y * (x / powf(y, p) - 1.0f) / p;
}

// e to the power of a logit less the highest, for results of type S: half precision does not see the error of the fast
// instruction (two units in the last place of a float, and 0 instead of a subnormal).
template <typename S> class Exponential {
 public:
  // Logits whose product with log2(e) overflows are so far apart that any rate tells whether they are equal.
  __device__ __forceinline__ explicit Exponential(float highest)
      : highest_(highest), rate_(fabsf(highest) > 1e38f ? 0.5f : 1.44269504f) {}

  __device__ __forceinline__ float operator()(float logit) const {
    if constexpr (sizeof(S) > 2) return expf(logit - highest_);
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(fmaf(logit, rate_, -highest_ * rate_)));
    return result;
  }

 private:
  float highest_, rate_;
};
template <typename S> __device__ __forceinline__ float logarithm(float x) { return sizeof(S) > 2 ? logf(x) : __logf(x); }

// 1 / x for x >= 1, without the branch that other numbers would need.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return fmaf(fmaf(-x, result, 1.0f), result, result);
}

// ------------------------------------------------------------------------------------ bitonic networks over a warp's lanes

// Two 16-bit numbers, each sorted by itself.
struct Pair { uint32_t bits; };

template <typename X> __device__ __forceinline__ X higher(X a, X b) { return max(a, b); }
template <typename X> __device__ __forceinline__ X lower(X a, X b) { return min(a, b); }
template <> __device__ __forceinline__ Pair higher(Pair a, Pair b) { return {__vmaxu2(a.bits, b.bits)}; }
template <> __device__ __forceinline__ Pair lower(Pair a, Pair b) { return {__vminu2(a.bits, b.bits)}; }
template <typename X> __device__ __forceinline__ X across(X x, int step) { return __shfl_xor_sync(kFull, x, step); }
template <> __device__ __forceinline__ Pair across(Pair x, int step) { return {__shfl_xor_sync(kFull, x.bits, step)}; }

// The lanes whose number lacks `bit`, which may lie beyond the five that lanes have.
__device__ __forceinline__ constexpr unsigned lanes_without(int bit) { return bit < 32 ? kFull / ((1u << bit) + 1) : kFull; }

// Sorts runs of `run` lanes that hold bitonic sequences: descending where the lane lacks the bit `run`, else ascending.
template <typename X> __device__ __forceinline__ void merge_runs(X& x, int run, unsigned lane_bit) {
#pragma unroll
  for (int step = run / 2; step > 0; step /= 2) {
    const X other = across(x, step);
    const bool takes_lower = (lane_bit & (lanes_without(step) ^ lanes_without(run))) != 0;
    x = takes_lower ? lower(x, other) : higher(x, other);
  }
}
template <typename X> __device__ __forceinline__ void sort_lanes(X& x, unsigned lane_bit) {
#pragma unroll
  for (int run = 2; run <= 32; run *= 2) merge_runs(x, run, lane_bit);
}

// --------------------------------------------------------------------------------------------------------------------- rows

struct Rows {
  int64_t tokens;
  int experts, slots;
  float p;  // of the norm the weights are divided by; 0 for none
};

// A register of logits: two half-precision numbers or one float.
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
  // NaN where one of both is NaN.
  static __device__ __forceinline__ uint32_t higher(uint32_t a, uint32_t b) {
    const Numbers result = __hmax2_nan(numbers(a), numbers(b));
    return reinterpret_cast<const uint32_t&>(result);
  }
  static __device__ __forceinline__ uint32_t same(T x) { return make(x, x); }
  static __device__ __forceinline__ uint32_t floor(float x) {
    if constexpr (std::is_same_v<T, __half>) return same(__float2half_rd(x));
    else return same(__float2bfloat16_rd(x));
  }
  // Ones where a number is not below the bound, which NaN is not, nor any number where the bound is NaN.
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
    return get(word, 0) < get(bound, 0) ? 0u : kFull;
  }
};

// One token's E numbers, as the lane that calls sees its N of them. V > 1 divides E.
template <typename T, int G, int N, int V> struct Row {
  static constexpr int kNumbers = Word<T>::kNumbers, kWords = N / kNumbers;
  using Words = Vector<uint32_t, (V > kNumbers ? V : kNumbers) / kNumbers>;

  static __device__ __forceinline__ int expert(unsigned i, int lane) { return (i / V * G + lane) * V + i % V; }
  static __device__ __forceinline__ int lane_of(int expert) { return expert / V % G; }
  static __device__ __forceinline__ int index_of(int expert) { return expert / (G * V) * V + expert % V; }

  // `fill` stands for what lies beyond the last expert.
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

constexpr int least(int a, int b, int c) { return a < b ? (a < c ? a : c) : (b < c ? b : c); }

// One V for logits and scores keeps the experts of a lane the same.
template <typename T, typename S, int N, bool kVectors>
constexpr int kVector = kVectors ? least(N, kVectorLength<T>, kVectorLength<S>) : 1;

// ---------------------------------------------------------------------------------------------------------------- selection

// The K highest of a group's keys in K rounds: chosen[r] of a lane is the (r * G + lane)-th highest.
template <int G, typename Key, int N, int R>
__device__ __forceinline__ void choose_in_rounds(const Key (&key)[N], int slots, int lane, Key (&chosen)[R]) {
  Key best = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) best = max(best, key[i]);
  for (int j = 0; j < slots; ++j) {
    const Key top = group_max<G>(best);
#pragma unroll
    for (int r = 0; r < R; ++r) if (j == r * G + lane) chosen[r] = top;
    if (best == top) {
      // The lane that had it looks for its next one, the nearest below. The distance of a key that is not below wraps around,
      // to top or more.
      Key nearest = top;
#pragma unroll
      for (int i = 0; i < N; ++i) nearest = min(nearest, top - 1 - key[i]);
      best = nearest < top ? top - 1 - nearest : 0;
    }
  }
}

// The highest of a warp's keys, in order. Keys, all different, wait in shared memory; each finds its place by counting those above
// it. When they fill it, only the K highest stay, and what enters must be higher than the last of these.
template <typename Key> class Ranking {
 public:
  static constexpr int kMost = 128;
  struct Memory {  // of one warp
    alignas(16) Key waiting[kMost];
    Key ranked[32];
  };

  __device__ __forceinline__ Ranking(Memory& memory, int lane, int slots) : memory_(memory), lane_(lane), slots_(slots) {}

  // One key of every lane, 0 for none.
  __device__ __forceinline__ void enter(Key key) {
    const unsigned entering = __ballot_sync(kFull, key > lowest_);
    if (key > lowest_) memory_.waiting[count_ + __popc(entering & ((1u << lane_) - 1))] = key;
    count_ += __popc(entering);
    if (count_ <= kMost - 32) return;
    const Key kept = ranked();
    lowest_ = __shfl_sync(kFull, kept, slots_ - 1);
    if (lane_ < slots_) memory_.waiting[lane_] = kept;
    count_ = slots_;
  }

  // The j-th highest in lane j, for j < slots; at least as many have entered.
  __device__ __forceinline__ Key ranked() {
    if (lane_ < kPerRead && count_ + lane_ < kMost) memory_.waiting[count_ + lane_] = 0;  // up to a whole read
    __syncwarp();
    if (count_ <= 32) place<1>();
    else if (count_ <= 64) place<2>();
    else place<4>();
    __syncwarp();
    return memory_.ranked[lane_];
  }

 private:
  static constexpr int kPerRead = 16 / sizeof(Key);
  using Read = Vector<Key, kPerRead>;

  // With M keys of each lane.
  template <int M> __device__ __forceinline__ void place() {
    Key key[M];
    int rank[M];
#pragma unroll
    for (int m = 0; m < M; ++m) {
      key[m] = memory_.waiting[m * 32 + lane_];
      rank[m] = m * 32 + lane_ < count_ ? 0 : slots_;
    }
    for (int i = 0; i < count_; i += kPerRead) {
      const Read others = reinterpret_cast<const Read*>(memory_.waiting)[i / kPerRead];
#pragma unroll
      for (int k = 0; k < kPerRead; ++k) {
#pragma unroll
        for (int m = 0; m < M; ++m) rank[m] += others.element[k] > key[m];
      }
    }
#pragma unroll
    for (int m = 0; m < M; ++m) if (rank[m] < slots_) memory_.ranked[rank[m]] = key[m];
  }

  Memory& memory_;
  int lane_, slots_, count_ = 0;
  Key lowest_ = 0;  // of the K highest, once memory has been full
};

// A logit that K of a warp's are not below; NaN where that may be all of them. The K-th highest of the maxima of 64 disjoint
// sets has that property, and so has the number next below it of 16 bits, two of which are sorted as one.
__device__ __forceinline__ float lower_bound(const float (&best)[2], int slots, unsigned lane_bit) {
  // With one half complemented, a descending sort leaves that half ascending, as a merge wants it.
  Pair pair{order_of(best[0]) >> 16 | (~order_of(best[1]) & 0xffff0000u)};
  sort_lanes(pair, lane_bit);
  uint32_t high = max(pair.bits & 0xffffu, ~pair.bits >> 16);
  merge_runs(high, 32, lane_bit);
  return logit_of(__shfl_sync(kFull, high, slots - 1) << 16);
}

// Which of a lane's numbers may be among the K highest of the warp: a bit for each, of a pair bits w and 16 + w.
template <typename T, int W> __device__ __forceinline__ unsigned find_candidates(
    const uint32_t (&word)[W], const float (&best)[2], int slots, unsigned lane_bit) {
  const uint32_t bound = Word<T>::floor(lower_bound(best, slots, lane_bit));
  unsigned candidates = 0;
#pragma unroll
  for (int w = 0; w < W; ++w) {
    candidates |= Word<T>::not_below(word[w], bound) & (Word<T>::kNumbers == 2 ? 0x10001u : 1u) << w;
  }
  return candidates;
}

// How many blocks an SM is to have room for. Warps with 32 experts a lane would take registers for two: too few to hide the
// latency of their networks.
template <typename T, int G, int N, bool kVectors>
constexpr int kBlocks = G < 32 || N < 32 ? 1 : sizeof(T) == 2 && kVectors ? 4 : 3;

// R: slots of a lane, R * G at least as many as there are.
template <typename T, typename S, int G, int N, int R, bool kVectors>
__global__ void __launch_bounds__(kThreads, kBlocks<T, G, N, kVectors>) route_kernel(
    const T* __restrict__ logits_TE, S* __restrict__ scores_TE, S* __restrict__ weights_TK, int64_t* __restrict__ ids_TK,
    float* __restrict__ logsumexp_T, const Rows rows) {
  constexpr int V = kVector<T, S, N, kVectors>, kNumbers = Word<T>::kNumbers;
  using Map = Row<T, G, N, V>;
  using Key = typename Keys<T>::Key;
  const int lane = threadIdx.x % G;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (kThreads / G) + threadIdx.x / G;
  // Lanes of a warp stay together for the shuffles; those behind the last token read token 0 and write nothing.
  const bool live = token < rows.tokens;
  const int64_t first = (live ? token : 0) * rows.experts;

  // What a lane has beyond the last expert is -inf of a higher expert than all: behind every one that can be chosen.
  uint32_t word[Map::kWords];
  Map::load(logits_TE + first, rows.experts, lane, -INFINITY, word);
  constexpr int kSets = 2 / kNumbers;
  uint32_t high[kSets];
#pragma unroll
  for (int w = 0; w < Map::kWords; ++w) high[w % kSets] = w < kSets ? word[w] : Word<T>::higher(high[w % kSets], word[w]);
  // Of the even ones and of the odd ones.
  const float best[2] = {Word<T>::get(high[0], 0), Word<T>::get(high[kSets - 1], kNumbers - 1)};
  const float highest = logit_of(group_max<G>(max(order_of(best[0]), order_of(best[1]))));

  const Exponential<S> exponential(highest);
  float value[N], sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    value[i] = exponential(Map::get(word, i));
    sum += value[i];
  }
  sum = group_sum<G>(sum);
  const float inverse = reciprocal(sum);
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] *= inverse;
  Row<S, G, N, V>::store(scores_TE + first, live ? rows.experts : 0, lane, value);
  if (live && lane == 0) logsumexp_T[token] = isinf(highest) ? highest : highest + logarithm<S>(sum);

  Key chosen[R];  // of slots lane, lane + G, ...
  if constexpr (G == 32) {
    __shared__ typename Ranking<Key>::Memory memory[kWarps];
    Ranking<Key> ranking(memory[threadIdx.x / 32], lane, rows.slots);
    unsigned candidates = find_candidates<T>(word, best, rows.slots, 1u << lane);
    while (__any_sync(kFull, candidates != 0)) {
      const unsigned bit = __ffs(candidates) - 1;
      const int expert = Map::expert(kNumbers == 2 ? bit % 16 * 2 + bit / 16 : bit, lane);
      // The logits have been read before, and few are read again.
      const bool exists = candidates != 0 && expert < rows.experts;
      ranking.enter(exists ? Keys<T>::make(static_cast<float>(widen(logits_TE[first + expert])), expert) : 0);
      candidates &= candidates - 1;
    }
    chosen[0] = ranking.ranked();
  } else {
    Key key[N];
#pragma unroll
    for (int i = 0; i < N; ++i) key[i] = Keys<T>::make(Map::get(word, i), Map::expert(i, lane));
    choose_in_rounds<G>(key, rows.slots, lane, chosen);
  }

  float weight[R], raised = 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    weight[r] = r * G + lane < rows.slots ? exponential(Keys<T>::logit(chosen[r])) * inverse : 0.0f;
    if (rows.p > 0 && r * G + lane < rows.slots) raised += power(weight[r], rows.p);
  }
  const float norm = rows.p > 0 ? root(group_sum<G>(raised), rows.p) : 1.0f;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const int slot = r * G + lane;
    if (!live || slot >= rows.slots) continue;
    weights_TK[token * rows.slots + slot] = narrow<S>(weight[r] / norm);
    ids_TK[token * rows.slots + slot] = Keys<T>::expert(chosen[r]);
  }
}

// With s the scores, r_j the chosen ones, n their norm and w = r / n:  through the weights r_j receives
// gw_j / n - <gw, r> / n^2 * (r_j / n)^(p-1); the logits receive s * (G - <s, G>) + g_lse * s, G the sum of what s receives.
template <typename T, typename S, int G, int N, int R, bool kVectors>
__global__ void __launch_bounds__(kThreads) route_backward_kernel(
    const S* __restrict__ scores_TE, const int64_t* __restrict__ ids_TK, const S* __restrict__ grad_scores_TE,
    const S* __restrict__ grad_weights_TK, const float* __restrict__ grad_logsumexp_T, T* __restrict__ grad_TE, const Rows rows) {
  constexpr int V = kVector<T, S, N, kVectors>;
  using Map = Row<S, G, N, V>;
  extern __shared__ float chosen_grads[];  // [warp][N][32]: what the weights send back to the scores of each lane
  const int lane = threadIdx.x % G;
  const int64_t token = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / G;
  const bool live = token < rows.tokens;
  const int64_t first = (live ? token : 0) * rows.experts, first_slot = (live ? token : 0) * rows.slots;
  uint32_t word[Map::kWords];
  float score[N], grad[N];
  Map::load(scores_TE + first, rows.experts, lane, 0.0f, word);
#pragma unroll
  for (int i = 0; i < N; ++i) score[i] = Map::get(word, i);
  if (grad_scores_TE) {
    Map::load(grad_scores_TE + first, rows.experts, lane, 0.0f, word);
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] = Map::get(word, i);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] = 0.0f;
  }
  if (grad_weights_TK) {
    float* sent = chosen_grads + threadIdx.x / 32 * (32 * N) + threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < N; ++i) sent[i * 32] = 0.0f;
    int id[R];
    float r[R], gradient[R], raised = 0, inner = 0;
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int slot = k * G + lane;
      const bool has_slot = slot < rows.slots;
      id[k] = has_slot ? static_cast<int>(ids_TK[first_slot + slot]) : -1;
      r[k] = has_slot ? static_cast<float>(widen(scores_TE[first + id[k]])) : 0.0f;
      gradient[k] = has_slot ? static_cast<float>(widen(grad_weights_TK[first_slot + slot])) : 0.0f;
      if (rows.p > 0 && has_slot) raised += power(r[k], rows.p);
      inner += gradient[k] * r[k];
    }
    if (rows.p > 0) {
      const float norm = root(group_sum<G>(raised), rows.p);
      inner = group_sum<G>(inner);
#pragma unroll
      for (int k = 0; k < R; ++k) {
        const float share = rows.p == 1.0f ? 1.0f : rows.p == 2.0f ? r[k] / norm : powf(r[k] / norm, rows.p - 1.0f);
        gradient[k] = rows.slots == 1 ? 0.0f : gradient[k] / norm - inner / (norm * norm) * share;  // a lone weight is always 1
      }
    }
    __syncwarp();
#pragma unroll
    for (int k = 0; k < R; ++k) {
      if (id[k] >= 0) sent[Map::index_of(id[k]) * 32 + Map::lane_of(id[k]) - lane] = gradient[k];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; ++i) grad[i] += sent[i * 32];
  }
  float inner = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) inner += score[i] * grad[i];
  inner = group_sum<G>(inner);
  if (!live) return;
  const float grad_lse = grad_logsumexp_T ? grad_logsumexp_T[token] : 0.0f;
#pragma unroll
  for (int i = 0; i < N; ++i) grad[i] = score[i] * (grad[i] - inner + grad_lse);
  Row<T, G, N, V>::store(grad_TE + first, rows.experts, lane, grad);
}

// Runs body with G lanes a token, N experts and R slots a lane, and whether the experts come in vectors.
#define GBMOE_ROUTE(lanes, experts_a_lane, slots_a_lane, vectors, ...) \
  { constexpr int G = lanes, N = experts_a_lane, R = slots_a_lane; constexpr bool kVectors = vectors; __VA_ARGS__; }
#define GBMOE_ROUTE_8_LANES(experts_a_lane, vectors, slots, ...)                  \
  { if (slots <= 8) GBMOE_ROUTE(8, experts_a_lane, 1, vectors, __VA_ARGS__)       \
    else GBMOE_ROUTE(8, experts_a_lane, 2, vectors, __VA_ARGS__) }
// Eight lanes up to where a warp is faster, measured; with `wide` logits, whose keys take two registers, not so far.
#define GBMOE_DISPATCH_EXPERTS(experts, slots, wide, ...)                                                             \
  do {                                                                                                                \
    const bool aligned = experts % 8 == 0, rounds = slots <= 16;                                                      \
    if (rounds && experts <= 16) GBMOE_ROUTE_8_LANES(2, false, slots, __VA_ARGS__)                                    \
    else if (rounds && experts <= 32 && experts % 4 == 0) GBMOE_ROUTE_8_LANES(4, true, slots, __VA_ARGS__)            \
    else if (rounds && experts <= 64 && aligned) GBMOE_ROUTE_8_LANES(8, true, slots, __VA_ARGS__)                     \
    else if (rounds && experts <= 64) GBMOE_ROUTE_8_LANES(8, false, slots, __VA_ARGS__)                               \
    else if (wide && slots <= 6 && experts <= 128 && aligned) GBMOE_ROUTE(8, 16, 1, true, __VA_ARGS__)                \
    else if (!wide && rounds && experts <= 128 && aligned) GBMOE_ROUTE_8_LANES(16, true, slots, __VA_ARGS__)          \
    else if (!wide && rounds && experts <= 256 && aligned) GBMOE_ROUTE_8_LANES(32, true, slots, __VA_ARGS__)          \
    else if (experts <= 64) GBMOE_ROUTE(32, 2, 1, false, __VA_ARGS__)                                                 \
    else if (experts <= 128 && experts % 4 == 0) GBMOE_ROUTE(32, 4, 1, true, __VA_ARGS__)                             \
    else if (experts <= 256 && aligned) GBMOE_ROUTE(32, 8, 1, true, __VA_ARGS__)                                      \
    else if (experts <= 256) GBMOE_ROUTE(32, 8, 1, false, __VA_ARGS__)                                                \
    else if (experts <= 512 && aligned) GBMOE_ROUTE(32, 16, 1, true, __VA_ARGS__)                                     \
    else if (aligned) GBMOE_ROUTE(32, 32, 1, true, __VA_ARGS__)                                                       \
    else GBMOE_ROUTE(32, 32, 1, false, __VA_ARGS__)                                                                   \
  } while (0)

// Runs body with T bound to the logits' type and S to the scores': the same, or float.
#define GBMOE_DISPATCH_LOGITS(logits, scores, name, ...)                                                              \
  do {                                                                                                                \
    if (logits == ScalarType::Float) { using T = float; using S = float; __VA_ARGS__; }                               \
    else if (logits == ScalarType::BFloat16 && scores == logits) { using T = __nv_bfloat16; using S = T; __VA_ARGS__; } \
    else if (logits == ScalarType::BFloat16) { using T = __nv_bfloat16; using S = float; __VA_ARGS__; }               \
    else if (logits == ScalarType::Half && scores == logits) { using T = __half; using S = T; __VA_ARGS__; }          \
    else if (logits == ScalarType::Half) { using T = __half; using S = float; __VA_ARGS__; }                          \
    else STD_TORCH_CHECK(false, name, ": expected bfloat16, float16 or float32");                                     \
  } while (0)

template <typename V> V* data(const Tensor& tensor) { return static_cast<V*>(tensor.data_ptr()); }
template <typename V> V* data(const std::optional<Tensor>& tensor) { return tensor ? data<V>(*tensor) : nullptr; }

unsigned blocks_for(int64_t tokens, int lanes) { return static_cast<unsigned>(ceil_div(tokens * lanes, kThreads)); }

}  // namespace

void route(Tensor logits, double p, Tensor scores, Tensor weights, Tensor ids, Tensor logsumexp) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const Rows rows{logits.size(0), static_cast<int>(logits.size(1)), static_cast<int>(ids.size(1)), static_cast<float>(p)};
  if (rows.tokens == 0) return;
  GBMOE_DISPATCH_LOGITS(logits.scalar_type(), scores.scalar_type(), "route",
                        GBMOE_DISPATCH_EXPERTS(rows.experts, rows.slots, (sizeof(T) > 2), {
    const auto kernel = route_kernel<T, S, G, N, R, kVectors>;
    kernel<<<blocks_for(rows.tokens, G), kThreads, 0, current_stream(logits)>>>(
        data<T>(logits), data<S>(scores), data<S>(weights), data<int64_t>(ids), data<float>(logsumexp), rows);
  }));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void route_backward(
    Tensor scores, Tensor ids, std::optional<Tensor> grad_scores, std::optional<Tensor> grad_weights,
    std::optional<Tensor> grad_logsumexp, double p, Tensor grad) {
  const torch::stable::accelerator::DeviceGuard guard(scores.get_device_index());
  const Rows rows{scores.size(0), static_cast<int>(scores.size(1)), static_cast<int>(ids.size(1)), static_cast<float>(p)};
  if (rows.tokens == 0) return;
  GBMOE_DISPATCH_LOGITS(grad.scalar_type(), scores.scalar_type(), "route_backward",
                        GBMOE_DISPATCH_EXPERTS(rows.experts, rows.slots, (sizeof(T) > 2), {
    const int shared_bytes = kThreads * N * static_cast<int>(sizeof(float));
    const auto kernel = route_backward_kernel<T, S, G, N, R, kVectors>;
    kernel<<<blocks_for(rows.tokens, G), kThreads, shared_bytes, current_stream(scores)>>>(
        data<S>(scores), data<int64_t>(ids), data<S>(grad_scores), data<S>(grad_weights), data<float>(grad_logsumexp),
        data<T>(grad), rows);
  }));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
