// m-grouped GEMMs whose groups have few rows: what takes time is to read each group's weights once, as when a few tokens are generated.
// (The hopper engine has its own in hopper/few_rows_gemm.cuh, and takes a batch-invariant router's logits from here.)
//
// A CTA computes the columns of one tile for all rows of one group, and its warps divide the terms of the sums over K among them. A lane
// loads the 16 bytes of a weight that it will multiply into registers of its own. CTAs are small, and several run on a multiprocessor:
// while one finds its group, or adds up, the others' loads keep the memory busy. The warps of a CTA either
// - sum a part of K each, and these parts are added up at the end, in a fixed order, so that no warp waits for another one's loads before;
// - or take turns, in a router's logits: each loads its next terms while others multiply, and hands the sums on to the next. All terms are
//   added to a sum in the order of K, 16 at a time, so that on Hopper its bits are those of every kernel in tensor_core/ and of those in
//   hopper/ that do not split sums (docs/numerics.md).
//
// The order of the 16 terms of an mma.sync is free as long as both operands have the same: they need not be those that its fragments are
// drawn with. On Hopper that changes no bit; before, an mma.sync of 16 terms is said to be two sums of 8, one after the other.
//
// Legend: out [P,N] = x [P,K] @ b[e]; b[e] is [N,K] where it is K-major, or [K,N]; E groups (experts), P rows of all groups. Lane 4 g + q
// of a warp has the columns and rows of number g, and the terms of number q.

#pragma once

#include <algorithm>

#include "../early_launch.cuh"
#include "../group_sizes.cuh"
#include "../pitch.cuh"
#include "../places.cuh"
#include "few_rows_store.cuh"
#include "ptx.cuh"
#include "traits.cuh"

