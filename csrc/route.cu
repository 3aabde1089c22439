// The router behind its linear layer: softmax over the experts, the K highest, their p-norm and the logsumexp of the z-loss,
// from the logits in one launch. Ties go to the lower expert; NaN ranks above every number, as in torch.topk.
//
// Groups of 2 to 16 lanes sort: a logit and its expert are one integer, each lane sorts its own by networks in registers and
// lists some of them, and lanes merge what they have into one list of P >= K that they share; if a lane had more of the K than
// it listed, which is rare, again with whole lists. Warps, for many experts, count: a lower bound of the K-th highest logit
// leaves few candidates (about 10 of 1024 for K = 8, 43 for K = 32), and each of them finds its place among the others.

#include <climits>

#include "ops.h"
#include "route.cuh"

namespace gbmoe {
namespace {

constexpr int kThreads = 128;

// A number that grows with the logit; NaN has the highest, and -0 that of 0.
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

// e to the power of a logit less the highest, for results of type S: half precision does not see the error of the fast
// instruction (two units in the last place of a float, and 0 instead of a subnormal).
template <typename S> class Exponential {
 public:
  // The rounding of highest * log2(e) is a factor of all results, and as such it cancels, unless it overflows: above a million
  // half-precision logits are so far apart that any rate tells whether they are equal, and this one's products are exact.
  __device__ __forceinline__ explicit Exponential(float highest)
      : highest_(highest), rate_(fabsf(highest) > 1e6f ? 0.5f : 1.44269504f) {}

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

// x / sum for sum >= 1: rounded once for floats, whose error would otherwise be twice that of a division.
template <typename S> class Share {
 public:
  __device__ __forceinline__ explicit Share(float sum) : sum_(sum), inverse_(reciprocal(sum)) {}

  __device__ __forceinline__ float operator()(float x) const {
    const float share = x * inverse_;
    return sizeof(S) > 2 ? fmaf(fmaf(-share, sum_, x), inverse_, share) : share;
  }

 private:
  float sum_, inverse_;
};

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

// ---------------------------------------------------------------------------------------------------------------- selection

// A logit and its expert in one integer, so that the largest key is the highest logit and, among equals, the lowest expert; 0,
// below -inf, stands for "none". A brief key has 32 bits, which hold a half-precision logit whole, but only the first 22 of a
// float's.
template <typename T> struct Keys {
  using Key = uint32_t;
  static constexpr bool kBriefIsExact = true;

  // Two numbers that grow with the logits of a word; NaN has the highest, and -0 that of 0.
  static __device__ __forceinline__ uint32_t order(uint32_t word) {
    const auto canonical = __hadd2(Word<T>::numbers(word), Word<T>::numbers(0u));
    const uint32_t bits = reinterpret_cast<const uint32_t&>(canonical);
    uint32_t signs;  // of either half, in all of its bits
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
  // What a key holds of its expert; complement(a | b) is complement(a) ^ b where a and b share no bits.
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
  // Of the same first 22 bits.
  static __device__ __forceinline__ bool alike(Key a, Key b) { return ((a ^ b) >> 32 & ~kExperts) == 0; }
  // A key above all of such.
  static __device__ __forceinline__ Key above(uint32_t order) { return static_cast<Key>(order | kExperts) << 32 | UINT_MAX; }
};

// Descending, by Batcher's merge of odd and even places.
template <int L> __device__ __forceinline__ void sort_list(uint32_t (&x)[L]) {
#pragma unroll
  for (int run = 1; run < L; run *= 2) {
#pragma unroll
    for (int step = run; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < L; ++i) {
        const int from = i - step % run;
        if (from < 0 || from / step % 2 != 0 || i + step >= L || i / (2 * run) != (i + step) / (2 * run)) continue;
        const uint32_t low = min(x[i], x[i + step]);
        x[i] = max(x[i], x[i + step]);
        x[i + step] = low;
      }
    }
  }
}
// The same where numbers fall and then rise, or rise and then fall.
template <int L> __device__ __forceinline__ void sort_bitonic(uint32_t (&list)[L]) {
#pragma unroll
  for (int step = L / 2; step > 0; step /= 2) {
#pragma unroll
    for (int i = 0; i < L; ++i) {
      if (i & step) continue;
      const uint32_t low = min(list[i], list[i + step]);
      list[i] = max(list[i], list[i + step]);
      list[i + step] = low;
    }
  }
}

// The P highest of two descending lists, descending.
template <int P> __device__ __forceinline__ void merge_lists(uint32_t (&list)[P], const uint32_t (&other)[P]) {
#pragma unroll
  for (int i = 0; i < P; ++i) list[i] = max(list[i], other[P - 1 - i]);
  sort_bitonic(list);
}

// A list that lanes share is dealt out to them: of G lanes the one of rank q has places q, q + G, q + 2 G and so on. Lanes are ranked
// by Gray's code, so that what two sets of lanes have can be dealt to both, and each lane keeps half of its own. Ranks that differ in
// one bit have lanes that differ by lane_of(bit).
__device__ __forceinline__ int rank_of(int lane) { return lane ^ lane >> 1 ^ lane >> 2 ^ lane >> 3; }
__device__ __forceinline__ int lane_of(int rank) { return rank ^ rank >> 1; }

// Sorts what lanes, of a rank with `bit` and of the same without, have in the same places of their first M.
template <int M, int L> __device__ __forceinline__ void sort_across(uint32_t (&list)[L], int rank, int bit) {
  const bool lower = rank & bit;
#pragma unroll
  for (int i = 0; i < M; ++i) {
    const uint32_t other = __shfl_xor_sync(kFull, list[i], lane_of(bit));
    list[i] = (list[i] > other) != lower ? list[i] : other;
  }
}

// The P highest of a group of G lanes, from lists of P that sets of kLanes share, sets of kSet lanes having the same; of each lane's L only
// the first M are other than 0. result[r] has place r * G + rank; where lanes are more than places, those of ranks from P on have copies.
template <int G, int P, int kLanes, int kSet, int M, int L, int R>
__device__ __forceinline__ void merge_lanes(const uint32_t (&list)[L], int lane, uint32_t (&result)[R]) {
  static_assert(kLanes * L == P && M <= L);
  // Of the numbers in opposite places of two lists the higher ones are the P highest, and they fall and rise.
  if constexpr (kSet == G) {
    static_assert(L == R);
#pragma unroll
    for (int r = 0; r < R; ++r) result[r] = list[r];
  } else if constexpr (L == 1) {
    uint32_t highest[1] = {max(list[0], __shfl_xor_sync(kFull, list[0], kSet | kLanes / 2))};
#pragma unroll
    for (int bit = kLanes / 2; bit > 0; bit /= 2) sort_across<1>(highest, rank_of(lane % kLanes), bit);
    merge_lanes<G, P, kLanes, kSet * 2, 1>(highest, lane, result);
  } else {
    uint32_t highest[L / 2];  // in a lane's own even places
#pragma unroll
    for (int i = 0; i < L / 2; ++i) {
      const int own = 2 * i, others = L - 1 - own;
      highest[i] = own < M ? list[own] : 0;
      if (others < M) highest[i] = max(highest[i], __shfl_xor_sync(kFull, list[others], lane_of(kLanes)));
    }
    sort_bitonic(highest);
    constexpr int kUsed = M < L / 2 ? M : L / 2;
#pragma unroll
    for (int bit = kLanes; bit > 0; bit /= 2) sort_across<kUsed>(highest, rank_of(lane % (2 * kLanes)), bit);
    merge_lanes<G, P, kLanes * 2, kSet * 2, kUsed>(highest, lane, result);
  }
}

// The Q highest of a lane's own N brief keys, descending, by networks in runs of Q.
template <typename T, typename Map, int N, int Q, int W>
__device__ __forceinline__ void list_own(const uint32_t (&order)[W], uint32_t complement, uint32_t (&list)[Q]) {
#pragma unroll
  for (int first = 0; first < N; first += Q) {
    uint32_t run[Q];
#pragma unroll
    for (int i = 0; i < Q; ++i) {
      const int number = first + i;
      run[i] = number < N ? Keys<T>::brief(order[number / Map::kNumbers], number % Map::kNumbers,
                                           complement ^ Map::expert(number, 0)) : 0;
    }
    sort_list(run);
    if (first > 0) {
      merge_lists(list, run);
    } else {
#pragma unroll
      for (int i = 0; i < Q; ++i) list[i] = run[i];
    }
  }
}

// Of `places` numbers among `lanes`, how many a lane lists of its own: so many times its share that it rarely has more, and the larger
// the share, the less it varies. With 4 or fewer places there is nothing to save.
constexpr int listed(int lanes, int places) {
  const int share = places / lanes, enough = share >= 8 ? 2 * share : share > 0 ? 4 * share : 4;
  return places < 8 || enough > places ? places : enough;
}

// The P highest brief keys of a group, shared by its lanes, of which the first `slots` matter; a lane lists Q of its own at first.
template <typename T, typename Map, int G, int N, int P, int Q, int W, int R>
__device__ __forceinline__ void list_highest(
    const uint32_t (&order)[W], uint32_t complement, int lane, int slots, uint32_t (&result)[R]) {
  uint32_t own[Q], list[P];
  list_own<T, Map, N>(order, complement, own);
#pragma unroll
  for (int i = 0; i < P; ++i) list[i] = i < Q ? own[i] : 0;
  merge_lanes<G, P, 1, 1, (N < Q ? N : Q)>(list, lane, result);
  if constexpr (Q < P && Q < N) {
    // A lane whose last one is above the last that matters may have had more: if so, again with lists that hold whatever comes.
    uint32_t last = UINT_MAX;
#pragma unroll
    for (int r = 0; r < R; ++r) if (r * G + rank_of(lane) < slots) last = min(last, result[r]);
    last = ~group_max<G>(~last);
    bool more = own[Q - 1] > last;
    // Of 16 lanes' highest 16 a lane may have had more than four in three of ten warps, and one has in one of 18: those count. Elsewhere
    // it is rarer, and to count would take registers.
    if (G == 16 && P == 16 && __any_sync(kFull, more)) {
      int above = 0;
#pragma unroll
      for (int i = 0; i < N; ++i) {
        above += Keys<T>::brief(order[i / Map::kNumbers], i % Map::kNumbers, complement ^ Map::expert(i, 0)) > last;
      }
      more = above > Q;
    }
    if (__any_sync(kFull, more)) list_highest<T, Map, G, N, P, P>(order, complement, lane, slots, result);
  }
}

// The highest of a group's keys below `top`, in a round of a maximum each, for the slots from `from` on: chosen[r] of a lane has
// slot r * G + rank.
template <typename T, typename Map, int G, int N, typename Key, int W, int R>
__device__ __forceinline__ void choose_in_rounds(
    const uint32_t (&order)[W], uint32_t complement, Key top, int from, int slots, int rank, Key (&chosen)[R]) {
  for (int slot = from; __any_sync(kFull, slot < slots); ++slot) {
    // The distance of a key that is not below wraps around, to top or more.
    Key nearest = top;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      const Key key = Keys<T>::make(order[i / Map::kNumbers], i % Map::kNumbers, complement ^ Map::expert(i, 0));
      nearest = min(nearest, top - 1 - key);
    }
    top = group_max<G>(nearest < top ? top - 1 - nearest : 0);
#pragma unroll
    for (int r = 0; r < R; ++r) if (slot == r * G + rank && slot < slots) chosen[r] = top;
  }
}

// The places of a group's P keys in descending order; of keys of 0, which stand for none, some place behind all others.
template <int G, int P, typename Key, int R> __device__ __forceinline__ void find_places(const Key (&key)[R], int (&place)[R]) {
#pragma unroll
  for (int r = 0; r < R; ++r) place[r] = 0;
#pragma unroll
  for (int i = 0; i < P; ++i) {
    const Key other = __shfl_sync(kFull, key[i / G], i % G, G);
#pragma unroll
    for (int r = 0; r < R; ++r) place[r] += other > key[r];
  }
}
// The same where keys are in order but for neighbours that are alike; place[r] is r * G + rank at first.
template <int G, int P, int R>
__device__ __forceinline__ void exchange_neighbours(const uint64_t (&key)[R], int rank, int (&place)[R]) {
  uint64_t next[R + 1], previous[R + 1];  // next[r] is key[r] of rank + 1, previous[r + 1] is key[r] of rank - 1
  next[R] = previous[0] = 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    next[r] = __shfl_sync(kFull, key[r], lane_of((rank + 1) % G), G);
    previous[r + 1] = __shfl_sync(kFull, key[r], lane_of((rank + G - 1) % G), G);
  }
  bool crowded = false;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    const uint64_t after = rank == G - 1 ? next[r + 1] : next[r], before = rank == 0 ? previous[r] : previous[r + 1];
    const bool like_next = Keys<float>::alike(key[r], after), like_previous = Keys<float>::alike(key[r], before);
    const bool below_next = like_next && after > key[r], above_previous = like_previous && key[r] > before;
    crowded |= like_next && like_previous && (below_next || above_previous);
    place[r] += below_next - above_previous;
  }
  if (__any_sync(kFull, crowded)) find_places<G, P>(key, place);
}

