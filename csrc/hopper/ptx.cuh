// The Hopper instructions that the grouped GEMM is made of: one function an instruction, nothing else.
//
// Shared memory is named by its 32-bit address. Barriers are mbarriers in shared memory; a wait names the parity of the phase
// whose end it waits for, so that a fresh barrier passes a wait for parity 1.

#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace gbmoe::hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---------------------------------------------------------------------------------------------------------- barriers

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}
// Makes initialised barriers visible to TMA and to the other CTAs of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives at the barrier of the same address in CTA `rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(barrier), "r"(rank) : "memory");
}
// Arrives at the barrier of the same address in CTA `rank`, and lets its phase end only when that many bytes were stored there.
__device__ __forceinline__ void mbarrier_expect_bytes_remote(uint32_t barrier, uint32_t bytes, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %2;\n"
      "mbarrier.arrive.expect_tx.shared::cluster.b64 _, [remote], %1;\n"
      "}" ::"r"(barrier), "r"(bytes), "r"(rank) : "memory");
}
// Arrives, and lets the phase end only when that many bytes were copied in.
__device__ __forceinline__ void mbarrier_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "wait:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra wait;\n"
      "}" ::"r"(barrier), "r"(parity) : "memory");
}
// Whether that phase is over, without a wait.
__device__ __forceinline__ bool mbarrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t over;
  asm volatile("{\n.reg .pred over;\nmbarrier.test_wait.parity.shared::cta.b64 over, [%1], %2;\nselp.b32 %0, 1, 0, over;\n}"
               : "=r"(over)
               : "r"(barrier), "r"(parity)
               : "memory");
  return over != 0;
}
// A barrier of `threads` threads of the CTA; 0 is __syncthreads' own.
__device__ __forceinline__ void named_barrier_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, which tells each thread whether `value` holds in one of them.
__device__ __forceinline__ bool named_barrier_any(uint32_t id, uint32_t threads, bool value) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred own, any;\n"
      "setp.ne.u32 own, %3, 0;\n"
      "bar.red.or.pred any, %1, %2, own;\n"
      "selp.b32 %0, 1, 0, any;\n"
      "}" : "=r"(any) : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(value)) : "memory");
  return any != 0;
}

// A load that sees what other multiprocessors' atomics have left, and not an older copy in the L1 cache.
__device__ __forceinline__ unsigned long long load_relaxed(const unsigned long long* from) {
  unsigned long long value;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
  return value;
}

// True in one thread of the warp, all of which call this. The compiler knows that it is one, and issues TMA without a loop over lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\nselp.b32 %0, 1, 0, elected;\n}" : "=r"(elected));
  return elected != 0;
}

__device__ __forceinline__ uint32_t cta_rank_in_cluster() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// ---------------------------------------------------------------------------------------------------------- vectors of 16 bytes

__device__ __forceinline__ void store_shared_16(uint32_t to, int4 value) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
               : "memory");
}
__device__ __forceinline__ int4 load_shared_16(uint32_t from) {
  int4 value;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_int(uint32_t to, int value) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ int load_shared_int(uint32_t from) {
  int value;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ float load_shared_float(uint32_t from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from) : "memory");
  return value;
}
// From global memory that is read once.
__device__ __forceinline__ int4 load_global_16_once(const void* from) {
  int4 value;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "l"(from)
               : "memory");
  return value;
}
// 4 bytes, likewise.
__device__ __forceinline__ uint32_t load_global_4_once(const void* from) {
  uint32_t value;
  asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
  return value;
}
// The address in the cluster's shared memory that this address has in CTA `rank`.
__device__ __forceinline__ uint32_t shared_address_in_cta(uint32_t address, int rank) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// An element of 16 bits to such an address.
template <typename T> __device__ __forceinline__ void store_shared_of_cluster(uint32_t to, T value) {
  static_assert(sizeof(T) == 2);
  asm volatile("st.shared::cluster.b16 [%0], %1;" ::"r"(to), "h"(reinterpret_cast<const uint16_t&>(value)) : "memory");
}
// To the same address in CTA `rank` of the cluster, whose barrier counts the bytes (st.async).
__device__ __forceinline__ void store_shared_16_remote(uint32_t to, int4 value, uint32_t barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 there, counts;\n"
      "mapa.shared::cluster.u32 there, %0, %6;\n"
      "mapa.shared::cluster.u32 counts, %5, %6;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%1, %2, %3, %4}, [counts];\n"
      "}" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w), "r"(barrier), "r"(rank)
      : "memory");
}

// ------------------------------------------------------------------------------------------------------- TMA and cp.async