namespace gbmoe::few_rows {

using tensor_core::mma;

constexpr int kRows = 8;  // of an mma.sync; a group with more is walked so many at a time
constexpr int kColumns = 8;  // of an mma.sync

using tensor_core::EpilogueKind;

struct Arguments {
  const void* sizes;  // [E], rows of each group; null: one group has all rows
  bool sizes_are_int64;  // else int32
  int groups;
  int rows;  // P: no group reaches beyond it, whatever its size says
  const void* x;  // [P,K], or the tokens [T,K] where slot_of_row is given
  const int* slot_of_row;  // [P]: row r is token slot_of_row[r] / top_k, or zeros where that names no token
  int tokens, top_k;
  int row_blocks;  // CTAs that divide a group's rows, kRows at a time, among them
  int size_n, size_k;
  const void* b[2];  // [E,N,K] or [E,K,N]; the second is v1 of a GLU
  Pitch pitch_b;  // of both
  bool paired;  // in a GLU: the only b is [E,K,2N], columns of w1 and v1 in turns
  Bias bias[2];  // the second is v1's; none for sums of warps that take turns
  ActivationOf activation;
  void* out[3];  // [P,N]; with an activation a, h and g, of which h and g may be null
  int step;  // of h and g, as store_few_rows has it
  bool reads_early;  // b and sizes were complete before the kernel before this one began: they are read before it has ended
  bool next_begins_early;  // the next kernel's CTAs take what room this one's last CTAs leave, rather than wait for them
  bool out_is_float;  // sums of warps that take turns: out has fp32, and they are not rounded
  Places places;  // of both b's
};

struct Group { int number, first_row, rows; };

// Group `index` of those that have rows; without rows where there are not so many. All lanes of a warp call it together.
__device__ __forceinline__ Group find_group(const Arguments& args, int index) {
  if (!args.sizes) return {0, 0, args.rows};
  constexpr int kAtOnce = 4;  // loads in flight
  const int lane = threadIdx.x % 32;
  int rows_before = 0;  // in this lane's groups
  for (int base = 0; base < args.groups; base += 32 * kAtOnce) {
    int sizes[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sizes[i] = size_of_group(args, base + 32 * i + lane);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const unsigned with_rows = __ballot_sync(kFullWarp, sizes[i] > 0);
      if (index < __popc(with_rows)) {
        const bool is_it = sizes[i] > 0 && __popc(with_rows & ((1u << lane) - 1)) == index;
        const int owner = __ffs(__ballot_sync(kFullWarp, is_it)) - 1;
        int first_row = lane < owner ? add_rows(args, rows_before, sizes[i]) : rows_before;
#pragma unroll
        for (int step = 16; step > 0; step /= 2)
          first_row = add_rows(args, first_row, __shfl_xor_sync(kFullWarp, first_row, step));
        const int size = __shfl_sync(kFullWarp, sizes[i], owner);
        return {base + 32 * i + owner, first_row, min(size, args.rows - first_row)};
      }
      index -= __popc(with_rows);
      rows_before = add_rows(args, rows_before, sizes[i]);
    }
  }
  return {};
}

// Row `row` of x, or null where there is none or it is zeros.
template <typename T> __device__ __forceinline__ const T* row_of(const Arguments& args, const Group& group, int row) {
  if (row >= group.rows) return nullptr;
  int64_t at = group.first_row + row;
  if (args.slot_of_row) {
    const int slot = tensor_core::load_in_place(args.slot_of_row + at);  // after those of weights
    at = slot / args.top_k;
    if (slot < 0 || at >= args.tokens) return nullptr;
  }
  return static_cast<const T*>(args.x) + at * args.size_k;
}

__device__ __forceinline__ uint4 zero_unless(bool here, const uint4& v) {
  return {here ? v.x : 0, here ? v.y : 0, here ? v.z : 0, here ? v.w : 0};
}

// The columns of a warp where b is contiguous along K: two runs of 8, of which a lane has column g each, and of a step's terms those
// from 8 q to 8 q + 7. In a GLU one run is w1's and one v1's. With kFewCtas, at most as many as there are multiprocessors, a CTA has 2,048
// terms in flight instead of 512, because there are no others to hide its loads, or with one run 4,096.
template <typename T, bool kGlu, bool kFewCtas = false, int kRuns = 2> struct KMajorColumns {
  static constexpr int kSmallCtas = kGlu ? 6 : 5;  // on a multiprocessor; with these ptxas spills at most 24 bytes
  static constexpr int kWarps = kFewCtas ? 8 : 4, kCtasPerMultiprocessor = kFewCtas ? 1 : kSmallCtas;
  static constexpr int kStep = 32, kVectors = kRuns;  // terms of a step, and a lane's vectors of it
  static constexpr int kAtOnce = kFewCtas ? 16 / kRuns : 4;  // steps in flight
  static constexpr int kTerms = 8;  // of a row that a lane multiplies in a step
  static constexpr int kTileN = kGlu ? kColumns : kRuns * kColumns;  // columns of one output tensor
  static constexpr int kSums = kRuns * kColumns;  // of a row; in a GLU h's, then g's
  static constexpr int kFragments = kRuns;
  using RowVector = uint4;

  const T* column[kRuns];
  alignas(16) float sums[kFragments][4] = {};  // of a run; the last two are of rows that there are none of

  // A column that does not exist is the first one instead, whose sums are not stored.
  __device__ __forceinline__ KMajorColumns(const Arguments& args, int group, int n) {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      const int number = n + (kGlu ? 0 : i * kColumns) + threadIdx.x % 32 / 4;
      const T* matrix = static_cast<const T*>(args.b[kGlu ? i : 0]) + args.places.of(group, kGlu ? i : 0) * args.pitch_b.group;
      column[i] = matrix + static_cast<int64_t>(number < args.size_n ? number : 0) * args.pitch_b.row;
    }
  }
  // The vectors of the step in which the lane's first term is k.
  __device__ __forceinline__ void load(const Arguments&, int k, uint4 (&to)[kVectors]) const {
#pragma unroll
    for (int i = 0; i < kRuns; ++i) to[i] = tensor_core::load_once_16(column[i] + k);
  }
  // In order, exchanges halves of vectors with another lane, so that x and y are of the step's first 16 terms in all lanes, z and w of its
  // last 16.
  template <bool kInOrder> __device__ __forceinline__ static void arrange(uint4 (&v)[kVectors]) {
    if constexpr (!kInOrder) return;
    const bool has_first = threadIdx.x % 4 < 2;
#pragma unroll
    for (uint4& own : v) {
      const uint2 other = {
          __shfl_xor_sync(kFullWarp, has_first ? own.z : own.x, 2), __shfl_xor_sync(kFullWarp, has_first ? own.w : own.y, 2)};
      own = has_first ? uint4{own.x, own.y, other.x, other.y} : uint4{other.x, other.y, own.z, own.w};
    }
  }
  // The row's terms that belong to a lane's vectors of the step that begins with term k.
  template <bool kInOrder> __device__ __forceinline__ static uint4 load_row(const T* row, int k, int end) {
    const int q = threadIdx.x % 4;
    if constexpr (kInOrder) {
      const int first = k + (q % 2 * 8 + q / 2 * 4);
      const uint2 nothing{}, low = row && first < end ? *reinterpret_cast<const uint2*>(row + first) : nothing,
                             high = row && first + 16 < end ? *reinterpret_cast<const uint2*>(row + first + 16) : nothing;
      return {low.x, low.y, high.x, high.y};
    } else {
      return row && k + kTerms * q < end ? *reinterpret_cast<const uint4*>(row + k + kTerms * q) : uint4{};
    }
  }
  __device__ __forceinline__ void multiply(const uint4& row, const uint4 (&v)[kVectors]) {
    // The weights are the second operand, which has them in the registers to which they were loaded.
#pragma unroll
    for (int i = 0; i < kRuns; ++i) {
      mma<T>(sums[i], {row.x, 0, row.y, 0}, v[i].x, v[i].y);
      mma<T>(sums[i], {row.z, 0, row.w, 0}, v[i].z, v[i].w);
    }
  }
  // Hands f each of the lane's sums, with its row and its place in the row.
  template <typename F> __device__ __forceinline__ void each(const Arguments&, const F& f) const {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2 * kRuns; ++i) f(g, i / 2 * kColumns + 2 * q + i % 2, sums[i / 2][i % 2]);
  }
};

