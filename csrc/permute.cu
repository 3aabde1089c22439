// padded_gather and padded_scatter: tokens to expert-major padded rows and back, with their gradients.
//
// All kernels are token-major: the threads of one group own one token, read what belongs to it once and visit its slots in
// ascending order, S of them at a time with their rows in registers. Sums are kept in fp32 (fp64 for fp64), in slot order,
// and rounded once; there are no floating-point atomics, so two runs give the same bits. Row and slot numbers fit int32;
// element offsets are int64.
//
// The kernels that write padded rows write the padding too: each warp owns a share of the rows, looks for those whose slot is -1
// and clears them when its token is done, so no memset precedes the launch, no few blocks clear at its end, and no warp waits
// for another. Rows behind the last expert (slot -2) are cleared only where asked.
//
// Maps may be a caller's: a row beyond the last, a slot beyond T * K and a column beyond the scalars' count as none, and a count beyond
// K as K. Whatever maps hold, nothing outside the tensors is read or written.
//
// Bytes at the least: gather 2H (T + P), scatter 2H (P + T), its backward 2H (T + 2P) in bf16.

#include <algorithm>
#include <initializer_list>

#include "common.cuh"
#include "ops.h"

namespace gbmoe {
namespace {

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kBehindTheLast = -2;
constexpr unsigned kAllLanes = 0xffffffffu;

// Where each token's slots are. Dense: row [T,K], scalars [T,K]. Ragged (a mask map): the first count[t] entries of row and
// column are in use, and slot j's scalar sits in column[t,j] of [T,E].
struct Slots {
  const int* row;
  const int* column;
  const int* count;
  int64_t row_stride, column_stride, count_stride, scalar_stride;
  int most;
  unsigned rows;  // of the padded matrix

  __device__ __forceinline__ int in_use(int64_t token) const { return count ? min(count[token * count_stride], most) : most; }
  // -1 where the slot has none.
  __device__ __forceinline__ int row_of(int64_t token, int j) const {
    const int entry = row[token * row_stride + j];
    return static_cast<unsigned>(entry) < rows ? entry : -1;
  }
  // -1 where the column is none.
  __device__ __forceinline__ int64_t scalar_of(int64_t token, int j) const {
    const int entry = column ? column[token * column_stride + j] : j;
    return entry >= 0 && entry < scalar_stride ? token * scalar_stride + entry : -1;
  }
};

// How one launch divides its work: `group` threads own one token, and each warp a share of the padded rows.
struct Shape {
  int64_t tokens, rows;
  int vectors;          // in one row of H elements
  int group;            // threads that own one token: a multiple of 32, at most kThreads
  int threads;          // of a block: whole groups
  unsigned blocks;
  int rows_a_warp;
  unsigned slots;       // T * K, what slot_of_row may name; at least 1
  bool clear_behind;    // the rows behind the last expert too
};

Shape make_shape(int64_t tokens, int slots_a_token, int64_t rows, int64_t vectors, int group, bool clear_behind) {
  const int groups = kThreads / group, warps = groups * group / 32;
  const int64_t blocks = std::max<int64_t>(ceil_div(tokens, groups), rows > 0 ? 1 : 0);
  return {tokens, rows, static_cast<int>(vectors), group, groups * group, static_cast<unsigned>(blocks),
          blocks > 0 ? static_cast<int>(ceil_div(rows, blocks * warps)) : 0,
          static_cast<unsigned>(std::clamp<int64_t>(tokens * slots_a_token, 1, INT32_MAX)), clear_behind};
}

// The threads of a token where four vectors a thread keep enough bytes in flight; more threads than that only add idle ones.
int few_threads(int64_t vectors) {
  int group = 32;
  while (group < kThreads / 2 && group * 4 < vectors) group *= 2;
  return group;
}
// Those of a token whose row is written several times, `a_thread` vectors by each: as many as the row takes, to read it at once.
int many_threads(int64_t vectors, int a_thread) {
  const int64_t warps = std::max<int64_t>(ceil_div(vectors, 32 * a_thread), 1);
  return 32 * static_cast<int>(std::min<int64_t>(warps, kWarps));
}

// What is written first to leave the cache: rows in random order take 2 % less time.
template <typename V> __device__ __forceinline__ void store_streaming(V* to, const V& value) {
  if constexpr (sizeof(V) == 16) __stcs(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4&>(value));
  else *to = value;
}
// The same for what is read: 3 % less with two to four rows a token, and nothing with more.
template <typename V> __device__ __forceinline__ V load_streaming(const V* from) {
  if constexpr (sizeof(V) != 16) {
    return *from;
  } else {
    const uint4 value = __ldcs(reinterpret_cast<const uint4*>(from));
    return reinterpret_cast<const V&>(value);
  }
}

// Asks for a row of 16-byte vectors that a block some 4 MiB further on will read: 1 % of a gather with several rows a token. Half
// of that distance helps half as much; twice of it takes 1 to 4 % longer where rows are long.
constexpr int kVectorsAhead = (4 << 20) / 16;
template <typename V> __device__ __forceinline__ void prefetch_ahead(const V* x_TH, int64_t token, int64_t tokens, int vectors) {
#if __CUDA_ARCH__ >= 900
  const int64_t later = token + kVectorsAhead / vectors;
  if (sizeof(V) == 16 && later < tokens) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(x_TH + later * vectors), "r"(vectors * 16) : "memory");
  }
#endif
}

