// The warp that looks through the scales of scaled e4m3 operands, a tile ahead of the consumers, and tells them which of two main loops a
// tile takes: the careful one where a product of a scale of a and one of b may not be a normal number (scale_product.cuh).
//
// Its word travels through the ring of tiles. Each place has one more barrier, at which this warp arrives when it has written its word
// there, and for which the consumers wait instead of the barrier of the tile itself. So a word is as safe as its tile: a place takes
// another tile, and this warp writes there again, only after all consumers have read both. A tile is sent when the one before it begins,
// so that its scan has as long as that one takes. Only a CTA's first tile has no tile before it: its scales are looked through by all
// consumers together, who have nothing to do until its first k-block comes.
//
// The scales are those that the CTA copies to its stages, too, read once more from the L2 cache: 1 % of what a k-block takes from there in
// products of rows, 3 % in gradients of weights.

#pragma once

#include <cfloat>

#include "../tile_scheduler.cuh"
#include "float8.cuh"

namespace gbmoe::hopper {

// The scales of a tile, of which kThreads threads take a share each. Several loads of each are under way at a time, fewer where kRare,
// because a warp alone would wait for the L2 cache with each. Votes end the loops, because the compiler then sees that all lanes go the
// same way (mainloop_scaled.cuh).
template <typename Traits, int kThreads, bool kRare> struct TileScales {
  // Scales, and vectors of four, of one thread that are under way. The scanner has 40 registers for all.
  static constexpr int kAhead = kRare ? 4 : 8, kVectorsAhead = kRare ? 1 : 4;

  // Calls of_a and of_b with the bits of the scales of the share of `thread`. Some may come twice.
  template <typename OfA, typename OfB>
  static __device__ __forceinline__ void visit(const Arguments& args, const Tile& tile, int thread, const OfA& of_a, const OfB& of_b) {
    if constexpr (Traits::kGroupedK) visit_columns(args, tile, thread, of_a, of_b);
    else visit_rows(args, tile, thread, of_a, of_b);
  }

 private:
  // m-grouped: the scales of the tile's rows lie in memory side by side, and so do those of each of the two runs of b's columns.
  template <typename OfA, typename OfB>
  static __device__ __forceinline__ void visit_rows(
      const Arguments& args, const Tile& tile, int thread, const OfA& of_a, const OfB& of_b) {
    constexpr int kBatch = kAhead * kThreads;
#pragma unroll 1
    for (int pair = 0; pair < args.operand_pairs; ++pair) {
      int count = min(tile.rows, kTileM) * args.k_blocks;
      const float* a = args.scales_a[pair] + static_cast<int64_t>(tile.row) * args.k_blocks;
#pragma unroll 1
      for (; !kRare && __any_sync(kFullWarp, count >= kBatch); a += kBatch, count -= kBatch) {
        uint32_t scale[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) scale[i] = load_global_4_once(a + thread + i * kThreads);
#pragma unroll
        for (int i = 0; i < kAhead; ++i) of_a(scale[i]);
      }
      visit_each<1, 4>(a + min(thread, max(count - 1, 0)), kThreads, count - thread, kThreads, of_a);
      const int second = thread & 1, run = min(tile.n / kScaledColumns + (Traits::kGlu ? 0 : second), args.scale_rows_b - 1);
      const int k_block = min(thread / 2, args.k_blocks - 1), line = tile.group * args.scale_rows_b + run;
      const float* b = args.scales_b[Traits::kGlu ? second : pair] + static_cast<int64_t>(line) * args.k_blocks + k_block;
      visit_each<1, 4>(b, kThreads / 2, args.k_blocks - thread / 2, kThreads / 2, of_b);
    }
  }

  // k-grouped: each k-block has a scale for each of the tile's columns, side by side. A warp takes 128 columns of one.
  template <typename OfA, typename OfB>
  static __device__ __forceinline__ void visit_columns(
      const Arguments& args, const Tile& tile, int thread, const OfA& of_a, const OfB& of_b) {
    constexpr int kWarps = kThreads / 32;
    const int warp = thread / 32, column = thread % 32 * 4;
    const int first = tile.row / Traits::kBlockK + warp, own = ceil_div(tile.rows, Traits::kBlockK) - warp;
    // Columns that do not exist take the last ones' scales. Their numbers are multiples of 16.
    const float* a = args.scales_a[0] + static_cast<int64_t>(first) * args.size_m + min(tile.m + column, args.size_m - 4);
    visit_each<4, kVectorsAhead>(a, kWarps * args.size_m, own, kWarps, of_a);
#pragma unroll 1
    for (int half = 0; half < 2; ++half) {
      const int n = min(tile.n + half * 128 + column, args.size_n - 4);
      const float* b = args.scales_b[0] + static_cast<int64_t>(first) * args.size_n + n;
      visit_each<4, kVectorsAhead>(b, kWarps * args.size_n, own, kWarps, of_b);
    }
  }

  static __device__ __forceinline__ void store_four(uint32_t (&to)[4], const int4& four) {
    to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
  }
  // Vectors of kVector scales: at `from` and after each `step` scales, as long as `left`, which falls by `each` with each of them, is
  // positive. Then the last one comes again until all lanes are done.
  template <int kVector, int kVectors, typename Of>
  static __device__ __forceinline__ void visit_each(const float* from, uint32_t step, int left, int each, const Of& of) {
    from = kept_in_register(from);
#pragma unroll 1
    while (__any_sync(kFullWarp, left > 0)) {
      uint32_t scale[kVectors][kVector];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        if constexpr (kVector == 1) scale[i][0] = load_global_4_once(from);
        else store_four(scale[i], load_global_16_once(from));
        left -= each;
        if (left > 0) from += step;
      }
#pragma unroll
      for (int i = 0; i < kVectors * kVector; ++i) of(scale[i / kVector][i % kVector]);
    }
  }
};