// The box at (x, y, z) of the tensor into shared memory, of this CTA or by multicast of every CTA of `mask`.
__device__ __forceinline__ void tma_load(const CUtensorMap* map, uint32_t barrier, uint32_t to, int x, int y, int z) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z)
      : "memory");
}
__device__ __forceinline__ void tma_load_multicast(
    const CUtensorMap* map, uint32_t barrier, uint32_t to, int x, int y, int z, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5, %6}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y), "r"(z)
      : "memory");
}
// The same of a matrix, whose boxes are a line each.
__device__ __forceinline__ void tma_load_line(const CUtensorMap* map, uint32_t barrier, uint32_t to, int x, int y) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];" ::"r"(to),
      "l"(map), "r"(barrier), "r"(x), "r"(y)
      : "memory");
}
__device__ __forceinline__ void tma_load_line_multicast(
    const CUtensorMap* map, uint32_t barrier, uint32_t to, int x, int y, uint16_t mask) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
      " [%0], [%1, {%4, %5}], [%2], %3;" ::"r"(to),
      "l"(map), "r"(barrier), "h"(mask), "r"(x), "r"(y)
      : "memory");
}
// Fetches the map itself, ahead of its first use.
__device__ __forceinline__ void tma_prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
// The box at (x, y, z) of the tensor into the L2 cache.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap* map, int x, int y, int z) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];" ::"l"(map), "r"(x), "r"(y), "r"(z) : "memory");
}
// A box from shared memory to (x, y, z) of the tensor; what lies outside the tensor is left out.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map), "r"(from), "r"(x),
               "r"(y), "r"(z)
               : "memory");
}
// The same, added to what is there.
__device__ __forceinline__ void tma_reduce_add(const CUtensorMap* map, uint32_t from, int x, int y, int z) {
  asm volatile("cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
               "r"(from), "r"(x), "r"(y), "r"(z)
               : "memory");
}
// 16 bytes, copied by this thread, without TMA.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// 4 bytes, likewise.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_16_or_zeros(uint32_t to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Arrives, once this thread's cp.async so far have come; one of the arrivals that the barrier was initialised with.
__device__ __forceinline__ void mbarrier_arrive_on_cp_async(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most N groups of this thread's TMA stores still read shared memory.
template <int N> __device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(N) : "memory");
}
// Waits until all but N groups of this thread's TMA stores are complete.
template <int N> __device__ __forceinline__ void tma_store_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(N) : "memory");
}
// Orders this thread's ordinary accesses to shared memory before what TMA and the tensor cores do next.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ------------------------------------------------------------------------------------------------------ tensor cores

template <int N> __device__ __forceinline__ void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N committed groups of products are still under way.
template <int N> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// A matrix in shared memory under the 128-byte swizzle, as wgmma wants it described. `stride` is the distance in bytes between swizzle
// atoms; `leading`, between runs of 64 elements along M or N, is used where these are the contiguous direction.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t leading, uint32_t stride) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  return static_cast<uint64_t>(address >> 4 & 0x3fff) | static_cast<uint64_t>(leading >> 4) << 16 |
         static_cast<uint64_t>(stride >> 4) << 32 | kSwizzle128;
}

// d [64,N] = a [64,16] @ b [16,N] (+ d where `add`), of one warpgroup. kTransposed: M (of a) or N (of b) is contiguous.
#define GBMOE_WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define GBMOE_WGMMA_8(i) GBMOE_WGMMA_4(i), GBMOE_WGMMA_4(i + 4)
#define GBMOE_WGMMA_32(i) GBMOE_WGMMA_8(i), GBMOE_WGMMA_8(i + 8), GBMOE_WGMMA_8(i + 16), GBMOE_WGMMA_8(i + 24)
#define GBMOE_WGMMA_64_NAMES                                                                                               \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29"          \
  ",%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56"           \
  ",%57,%58,%59,%60,%61,%62,%63"
#define GBMOE_WGMMA_96_NAMES                                                                                               \
  GBMOE_WGMMA_64_NAMES                                                                                                     \
  ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90"           \
  ",%91,%92,%93,%94,%95"
#define GBMOE_WGMMA_OPERANDS \
  "l"(a), "l"(b), "r"(static_cast<int>(add)), "n"(kTransposedA ? 1 : 0), "n"(kTransposedB ? 1 : 0)
#define GBMOE_WGMMA_N256(type)                                                                                             \
  asm volatile(                                                                                                            \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %130, 0;\n"                                                                    \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" GBMOE_WGMMA_96_NAMES                               \
      ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,"   \
      "%119,%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, add, 1, 1, %131, %132;\n}"                               \
      : GBMOE_WGMMA_32(0), GBMOE_WGMMA_32(32), GBMOE_WGMMA_32(64), GBMOE_WGMMA_32(96)                                      \
      : GBMOE_WGMMA_OPERANDS)
#define GBMOE_WGMMA_N192(type)                                                                                             \
  asm volatile(                                                                                                            \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %98, 0;\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n192k16.f32." type "." type " {" GBMOE_WGMMA_96_NAMES                               \
      "}, %96, %97, add, 1, 1, %99, %100;\n}"                                                                              \
      : GBMOE_WGMMA_32(0), GBMOE_WGMMA_32(32), GBMOE_WGMMA_32(64)                                                          \
      : GBMOE_WGMMA_OPERANDS)
