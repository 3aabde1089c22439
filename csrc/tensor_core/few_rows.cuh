// m-grouped GEMMs whose groups have few rows: what takes time is to read each group's weights once, as when a few tokens are generated.
//
// A work item is a tile of columns of one group, with all of its rows. Each CTA takes the same number of items, one after the other, and
// its warps divide the sum over K among them. A lane copies the 16 bytes of a weight that it will multiply to a place in shared memory of
// its own, many ahead and beyond the end of an item, and takes them from there: until an item's sums are complete no warp waits for
// another one. Then these are added up, in a fixed order. So what a row gets does not depend on other rows.
//
// mma.sync multiplies 16 columns of b, as the 16 rows of its first operand, by 8 rows of x. In a sum the order of K is free as long as both
// operands have the same. So the 16 terms of an mma.sync are those that lie side by side in a lane's vectors, not those that its
// fragments are drawn with.
//
// Legend: out [P,N] = x [P,K] @ b[e]; b[e] is [N,K] where it is K-major, or [K,N]; E groups (experts), P rows of all groups.

#pragma once

#include <algorithm>

#include "../activation_formulas.cuh"
#include "../group_sizes.cuh"
#include "ptx.cuh"

namespace gbmoe::few_rows {

using tensor_core::mma;

constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kCtasPerMultiprocessor = 2;
constexpr int kRows = 8;    // of an mma.sync; a group with more is walked so many at a time
constexpr int kBlock = 8;   // columns, half of an mma.sync's
constexpr int kStep = 32;   // terms of the sum that a warp multiplies at a time

enum class Epilogue { kStore, kActivation, kGlu };  // as in traits.cuh

struct Arguments {
  const void* sizes;        // [E], rows of each group
  bool sizes_are_int64;     // else int32
  int groups;
  int rows;                 // P: no group reaches beyond it, whatever its size says
  const void* x;            // [P,K], or the tokens [T,K] where slot_of_row is given
  const int* slot_of_row;   // [P]: row r is token slot_of_row[r] / top_k, or zeros where that names no token
  int tokens, top_k;
  int size_n, size_k;
  const void* b[2];         // [E,N,K] or [E,K,N]; the second is v1 of a GLU
  int activation;
  void* out[3];             // [P,N]; with an activation a, h and g, of which h and g may be null
};

struct Group { int number, first_row, rows; };

// Walks the groups that have rows, 32 groups at a time, until f(group of the lane, its number among those with rows, whether it has any)
// is true; f and this are called by all lanes of a warp. Returns how many groups with rows have been passed.
template <typename F> __device__ __forceinline__ int walk_groups(const Arguments& args, const F& f) {
  constexpr int kAtOnce = 4;  // loads in flight
  const int lane = threadIdx.x % 32;
  int next_row = 0, passed = 0;
  for (int base = 0; base < args.groups; base += 32 * kAtOnce) {
    int sizes[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sizes[i] = size_of_group(args, base + 32 * i + lane);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      int end = sizes[i];
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int below = __shfl_up_sync(kFullWarp, end, step);
        if (lane >= step) end = add_rows(args, end, below);
      }
      end = add_rows(args, end, next_row);
      const int before = __shfl_up_sync(kFullWarp, end, 1), first = lane == 0 ? next_row : before;
      const unsigned with_rows = __ballot_sync(kFullWarp, end > first);
      const int number = passed + __popc(with_rows & ((1u << lane) - 1));
      if (f(Group{base + 32 * i + lane, first, end - first}, number, end > first)) return passed;
      passed += __popc(with_rows);
      next_row = __shfl_sync(kFullWarp, end, 31);
    }
  }
  return passed;
}
__device__ __forceinline__ int count_groups_with_rows(const Arguments& args) {
  return walk_groups(args, [](const Group&, int, bool) { return false; });
}
// Group `index` of those that have rows, which exists.
__device__ __forceinline__ Group find_group(const Arguments& args, int index) {
  Group found{};
  walk_groups(args, [&](const Group& of_lane, int number, bool has_rows) {
    const unsigned is_it = __ballot_sync(kFullWarp, has_rows && number == index);
    if (!is_it) return false;
    const int owner = __ffs(is_it) - 1;
    found.number = __shfl_sync(kFullWarp, of_lane.number, owner);
    found.first_row = __shfl_sync(kFullWarp, of_lane.first_row, owner);
    found.rows = __shfl_sync(kFullWarp, of_lane.rows, owner);
    return true;
  });
  return found;
}