// The share of the padded rows of one warp; all its lanes construct it before their token and clear after it, so that the slots
// are read while the token is. It keeps nothing else meanwhile.
class PaddingRows {
 public:
  __device__ __forceinline__ PaddingRows(const int* slot_of_row, const Shape& shape) : slot_(find(slot_of_row, shape, 0)) {}

  // Calls also(row), in one lane, for every row that it clears.
  template <typename V, typename F>
  __device__ __forceinline__ void clear(V* rows_PH, const int* slot_of_row, const Shape& shape, const F& also) const {
    for (int base = 0; base < shape.rows_a_warp; base += 32) {
      const int slot = base == 0 ? slot_ : find(slot_of_row, shape, base);
      const bool own = slot == kBehindTheLast ? shape.clear_behind : static_cast<unsigned>(slot) >= shape.slots;
      for (unsigned left = __ballot_sync(kAllLanes, own); left; left &= left - 1) {
        const int64_t row = first(shape) + base + __ffs(left) - 1;
        V* out = rows_PH + row * shape.vectors;
        for (int v = threadIdx.x % 32; v < shape.vectors; v += 32) store_streaming(out + v, V{});
        if (threadIdx.x % 32 == 0) also(row);
      }
    }
  }

 private:
  static __device__ __forceinline__ int64_t first(const Shape& shape) {
    return (static_cast<int64_t>(blockIdx.x) * (shape.threads / 32) + threadIdx.x / 32) * shape.rows_a_warp;
  }
  // The slot of this lane's row from `base` on; 0, which is none to clear, where the share or the rows end.
  static __device__ __forceinline__ int find(const int* slot_of_row, const Shape& shape, int base) {
    const int i = base + threadIdx.x % 32;
    return i < shape.rows_a_warp && first(shape) + i < shape.rows ? slot_of_row[first(shape) + i] : 0;
  }

  int slot_;
};

// What gather does to a vector on its way.
template <typename V> struct Copy {
  static constexpr bool kWeighted = false;
  using Vec = V;
  using Factor = float;
};
template <typename T, int N> struct Scale {
  static constexpr bool kWeighted = true;
  using Vec = Vector<T, N>;
  using Factor = accumulate_t<T>;
  static __device__ __forceinline__ Vec apply(const Vec& value, accumulate_t<T> scale) {
    Vec scaled;
#pragma unroll
    for (int i = 0; i < N; ++i) scaled.element[i] = narrow<T>(scale * widen(value.element[i]));
    return scaled;
  }
};