template <typename Traits> struct ScaleScanner {
  using Shared = SharedMemory<Traits>;
  static constexpr int kConsumers = kConsumerWarpgroups * 128;

  // One warp, from its first tile to its last.
  static __device__ void run(const Arguments& args, uint32_t shared) {
    PipelineState tiles;
    bool is_first = true;
    for (;;) {
      const uint32_t place = tiles.stage;
      const Tile tile = receive_tile<Traits>(shared, tiles);
      const bool careful = tile.group >= 0 && !is_first && may_leave_the_range(args, tile, Shared::tile(shared, place));
      is_first = false;
      if (threadIdx.x % 32 == 0) {
        store_shared_int(Shared::careful(shared, place), careful);
        mbarrier_arrive(Shared::tiles_scanned(shared) + place * 8);
      }
      __syncwarp();
      if (tile.group < 0) break;
    }
  }

  // In all consumers, of a CTA's first tile: whether it takes the careful main loop.
  static __device__ __forceinline__ bool scan_together(const Arguments& args, const Tile& tile) {
    bool careful = false;
    if (__any_sync(kFullWarp, tile.group >= 0)) careful = beyond_the_middle<kConsumers>(args, tile, threadIdx.x);
    return named_barrier_any(kBarrier, kConsumers, careful);
  }

 private:
  static constexpr uint32_t kBarrier = 1;  // of the consumers
  // Scales from 2^-63 on and below 2^64 multiply to normal numbers. These are the bits of the first one and the size of the range.
  static constexpr uint32_t kMiddle = 0x20000000, kMiddleSize = 0x40000000;

  // Whether one of the thread's share of the scales lies outside that range, as 0, NaN and negative numbers do.
  template <int kThreads>
  static __device__ __forceinline__ bool beyond_the_middle(const Arguments& args, const Tile& tile, int thread) {
    uint32_t furthest = 0;
    const auto of = [&](uint32_t bits) { furthest = max(furthest, bits - kMiddle); };  // one instruction
    TileScales<Traits, kThreads, false>::visit(args, tile, thread, of, of);
    return furthest >= kMiddleSize;
  }

  // The least magnitude but 0 and the largest one of one operand's scales. NaN, of which both main loops make NaN, is left out.
  struct Range {
    float least = FLT_MAX, most = 0.0f;

    __device__ __forceinline__ void add(uint32_t bits) {
      const float magnitude = fabsf(__uint_as_float(bits));
      if (magnitude > 0.0f) least = fminf(least, magnitude);
      most = fmaxf(most, magnitude);
    }
    // Of all lanes; as integers magnitudes are in the same order.
    __device__ __forceinline__ void join_lanes() {
      least = __uint_as_float(__reduce_min_sync(kFullWarp, __float_as_uint(least)));
      most = __uint_as_float(__reduce_max_sync(kFullWarp, __float_as_uint(most)));
    }
  };

  // In the whole warp: whether a product of two of the tile's scales may not be a normal number, nor 0 because a scale is. Where all scales
  // lie in the middle, as almost everywhere, it takes one instruction for each to know. Otherwise the tile is loaded again from its place
  // in the ring, where it lies until this warp has written its word: else it would take registers that the loads need.
  static __device__ __forceinline__ bool may_leave_the_range(const Arguments& args, const Tile& tile, uint32_t place) {
    if (!__any_sync(kFullWarp, beyond_the_middle<32>(args, tile, kept_in_register(threadIdx.x % 32)))) return false;
    Range a, b;
    const auto of_a = [&](uint32_t bits) { a.add(bits); };
    const auto of_b = [&](uint32_t bits) { b.add(bits); };
    TileScales<Traits, 32, true>::visit(args, load_tile(place), kept_in_register(threadIdx.x % 32), of_a, of_b);
    a.join_lanes();
    b.join_lanes();
    return a.least * b.least < FLT_MIN || a.most * b.most > FLT_MAX;
  }
};

}  // namespace gbmoe::hopper
