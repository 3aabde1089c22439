// The instructions that these kernels and those for few rows are made of, one function each: cp.async, ldmatrix, mma.sync, barriers.
// Names are PTX's.
//
// A fragment is a warp's operand of one mma.sync, spread over the registers of its 32 lanes. All lanes call each function that reads
// or multiplies fragments together.

#pragma once

#include <cstdint>

#include "../common.cuh"

namespace gbmoe::tensor_core {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Copies 16 bytes to shared memory, past the L1; or writes zeros where they do not `exist`, and then reads nothing. It is complete
// for this thread after a cp_async_wait, and for others after the next barrier.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
// Closes a group of copies, which may be empty.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups but the `kPending` that were closed last.
template <int kPending> __device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// 16 bytes that no kernel writes meanwhile and nobody reads again soon: past the L1. The L2 reads the line of 128 bytes.
__device__ __forceinline__ uint4 load_once_16(const void* from) {
  uint4 value;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from));
  return value;
}

// Warps of a CTA that take turns: a warp waits until another one passes the turn on to it, and then reads what that one wrote to shared
// memory before. Warps have numbers below kWarps. Warp w uses barrier w + 1; 0 is __syncthreads'. The number is a constant in each branch,
// because a turn takes longer where ptxas finds it in a register.
template <int kWarps> __device__ __forceinline__ void await_turn(int warp) {
  static_assert(kWarps < 16, "a CTA has 16 barriers");
  __syncwarp();
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    if (w == warp) asm volatile("bar.sync %0, 64;" ::"r"(w + 1) : "memory");
}
// bar.arrive orders the writes before it as bar.sync does (PTX manual). The fence says so to whoever does not know; it takes no time that
// could be measured.
template <int kWarps> __device__ __forceinline__ void pass_turn(int to_warp) {
  static_assert(kWarps < 16, "a CTA has 16 barriers");
  __threadfence_block();
  __syncwarp();
#pragma unroll
  for (int w = 0; w < kWarps; ++w)
    if (w == to_warp) asm volatile("bar.arrive %0, 64;" ::"r"(w + 1) : "memory");
}

// A load that stays after the ones before it.
__device__ __forceinline__ int load_in_place(const int* from) {
  int value;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(value) : "l"(from));
  return value;
}

// Four 8 x 8 matrices of 16-bit elements; lanes 8 i to 8 i + 7 hold the addresses of matrix i's rows. Lane l gets elements
// (l / 4, 2 (l % 4)) and the one next to it; transposed it gets (2 (l % 4), l / 4) and the one below it.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&fragment)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3]) : "r"(row) : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&fragment)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(fragment[0]), "=r"(fragment[1]), "=r"(fragment[2]), "=r"(fragment[3]) : "r"(row) : "memory");
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t from) {
  uint32_t word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
  return word;
}

// sums [16,8] += a [16,K] @ b [K,8] with K = 16, or 8 for float, whose operands are TF32. Lane l has of the sums rows l / 4 and
// l / 4 + 8, columns 2 (l % 4) and the next.
template <typename T> __device__ void mma(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1);

template <>
__device__ __forceinline__ void mma<__nv_bfloat16>(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma<__half>(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <> __device__ __forceinline__ void mma<float>(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// fp32 to TF32, to nearest. The tensor cores would cut the lower bits off.
__device__ __forceinline__ uint32_t round_to_tf32(uint32_t bits) {
  uint32_t rounded;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "r"(bits));
  return rounded;
}

}  // namespace gbmoe::tensor_core
