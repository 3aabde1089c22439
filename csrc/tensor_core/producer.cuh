// The producer's part of every thread: it runs kStages - 1 k-blocks ahead of the multiplication, beyond the end of a tile, and copies
// the thread's share of each k-block to shared memory. What lies outside of the operands, or in another group, becomes zeros.
//
// These instructions stand between those of the multiplication, so there are few: pointers move on by a constant from k-block to
// k-block, and a copy takes one multiplication for its address and one comparison.

#pragma once

#include "shared_memory.cuh"
#include "tile_scheduler.cuh"

namespace gbmoe::tensor_core {

// One thread's share of one operand: chunks of one column, in every kRowStep-th row of the tile.
template <typename Traits, bool kIsA> class OperandCopies {
  using T = typename Traits::T;
  static constexpr int kSize = kIsA ? Traits::kTileM : Traits::kTileN;
  static constexpr bool kKMajor = kIsA ? Traits::kKMajorA : Traits::kKMajorB;
  using Layout = OperandTile<T, kSize, Traits::kRowBytes, kKMajor>;
  static constexpr int kChunksOfRow = Layout::kChunksOfRow, kRowStep = Traits::kThreads / kChunksOfRow;
  // Under kGlu 32 of b's rows are w1's and the next 32 the same ones of v1's. A thread copies from both, or, with 64 rows at a time,
  // from one.
  static constexpr bool kGlu = !kIsA && Traits::kGlu, kBoth = kGlu && kRowStep <= 32;

 public:
  static constexpr int kCopies = Layout::kRows / kRowStep;
  static_assert(kCopies * kRowStep == Layout::kRows && kRowStep % Layout::kSwizzlePeriod == 0 && (!kGlu || 64 % kRowStep == 0));

  // The tile begins at `corner` (and at `second`, v1's, under kGlu), whose rows are `stride` elements apart; `valid` elements along M or
  // N exist.
  __device__ __forceinline__ void begin(const T* corner, const T* second, int stride, int valid) {
    const int64_t offset = rows(first_row(), stride) + chunk() * kChunkBytes;
    from_ = reinterpret_cast<const char*>(kGlu && !kBoth && of_second() ? second : corner) + offset;
    if constexpr (kBoth) from_second_ = reinterpret_cast<const char*>(second) + offset;
    valid_ = kKMajor ? valid - first_row() : chunk() * Traits::kChunk < valid ? INT32_MAX : 0;
  }

  // On to the tile's next k-block.
  __device__ __forceinline__ void advance(int stride) {
    const int64_t offset = kKMajor ? Traits::kRowBytes : rows(Traits::kBlockK, stride);
    from_ += offset;
    if constexpr (kBoth) from_second_ += offset;
  }

  // Copy number `i` of this k-block, with `terms` terms from it on, to the operand's place in a stage.
  __device__ __forceinline__ void copy(int i, uint32_t to, int stride, int terms) const {
    const int row = i * kRowStep;  // beyond the thread's first
    const int source_row = kGlu ? row / 64 * 32 + row % 32 : row;
    const int existing = kKMajor ? (chunk() * Traits::kChunk < terms ? valid_ : 0) : min(valid_, terms) - first_row();
    const char* from = kBoth && row / 32 % 2 ? from_second_ : from_;
    // All of a thread's rows have the same swizzle. Where nothing exists the address is not read.
    cp_async_16(to + Layout::offset(threadIdx.x / kChunksOfRow, chunk()) + row * Layout::kPitch,
                from + rows(source_row, stride), source_row < existing);
  }

 private:
  // The bytes of so many rows: one multiplication of 32 by 32 bits, where the number of rows is a constant.
  static __device__ __forceinline__ int64_t rows(int number, int stride) {
    return static_cast<int64_t>(stride) * (number * static_cast<int>(sizeof(T)));
  }
  static __device__ __forceinline__ int chunk() { return threadIdx.x % kChunksOfRow; }
  static __device__ __forceinline__ bool of_second() { return threadIdx.x / kChunksOfRow >= 32; }
  // Of the tensor that the thread copies from.
  static __device__ __forceinline__ int first_row() { return threadIdx.x / kChunksOfRow % (kGlu ? 32 : Layout::kRows); }

  const char* from_ = nullptr;  // the thread's chunk in its first row
  const char* from_second_ = nullptr;
  int valid_ = 0;  // K-major: rows that exist from the first on; MN-major: of the rows along K those whose chunk exists: all or none
};

// The tiles whose copies have begun, and the next one. The multiplication is up to kStages - 1 k-blocks, so at most as many tiles,
// behind. A barrier lies between an entry's write and its first read, and between its last read and the next write.
constexpr int kTileRing = 8;
struct TileQueue {
  Tile ring[kTileRing];
  SchedulerState scheduler;
  __device__ __forceinline__ const Tile& operator[](int number) const { return ring[number % kTileRing]; }
};

template <typename Traits> class Producer {
  using T = typename Traits::T;
  static_assert(Traits::kStages + 2 <= kTileRing);

 public:
  // All threads of the CTA together. A barrier has to follow.
  __device__ __forceinline__ Producer(const Arguments& args, TileQueue& queue) : pair_(args.operand_pairs - 1) {
    if (threadIdx.x >= 32) return;
    TileScheduler<Traits>::begin(queue.scheduler);
    find_tile(args, queue, 0);
  }

  // On to the next k-block, of this or of a later tile; a barrier lies between two calls. After the last tile there are no terms, and
  // zeros are copied.
  __device__ __forceinline__ void next_k_block(const Arguments& args, TileQueue& queue) {
    if (k_blocks_ == 0) {
      begin(args, queue);
      return;
    }
    --k_blocks_;
    terms_ -= Traits::kBlockK;
    a_.advance(stride_of_a(args));
    b_.advance(stride_of_b(args));
  }

  // Part `part` of kParts of this k-block's copies.
  template <int kParts> __device__ __forceinline__ void copy(const Arguments& args, uint32_t stage, int part) const {
    constexpr int kOfA = decltype(a_)::kCopies, kAll = kOfA + decltype(b_)::kCopies;
#pragma unroll
    for (int i = part * kAll / kParts; i < (part + 1) * kAll / kParts; ++i) {
      if (i < kOfA) a_.copy(i, stage, stride_of_a(args), terms_);
      else b_.copy(i - kOfA, stage + Traits::kBytesA, stride_of_b(args), terms_);
    }
  }

 private:
  static __device__ __forceinline__ int stride_of_a(const Arguments& args) { return Traits::kGroupedK ? args.size_m : args.size_k; }
  static __device__ __forceinline__ int stride_of_b(const Arguments& args) {
    return Traits::kGroupedK ? args.size_n : args.pitch_b.row;
  }

  // Warp 0 alone.
  static __device__ __forceinline__ void find_tile(const Arguments& args, TileQueue& queue, int number) {
    const Tile tile = TileScheduler<Traits>::next(args, queue.scheduler);
    if (threadIdx.x == 0) queue.ring[number % kTileRing] = tile;
  }

  // The first k-block of the tile's second pair of operands, or of the next tile; then warp 0 looks for the one after that.
  __device__ __forceinline__ void begin(const Arguments& args, TileQueue& queue) {
    const bool next_tile = pair_ + 1 == args.operand_pairs;
    pair_ = next_tile ? 0 : pair_ + 1;
    tile_ += next_tile;
    const Tile tile = queue[tile_];
    if (tile.group < 0) {
      terms_ = 0;
      k_blocks_ = INT32_MAX;  // more than are asked for
      return;
    }
    if (next_tile && threadIdx.x < 32) find_tile(args, queue, tile_ + 1);
    terms_ = Traits::kGroupedK ? tile.rows : args.size_k;
    k_blocks_ = max(0, ceil_div(terms_, Traits::kBlockK) - 1);
    const T* a = static_cast<const T*>(args.a[pair_]);
    const T* b = static_cast<const T*>(args.b[Traits::kGlu ? 0 : pair_]);
    const int64_t row = tile.row, m = tile.m, n = tile.n;
    if constexpr (Traits::kGroupedK) {
      a_.begin(a + row * args.size_m + m, nullptr, args.size_m, args.size_m - tile.m);
      b_.begin(b + row * args.size_n + n, nullptr, args.size_n, args.size_n - tile.n);
    } else {
      a_.begin(a + row * args.size_k, nullptr, args.size_k, tile.rows);
      const int64_t corner = Traits::kKMajorB ? n * args.pitch_b.row : n;
      const auto in_group = [&](int number) { return args.places.of(tile.group, number) * args.pitch_b.group + corner; };
      const T* second = Traits::kGlu ? static_cast<const T*>(args.b[1]) + in_group(1) : nullptr;
      b_.begin(b + in_group(pair_), second, stride_of_b(args), args.size_n - tile.n);
    }
  }

  OperandCopies<Traits, true> a_;
  OperandCopies<Traits, false> b_;
  int tile_ = -1, pair_;  // number of the tile, and of the pair of operands, that this k-block is of
  int k_blocks_ = 0;      // after this one, of this pair
  int terms_ = 0;         // from this k-block on, of this pair
};

}  // namespace gbmoe::tensor_core