// The slots of one pass: where their rows begin, and their weights. Lane j of every warp looks slot j up and hands it to the
// others, so that a pass waits for memory once; all lanes of a warp construct it together, for one token. A missing slot points
// at row 0, which every thread may load, so that all loads of a pass leave together, and `exists` keeps it out of the sums.
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
    exists = __ballot_sync(kAllLanes, own_row >= 0);
#pragma unroll
    for (int j = 0; j < S; ++j) {
      const int row = __shfl_sync(kAllLanes, own_row, j);
      if constexpr (kWeighted) weight[j] = __shfl_sync(kAllLanes, own_weight, j);
      at[j] = row >= 0 ? static_cast<int64_t>(row) * vectors : 0;
    }
  }
  __device__ __forceinline__ bool has(int j) const { return exists >> j & 1; }
};

struct GatherScalars {
  Scalars scale, probs, probs_out;
  bool drop_zero_probs;  // a slot whose probability is exactly 0 gets a row of zeros
};

// U vectors of the token are loaded together and then stored to each of its rows; where these are several, the first ones are
// loaded while the slots are looked up, and more, of very long rows, while those before are stored. kProbs: the probabilities
// travel too, whose calls leave no registers for that.
template <typename Step, int S, int U, bool kProbs>
__global__ void __launch_bounds__(kThreads) gather_kernel(
    const typename Step::Vec* __restrict__ x_TH, const Slots slots, const int* __restrict__ slot_of_row,
    const GatherScalars scalars, typename Step::Vec* __restrict__ out_PH, const Shape shape) {
  using V = typename Step::Vec;
  constexpr bool kAhead = S > 1 && !kProbs;
  const PaddingRows padding(slot_of_row, shape);
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (shape.threads / shape.group) + threadIdx.x / shape.group;
  const int lane = threadIdx.x % shape.group;
  const V* x = x_TH + token * shape.vectors;
  if (kAhead && lane == 0) prefetch_ahead(x_TH, token, shape.tokens, shape.vectors);
  const auto load = [&](int v, V (&value)[U]) {
#pragma unroll
    for (int u = 0; u < U; ++u) value[u] = x[min(v + u * shape.group, shape.vectors - 1)];
  };
  const int in_use = token < shape.tokens ? slots.in_use(token) : 0;
  for (int first = 0; first < in_use; first += S) {
    V next[U];
    if constexpr (kAhead) load(lane, next);
    Pass<typename Step::Factor, S, Step::kWeighted> pass(slots, scalars.scale, token, first, in_use, shape.vectors);
    unsigned zeroed = 0;
    if constexpr (kProbs) {
      const int j = threadIdx.x % 32;
      double prob = 1;
      const int64_t scalar = j < S && pass.has(j) ? slots.scalar_of(token, first + j) : -1;
      if (scalar >= 0) {
        prob = scalars.probs.read(scalar);
        if (lane < 32) scalars.probs_out.write(slots.row_of(token, first + j), prob);
      }
      pass.exists = __ballot_sync(kAllLanes, scalar >= 0);
      zeroed = __ballot_sync(kAllLanes, scalars.drop_zero_probs && prob == 0.0);
    }
    for (int v = lane; v < shape.vectors; v += U * shape.group) {
      V value[U];
      if constexpr (kAhead) {
#pragma unroll
        for (int u = 0; u < U; ++u) value[u] = next[u];
        if (v + U * shape.group < shape.vectors) load(v + U * shape.group, next);
      } else {
        load(v, value);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int at = v + u * shape.group;
        if (at >= shape.vectors) continue;
#pragma unroll
        for (int j = 0; j < S; ++j) {
          if (!pass.has(j)) continue;
          V out = value[u];
          if constexpr (Step::kWeighted) out = Step::apply(out, pass.weight[j]);
          if (kProbs && (zeroed >> j & 1)) out = V{};
          if constexpr (S > 1) store_streaming(out_PH + pass.at[j] + at, out);
          else out_PH[pass.at[j] + at] = out;
        }
      }
    }
  }
  padding.clear(out_PH, slot_of_row, shape, [&](int64_t row) {
    if constexpr (kProbs) scalars.probs_out.write(row, 0.0);
  });
}

