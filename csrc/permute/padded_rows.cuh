// What padded_gather, padded_scatter and its backward share: tokens to expert-major padded rows and back.
//
// All kernels are token-major: one to eight warps own one token, read what belongs to it once and visit its slots in ascending
// order, S of them at a time with their rows in registers. Loads and stores are coalesced, and vectorised where rows and pointers
// allow it. Sums are kept in fp32 (fp64 for fp64), in slot order, and rounded once; there are no floating-point atomics, so two
// runs give the same bits. Row and slot numbers fit int32; element offsets are int64.
//
// The kernels that write padded rows write the padding too: each warp owns a share of the rows, looks for those whose slot is
// kPadding, and clears them when its token is done. So no memset precedes the launch, the clearing is not left to a few CTAs at
// its end, and no warp waits for another. Rows after the last expert (slot kBehindTheLast) are cleared only where asked.
//
// Maps may be a caller's: a row beyond the last, a slot beyond T * K and a column beyond the scalars' count as none, and a count
// beyond K counts as K. Whatever maps hold, nothing outside the tensors is read or written.
//
// Bytes at the least: gather 2H (T + P), scatter 2H (P + T), its backward 2H (T + 2P) in bf16.

#pragma once

#include <algorithm>
#include <initializer_list>

#include "../common.cuh"

namespace gbmoe {
namespace {

// The threads of a CTA, the vectors that a thread has in flight and the slots of a pass are template parameters and launch bounds
// of these kernels. A launch takes the smallest instance that its call fits in. Choices by shape that were measured are in
// gbmoe/tuning/.
constexpr int kThreads = 256, kWarps = kThreads / 32;

// The rows of each token's slots, and where their scalars (weights, probabilities) are. Dense: row [T,K], scalars [T,K]. Ragged
// (a map made from a mask): the first count[t] entries of row and column are in use, and slot j's scalar sits in column[t,j] of
// [T,E].
struct Slots {
  const int* row;
  const int* column;
  const int* count;
  int64_t row_stride, column_stride, count_stride, scalar_stride;
  int most;
  unsigned rows;  // of the padded matrix

  __device__ __forceinline__ int in_use(int64_t token) const { return count ? min(count[token * count_stride], most) : most; }
  // -1 where the slot has no row.
  __device__ __forceinline__ int row_of(int64_t token, int j) const {
    const int entry = row[token * row_stride + j];
    return static_cast<unsigned>(entry) < rows ? entry : -1;
  }
  // Index of the slot's scalar; -1 where its column is out of range.
  __device__ __forceinline__ int64_t scalar_of(int64_t token, int j) const {
    const int entry = column ? column[token * column_stride + j] : j;
    return entry >= 0 && entry < scalar_stride ? token * scalar_stride + entry : -1;
  }
};

// How one launch divides its work: token_threads threads own one token, and each warp owns a share of the padded rows.
struct LaunchShape {
  int64_t tokens, rows;
  int vectors;          // in one row of H elements
  int token_threads;    // threads that own one token: a multiple of 32, at most kThreads
  int threads;          // of a CTA: those of whole tokens
  unsigned ctas;
  int rows_per_warp;
  unsigned slots;       // T * K, what slot_of_row may name; at least 1
  bool clear_behind;    // whether the rows after the last expert are cleared too

  __device__ __forceinline__ int64_t own_token() const {
    return static_cast<int64_t>(blockIdx.x) * (threads / token_threads) + threadIdx.x / token_threads;
  }
};

inline LaunchShape make_launch_shape(
    int64_t tokens, int slots_per_token, int64_t rows, int64_t vectors, int token_threads, bool clear_behind) {
  const int tokens_per_cta = kThreads / token_threads, threads = tokens_per_cta * token_threads, warps = threads / 32;
  const int64_t ctas = std::max<int64_t>(ceil_div(tokens, tokens_per_cta), rows > 0 ? 1 : 0);
  return {tokens, rows, static_cast<int>(vectors), token_threads, threads, static_cast<unsigned>(ctas),
          ctas > 0 ? static_cast<int>(ceil_div(rows, ctas * warps)) : 0,
          static_cast<unsigned>(std::clamp<int64_t>(tokens * slots_per_token, 1, INT32_MAX)), clear_behind};
}

// Threads per token where four vectors per thread keep enough bytes in flight: more threads than that would only add idle ones.
inline int few_threads(int64_t vectors) {
  int threads = 32;
  while (threads < kThreads / 2 && threads * 4 < vectors) threads *= 2;
  return threads;
}

// A thread for each vector, as far as a CTA has them: for a few tokens, where latency is what takes time.
inline int many_threads(int64_t vectors) {
  return static_cast<int>(std::clamp<int64_t>(ceil_div(vectors, 32) * 32, 32, kThreads));
}

// rows: the length of the padded matrix that the slots' rows are read from or written to.
inline Slots make_slots(const Tensor& row_of_slot, const std::optional<Tensor>& columns, const std::optional<Tensor>& counts,
                        int64_t rows, std::initializer_list<const std::optional<Tensor>*> scalar_tensors) {
  int64_t scalar_stride = row_of_slot.size(1);
  for (const auto* tensor : scalar_tensors) if (*tensor) scalar_stride = (*tensor)->size(1);
  return {data<const int>(row_of_slot), data<const int>(columns), data<const int>(counts), row_of_slot.stride(0),
          columns ? columns->stride(0) : 0, counts ? counts->stride(0) : 0, scalar_stride, static_cast<int>(row_of_slot.size(1)),
          static_cast<unsigned>(std::min<int64_t>(rows, INT32_MAX))};
}

// A store whose line is the first to leave the cache (evict-first): rows in random order take 2 % less time with it.
template <typename V> __device__ __forceinline__ void store_streaming(V* to, const V& value) {
  if constexpr (sizeof(V) == 16) __stcs(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4&>(value));
  else *to = value;
}

// One warp's share of the padded rows. All its lanes construct it before they begin with their token, so that the loads of the
// share's slots and of the token overlap, and call clear when they have ended with the token. In between it holds only those
// slots.
class PaddingRows {
 public:
  __device__ __forceinline__ PaddingRows(const int* slot_of_row, const LaunchShape& shape) : slot_(find(slot_of_row, shape, 0)) {}