// The same where b is contiguous along N: eight runs of 8 columns. A lane's vectors are columns 8 g to 8 g + 7 of one term each, those
// from kTerms q on. In a GLU half of the runs are w1's and half v1's, or in all columns of both take turns. The first GEMM (kUp) divides
// the terms among warps and products as KMajorColumns does, so that its bits do not depend on how weights lie.
template <typename T, bool kUp = false, bool kGlu = false> struct NMajorColumns {
  static constexpr int kWarps = kUp ? 4 : 8, kCtasPerMultiprocessor = kUp ? 4 : 2;
  static constexpr int kTerms = kUp ? 8 : 4, kStep = 4 * kTerms, kVectors = kTerms, kAtOnce = 16 / kTerms;
  static constexpr int kSums = 64, kTileN = kGlu ? kSums / 2 : kSums, kFragments = 4;
  using RowVector = std::conditional_t<kUp, uint4, uint2>;

  const T* terms;  // of the lane's columns
  alignas(16) float sums[kFragments][4] = {};  // of columns 8 g + 2 j, then of those next to them

  __device__ __forceinline__ NMajorColumns(const Arguments& args, int group, int n) {
    const int run = threadIdx.x % 32 / 4 * kColumns, times = kGlu && args.paired ? 2 : 1;
    const bool of_v1 = kGlu && times == 1 && run >= kTileN;
    const T* matrix = static_cast<const T*>(of_v1 ? args.b[1] : args.b[0]) + args.places.of(group, of_v1) * args.pitch_b.group;
    const int column = times * n + run - (of_v1 ? kTileN : 0);
    terms = matrix + (column < times * args.size_n ? column : 0);
  }
  __device__ __forceinline__ void load(const Arguments& args, int k, uint4 (&to)[kVectors]) const {
    const T* from = terms + static_cast<int64_t>(k) * args.pitch_b.row;
#pragma unroll
    for (int i = 0; i < kVectors; ++i, from += args.pitch_b.row) to[i] = tensor_core::load_once_16(from);
  }
  // Two terms a word instead of two columns: terms 0 and 1 of columns 2 j, the same of columns 2 j + 1, then terms 2 and 3, and so on.
  template <bool> __device__ __forceinline__ static void arrange(uint4 (&v)[kVectors]) {
#pragma unroll
    for (int i = 0; i < kVectors; i += 2) {
      const uint4 one = v[i], next = v[i + 1];
      const auto pairs = [&](unsigned bytes) {
        return uint4{
            __byte_perm(one.x, next.x, bytes), __byte_perm(one.y, next.y, bytes), __byte_perm(one.z, next.z, bytes),
            __byte_perm(one.w, next.w, bytes)};
      };
      v[i] = pairs(0x5410), v[i + 1] = pairs(0x7632);
    }
  }
  template <bool> __device__ __forceinline__ static RowVector load_row(const T* row, int k, int end) {
    const int first = k + kTerms * (threadIdx.x % 4);
    return row && first < end ? *reinterpret_cast<const RowVector*>(row + first) : RowVector{};
  }
  __device__ __forceinline__ void multiply(const RowVector& row, const uint4 (&v)[kVectors]) {
    multiply_four(row.x, row.y, v);
    if constexpr (kUp) multiply_four(row.z, row.w, v + 4);
  }
  // A lane's next four terms.
  __device__ __forceinline__ void multiply_four(unsigned one, unsigned next, const uint4* v) {
    mma<T>(sums[0], {v[0].x, v[1].x, v[2].x, v[3].x}, one, next);
    mma<T>(sums[1], {v[0].y, v[1].y, v[2].y, v[3].y}, one, next);
    mma<T>(sums[2], {v[0].z, v[1].z, v[2].z, v[3].z}, one, next);
    mma<T>(sums[3], {v[0].w, v[1].w, v[2].w, v[3].w}, one, next);
  }
  template <typename F> __device__ __forceinline__ void each(const Arguments& args, const F& f) const {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const bool paired = kGlu && args.paired;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int of_two = i / 2 % 2, of_eight = i / 4 * 2 + of_two;
      f(2 * q + i % 2, paired ? of_two * kTileN + 4 * g + i / 4 : 8 * g + of_eight, sums[i / 4][i % 4]);
    }
  }
};

