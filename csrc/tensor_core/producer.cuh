// The producer's part of every thread: it runs kStages - 1 k-blocks ahead of the multiplication, beyond the end of a tile, and copies
// the thread's share of each k-block to shared memory. What lies outside of the operands, or in another group, becomes zeros.

#pragma once

#include "shared_memory.cuh"
#include "tile_scheduler.cuh"

namespace gbmoe::tensor_core {

// One thread's share of one operand: chunks of one column, in every kRowStep-th row.
template <typename Traits, bool kIsA> struct OperandCopy {
  using T = typename Traits::T;
  static constexpr int kSize = kIsA ? Traits::kTileM : Traits::kTileN;
  static constexpr bool kKMajor = kIsA ? Traits::kKMajorA : Traits::kKMajorB;
  static constexpr bool kTwoTensors = !kIsA && Traits::kGlu;
  using Layout = OperandTile<T, kSize, kKMajor>;
  static constexpr int kChunksOfRow = Layout::kChunksOfRow, kRowStep = Traits::kThreads / kChunksOfRow;
  static constexpr int kCopies = Layout::kRows / kRowStep;
  static_assert(kCopies * kRowStep == Layout::kRows && kRowStep % Layout::kSwizzlePeriod == 0);

  // The tile's corner at `from` (and at `second`, v1's, under kGlu), whose rows are `stride` elements apart; `valid` elements along M
  // or N exist, and `terms` along K from this k-block on.
  static __device__ __forceinline__ void copy(uint32_t to, const T* from, const T* second, int64_t stride, int valid, int terms) {
    const int chunk = threadIdx.x % kChunksOfRow, first = threadIdx.x / kChunksOfRow;
    const bool chunk_exists = chunk * Traits::kChunk < (kKMajor ? terms : valid);
    // All of a thread's rows have the same swizzle.
    const uint32_t first_to = to + Layout::offset(first, chunk);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = first + i * kRowStep;
      const int source_row = kTwoTensors ? row / 64 * 32 + row % 32 : row;
      const bool exists = chunk_exists && source_row < (kKMajor ? valid : terms);
      const T* base = kTwoTensors && row / 32 % 2 ? second : from;
      // Where nothing exists the address is not read.
      const T* source = exists ? base + source_row * stride + chunk * Traits::kChunk : base;
      cp_async_16(first_to + i * kRowStep * Layout::kPitch, source, exists);
    }
  }
};

// The tiles whose copies have begun. The multiplication is up to kStages - 1 k-blocks, so at most as many tiles, behind. A barrier lies
// between an entry's write and its first read, and between its last read and the next write.
constexpr int kTileRing = 8;

template <typename Traits> class Producer {
  using T = typename Traits::T;
  static_assert(Traits::kStages <= kTileRing);

 public:
  __device__ __forceinline__ Producer(const Arguments& args, Tile* ring) : scheduler_(args), ring_(ring) {}

  // Copies the next k-block, of this or of a later tile, to a stage; none behind the last.
  __device__ __forceinline__ void copy_next(const Arguments& args, uint32_t stage) {
    if (k_block_ == k_blocks_) {
      if (tile_.group < 0) return;
      tile_ = scheduler_.next(args);
      if (threadIdx.x == 0) ring_[begun_ % kTileRing] = tile_;
      ++begun_;
      k_block_ = k_blocks_ = 0;
      if (tile_.group < 0) return;
      k_blocks_ = count_k_blocks<Traits>(args, tile_);
    }
    const int of_pair = Traits::kGroupedK ? k_blocks_ : k_blocks_ / args.operand_pairs;
    const int pair = k_block_ >= of_pair ? 1 : 0, k = (k_block_ - pair * of_pair) * Traits::kBlockK;
    ++k_block_;
    const T* a = static_cast<const T*>(args.a[pair]);
    const T* b = static_cast<const T*>(args.b[Traits::kGlu ? 0 : pair]);
    const int64_t m = args.size_m, n = args.size_n;
    if constexpr (Traits::kGroupedK) {
      const int64_t row = tile_.row + k;
      const int terms = tile_.rows - k;
      OperandCopy<Traits, true>::copy(stage, a + row * m + tile_.m, nullptr, m, args.size_m - tile_.m, terms);
      OperandCopy<Traits, false>::copy(stage + Traits::kBytesA, b + row * n + tile_.n, nullptr, n, args.size_n - tile_.n, terms);
    } else {
      const int64_t size_k = args.size_k, group = tile_.group;
      const int terms = args.size_k - k, valid_n = args.size_n - tile_.n;
      OperandCopy<Traits, true>::copy(stage, a + tile_.row * size_k + k, nullptr, size_k, tile_.rows, terms);
      const int64_t corner = Traits::kKMajorB ? (group * n + tile_.n) * size_k + k : (group * size_k + k) * n + tile_.n;
      const T* second = Traits::kGlu ? static_cast<const T*>(args.b[1]) + corner : nullptr;
      OperandCopy<Traits, false>::copy(stage + Traits::kBytesA, b + corner, second, Traits::kKMajorB ? size_k : n, valid_n, terms);
    }
  }

 private:
  TileScheduler<Traits> scheduler_;
  Tile* ring_;
  Tile tile_{};
  int k_block_ = 0, k_blocks_ = 0, begun_ = 0;
};

}  // namespace gbmoe::tensor_core