  // Clears the share's padding, and calls also(row), in one lane, for every row that it clears.
  template <typename V, typename F>
  __device__ __forceinline__ void clear(V* rows_PH, const int* slot_of_row, const LaunchShape& shape, const F& also) const {
    for (int base = 0; base < shape.rows_per_warp; base += 32) {
      const int slot = base == 0 ? slot_ : find(slot_of_row, shape, base);
      const bool own = slot == kBehindTheLast ? shape.clear_behind : static_cast<unsigned>(slot) >= shape.slots;
      for (unsigned left = __ballot_sync(kFullWarp, own); left; left &= left - 1) {
        const int64_t row = first(shape) + base + __ffs(left) - 1;
        V* out = rows_PH + row * shape.vectors;
        for (int v = threadIdx.x % 32; v < shape.vectors; v += 32) store_streaming(out + v, V{});
        if (threadIdx.x % 32 == 0) also(row);
      }
    }
  }

 private:
  static __device__ __forceinline__ int64_t first(const LaunchShape& shape) {
    return (static_cast<int64_t>(blockIdx.x) * (shape.threads / 32) + threadIdx.x / 32) * shape.rows_per_warp;
  }
  // The slot of this lane's row from `base` on; 0, which stands for a row not to be cleared, where the share or the rows end.
  static __device__ __forceinline__ int find(const int* slot_of_row, const LaunchShape& shape, int base) {
    const int i = base + threadIdx.x % 32;
    return i < shape.rows_per_warp && first(shape) + i < shape.rows ? slot_of_row[first(shape) + i] : 0;
  }

  int slot_;
};

// A pass over S of a token's slots: where their rows begin, and their weights. Lane j of every warp looks slot j up and hands
// it to the other lanes, so that a pass waits for memory once; all lanes of a warp construct it together, for one token. A slot
// without a row points at row 0, which every thread may load, so that all loads of a pass are started together, and `exists`
// keeps it out of the sums.
template <typename A, int S, bool kWeighted = true> struct Pass {
  int64_t at[S];
  A weight[S];
  unsigned exists = 0;

  __device__ __forceinline__ Pass(const Slots& slots, const Scalars& weights, int64_t token, int first, int in_use, int vectors) {
    const int slot = first + threadIdx.x % 32;
    int own_row = -1;
    A own_weight = 1;
    if (threadIdx.x % 32 < S && slot < in_use) {
      own_row = slots.row_of(token, slot);
      if (kWeighted && own_row >= 0 && weights.data) {
        const int64_t scalar = slots.scalar_of(token, slot);
        if (scalar >= 0) own_weight = static_cast<A>(weights.read(scalar));
        else own_row = -1;
      }
    }
    exists = __ballot_sync(kFullWarp, own_row >= 0);
#pragma unroll
    for (int j = 0; j < S; ++j) {
      const int row = __shfl_sync(kFullWarp, own_row, j);
      if constexpr (kWeighted) weight[j] = __shfl_sync(kFullWarp, own_weight, j);
      at[j] = row >= 0 ? static_cast<int64_t>(row) * vectors : 0;
    }
  }
  __device__ __forceinline__ bool has(int j) const { return exists >> j & 1; }
};

// Runs body with N bound to the length of a vector and S to the slots of a pass. Where rows and pointers allow it (`fits`), a
// vector has 16 bytes, and S is what the number of slots needs; otherwise it has one element, with one S, to keep the number of
// kernels small.
#define GBMOE_DISPATCH_VECTOR_AND_SLOTS(fits, slots, ...)                                  \
  do {                                                                                    \
    if (!(fits)) { constexpr int N = 1, S = 4; __VA_ARGS__; }                             \
    else if (slots <= 1) { constexpr int N = kVectorLength<T>, S = 1; __VA_ARGS__; }      \
    else if (slots <= 2) { constexpr int N = kVectorLength<T>, S = 2; __VA_ARGS__; }      \
    else if (slots <= 4) { constexpr int N = kVectorLength<T>, S = 4; __VA_ARGS__; }      \
    else { constexpr int N = kVectorLength<T>, S = 8; __VA_ARGS__; }                      \
  } while (0)

}  // namespace
}  // namespace gbmoe
