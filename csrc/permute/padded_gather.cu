// padded_gather: tokens to the rows of their slots, with the padding cleared; and, where given, their probabilities.

#include "../operators.h"
#include "padded_rows.cuh"

namespace gbmoe {
namespace {

// Prefetches to L2 a row of 16-byte vectors that a CTA some 4 MiB further on will read: a gather with several rows per token
// takes 1 % less time. Half that distance helps half as much; twice that distance makes it take 1 to 4 % longer where rows are
// long.
constexpr int kVectorsAhead = (4 << 20) / 16;
template <typename V> __device__ __forceinline__ void prefetch_ahead(const V* x_TH, int64_t token, int64_t tokens, int vectors) {
#if __CUDA_ARCH__ >= 900
  const int64_t later = token + kVectorsAhead / vectors;
  if (sizeof(V) == 16 && later < tokens) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(x_TH + later * vectors), "r"(vectors * 16) : "memory");
  }
#endif
}

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

struct GatherScalars {
  Scalars scale, probs, probs_out;
  bool drop_zero_probs;  // a slot whose probability is exactly 0 gets a row of zeros
};

// U vectors of the token are loaded together and then stored to each of its rows. Where a token has several rows, the first
// vectors are loaded while the slots are looked up, and the next ones, of very long rows, while those before are stored. With
// kProbs the probabilities are gathered too; their function calls leave no registers for loading ahead.
template <typename Step, int S, int U, bool kProbs>
__global__ void __launch_bounds__(kThreads) gather_kernel(
    const typename Step::Vec* __restrict__ x_TH, const Slots slots, const int* __restrict__ slot_of_row,
    const GatherScalars scalars, typename Step::Vec* __restrict__ out_PH, const LaunchShape shape) {
  using V = typename Step::Vec;
  constexpr bool kAhead = S > 1 && !kProbs;
  const PaddingRows padding(slot_of_row, shape);
  const int64_t token = shape.own_token();
  const int thread = threadIdx.x % shape.token_threads;  // of those that own the token
  const V* x = x_TH + token * shape.vectors;
  if (kAhead && thread == 0) prefetch_ahead(x_TH, token, shape.tokens, shape.vectors);
  const auto load = [&](int v, V (&value)[U]) {
#pragma unroll
    for (int u = 0; u < U; ++u) value[u] = x[min(v + u * shape.token_threads, shape.vectors - 1)];
  };
  const int in_use = token < shape.tokens ? slots.in_use(token) : 0;
  for (int first = 0; first < in_use; first += S) {
    V next[U];
    if constexpr (kAhead) load(thread, next);
    Pass<typename Step::Factor, S, Step::kWeighted> pass(slots, scalars.scale, token, first, in_use, shape.vectors);
    unsigned zeroed = 0;
    if constexpr (kProbs) {
      const int j = threadIdx.x % 32;
      double prob = 1;
      const int64_t scalar = j < S && pass.has(j) ? slots.scalar_of(token, first + j) : -1;
      if (scalar >= 0) {
        prob = scalars.probs.read(scalar);
        if (thread < 32) scalars.probs_out.write(slots.row_of(token, first + j), prob);
      }
      pass.exists = __ballot_sync(kFullWarp, scalar >= 0);
      zeroed = __ballot_sync(kFullWarp, scalars.drop_zero_probs && prob == 0.0);
    }
    for (int v = thread; v < shape.vectors; v += U * shape.token_threads) {
      V value[U];
      if constexpr (kAhead) {
#pragma unroll
        for (int u = 0; u < U; ++u) value[u] = next[u];
        if (v + U * shape.token_threads < shape.vectors) load(v + U * shape.token_threads, next);
      } else {
        load(v, value);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int at = v + u * shape.token_threads;
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

// Threads per token where its row is written several times: as many as read the whole row at once, `per_thread` vectors each.
int many_threads(int64_t vectors, int per_thread) {
  const int64_t warps = std::max<int64_t>(ceil_div(vectors, 32 * per_thread), 1);
  return 32 * static_cast<int>(std::min<int64_t>(warps, kWarps));
}

}  // namespace

// row_of_slot, columns and counts may be views with a row stride; short_row is tuning.permute.SHORT_ROW
void padded_gather(
    Tensor x, Tensor row_of_slot, Tensor slot_of_row, std::optional<Tensor> columns, std::optional<Tensor> counts,
    std::optional<Tensor> scale, std::optional<Tensor> probs, bool drop_zero_probs, bool clear_behind, int64_t short_row, Tensor out,
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
  const auto launch = [&](auto step, auto slots_per_pass, int64_t vectors) {
    using Step = decltype(step);
    using V = typename Step::Vec;
    constexpr int S = decltype(slots_per_pass)::value;
    const auto start = [&](auto vectors_per_thread, int token_threads) {
      constexpr int U = decltype(vectors_per_thread)::value;
      const LaunchShape shape = make_launch_shape(tokens, slots.most, rows, vectors, token_threads, clear_behind);
      if (shape.ctas == 0) return;
      const auto kernel = probs ? gather_kernel<Step, S, U, true> : gather_kernel<Step, S, U, false>;
      kernel<<<shape.ctas, shape.threads, 0, current_stream(x)>>>(
          data<V>(x), slots, data<const int>(slot_of_row), scalar_data, data<V>(out), shape);
    };
    if constexpr (S == 1) return start(Four(), few_threads(vectors));
    // Short rows want more threads, longer ones fewer.
    else if (vectors <= short_row) return start(Two(), many_threads(vectors, 2));
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

GBMOE_OPERATOR(padded_gather,
               "(Tensor x, Tensor row_of_slot, Tensor slot_of_row, Tensor? columns, Tensor? counts, Tensor? scale, Tensor? "
               "probs, bool drop_zero_probs, bool clear_behind, int short_row, Tensor(a!) out, Tensor(b!)? probs_out) -> ()");

}  // namespace gbmoe
