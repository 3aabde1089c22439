// Where everything lies in a CTA's shared memory, by 32-bit addresses from `shared`, a multiple of 1,024 bytes:
//
//   stages             [stage][a's k-block, then b's]
//   epilogue buffers   [consumer warp][buffer][16 lines]
//   scales             kScaled: [stage][a's, then b's]
//   barriers           stages full, then empty; tile ring full, then empty; kActivationBackward: epilogue buffers; kPingPong: turns;
//                      kScaled: places of the tile ring whose tile's scales were looked through
//   tile ring          [place] Tile
//   careful            kScaled: [place] whether the tile takes the careful main loop (scale_scanner.cuh)
//   tokens             kGatherLines: of the 64 lines that this CTA loads of a k-block
//
// A full barrier says that the writer has written, an empty one that all readers have read.

#pragma once

#include "ptx.cuh"
#include "tile.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

// A place in a ring of stages, and the parity of the phase that its barriers are in.
struct PipelineState {
  uint32_t stage = 0, parity = 0;

  template <int kStages> __device__ __forceinline__ void advance() { advance(kStages); }
  __device__ __forceinline__ void advance(uint32_t stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  template <int kStages> __device__ __forceinline__ void skip(int steps) {
    const uint32_t to = stage + steps, rounds = to / kStages;
    stage = to - rounds * kStages;
    parity ^= rounds & 1;
  }
};

template <typename Traits> struct SharedMemory {
  static constexpr int kStages = Traits::kStages, kBuffers = Traits::kEpilogueBuffers;
  static constexpr uint32_t kEpilogueBuffers = kStages * Traits::kStageBytes;
  static constexpr uint32_t kScales = kEpilogueBuffers + kConsumerWarps * kBuffers * kEpilogueBufferBytes;
  static constexpr uint32_t kStageBarriers = kScales + kStages * Traits::kScaleBytes;
  static constexpr uint32_t kTileBarriers = kStageBarriers + 2 * kStages * 8;
  static constexpr uint32_t kBufferBarriers = kTileBarriers + 2 * kTileRing * 8;
  static constexpr uint32_t kTurnBarriers = kBufferBarriers + (Traits::kActivationBackward ? 2 * kConsumerWarps * kBuffers * 8 : 0);
  static constexpr uint32_t kScannedBarriers = kTurnBarriers + (Traits::kPingPong ? kConsumerWarpgroups * 8 : 0);
  static constexpr uint32_t kTiles = kScannedBarriers + (Traits::kScaled ? kTileRing * 8 : 0);
  static constexpr uint32_t kCareful = kTiles + kTileRing * sizeof(Tile);
  static constexpr uint32_t kTokens = kCareful + (Traits::kScaled ? kTileRing * sizeof(int) : 0);
  static constexpr uint32_t kBytes = kTokens + (Traits::kGatherLines ? 64 * sizeof(int) : 0);
  static_assert(kBytes <= 227 << 10, "a CTA has 227 KiB of shared memory");

  // Barriers of a ring are an array each, 8 bytes a stage.
  static __device__ __forceinline__ uint32_t stages_full(uint32_t shared) { return shared + kStageBarriers; }
  static __device__ __forceinline__ uint32_t stages_empty(uint32_t shared) { return shared + kStageBarriers + kStages * 8; }
  static __device__ __forceinline__ uint32_t tiles_full(uint32_t shared) { return shared + kTileBarriers; }
  static __device__ __forceinline__ uint32_t tiles_empty(uint32_t shared) { return shared + kTileBarriers + kTileRing * 8; }
  static __device__ __forceinline__ uint32_t tiles_scanned(uint32_t shared) { return shared + kScannedBarriers; }
  static __device__ __forceinline__ uint32_t turn(uint32_t shared, int warpgroup) { return shared + kTurnBarriers + warpgroup * 8; }

  static __device__ __forceinline__ uint32_t tile(uint32_t shared, uint32_t number) {
    return shared + kTiles + number * sizeof(Tile);
  }

  static __device__ __forceinline__ uint32_t careful(uint32_t shared, uint32_t place) { return shared + kCareful + place * sizeof(int); }

  static __device__ __forceinline__ uint32_t tokens(uint32_t shared) { return shared + kTokens; }

  static __device__ __forceinline__ uint32_t scales(uint32_t shared, uint32_t stage) {
    return shared + kScales + stage * Traits::kScaleBytes;
  }

  // A consumer warp's epilogue buffers. Under kActivationBackward each has two barriers.
  static __device__ __forceinline__ uint32_t buffer(uint32_t shared, int warp, int number) {
    return shared + kEpilogueBuffers + (warp * kBuffers + number) * kEpilogueBufferBytes;
  }
  static __device__ __forceinline__ uint32_t buffer_full(uint32_t shared, int warp, int number) {
    return shared + kBufferBarriers + (warp * kBuffers + number) * 16;
  }
  static __device__ __forceinline__ uint32_t buffer_empty(uint32_t shared, int warp, int number) {
    return buffer_full(shared, warp, number) + 8;
  }

  // Where lane l finds its row of quarter `quarter` of an epilogue buffer, 16 x 16 elements, for stmatrix. Matrices are (rows
  // 0-7, columns 0-7), (rows 8-15, columns 0-7), then the same of columns 8-15; the swizzle moves a line's 16-byte vectors by the
  // line's number.
  static __device__ __forceinline__ uint32_t fragment_address(uint32_t buffer, int quarter) {
    const int lane = threadIdx.x % 32, line = lane % 16, vector = quarter * 2 + lane / 16;
    return buffer + line * kLineBytes + ((vector ^ (line & 7)) << 4);
  }
  // The same where columns become lines, of 16 elements and without a swizzle: matrix l / 8 has columns 0-7 or 8-15, and rows 0-7
  // or 8-15 as its vector.
  static __device__ __forceinline__ uint32_t transposed_fragment_address(uint32_t buffer, int quarter) {
    const int lane = threadIdx.x % 32;
    return buffer + (quarter * 16 + lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
  }
};

}  // namespace gbmoe::hopper