// The highest of a warp's keys, in order. Keys, all different, wait in shared memory; each finds its place by counting those
// above it. When they fill it, only the K highest stay, and what enters must be higher than the last of these.
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

// P: a power of two, at least as many as there are slots, or 0 where a warp ranks its candidates.
template <typename T, typename S, int G, int N, int P, int kWidest>
__global__ void __launch_bounds__(kThreads) route_kernel(
    const T* __restrict__ logits_TE, S* __restrict__ scores_TE, S* __restrict__ weights_TK, int64_t* __restrict__ ids_TK,
    float* __restrict__ logsumexp_T, const Rows rows) {
  constexpr int V = kVector<T, S, N, kWidest>, kNumbers = Word<T>::kNumbers;
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
  const Share<S> share(sum);
#pragma unroll
  for (int i = 0; i < N; ++i) value[i] = share(value[i]);
  Row<S, G, N, V>::store(scores_TE + first, live ? rows.experts : 0, lane, value);
  if (live && lane == 0) logsumexp_T[token] = isinf(highest) ? highest : highest + logarithm<S>(sum);

  constexpr int R = P > G ? P / G : 1;  // slots of a lane
  const int rank = P > 0 ? rank_of(lane) : lane;
  Key chosen[R];
  int slot[R];
#pragma unroll
  for (int r = 0; r < R; ++r) slot[r] = r * G + rank;
  if constexpr (P == 0) {
    __shared__ typename Ranking<Key>::Memory memory[kThreads / 32];
    Ranking<Key> ranking(memory[threadIdx.x / 32], lane, rows.slots);
    unsigned candidates = find_candidates<T>(word, best, rows.slots, 1u << lane);
    while (__any_sync(kFull, candidates != 0)) {
      const unsigned bit = __ffs(candidates) - 1;
      const int expert = Map::expert(kNumbers == 2 ? bit % 16 * 2 + bit / 16 : bit, lane);
      // The logits have been read before, and few are read again.
      const bool exists = candidates != 0 && expert < rows.experts;
      ranking.enter(exists ? Keys<T>::of(logits_TE[first + expert], expert) : 0);
      candidates &= candidates - 1;
    }
    chosen[0] = ranking.ranked();
  } else {
    uint32_t order[Map::kWords], brief[R];
#pragma unroll
    for (int w = 0; w < Map::kWords; ++w) order[w] = Keys<T>::order(word[w]);
    const uint32_t complement = Keys<T>::complement(Map::expert(0, lane));
    list_highest<T, Map, G, N, P, listed(G, P)>(order, complement, lane, rows.slots, brief);
    if constexpr (Keys<T>::kBriefIsExact) {
#pragma unroll
      for (int r = 0; r < R; ++r) chosen[r] = brief[r];
    } else {
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int expert = Keys<T>::expert(brief[r]);
        chosen[r] = slot[r] < rows.slots ? Keys<T>::of(logits_TE[first + expert], expert) : 0;
      }
      // Of those alike, brief keys tell the lowest experts, not the highest logits: is any logit above the lowest that was
      // chosen, and was not chosen itself? Of those equal to it the right ones were chosen: their briefs tell the experts.
      uint32_t lowest = UINT_MAX;
#pragma unroll
      for (int r = 0; r < R; ++r) if (slot[r] < rows.slots) lowest = min(lowest, static_cast<uint32_t>(chosen[r] >> 32));
      lowest = ~group_max<G>(~lowest);
      int missed = 0;
#pragma unroll
      for (int w = 0; w < Map::kWords; ++w) missed += order[w] > lowest;
#pragma unroll
      for (int r = 0; r < R; ++r) missed -= static_cast<uint32_t>(chosen[r] >> 32) > lowest;
      if (__any_sync(kFull, group_sum<G>(missed) > 0)) {
        const Key above = Keys<T>::above(lowest);
        int certain = 0;
#pragma unroll
        for (int r = 0; r < R; ++r) certain += chosen[r] > above;
        choose_in_rounds<T, Map, G, N>(order, complement, above, group_sum<G>(certain), rows.slots, rank, chosen);
      }
      exchange_neighbours<G, P>(chosen, rank, slot);
    }
  }

  float weight[R], raised = 0;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    weight[r] = slot[r] < rows.slots ? share(exponential(Keys<T>::logit(chosen[r]))) : 0.0f;
    if (rows.p > 0 && slot[r] < rows.slots) raised += power(weight[r], rows.p);
  }
  const float norm = rows.p > 0 ? root(group_sum<G>(raised), rows.p) : 1.0f;