// A warp's way through the items of its CTA, and through the rows of each.
template <int kTileN> struct Cursor {
  int item, end, tiles_n;
  Group group{};
  int row = 0;  // of the group, the first of those that are multiplied together

  __device__ __forceinline__ Cursor(const Arguments& args, int first, int end)
      : item(first), end(end), tiles_n(ceil_div(args.size_n, kTileN)) {
    if (valid()) group = find_group(args, item / tiles_n);
  }
  __device__ __forceinline__ bool valid() const { return item < end; }
  __device__ __forceinline__ int n() const { return item % tiles_n * kTileN; }
  __device__ __forceinline__ void advance(const Arguments& args) {
    row += kRows;
    if (row < group.rows) return;
    row = 0;
    if (++item % tiles_n == 0 && valid()) group = find_group(args, item / tiles_n);
  }
};

// Row `row` of x, or null where there is none or it is zeros.
template <typename T> __device__ __forceinline__ const T* row_of(const Arguments& args, const Group& group, int row) {
  if (row >= group.rows) return nullptr;
  int64_t at = group.first_row + row;
  if (args.slot_of_row) {
    const int slot = args.slot_of_row[at];
    at = slot / args.top_k;
    if (slot < 0 || at >= args.tokens) return nullptr;
  }
  return static_cast<const T*>(args.x) + at * args.size_k;
}

// Vectors of 16 bytes in shared memory, as C++ and as cp.async find them.
struct Places {
  const uint4* vectors;
  uint32_t address;

  __device__ __forceinline__ Places from(int number) const { return {vectors + number, address + number * 16}; }
};

// The columns of a warp where b is contiguous along K: two blocks of 8, of which lane 4 g + q has column g each, and of a step's terms
// those from 8 q to 8 q + 7. In a GLU one block is w1's and one v1's.
template <typename T, bool kGlu> struct KMajorColumns {
  static constexpr int kVectors = 2, kStages = 6;
  static constexpr int kTileN = kGlu ? kBlock : 2 * kBlock;  // columns of one output tensor
  static constexpr int kSums = 2 * kBlock;                   // of a row; in a GLU h's, then g's

  const T* column[2];  // null where there is none

  __device__ __forceinline__ void set(const Arguments& args, int group, int n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int number = n + (kGlu ? 0 : i * kBlock) + threadIdx.x % 32 / 4;
      const T* matrix = static_cast<const T*>(args.b[kGlu ? i : 0]) + static_cast<int64_t>(group) * args.size_n * args.size_k;
      column[i] = number < args.size_n ? matrix + static_cast<int64_t>(number) * args.size_k : nullptr;
    }
  }
  __device__ __forceinline__ void copy(const Arguments& args, int k, bool exists, uint32_t to) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool here = exists && column[i];
      tensor_core::cp_async_16(to + i * 512, here ? static_cast<const void*>(column[i] + k) : args.x, here);
    }
  }

  struct Accumulators {
    float sums[4] = {};

    __device__ __forceinline__ void multiply(const uint4& row, const uint4* from) {
      const uint4 first = from[0], second = from[32];
      mma<T>(sums, {first.x, second.x, first.y, second.y}, row.x, row.y);
      mma<T>(sums, {first.z, second.z, first.w, second.w}, row.z, row.w);
    }
    // Hands f each of the lane's sums, with its row and its place in the row.
    template <typename F> __device__ __forceinline__ void each(const F& f) const {
      const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
      for (int i = 0; i < 4; ++i) f(2 * q + i % 2, i / 2 * kBlock + g, sums[i]);
    }
  };
};