// The sums of kRows rows, in shared memory; rows begin in different banks. Warps that take turns make one sum together, the others make
// a part each.
template <typename Columns, bool kInTurns> struct Sums {
  static constexpr int kParts = kInTurns ? 1 : Columns::kWarps;
  float of_part[kParts][kRows][Columns::kSums + 1];
  float4 handed_on[kInTurns ? Columns::kFragments : 1][32];  // to the warp whose turn is next
};

// A warp's products of one batch of steps, whose first terms are k and those after it, added to its sums.
//
// The steps of a batch are loaded together, and then multiplied: it is other warps that load meanwhile. A load under a condition costs
// ptxas more registers than its vector has. So the weights of terms that do not exist are those of the first one, and count as zeros.
template <typename T, bool kInOrder, typename Columns, typename F>
__device__ __forceinline__ void add_batch(
    const Arguments& args, const Group& group, int row, int k, int end, bool waits, Columns& columns, const F& before_products) {
  constexpr int kAtOnce = Columns::kAtOnce, kStep = Columns::kStep;
  const int own = k + Columns::kTerms * (threadIdx.x % 4);  // the first of the lane's terms
  uint4 vectors[kAtOnce][Columns::kVectors];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) columns.load(args, own + i * kStep < end ? own + i * kStep : 0, vectors[i]);
  if (waits) wait_for_kernel_before();
  const T* of_row = row_of<T>(args, group, row + threadIdx.x % 32 / 4);
  typename Columns::RowVector terms[kAtOnce];
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) terms[i] = Columns::template load_row<kInOrder>(of_row, k + i * kStep, end);
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) {
#pragma unroll
    for (uint4& v : vectors[i]) v = zero_unless(own + i * kStep < end, v);
    Columns::template arrange<kInOrder>(vectors[i]);
  }
  before_products();
#pragma unroll
  for (int i = 0; i < kAtOnce; ++i) columns.multiply(terms[i], vectors[i]);
}