#pragma unroll
  for (int r = 0; r < R; ++r) {
    if (!live || slot[r] >= rows.slots) continue;
    weights_TK[token * rows.slots + slot[r]] = narrow<S>(weight[r] / norm);
    ids_TK[token * rows.slots + slot[r]] = Keys<T>::expert(chosen[r]);
  }
}

// ------------------------------------------------------------------------------------------------------------------ launches

// The arguments of one call.
template <typename T, typename S> struct Route {
  const T* logits;
  S *scores, *weights;
  int64_t* ids;
  float* logsumexp;
  Rows rows;
  cudaStream_t stream;

  template <int G, int N, int P, int kWidest> void launch() const {
    static_assert(G * N <= 1024 && (G & (G - 1)) == 0, "a brief key holds experts below 1024, and lane and index in bits apart");
    STD_TORCH_CHECK(rows.slots <= (P > 0 ? P : 32) && rows.experts <= G * N, "route: no kernel for ", rows.experts, " experts");
    const unsigned blocks = static_cast<unsigned>(ceil_div(rows.tokens * G, kThreads));
    route_kernel<T, S, G, N, P, kWidest><<<blocks, kThreads, 0, stream>>>(logits, scores, weights, ids, logsumexp, rows);
  }
  // kMost: of slots that come here.
  template <int G, int N, int kWidest, int kMost = 32> void launch_lists() const {
    if (rows.slots <= 4) return launch<G, N, 4, kWidest>();
    if (rows.slots <= 8 || kMost == 8) return launch<G, N, 8, kWidest>();
    if constexpr (kMost >= 16) {
      if (rows.slots <= 16 || kMost == 16) return launch<G, N, 16, kWidest>();
    }
    if constexpr (kMost >= 32) return launch<G, N, 32, kWidest>();
  }
  // Lists up to where a warp is faster, measured; for floats, whose briefs must be checked, not so far unless slots are many.
  void launch() const {
    constexpr bool kHalf = sizeof(T) == 2;
    const int experts = rows.experts;
    const bool fours = experts % 4 == 0, eights = experts % 8 == 0, many_slots = rows.slots > 16;
    if (fours && experts <= 8) return launch_lists<2, 4, 16, 8>();
    if (fours && experts <= 16) return launch_lists<4, 4, 16, 16>();
    if (experts <= 16) return launch_lists<8, 2, 1, 16>();
    if constexpr (kHalf) {
      if (eights && experts <= 32 && many_slots) return launch<8, 4, 32, 16>();
      if (eights && experts <= 64 && many_slots) return launch<8, 8, 32, 16>();
      if (fours && experts <= 64 && many_slots) return launch<8, 8, 32, 4>();
    }
    constexpr int kMost = kHalf ? 16 : 32;
    if (eights && experts <= 32) return launch_lists<4, 8, 16, kMost>();
    if (eights && experts <= 64) return launch_lists<4, 16, 16, kMost>();
    if (fours && experts <= 64) return launch_lists<4, 16, 4, kMost>();
    if (experts <= 64) return launch_lists<8, 8, 1>();
    if constexpr (kHalf) {
      if (eights && experts <= 128) return launch_lists<4, 32, 16>();
      if (eights && experts <= 160) return launch_lists<4, 40, 16>();
      if (eights && experts <= 192) return launch_lists<4, 48, 16>();
      if (eights && experts <= 256) return launch_lists<8, 32, 16>();
      if (eights && experts <= 384) return launch_lists<8, 48, 16>();
      if (eights && experts <= 512) return launch_lists<16, 32, 16>();
    } else {
      if (fours && experts <= 128 && rows.slots <= 16) return launch_lists<4, 32, 16, 16>();
      if (fours && experts <= 128) return launch<8, 16, 32, 16>();
      if (fours && experts <= 160) return launch_lists<8, 20, 16>();
      if (fours && experts <= 192) return launch_lists<8, 24, 16>();
      if (fours && experts <= 256 && many_slots) return launch<16, 16, 32, 16>();
      if (fours && experts <= 256) return launch_lists<8, 32, 16, 16>();
      if (fours && experts <= 384 && rows.slots <= 8) return launch_lists<16, 24, 16, 8>();
      if (fours && experts <= 384 && many_slots) return launch<16, 24, 32, 16>();
      if (fours && experts <= 384) return launch<32, 12, 0, 16>();
      if (fours && experts <= 512 && many_slots) return launch<16, 32, 32, 16>();
    }
    if (experts <= 128 && fours) return launch<32, 4, 0, 16>();
    if (experts <= 256) return launch<32, 8, 0, 1>();
    if (experts <= 512 && eights) return launch<32, 16, 0, 16>();
    if (eights) return launch<32, 32, 0, 16>();
    return launch<32, 32, 0, 1>();
  }
};

}  // namespace

void route(Tensor logits, double p, Tensor scores, Tensor weights, Tensor ids, Tensor logsumexp) {
  const torch::stable::accelerator::DeviceGuard guard(logits.get_device_index());
  const Rows rows{logits.size(0), static_cast<int>(logits.size(1)), static_cast<int>(ids.size(1)), static_cast<float>(p)};
  if (rows.tokens == 0) return;
  GBMOE_DISPATCH_LOGITS(logits.scalar_type(), scores.scalar_type(), "route", {
    const Route<T, S> call{data<T>(logits), data<S>(scores), data<S>(weights), data<int64_t>(ids), data<float>(logsumexp), rows,
                           current_stream(logits)};
    call.launch();
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