// The same where b is contiguous along N: eight blocks of 8 columns. A lane's vectors are columns 8 g to 8 g + 7 of one term each.
template <typename T> struct NMajorColumns {
  static constexpr int kVectors = 8, kStages = 2, kTileN = 64, kSums = 64;

  const T* terms;  // of the lane's columns; null where there are none

  __device__ __forceinline__ void set(const Arguments& args, int group, int n) {
    const int column = n + threadIdx.x % 32 / 4 * kBlock;
    const T* matrix = static_cast<const T*>(args.b[0]) + static_cast<int64_t>(group) * args.size_n * args.size_k;
    terms = column < args.size_n ? matrix + column : nullptr;
  }
  __device__ __forceinline__ void copy(const Arguments& args, int k, bool exists, uint32_t to) const {
    const bool here = exists && terms;
    const T* from = terms + static_cast<int64_t>(k) * args.size_n;
#pragma unroll
    for (int i = 0; i < kVectors; ++i, from += args.size_n) {
      tensor_core::cp_async_16(to + i * 512, here ? static_cast<const void*>(from) : args.x, here);
    }
  }

  struct Accumulators {
    float sums[4][4] = {};  // of columns 8 g + 2 j, then of those beside them

    __device__ __forceinline__ void multiply(const uint4& row, const uint4* from) {
      multiply_half(from, row.x, row.y);
      multiply_half(from + 4 * 32, row.z, row.w);
    }
    __device__ __forceinline__ void multiply_half(const uint4* from, uint32_t row_low, uint32_t row_high) {
      uint32_t term[4][4];  // two columns a word
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = from[i * 32];
        term[i][0] = v.x, term[i][1] = v.y, term[i][2] = v.z, term[i][3] = v.w;
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const auto of_both = [&](int first, unsigned bytes) { return __byte_perm(term[first][j], term[first + 1][j], bytes); };
        mma<T>(sums[j], {of_both(0, 0x5410), of_both(0, 0x7632), of_both(2, 0x5410), of_both(2, 0x7632)}, row_low, row_high);
      }
    }
    template <typename F> __device__ __forceinline__ void each(const F& f) const {
      const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
      for (int i = 0; i < 16; ++i) f(2 * q + i % 2, 8 * g + i / 4 * 2 + i / 2 % 2, sums[i / 4][i % 4]);
    }
  };
};

// What a warp copies ahead: for each step a vector of a row of x, and those of its columns.
template <typename T, typename Columns> struct Copies {
  static constexpr int kStages = Columns::kStages, kStageVectors = 32 * (1 + Columns::kVectors), kWarpVectors = kStages * kStageVectors;

  const Arguments& args;
  const uint4* vectors;  // the lane's first place in shared memory, as C++ and as cp.async find it
  uint32_t address;
  int first, last, step;  // the warp's steps in each sum, and the one to copy next
  int to = 0;             // the stage to copy it to
  Cursor<Columns::kTileN> ahead;
  const T* row = nullptr;
  Columns columns;

  __device__ __forceinline__ Copies(const Arguments& arguments, const uint4* shared, uint32_t shared_address, int first_item, int end)
      : args(arguments), ahead(arguments, first_item, end) {
    const int warp = threadIdx.x / 32, place = warp * kWarpVectors + threadIdx.x % 32, steps = ceil_div(args.size_k, kStep);
    vectors = shared + place, address = shared_address + place * 16;
    first = warp * steps / kWarps, last = (warp + 1) * steps / kWarps, step = first;
    find_operands();
#pragma unroll
    for (int i = 0; i < kStages; ++i) copy_next();
  }
  __device__ __forceinline__ void find_operands() {
    if (!ahead.valid()) return;
    row = row_of<T>(args, ahead.group, ahead.row + threadIdx.x % 32 / 4);
    columns.set(args, ahead.group.number, ahead.n());
  }
  // Closes a group of copies in any case, so that waiting for all but the last kStages - 1 is waiting for the oldest stage.
  __device__ __forceinline__ void copy_next() {
    if (ahead.valid() && first < last) {
      const int k = step * kStep + 8 * (threadIdx.x % 4);
      const bool exists = k < args.size_k, has_row = exists && row;
      const uint32_t stage = address + to * kStageVectors * 16;
      tensor_core::cp_async_16(stage, has_row ? static_cast<const void*>(row + k) : args.x, has_row);
      columns.copy(args, k, exists, stage + 512);
      if (++step == last) {
        step = first;
        ahead.advance(args);
        find_operands();
      }
    }
    tensor_core::cp_async_commit();
    to = to + 1 == kStages ? 0 : to + 1;
  }
  // The warp's share of the next sum.
  __device__ __forceinline__ typename Columns::Accumulators multiply() {
    typename Columns::Accumulators accumulators;
#pragma unroll 1
    for (int i = first; i < last; ++i) {
      tensor_core::cp_async_wait<kStages - 1>();
      const uint4* stage = vectors + to * kStageVectors;  // the oldest, which is copied to next
      accumulators.multiply(stage[0], stage + 32);
      copy_next();
    }
    return accumulators;
  }
};