// U vectors a thread at a time, U * S loads in flight. With kMany the slots take several passes, which start from the sums of
// those before.
template <typename T, int N, int S, bool kMany>
__global__ void __launch_bounds__(kThreads) scatter_kernel(
    const Vector<T, N>* __restrict__ y_PH, const Slots slots, const Scalars weights, Vector<T, N>* __restrict__ out_TH,
    const Shape shape) {
  using A = accumulate_t<T>;
  constexpr int U = S >= 8 ? 1 : S >= 4 ? 2 : 4;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (shape.threads / shape.group) + threadIdx.x / shape.group;
  if (token >= shape.tokens) return;
  const int in_use = slots.in_use(token);
  const int lane = threadIdx.x % shape.group;
  Vector<T, N>* out = out_TH + token * shape.vectors;
  const auto add = [&](const Pass<A, S>& pass, int v, A (&sum)[U][N]) {
    Vector<T, N> value[U][S];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const int at = min(v + u * shape.group, shape.vectors - 1);
#pragma unroll
      for (int j = 0; j < S; ++j) value[u][j] = S > 1 && S < 8 ? load_streaming(y_PH + pass.at[j] + at) : y_PH[pass.at[j] + at];
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
      for (int j = 0; j < S; ++j) {
        if (!pass.has(j)) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) sum[u][i] += pass.weight[j] * widen(value[u][j].element[i]);
      }
    }
  };
  const auto store = [&](int v, const A (&sum)[U][N]) {
#pragma unroll
    for (int u = 0; u < U; ++u) {
      Vector<T, N> rounded;
#pragma unroll
      for (int i = 0; i < N; ++i) rounded.element[i] = narrow<T>(sum[u][i]);
      if (v + u * shape.group < shape.vectors) out[v + u * shape.group] = rounded;
    }
  };
  if constexpr (kMany) {
    for (int v = lane; v - lane < shape.vectors; v += U * shape.group) {  // a warp's lanes stay together
      A sum[U][N] = {};
      for (int first = 0; first < in_use; first += S) {
        const Pass<A, S> pass(slots, weights, token, first, in_use, shape.vectors);
        if (pass.exists) add(pass, v, sum);
      }
      store(v, sum);
    }
  } else {
    const Pass<A, S> pass(slots, weights, token, 0, in_use, shape.vectors);
    for (int v = lane; v < shape.vectors; v += U * shape.group) {
      A sum[U][N] = {};
      if (pass.exists) add(pass, v, sum);
      store(v, sum);
    }
  }
}