// The sums of kRows rows of the group, from row `row` on: all warps together leave them in shared memory, complete after a barrier.
template <typename T, typename Columns, bool kInTurns>
__device__ __forceinline__ void sum_rows(
    const Arguments& args, const Group& group, int row, int n, Sums<Columns, kInTurns>& sums) {
  constexpr int kWarps = Columns::kWarps, kStep = Columns::kStep, kBatch = Columns::kAtOnce * kStep;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, steps = ceil_div(args.size_k, kStep);
  const int first = kInTurns ? warp * kBatch : warp * steps / kWarps * kStep;
  const int end = kInTurns ? args.size_k : min((warp + 1) * steps / kWarps * kStep, args.size_k);
  Columns columns(args, group.number, n);
#pragma unroll 1
  for (int k = first; k < end; k += kInTurns ? kWarps * kBatch : kBatch) {
    add_batch<T, kInTurns>(args, group, row, k, end, args.reads_early && k == first, columns, [&] {
      if (!kInTurns || k == 0) return;
      tensor_core::await_turn<kWarps>(warp);
#pragma unroll
      for (int i = 0; i < Columns::kFragments; ++i) reinterpret_cast<float4&>(columns.sums[i]) = sums.handed_on[i][lane];
    });
    if (kInTurns && k + kBatch < end) {
#pragma unroll
      for (int i = 0; i < Columns::kFragments; ++i) sums.handed_on[i][lane] = reinterpret_cast<const float4&>(columns.sums[i]);
      tensor_core::pass_turn<kWarps>((warp + 1) % kWarps);
    }
  }
  wait_for_kernel_before();  // also in a warp without terms
  let_next_kernel_begin();
  const bool has_sums = !kInTurns || warp == (args.size_k - 1) / kBatch % kWarps;
  if (has_sums) columns.each(args, [&](int r, int in_row, float sum) { sums.of_part[kInTurns ? 0 : warp][r][in_row] = sum; });
}

// Adds the parts of the sums up, and biases to them, and stores the results of those of the kRows rows that exist. Sums that warps took
// turns with have one part, no bias and no activation.
template <typename T, EpilogueKind kEpilogue, typename Columns, bool kInTurns>
__device__ __forceinline__ void store(
    const Arguments& args, const Sums<Columns, kInTurns>& sums, int group, int64_t first_row, int rows, int n) {
  const int existing = min(rows, kRows), threads = 32 * Columns::kWarps;
  if constexpr (kInTurns) {
#pragma unroll 1  // registers for more addresses at a time would be spilled in the main loop
    for (int i = threadIdx.x; i < existing * Columns::kTileN; i += threads) {
      const int row = i / Columns::kTileN, column = i % Columns::kTileN;
      if (n + column >= args.size_n) continue;
      const int64_t at = (first_row + row) * args.size_n + n + column;
      const float sum = sums.of_part[0][row][column];
      if (args.out_is_float) static_cast<float*>(args.out[0])[at] = sum;
      else static_cast<T*>(args.out[0])[at] = narrow<T>(sum);
    }
  } else {
    const auto rounded_sum = [&](int row, int in_row) {
      float sum = sums.of_part[0][row][in_row];
#pragma unroll
      for (int part = 1; part < sums.kParts; ++part) sum += sums.of_part[part][row][in_row];
      const bool of_v1 = kEpilogue == EpilogueKind::kGlu && in_row >= Columns::kTileN;
      return narrow<T>(sum + bias_at<T>(args.bias[of_v1], group, n + in_row - (of_v1 ? Columns::kTileN : 0), args.size_n));
    };
    store_few_rows<T, kEpilogue != EpilogueKind::kStore, kEpilogue == EpilogueKind::kGlu>(
        args.out, args.activation, first_row, existing, args.size_n, n, Columns::kTileN, args.step, threads, rounded_sum);
  }
}

// row_blocks CTAs for each tile of columns of each group that may have rows, min(E, P) of them; the tiles of a group come one after the
// other.
template <typename T, typename Columns, EpilogueKind kEpilogue, bool kInTurns>
__global__ void __launch_bounds__(32 * Columns::kWarps, Columns::kCtasPerMultiprocessor) few_rows_kernel(const Arguments args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(16) unsigned char shared_bytes[];
  auto& sums = *reinterpret_cast<Sums<Columns, kInTurns>*>(shared_bytes);
  if (!args.reads_early) {
    wait_for_kernel_before();
    if (args.next_begins_early) let_next_kernel_begin();
  }
  const int tiles_n = ceil_div(args.size_n, Columns::kTileN), n = blockIdx.x % tiles_n * Columns::kTileN;
  const int block = blockIdx.x / tiles_n;
  const Group group = find_group(args, block / args.row_blocks);
  const int first_row = block % args.row_blocks * kRows;
  if (first_row >= group.rows) wait_for_kernel_before();
  for (int row = first_row; row < group.rows; row += args.row_blocks * kRows) {
    sum_rows<T, Columns>(args, group, row, n, sums);
    __syncthreads();
    store<T, kEpilogue>(args, sums, group.number, group.first_row + row, group.rows - row, n);
    __syncthreads();
  }
#else
  __trap();
#endif
}

}  // namespace gbmoe::few_rows
