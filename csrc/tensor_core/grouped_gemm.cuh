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

// One k-block: its products; the loads of the next step's fragments, each step's before its products; and, between products, the copies
// of another k-block.
template <typename Traits> struct KBlock {
  static constexpr int kSteps = Traits::kSteps, kFragmentsM = Traits::kFragmentsM;
  // Copies are spread over all steps but the last, one part after the products of each fragment of rows.
  static constexpr int kCopyParts = (kSteps - 1) * kFragmentsM;

  // copy(part) copies a part. finish_copies() is called after the last part; next_stage() waits for the next k-block and returns its
  // address. It is called halfway through the last step, so that there are products on both sides of its barrier.
  template <typename Copy, typename Finish, typename Next>
  static __device__ __forceinline__ void multiply(Fragments<Traits> (&fragments)[2], Accumulators<Traits>& accumulators, uint32_t stage,
                                                  const Copy& copy, const Finish& finish_copies, const Next& next_stage) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const bool last = step + 1 == kSteps;
      if (last) finish_copies();
      else fragments[(step + 1) % 2].load(stage, step + 1);
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        if (last && i == kFragmentsM / 2) fragments[0].load(next_stage(), 0);
        fragments[step % 2].multiply(i, accumulators);
        if (!last) copy(step * kFragmentsM + i);
      }
    }
  }
};

// What a CTA does.
template <typename Traits> __device__ __forceinline__ void compute_tiles(const Arguments& args) {
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const uint32_t shared = shared_address(shared_bytes);
  __shared__ TileQueue tiles;
  static_assert(sizeof(tiles) <= Traits::kStaticBytes);
  const auto address = [&](int stage) { return shared + stage * Traits::kStageBytes; };

  Producer<Traits> producer(args, tiles);
#pragma unroll
  for (int stage = 0; stage < Traits::kStages - 1; ++stage) {
    __syncthreads();
    producer.next_k_block(args, tiles);
    producer.template copy<1>(args, address(stage), 0);
    cp_async_commit();
  }
  cp_async_wait<Traits::kStages - 2>();
  __syncthreads();
  Fragments<Traits> fragments[2];
  fragments[0].load(shared, 0);

  int stage = 0;                         // of the k-block that is multiplied
  int free_stage = Traits::kStages - 1;  // where no warp reads any more
  for (int finished = 0; tiles[finished].group >= 0; ++finished) {
    Accumulators<Traits> accumulators;
    accumulators.clear();
    for (int k_blocks = count_k_blocks<Traits>(args, tiles[finished]); k_blocks > 0; --k_blocks) {
      producer.next_k_block(args, tiles);
      const auto copy = [&](int part) { producer.template copy<KBlock<Traits>::kCopyParts>(args, address(free_stage), part); };
      const auto next_stage = [&] {
        // The next k-block has arrived, and all warps have read all of this one.
        cp_async_wait<Traits::kStages - 2>();
        __syncthreads();
        free_stage = stage;
        stage = stage + 1 == Traits::kStages ? 0 : stage + 1;
        return address(stage);
      };
      KBlock<Traits>::multiply(fragments, accumulators, address(stage), copy, [] { cp_async_commit(); }, next_stage);
    }
    Epilogue<Traits>::store(args, tiles[finished], accumulators);
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
