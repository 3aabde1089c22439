// m-grouped GEMMs whose groups have few rows: what takes time is to read each group's weights once, as when a few tokens are generated.
//
// A CTA computes the columns of one tile for all rows of one group, and its warps divide the sum over K among them. A lane copies the 16
// bytes of a weight that it will multiply to a place in shared memory of its own, many ahead, and takes them from there: no warp waits
// for another one before the sums are complete. Then these are added up, in a fixed order. So what a row gets does not depend on other
// rows.
//
// In a sum the order of K is free as long as both operands have the same. So the 16 terms of an mma.sync are those that lie side by
// side in a lane's vectors, not those that its fragments are drawn with.
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
constexpr int kRows = 16;      // of an mma.sync; a group with more is walked 16 rows at a time
constexpr int kBlock = 8;      // columns of an mma.sync

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

// Group `index` of those that have rows; all lanes of a warp call it together. Its number is -1 where there are not so many.
__device__ __forceinline__ Group find_group(const Arguments& args, int index) {
  constexpr int kAtOnce = 4;  // loads in flight
  const int lane = threadIdx.x % 32;
  int next_row = 0, found = 0;
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
      const int rank = found + __popc(with_rows & ((1u << lane) - 1));
      const unsigned is_it = __ballot_sync(kFullWarp, end > first && rank == index);
      if (is_it) {
        const int owner = __ffs(is_it) - 1, row = __shfl_sync(kFullWarp, first, owner);
        return {base + 32 * i + owner, row, __shfl_sync(kFullWarp, end, owner) - row};
      }
      found += __popc(with_rows);
      next_row = __shfl_sync(kFullWarp, end, 31);
    }
  }
  return {-1, 0, 0};
}

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

// A warp's share of the sums is walked in steps of 32 terms. Lane 4 g + q multiplies terms 8 q to 8 q + 7 of each step: of rows g and g + 8
// of x, which are two vectors of 16 bytes, and of its columns of b. `Columns` says which these are.
constexpr int kStep = 32, kRowVectors = 2;
template <typename T, typename Columns> struct Warp {
  static constexpr int kVectors = kRowVectors + Columns::kVectors;  // that a lane copies for a step
  static constexpr int kStages = Columns::kStages;                  // steps that are copied ahead
  static constexpr int kStageVectors = kVectors * 32, kWarpVectors = kStages * kStageVectors;

  static __device__ __forceinline__ void multiply(const Arguments& args, Columns& columns, const T* const (&rows)[kRowVectors], int first,
                                                  int last, const Places& of_warp) {
    const int q = threadIdx.x % 4;
    const Places of_lane = of_warp.from(threadIdx.x % 32);
    const auto copy = [&](int step) {
      const int k = step * kStep + 8 * q;
      const bool exists = step < last && k < args.size_k;
      const uint32_t to = of_lane.from((step - first) % kStages * kStageVectors).address;
#pragma unroll
      for (int i = 0; i < kRowVectors; ++i) {
        const bool has_row = exists && rows[i];
        tensor_core::cp_async_16(to + i * 512, has_row ? static_cast<const void*>(rows[i] + k) : args.x, has_row);
      }
      columns.copy(args, k, exists, to + kRowVectors * 512);
      tensor_core::cp_async_commit();
    };
#pragma unroll
    for (int i = 0; i < kStages; ++i) copy(first + i);
#pragma unroll 1
    for (int step = first; step < last; ++step) {
      tensor_core::cp_async_wait<kStages - 1>();
      const uint4* from = of_lane.from((step - first) % kStages * kStageVectors).vectors;
      const uint4 low = from[0], high = from[32];
      columns.multiply({low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}, from + kRowVectors * 32);
      copy(step + kStages);
    }
    tensor_core::cp_async_wait<0>();
  }
};

// The columns of a warp where b is contiguous along K: two blocks of 8, of which a lane has column g each. In a GLU one block is w1's and
// one v1's.
template <typename T, bool kGlu> struct KMajorColumns {
  static constexpr int kVectors = 2, kStages = 6;
  static constexpr int kTileN = kGlu ? kBlock : 2 * kBlock;  // columns of one output tensor
  static constexpr int kSums = 2 * kBlock;                   // of a row; in a GLU h's, then g's

  const T* column[2];  // null where there is none
  float sums[2][4] = {};

  __device__ __forceinline__ KMajorColumns(const Arguments& args, int group, int n) {
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
  __device__ __forceinline__ void multiply(const uint32_t (&first_rows)[4], const uint32_t (&second_rows)[4], const uint4* from) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint4 terms = from[i * 32];
      mma<T>(sums[i], first_rows, terms.x, terms.y);
      mma<T>(sums[i], second_rows, terms.z, terms.w);
    }
  }
  // Hands f each of the lane's sums, with its row and its place in the row.
  template <typename F> __device__ __forceinline__ void each(const F& f) const {
    const int row = threadIdx.x % 32 / 4, in_row = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < 8; ++i) f(row + i / 2 % 2 * 8, i / 4 * kBlock + in_row + i % 2, sums[i / 4][i % 4]);
  }
};