// grad_y[row] = weight * grad[token]; grad_weight[slot] = <grad[token], y[row]>. Either may be left out.
template <typename T, int N, int S, bool kDots>
__global__ void __launch_bounds__(kThreads) scatter_backward_kernel(
    const Vector<T, N>* __restrict__ grad_TH, const Vector<T, N>* __restrict__ y_PH, const Slots slots,
    const int* __restrict__ slot_of_row, const Scalars weights, Vector<T, N>* __restrict__ grad_y_PH,
    const Scalars grad_weights, const Shape shape) {
  using A = accumulate_t<T>;
  constexpr int U = S >= 8 ? 1 : S >= 4 ? 2 : 4;
  const PaddingRows padding(slot_of_row, shape);
  __shared__ A warp_sums[kWarps][S];
  const int64_t token = static_cast<int64_t>(blockIdx.x) * (shape.threads / shape.group) + threadIdx.x / shape.group;
  const bool live = token < shape.tokens;
  const int in_use = live ? slots.in_use(token) : 0;
  const int lane = threadIdx.x % shape.group;
  // Groups of one block may have different numbers of slots in use, and all threads must meet at the barriers.
  __shared__ int most_in_use;
  int passes = slots.most;
  if (slots.count) {
    if (threadIdx.x == 0) most_in_use = 0;
    __syncthreads();
    if (lane == 0) atomicMax(&most_in_use, in_use);
    __syncthreads();
    passes = most_in_use;
  }
  for (int first = 0; first < passes; first += S) {
    const Pass<A, S> pass(slots, weights, live ? token : 0, first, in_use, shape.vectors);
    A dot[S] = {};
    if (pass.exists) {
      for (int v = lane; v < shape.vectors; v += U * shape.group) {
        Vector<T, N> grad[U], value[U][S];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int at = min(v + u * shape.group, shape.vectors - 1);
          grad[u] = grad_TH[token * shape.vectors + at];
          if constexpr (kDots) {
#pragma unroll
            for (int j = 0; j < S; ++j) value[u][j] = y_PH[pass.at[j] + at];
          }
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
          const int at = v + u * shape.group;
          if (at >= shape.vectors) continue;
#pragma unroll
          for (int j = 0; j < S; ++j) {
            if (!pass.has(j)) continue;
            if constexpr (kDots) {
#pragma unroll
              for (int i = 0; i < N; ++i) dot[j] += widen(grad[u].element[i]) * widen(value[u][j].element[i]);
            }
            if (grad_y_PH) {
              Vector<T, N> scaled;
#pragma unroll
              for (int i = 0; i < N; ++i) scaled.element[i] = narrow<T>(pass.weight[j] * widen(grad[u].element[i]));
              grad_y_PH[pass.at[j] + at] = scaled;
            }
          }
        }
      }
    }
    if constexpr (kDots) {
      // Threads of a warp by a butterfly, then the group's warps in ascending order.
      A sum = 0;
#pragma unroll
      for (int j = 0; j < S; ++j) {
#pragma unroll
        for (int step = 16; step > 0; step /= 2) dot[j] += __shfl_xor_sync(kAllLanes, dot[j], step);
        if (lane == j) sum = dot[j];
        if (shape.group > 32 && threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32][j] = dot[j];
      }
      if (shape.group > 32) {
        __syncthreads();
        const int first_warp = threadIdx.x / shape.group * (shape.group / 32);
        for (int w = 1; lane < S && w < shape.group / 32; ++w) sum += warp_sums[first_warp + w][lane];
        if (first + S < passes) __syncthreads();
      }
      // A ragged map's slot without a row may have any column; its gradient is zero beforehand.
      if (lane < S && first + lane < in_use && (!slots.column || slots.row_of(token, first + lane) >= 0)) {
        const int64_t scalar = slots.scalar_of(token, first + lane);
        if (scalar >= 0) grad_weights.write(scalar, sum);
      }
    }
  }
  padding.clear(grad_y_PH, slot_of_row, shape, [](int64_t) {});
}

const int* ints(const Tensor& tensor) { return static_cast<const int*>(tensor.data_ptr()); }

// rows: of the padded matrix that the slots' rows are read from or written to.
Slots make_slots(const Tensor& row_of_slot, const std::optional<Tensor>& columns, const std::optional<Tensor>& counts, int64_t rows,
                 std::initializer_list<const std::optional<Tensor>*> scalar_tensors) {
  int64_t scalar_stride = row_of_slot.size(1);
  for (const auto* tensor : scalar_tensors) if (*tensor) scalar_stride = (*tensor)->size(1);
  return {ints(row_of_slot), columns ? ints(*columns) : nullptr, counts ? ints(*counts) : nullptr, row_of_slot.stride(0),
          columns ? columns->stride(0) : 0, counts ? counts->stride(0) : 0, scalar_stride, static_cast<int>(row_of_slot.size(1)),
          static_cast<unsigned>(std::min<int64_t>(rows, INT32_MAX))};
}

