// The grouped GEMM of GPUs since Ampere: mma.sync, fed by cp.async and ldmatrix, with the sizes of the groups on the device.
//
//   m-grouped   out[rows of e] = a[rows of e] @ b[e]        b [E,K,N], or [E,N,K], contiguous along K
//   k-grouped   out[e] = a[rows of e].T @ b[rows of e]      a [P,M], b [P,N]; exactly 0 for an empty group
//
// CTAs are persistent: each computes its tiles one after the other, with its k-blocks in one sequence over all of them, so that a
// tile's first k-blocks arrive while the one before is finished. Each element of the result is summed by one warp in the order of K:
// two runs give the same bits.
//
//   traits.cuh          what is fixed when an instance is compiled: dtypes, layouts, tile, epilogue
//   arguments.cuh       what a launch hands over
//   tile_scheduler.cuh  which tiles a CTA computes
//   shared_memory.cuh   the layout of a k-block, and the reads of its fragments
//   producer.cuh        the copies from global memory
//   mainloop.cuh        the multiplication
//   epilogue.cuh        the stores
//   ptx.cuh             the instructions
//   launch.cuh          the host's side

#pragma once

#include "epilogue.cuh"
#include "mainloop.cuh"
#include "producer.cuh"

namespace gbmoe::tensor_core {

// What a CTA does.
template <typename Traits> __device__ __forceinline__ void compute_tiles(const Arguments& args) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const uint32_t shared = shared_address(shared_bytes);
  __shared__ Tile tiles[kTileRing];
  constexpr int kSteps = Traits::kSteps, kFragmentsM = Traits::kFragmentsM;
  // The copies of a k-block are spread over all its steps but the last, one part for each fragment of rows.
  constexpr int kParts = (kSteps - 1) * kFragmentsM;
  const auto behind = [](int stage) { return stage + 1 == Traits::kStages ? 0 : stage + 1; };

  Producer<Traits> producer(args, tiles);
#pragma unroll
  for (int stage = 0; stage < Traits::kStages - 1; ++stage) {
    producer.next_k_block(args);
    producer.template copy<1>(args, shared + stage * Traits::kStageBytes, 0);
    cp_async_commit();
  }
  cp_async_wait<Traits::kStages - 2>();
  __syncthreads();
  Fragments<Traits> fragments[2];
  fragments[0].load(shared, 0);

  int stage = 0;                         // of the k-block that is multiplied
  int free_stage = Traits::kStages - 1;  // where no warp reads any more
  for (int finished = 0; tiles[finished % kTileRing].group >= 0; ++finished) {
    const Tile tile = tiles[finished % kTileRing];
    Accumulators<Traits> accumulators;
    accumulators.clear();
    for (int k_blocks = count_k_blocks<Traits>(args, tile); k_blocks > 0; --k_blocks) {
      producer.next_k_block(args);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        if (step + 1 < kSteps) {
          fragments[(step + 1) % 2].load(shared + stage * Traits::kStageBytes, step + 1);
        } else {
          cp_async_commit();
          // The next k-block has arrived, and all warps have read all of this one.
          cp_async_wait<Traits::kStages - 2>();
          __syncthreads();
          free_stage = stage;
          stage = behind(stage);
          fragments[0].load(shared + stage * Traits::kStageBytes, 0);
        }
#pragma unroll
        for (int i = 0; i < kFragmentsM; ++i) {
          fragments[step % 2].multiply(i, accumulators);
          if (step + 1 < kSteps) producer.template copy<kParts>(args, shared + free_stage * Traits::kStageBytes, step * kFragmentsM + i);
        }
      }
    }
    Epilogue<Traits>::store(args, tile, accumulators);
    __syncwarp();
  }
  cp_async_wait<0>();
}

template <typename Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kCtasPerMultiprocessor)
    grouped_gemm_kernel(const __grid_constant__ Arguments args) {
#if defined(__CUDA_ARCH__)
  // Where there are no instances, memory_of has said so, and the host launches none.
  if constexpr (has_instances(__CUDA_ARCH__ / 10, Traits::kMemory)) compute_tiles<Traits>(args);
  else __trap();
#else
  compute_tiles<Traits>(args);
#endif
}

}  // namespace gbmoe::tensor_core