// The same where b is contiguous along N: eight blocks of 8 columns. A lane's vectors are columns 8 g to 8 g + 7 of one term each, and
// block j is made of every lane's column j.
template <typename T> struct NMajorColumns {
  static constexpr int kVectors = 8, kStages = 2, kTileN = 64, kSums = 64;

  const T* terms;  // of the lane's columns; null where there are none
  float sums[8][4] = {};

  __device__ __forceinline__ NMajorColumns(const Arguments& args, int group, int n) {
    const int column = n + threadIdx.x % 32 / 4 * kBlock;
    const T* matrix = static_cast<const T*>(args.b[0]) + static_cast<int64_t>(group) * args.size_n * args.size_k;
    terms = column < args.size_n ? matrix + column : nullptr;
  }
  __device__ __forceinline__ void copy(const Arguments& args, int k, bool exists, uint32_t to) const {
    const bool here = exists && terms;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const void* from = here ? static_cast<const void*>(terms + static_cast<int64_t>(k + i) * args.size_n) : args.x;
      tensor_core::cp_async_16(to + i * 512, from, here);
    }
  }
  __device__ __forceinline__ void multiply(const uint32_t (&first_rows)[4], const uint32_t (&second_rows)[4], const uint4* from) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t term[4][4];  // two columns a word
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint4 v = from[(half * 4 + i) * 32];
        term[i][0] = v.x, term[i][1] = v.y, term[i][2] = v.z, term[i][3] = v.w;
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const unsigned bytes = j % 2 ? 0x7632 : 0x5410;  // column j of two terms
        mma<T>(sums[j], half == 0 ? first_rows : second_rows, __byte_perm(term[0][j / 2], term[1][j / 2], bytes),
               __byte_perm(term[2][j / 2], term[3][j / 2], bytes));
      }
    }
  }
  template <typename F> __device__ __forceinline__ void each(const F& f) const {
    const int row = threadIdx.x % 32 / 4, in_row = threadIdx.x % 4 * 16;
#pragma unroll
    for (int i = 0; i < 32; ++i) f(row + i / 2 % 2 * 8, in_row + i % 2 * 8 + i / 4, sums[i / 4][i % 4]);
  }
};

// The warps' sums of 16 rows, in shared memory. Rows begin in different banks.
template <int kSums> struct Sums { float of_warp[kWarps][kRows][kSums + 1]; };

// Adds the warps' sums up and stores the results of those of the 16 rows that exist.
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

template <typename T, typename Columns> constexpr int bytes_of_shared_memory() {
  constexpr size_t kCopied = kWarps * Warp<T, Columns>::kWarpVectors * sizeof(uint4);
  return static_cast<int>(std::max(kCopied, sizeof(Sums<Columns::kSums>)));
}

// One CTA for each tile of columns of each group that has rows; the tiles of a group come one after the other.
template <typename T, typename Columns, Epilogue kEpilogue>
__global__ void __launch_bounds__(kThreads) few_rows_kernel(const Arguments args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const Places places{reinterpret_cast<const uint4*>(shared_bytes), tensor_core::shared_address(shared_bytes)};
  auto& sums = *reinterpret_cast<Sums<Columns::kSums>*>(shared_bytes);  // in the place of what was copied
  const int tiles_n = ceil_div(args.size_n, Columns::kTileN);
  const Group group = find_group(args, blockIdx.x / tiles_n);
  if (group.number < 0) return;
  const int n = blockIdx.x % tiles_n * Columns::kTileN, warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
  const int steps = ceil_div(args.size_k, kStep), first = warp * steps / kWarps, last = (warp + 1) * steps / kWarps;
  for (int row = 0; row < group.rows; row += kRows) {
    const T* rows[kRowVectors] = {row_of<T>(args, group, row + g), row_of<T>(args, group, row + g + 8)};
    Columns columns(args, group.number, n);
    Warp<T, Columns>::multiply(args, columns, rows, first, last, places.from(warp * Warp<T, Columns>::kWarpVectors));
    __syncthreads();
    columns.each([&](int r, int in_row, float sum) { sums.of_warp[warp][r][in_row] = sum; });
    __syncthreads();
    store<T, kEpilogue>(args, sums, group.first_row + row, group.rows - row, n);
    __syncthreads();
  }
#endif
}

}  // namespace gbmoe::few_rows