// Runs body with N bound to the vector length and S to the slots of a pass: 16 bytes where rows and pointers allow it, with
// S as the slots need; one element otherwise, with one S, to keep the number of kernels small.
#define GBMOE_DISPATCH_VECTOR_AND_SLOTS(fits, slots, ...)                                  \
  do {                                                                                    \
    if (!(fits)) { constexpr int N = 1, S = 4; __VA_ARGS__; }                             \
    else if (slots <= 1) { constexpr int N = kVectorLength<T>, S = 1; __VA_ARGS__; }      \
    else if (slots <= 2) { constexpr int N = kVectorLength<T>, S = 2; __VA_ARGS__; }      \
    else if (slots <= 4) { constexpr int N = kVectorLength<T>, S = 4; __VA_ARGS__; }      \
    else { constexpr int N = kVectorLength<T>, S = 8; __VA_ARGS__; }                      \
  } while (0)

bool fits_16_bytes(int64_t row_bytes, std::initializer_list<const Tensor*> tensors) {
  bool fits = row_bytes % 16 == 0;
  for (const Tensor* tensor : tensors) fits = fits && (!tensor || aligned_16(*tensor));
  return fits;
}

template <typename V> V* data(const Tensor& tensor) { return static_cast<V*>(tensor.data_ptr()); }

}  // namespace