#define GBMOE_WGMMA_N32(type)                                                                                              \
  asm volatile(                                                                                                            \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %18, 0;\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n32k16.f32." type "." type                                                          \
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, %16, %17, add, 1, 1, %19, %20;\n}"                        \
      : GBMOE_WGMMA_8(0), GBMOE_WGMMA_8(8)                                                                                 \
      : GBMOE_WGMMA_OPERANDS)
#define GBMOE_WGMMA_N128(type)                                                                                             \
  asm volatile(                                                                                                            \
      "{\n.reg .pred add;\nsetp.ne.b32 add, %66, 0;\n"                                                                     \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." type "." type " {" GBMOE_WGMMA_64_NAMES                               \
      "}, %64, %65, add, 1, 1, %67, %68;\n}"                                                                               \
      : GBMOE_WGMMA_32(0), GBMOE_WGMMA_32(32)                                                                              \
      : GBMOE_WGMMA_OPERANDS)

template <typename T, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[128], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) GBMOE_WGMMA_N256("bf16");
  else GBMOE_WGMMA_N256("f16");
}
template <typename T, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[96], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) GBMOE_WGMMA_N192("bf16");
  else GBMOE_WGMMA_N192("f16");
}
template <typename T, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[64], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) GBMOE_WGMMA_N128("bf16");
  else GBMOE_WGMMA_N128("f16");
}
template <typename T, bool kTransposedA, bool kTransposedB>
__device__ __forceinline__ void wgmma(float (&d)[16], uint64_t a, uint64_t b, bool add) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) GBMOE_WGMMA_N32("bf16");
  else GBMOE_WGMMA_N32("f16");
}
// d [64,N] = a [64,32] @ b [32,N] (+ d where `add`) in e4m3, both contiguous along K; a and b are the lower halves of descriptors
// whose stride is a swizzle atom. To add to 64 bits takes four times the instructions, in front of every product.
__device__ __forceinline__ uint32_t wgmma_address(uint32_t address) { return address >> 4 & 0x3fff; }
__device__ __forceinline__ void wgmma_float8(float (&d)[64], uint32_t a, uint32_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 of_a, of_b;\nsetp.ne.b32 add, %66, 0;\n"
      "mov.b64 of_a, {%64, %67};\nmov.b64 of_b, {%65, %67};\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" GBMOE_WGMMA_64_NAMES "}, of_a, of_b, add, 1, 1;\n}"
      : GBMOE_WGMMA_32(0), GBMOE_WGMMA_32(32)
      : "r"(a), "r"(b), "r"(static_cast<int>(add)), "n"(1 << 30 | 1024 >> 4));
}
__device__ __forceinline__ void wgmma_float8(float (&d)[96], uint32_t a, uint32_t b, bool add) {
  asm volatile(
      "{\n.reg .pred add;\n.reg .b64 of_a, of_b;\nsetp.ne.b32 add, %98, 0;\n"
      "mov.b64 of_a, {%96, %99};\nmov.b64 of_b, {%97, %99};\n"
      "wgmma.mma_async.sync.aligned.m64n192k32.f32.e4m3.e4m3 {" GBMOE_WGMMA_96_NAMES "}, of_a, of_b, add, 1, 1;\n}"
      : GBMOE_WGMMA_32(0), GBMOE_WGMMA_32(32), GBMOE_WGMMA_32(64)
      : "r"(a), "r"(b), "r"(static_cast<int>(add)), "n"(1 << 30 | 1024 >> 4));
}
// Keeps the compiler from moving accesses of an accumulator over a wait.
template <int N> __device__ __forceinline__ void fence_accumulators(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// The lane, which the compiler then keeps in a register rather than compute it again.
__device__ __forceinline__ int own_lane() {
  uint32_t lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  return static_cast<int>(lane);
}
// The same number, which the compiler then keeps in a register rather than compute it again wherever it is used.
__device__ __forceinline__ uint32_t kept_in_register(uint32_t value) {
  asm volatile("mov.b32 %0, %0;" : "+r"(value));
  return value;
}
template <typename T> __device__ __forceinline__ const T* kept_in_register(const T* pointer) {
  asm volatile("mov.b64 %0, %0;" : "+l"(pointer));
  return pointer;
}

// Four 8x8 matrices of 16-bit elements from fragments to shared memory; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix(uint32_t to, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}
// The same, each matrix transposed: its columns are the rows that are stored.
__device__ __forceinline__ void stmatrix_transposed(uint32_t to, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(m0), "r"(m1), "r"(m2), "r"(m3)
               : "memory");
}
// Two 16-bit numbers in a register. In assembly, because the compiler, seeing the halves, keeps each in a register of its own.
template <typename T> __device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t pair;
  if constexpr (std::is_same_v<T, __nv_bfloat16>) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
template <typename T> __device__ __forceinline__ float2 unpack(uint32_t pair) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
  float2 both;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(both.x), "=f"(both.y)
      : "r"(pair));
  return both;
}

}  // namespace gbmoe::hopper