// The warps' sums of kRows rows, in shared memory. Rows begin in different banks.
template <int kSums> struct Sums { float of_warp[kWarps][kRows][kSums + 1]; };

// Adds the warps' sums up and stores the results of those of the kRows rows that exist.
template <typename T, Epilogue kEpilogue, int kSums>
__device__ __forceinline__ void store(const Arguments& args, const Sums<kSums>& sums, int64_t first_row, int rows, int n) {
  constexpr bool kGlu = kEpilogue == Epilogue::kGlu;
  constexpr int kTileN = kGlu ? kSums / 2 : kSums;
  const auto rounded_sum = [&](int row, int in_row) {
    float sum = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWarps; ++warp) sum += sums.of_warp[warp][row][in_row];
    return narrow<T>(sum);
  };
  const auto out = [&](int i) { return static_cast<T*>(args.out[i]); };
  for (int i = threadIdx.x; i < min(rows, kRows) * kTileN; i += kThreads) {
    const int row = i / kTileN, column = i % kTileN;
    if (n + column >= args.size_n) continue;
    const int64_t at = (first_row + row) * args.size_n + n + column;
    const T h = rounded_sum(row, column);
    if constexpr (kEpilogue == Epilogue::kStore) {
      out(0)[at] = h;
    } else {
      // h and g are rounded for storage before a is computed from them.
      float a = 0.0f;
      with_activation(args.activation, [&](auto kind) { a = activation_at<decltype(kind)::value, true>(widen(h)).value; });
      if (out(1)) out(1)[at] = h;
      if constexpr (kGlu) {
        const T g = rounded_sum(row, kTileN + column);
        if (out(2)) out(2)[at] = g;
        a *= widen(g);
      }
      out(0)[at] = narrow<T>(a);
    }
  }
}

template <typename T, typename Columns> constexpr int kCopiesBytes = kWarps * Copies<T, Columns>::kWarpVectors * sizeof(uint4);
template <typename T, typename Columns> constexpr int kSharedBytes = kCopiesBytes<T, Columns> + sizeof(Sums<Columns::kSums>);

template <typename T, typename Columns, Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads, kCtasPerMultiprocessor) few_rows_kernel(const Arguments args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  static_assert(kSharedBytes<T, Columns> <= 99 << 10);  // what a CTA can have where a multiprocessor has 100 KiB
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  auto& sums = *reinterpret_cast<Sums<Columns::kSums>*>(shared_bytes + kCopiesBytes<T, Columns>);
  const int64_t items = int64_t{count_groups_with_rows(args)} * ceil_div(args.size_n, Columns::kTileN);
  const int first = static_cast<int>(items * blockIdx.x / gridDim.x), end = static_cast<int>(items * (blockIdx.x + 1) / gridDim.x);
  Copies<T, Columns> copies(args, reinterpret_cast<const uint4*>(shared_bytes), tensor_core::shared_address(shared_bytes), first, end);
  for (Cursor<Columns::kTileN> now(args, first, end); now.valid(); now.advance(args)) {
    const auto accumulators = copies.multiply();
    accumulators.each([&](int row, int in_row, float sum) { sums.of_warp[threadIdx.x / 32][row][in_row] = sum; });
    __syncthreads();
    store<T, kEpilogue>(args, sums, now.group.first_row + now.row, now.group.rows - now.row, now.n());
    __syncthreads();
  }
  tensor_core::cp_async_wait<0>();
#endif
}

}  // namespace gbmoe::few_rows