void padded_gather(
    Tensor x, Tensor row_of_slot, Tensor slot_of_row, std::optional<Tensor> columns, std::optional<Tensor> counts,
    std::optional<Tensor> scale, std::optional<Tensor> probs, bool drop_zero_probs, bool clear_behind, Tensor out,
    std::optional<Tensor> probs_out) {
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  const int64_t hidden = x.size(1), rows = slot_of_row.size(0), tokens = x.size(0);
  if (out.numel() == 0 && !probs_out) return;
  const Slots slots = make_slots(row_of_slot, columns, counts, rows, {&scale, &probs});
  const GatherScalars scalar_data{scalars(scale), scalars(probs), scalars(probs_out), drop_zero_probs};
  using One = std::integral_constant<int, 1>;
  using Two = std::integral_constant<int, 2>;
  using Four = std::integral_constant<int, 4>;
  using Eight = std::integral_constant<int, 8>;
  const auto launch = [&](auto step, auto slots_a_pass, int64_t vectors) {
    using Step = decltype(step);
    using V = typename Step::Vec;
    constexpr int S = decltype(slots_a_pass)::value;
    const auto start = [&](auto vectors_a_thread, int group) {
      constexpr int U = decltype(vectors_a_thread)::value;
      const Shape shape = make_shape(tokens, slots.most, rows, vectors, group, clear_behind);
      if (shape.blocks == 0) return;
      const auto kernel = probs ? gather_kernel<Step, S, U, true> : gather_kernel<Step, S, U, false>;
      kernel<<<shape.blocks, shape.threads, 0, current_stream(x)>>>(
          data<V>(x), slots, ints(slot_of_row), scalar_data, data<V>(out), shape);
    };
    if constexpr (S == 1) return start(Four(), few_threads(vectors));
    // Rows of up to 256 vectors want more threads, longer ones fewer; measured from 128 to 896.
    else if (vectors <= 256) return start(Two(), many_threads(vectors, 2));
    else return start(Four(), many_threads(vectors, 4));
  };
  const int64_t row_bytes = hidden * static_cast<int64_t>(x.element_size());
  const bool fits = fits_16_bytes(row_bytes, {&x, &out});
  if (scale) {
    GBMOE_DISPATCH_FLOATING(x.scalar_type(), "padded_gather", {
      if (fits) launch(Scale<T, kVectorLength<T>>(), Four(), hidden / kVectorLength<T>);
      else launch(Scale<T, 1>(), Four(), hidden);
    });
  } else if (fits) {
    if (slots.most <= 1) launch(Copy<uint4>(), One(), row_bytes / 16);
    else if (slots.most <= 2) launch(Copy<uint4>(), Two(), row_bytes / 16);
    else if (slots.most <= 4) launch(Copy<uint4>(), Four(), row_bytes / 16);
    else launch(Copy<uint4>(), Eight(), row_bytes / 16);
  } else {
    switch (x.element_size()) {
      case 8: launch(Copy<uint64_t>(), Four(), hidden); break;
      case 4: launch(Copy<uint32_t>(), Four(), hidden); break;
      case 2: launch(Copy<uint16_t>(), Four(), hidden); break;
      default: launch(Copy<uint8_t>(), Four(), row_bytes);
    }
  }
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void padded_scatter(
    Tensor y, Tensor row_of_slot, std::optional<Tensor> columns, std::optional<Tensor> counts, std::optional<Tensor> weights,
    Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(y.get_device_index());
  const int64_t hidden = y.size(1);
  if (out.numel() == 0) return;
  const Slots slots = make_slots(row_of_slot, columns, counts, y.size(0), {&weights});
  GBMOE_DISPATCH_FLOATING(y.scalar_type(), "padded_scatter", {
    const bool fits = fits_16_bytes(hidden * sizeof(T), {&y, &out});
    GBMOE_DISPATCH_VECTOR_AND_SLOTS(fits, slots.most, {
      const Shape shape = make_shape(out.size(0), slots.most, 0, hidden / N, few_threads(hidden / N), false);
      const auto kernel = slots.most > S ? scatter_kernel<T, N, S, true> : scatter_kernel<T, N, S, false>;
      kernel<<<shape.blocks, shape.threads, 0, current_stream(y)>>>(
          data<Vector<T, N>>(y), slots, scalars(weights), data<Vector<T, N>>(out), shape);
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

void padded_scatter_backward(
    Tensor grad, std::optional<Tensor> y, Tensor row_of_slot, Tensor slot_of_row, std::optional<Tensor> columns,
    std::optional<Tensor> counts, std::optional<Tensor> weights, bool clear_behind, std::optional<Tensor> grad_y,
    std::optional<Tensor> grad_weights) {
  const torch::stable::accelerator::DeviceGuard guard(grad.get_device_index());
  const int64_t hidden = grad.size(1), tokens = grad.size(0), rows = grad_y ? grad_y->size(0) : 0;
  if (hidden == 0 || (tokens == 0 && rows == 0)) return;
  if (!grad_weights) y.reset();  // y serves its gradient only
  const int64_t rows_of_both = grad_y && y ? std::min(rows, y->size(0)) : y ? y->size(0) : rows;
  const Slots slots = make_slots(row_of_slot, columns, counts, rows_of_both, {&weights, &grad_weights});
  const Tensor* y_data = y ? &*y : nullptr;
  const Tensor* grad_y_data = grad_y ? &*grad_y : nullptr;
  GBMOE_DISPATCH_FLOATING(grad.scalar_type(), "padded_scatter_backward", {
    const bool fits = fits_16_bytes(hidden * sizeof(T), {&grad, y_data, grad_y_data});
    GBMOE_DISPATCH_VECTOR_AND_SLOTS(fits, slots.most, {
      using V = Vector<T, N>;
      const Shape shape = make_shape(tokens, slots.most, rows, hidden / N, few_threads(hidden / N), clear_behind);
      const auto kernel = y ? scatter_backward_kernel<T, N, S, true> : scatter_backward_kernel<T, N, S, false>;
      kernel<<<shape.blocks, shape.threads, 0, current_stream(grad)>>>(
          data<V>(grad), y ? data<V>(*y) : nullptr, slots, ints(slot_of_row), scalars(weights),
          grad_y ? data<V>(*grad_y) : nullptr, scalars(grad_weights), shape);
    });
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace gbmoe
