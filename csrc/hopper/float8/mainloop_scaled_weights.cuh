// The main loop for gradients of weights of e4m3 operands: in each k-block of 128 rows every column of a and of b has a scale.
//
// As in mainloop_scaled.cuh a k-block's products are summed in registers of their own, for 128 columns at a time, and then added to the
// tile's sums in fp32, times both scales. But here each product of two scales is that of one number alone. The scales of a k-block lie
// side by side in memory, so that TMA brings them with the stage. A warp releases a stage when it has added the products, because it
// reads scales until then. Here, too, there is a careful loop, and the ballot that chooses is what the compiler understands.
//
// With the scales of four stages there is room for one epilogue buffer a warp. So a tile is stored by ordinary stores, which have read
// the buffer when they have been issued; before the next ones a warp would have to wait for TMA.

#pragma once

#include "../mma.cuh"
#include "../tile_scheduler.cuh"
#include "scale_product.cuh"
#include "scale_scanner.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct ScaledWeightsMainLoop {
  using Shared = SharedMemory<Traits>;
  using Mma = hopper::Mma<Traits>;
  using Output = typename Traits::Output;
  static constexpr int kHalfSums = 64;  // one thread's, of 64 rows by 128 columns
  static constexpr int kHalves = 2;  // of a tile's columns
  static constexpr int kAhead = 4;  // pairs of b's scales that are loaded ahead

  // A consumer warp, from its first tile to its last.
  static __device__ void run(const Arguments& args, uint32_t shared) {
    const int warpgroup = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
    const uint32_t buffer = Shared::buffer(shared, threadIdx.x / 32, 0);
    PipelineState pipe, tiles;
    bool careful;
    Tile tile = receive_tile<Traits>(shared, tiles, &careful);
    careful = ScaleScanner<Traits>::scan_together(args, tile);
    // The vote tells the compiler that all lanes go the same way, so that it keeps the operands' addresses in uniform registers, from where
    // a product takes them.
    while (__any_sync(kFullWarp, tile.group >= 0)) {
      typename Traits::Accumulators sum;
      if (__ballot_sync(kFullWarp, careful) != 0) multiply_tile<true>(sum, tile, warpgroup, shared, pipe);
      else multiply_tile<false>(sum, tile, warpgroup, shared, pipe);
      const Tile upcoming = receive_tile<Traits>(shared, tiles, &careful);
      store_tile(sum, args, tile, buffer);
      tile = upcoming;
    }
  }

 private:
  static __device__ __forceinline__ float2 load_scales(uint32_t from) {
    float2 pair;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(from) : "memory");
    return pair;
  }

  // The sums of a tile, zero where nothing is summed.
  template <bool kCareful> static __device__ __forceinline__ void multiply_tile(
      typename Traits::Accumulators& sum, const Tile& tile, int warpgroup, uint32_t shared, PipelineState& pipe) {
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    const uint32_t a = wgmma_address(shared + warpgroup * kSubtileBytes), b = wgmma_address(shared + kStageBytesA);
    const int lane = own_lane();
    // Of this thread's first row, and of its first columns.
    const uint32_t of_row = kept_in_register((threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * sizeof(float));
    const uint32_t of_columns = kept_in_register(kTileM * sizeof(float) + threadIdx.x % 4 * 2 * sizeof(float));
#pragma unroll
    for (int i = 0; i < kHalves * kHalfSums; ++i) sum[i] = 0.0f;
#pragma unroll 1
    for (int row = 0; row < tile.rows; row += Traits::kBlockK) {
      const uint32_t stage = pipe.stage * (Traits::kStageBytes >> 4), scales = Shared::scales(shared, pipe.stage);
      mbarrier_wait(full + pipe.stage * 8, pipe.parity);
      const float scale_a[2] = {load_shared_float(scales + of_row), load_shared_float(scales + of_row + 8 * sizeof(float))};
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float part[kHalfSums];
        fence_accumulators(part);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < static_cast<int>(kLineBytes) / 32; ++step) {
          wgmma_float8(part, a + stage + step * 2, b + stage + half * 2 * (kSubtileBytes >> 4) + step * 2, step > 0);
        }
        wgmma_commit();
        const uint32_t of_half = scales + of_columns + half * 128 * sizeof(float);
        float2 ahead[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) ahead[i] = load_scales(of_half + i * 8 * sizeof(float));
        wgmma_wait<0>();
        fence_accumulators(part);
#pragma unroll
        for (int i = 0; i < kHalfSums / 4; ++i) {  // two columns each of both rows; the next ones are 8 columns on
          const float2 scale_b = ahead[i % kAhead];
          if (i + kAhead < kHalfSums / 4) ahead[i % kAhead] = load_scales(of_half + (i + kAhead) * 8 * sizeof(float));
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float of_a = scale_a[j / 2], of_b = j % 2 ? scale_b.y : scale_b.x;
            float& to = sum[half * kHalfSums + i * 4 + j];
            if constexpr (kCareful) {
              const ScaleFactors factors(of_a, of_b);
              to += factors.last * (factors.first * part[i * 4 + j]);
            } else {
              to += of_a * of_b * part[i * 4 + j];
            }
          }
        }
      }
      __syncwarp();
      Mma::release(empty + pipe.stage * 8, lane);
      pipe.template advance<Traits::kStages>();
    }
  }

  // A warp's 16 rows, in chunks of 64 columns. Both sides of out[e] are multiples of 16, so that all 16 rows exist, or none.
  static __device__ __forceinline__ void store_tile(
      const typename Traits::Accumulators& sum, const Arguments& args, const Tile& tile, uint32_t buffer) {
    const int lane = threadIdx.x % 32, vector = lane % 8, first_row = tile.m + threadIdx.x / 32 * 16;
    if (first_row >= args.size_m) return;
    Output* const out = static_cast<Output*>(args.out[0]) + tile.group * args.out_pitch.group;
#pragma unroll
    for (int chunk = 0; chunk < Traits::kTileN / 64; ++chunk) {
      if (tile.n + chunk * 64 >= args.size_n) break;
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const float* of_quarter = sum + chunk * 32 + quarter * 8;
        stmatrix(
            Shared::fragment_address(buffer, quarter), pack<Output>(of_quarter[0], of_quarter[1]),
            pack<Output>(of_quarter[2], of_quarter[3]), pack<Output>(of_quarter[4], of_quarter[5]),
            pack<Output>(of_quarter[6], of_quarter[7]));
      }
      __syncwarp();
      const int column = tile.n + chunk * 64 + vector * 8;
#pragma unroll
      for (int line = lane / 8; line < 16; line += 4) {
        const int4 value = load_shared_16(buffer + line * kLineBytes + ((vector ^ (line & 7)) << 4));
        if (column >= args.size_n) continue;
        *reinterpret_cast<int4*>(out + static_cast<int64_t>(first_row + line) * args.out_pitch.row + column) = value;
      }
      __syncwarp();
    }
  }
};

}  // namespace gbmoe::hopper
