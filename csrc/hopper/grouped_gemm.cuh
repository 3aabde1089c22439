// One persistent kernel for every grouped GEMM of a layer on Hopper (sm_90a), with the group sizes on the device.
//
// A CTA walks over tiles of 128 x 256 results, or 128 x 192 where that leaves less of them empty. One warp is its producer
// (producer.cuh): it loads k-blocks, 64-wide slices of both operands, by TMA, kStages of them ahead. Two warpgroups are the
// consumers (mainloop.cuh): each multiplies its own 64 rows by all columns on the tensor cores, and stores them (epilogue.cuh),
// or hands them to warps that compute the gradient of the activation (epilogue_backward.cuh). In ping-pong
// (mainloop_ping_pong.cuh) tiles have 128 x 128 results, and the consumers make whole ones in turns. Operands in e4m3 come with a scale
// for every k-block of a row and every 128 x 128 block of b (mainloop_scaled.cuh), which a warp next to the producer copies
// (scale_loader.cuh), or where rows are summed over for every k-block of a column (mainloop_scaled_weights.cuh). Another warp looks
// through the scales a tile ahead, and has tiles multiplied carefully where two scales' product may leave float32's range
// (scale_scanner.cuh).
//
// Groups may begin at any row: a k-block that reaches into the next group is harmless, because rows of a group are rows of its
// result only, and are stored only if they belong to it. Where rows are what is summed over (gradients of weights), the lines of
// the last k-block that belong to the next group are set to zero in shared memory before they are multiplied. Of scaled operands every
// group begins a k-block, and zeros in memory fill up its last one (quantize_k_blocks.cu); they lie there as k-blocks, transposed.
//
//   m-grouped, groups are rows of the result:        out [rows,N] = a [rows,K] @ b[e]    b[e] [N,K], or [K,N] where kTransposedB
//   k-grouped (kGroupedK), groups are summed over:   out[e] [M,N] = a [rows,M].T @ b [rows,N]
//
// CTAs may come in clusters of two: side by side in N they share their k-blocks of a, side by side in M those of b, by multicast.
// One warp of a cluster is its scheduler (tile_scheduler.cuh): it finds the tiles ahead of time and sends them through shared
// memory, as k-blocks are. Tiles that would keep few CTAs busy for long are cut along K (split_k.cuh), as balanced_schedule.cu
// says ahead of the launch. Over long sums clusters may be kept together, so that they share what they read in the L2 cache (pacing.cuh).
//
// Where kGatherA, a is not in memory: its rows are gathered from the tokens' matrix, and zeros where a row has no slot. A CTA alone
// has four producer warps for that (gather_producer.cuh), and TMA brings b only; in a pair along N two warps of each CTA load half of
// the lines by TMA (line_producer.cuh). A k-grouped GEMM then computes out[e].T, because a tile has half as many rows as columns, and the
// gathered operand should be the smaller one; the stores transpose it back. It may have two b, and two outputs: their tiles are
// neighbours along N, so that both share what is gathered.
//
// Legend: M, N, K as in out [M,N] = a [M,K] @ b [K,N]; E groups (experts); P rows of all groups. A chunk is 64 columns of a tile.

#pragma once

#include "epilogue_backward.cuh"
#include "float8/mainloop_scaled.cuh"
#include "float8/mainloop_scaled_weights.cuh"
#include "float8/scale_loader.cuh"
#include "float8/scale_scanner.cuh"
#include "line_producer.cuh"
#include "mainloop.cuh"
#include "mainloop_ping_pong.cuh"
#include "producer.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct GroupedGemm {
  using Shared = SharedMemory<Traits>;

  static __device__ void run(const TensorMaps& maps, const Arguments& args) {
    extern __shared__ __align__(1024) uint8_t memory[];
    const uint32_t shared = shared_address(memory);
    if (threadIdx.x == 0) init_barriers(shared);
    if (Traits::kClusterSize > 1) cluster_sync(); else __syncthreads();
    if (threadIdx.x / 128 == kConsumerWarpgroups) {
      const int warp = threadIdx.x / 32;
      setmaxnreg_dec<Traits::kProducerRegisters>();
      if (warp < kConsumerWarps + Traits::kProducerWarps) {
        Producer<Traits>::run(maps, args, shared);
      } else if (warp < kConsumerWarps + Traits::kProducerWarps + Traits::kLineWarps) {
        if constexpr (Traits::kGatherLines) LineProducer<Traits>::run(maps, args, shared);
      } else if (Traits::kScaledRows && warp == kConsumerWarps + Traits::kProducerWarps) {
        if constexpr (Traits::kScaledRows) ScaleLoader<Traits>::run(args, shared);
      } else if (Traits::kScaled && warp == kConsumerWarps + Traits::kProducerWarps + Traits::kScaleWarps) {
        if constexpr (Traits::kScaled) ScaleScanner<Traits>::run(args, shared);
      } else if constexpr (Traits::kActivationBackward) {
        ActivationBackward<Traits>::run(maps, args, shared);
      } else if (warp == Traits::kSchedulerWarp && (Traits::kClusterSize == 1 || cta_rank_in_cluster() == 0)) {
        TileSender<Traits> sender(args);
        while (sender.send(shared)) {}
        sender.drain(shared);
      }
    } else {
      setmaxnreg_inc<Traits::kConsumerRegisters>();
      if constexpr (Traits::kPingPong) PingPongMainLoop<Traits>::run(maps, args, shared);
      else if constexpr (Traits::kScaledK) ScaledWeightsMainLoop<Traits>::run(args, shared);
      else if constexpr (Traits::kScaled) ScaledMainLoop<Traits>::run(maps, args, shared);
      else MainLoop<Traits>::run(maps, args, shared);
    }
  }

 private:
  // How many arrivals end a phase of each barrier.
  static __device__ __forceinline__ void init_barriers(uint32_t shared) {
    const uint32_t full = Shared::stages_full(shared), empty = Shared::stages_empty(shared);
    for (int i = 0; i < Traits::kStages; ++i) {
      mbarrier_init(full + i * 8, 1 + (Traits::kGatherCopies ? 128 : 0) + 32 * Traits::kScaleWarps);
      mbarrier_init(empty + i * 8, (Traits::kPingPong ? 4 : kConsumerWarps) * Traits::kClusterSize);
    }
    for (int i = 0; i < kTileRing; ++i) {
      mbarrier_init(Shared::tiles_full(shared) + i * 8, 1);
      mbarrier_init(Shared::tiles_empty(shared) + i * 8, Traits::kTileReaders * Traits::kClusterSize);
    }
    for (int i = 0; Traits::kActivationBackward && i < kConsumerWarps * Traits::kEpilogueBuffers; ++i) {
      mbarrier_init(Shared::buffer_full(shared, 0, i), 1);
      mbarrier_init(Shared::buffer_empty(shared, 0, i), 1);
    }
    for (int i = 0; Traits::kScaled && i < kTileRing; ++i) mbarrier_init(Shared::tiles_scanned(shared) + i * 8, 1);
    for (int i = 0; Traits::kPingPong && i < kConsumerWarpgroups; ++i) mbarrier_init(Shared::turn(shared, i), 4);
    fence_mbarrier_init();
  }
};

template <typename Traits> __global__ void __launch_bounds__(kThreads, 1) grouped_gemm_kernel(
    const __grid_constant__ TensorMaps maps, const __grid_constant__ Arguments args) {
  GroupedGemm<Traits>::run(maps, args);
}

}  // namespace gbmoe::hopper
