// One CTA at a time of a CUDA kernel, on a CPU: each of its threads is a fiber, and a fiber waits where a thread would.
//
// It is made for kernels of barriers, warp-wide functions and cp.async. It shows wrong indices, reads of what has not arrived and
// writes to what is still read: warps run in a random order, now this and now that one far ahead of the others, cp.async writes either
// at once or as late as a wait lets it, and shared memory begins full of NaN. It does not show what takes two threads to run at the
// same time.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <vector>

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __shared__ thread_local
#define __align__(bytes)
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct uint2 { uint32_t x, y; };
struct uint4 { uint32_t x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };

namespace emulated_gpu {

constexpr uint32_t kSharedBytes = 1 << 18;
constexpr int kMostRanges = 10;
inline uint32_t shared_limit = kSharedBytes;  // what a CTA of the launch has
constexpr int kMostWords = 12;  // that a lane gives to the others at once

struct Copy {
  uint32_t to;
  const void* from;
  bool exists;
};

using Place = void* [5];  // where __builtin_longjmp goes, which keeps no signals' masks and takes a fifth of the time of longjmp

// The stack of a fiber, which runs one thread of a CTA after the other. `runs`: it is where `resume` says.
struct Stack {
  std::vector<char> bytes = std::vector<char>(1 << 16);
  ucontext_t context;
  Place resume;
  bool runs = false;
};

struct Fiber {
  bool ended = false, waited = false;
  std::deque<std::vector<Copy>> groups;  // of cp.async, the oldest first
  std::vector<Copy> open_group;
};

// What the lanes of a warp gave in this exchange and in the one before, which a slow lane may still read.
struct Warp {
  int arrived = 0;
  unsigned exchanges = 0;
  uint32_t words[2][32][kMostWords];
};

// A barrier of two warps, of which one arrives and goes on, and the other waits.
struct Turn { int arrived = 0, awaited = 0; };

// How a kernel is launched. cp.async and loads of 16 bytes may read the `ranges` of global memory alone.
struct Run {
  int ctas, late_copies, large_memory;
  unsigned seed;
  int ranges;
  uintptr_t begin[kMostRanges], end[kMostRanges];
};

struct Cta {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::function<void()> kernel;
  std::vector<Turn> turns;
  int arrived = 0;
  unsigned barriers = 0;
};

inline Cta cta;
inline std::deque<Stack> stacks;  // of the fibers, by their number; every CTA uses them again
inline unsigned steps;  // that fibers have taken: arrivals, and ends
inline Run run;
inline const char* failure;  // of the kernel that was launched last, or null
inline int thread, block, blocks;
inline unsigned char* shared_memory;
inline Place scheduler;
inline std::function<void()> kernel_before;  // what is left of it where a kernel is launched early; otherwise empty
inline bool early;                           // whether the kernel was launched so

// Ends the kernel.
[[noreturn, gnu::noinline]] inline void fail(const char* what) {
  failure = what;
  for (Stack& stack : stacks) stack.runs = false;  // the other fibers are in the middle of the kernel
  __builtin_longjmp(scheduler, 1);
}

// Not in a function that calls __builtin_setjmp: g++ takes it that such a one does not return a second time.
[[noreturn, gnu::noinline]] inline void go_to(Place& place) { __builtin_longjmp(place, 1); }

// Lets the other fibers run.
[[gnu::noinline]] inline void yield() {
  if (__builtin_setjmp(stacks[thread].resume) == 0) go_to(scheduler);
}

inline void wait_for_kernel_before() {
  cta.fibers[thread].waited = true;
  if (kernel_before) kernel_before();
  kernel_before = nullptr;
}
inline void let_next_kernel_begin() {
  if (early && !cta.fibers[thread].waited) fail("lets the next kernel begin before it has waited for the one before");
}

inline void barrier() {
  const unsigned before = cta.barriers;
  ++steps;
  if (++cta.arrived == static_cast<int>(cta.fibers.size())) cta.arrived = 0, ++cta.barriers;
  else while (cta.barriers == before) yield();
}

// A turn that is passed on twice before it is taken fails: on a GPU the barrier would count lanes of two turns as one's.
inline void pass_turn(int to_warp) {
  ++steps;
  Turn& turn = cta.turns[to_warp];
  if (++turn.arrived > 32 * (turn.awaited / 32 + 1)) fail("passes a turn on that was not taken");
}
inline void await_turn(int warp) {
  Turn& turn = cta.turns[warp];
  const int mine = ++turn.awaited;
  ++steps;
  while (turn.arrived < (mine + 31) / 32 * 32) yield();
}

// Gives words of 4 bytes to the other lanes of the warp, and returns all lanes' words.
template <typename T> auto exchange(const T* mine, int words) -> const T (*)[kMostWords] {
  static_assert(sizeof(T) == 4);
  Warp& warp = cta.warps[thread / 32];
  const unsigned before = warp.exchanges;
  ++steps;
  std::memcpy(warp.words[before & 1][thread % 32], mine, 4 * words);
  if (++warp.arrived == 32) warp.arrived = 0, ++warp.exchanges;
  else while (warp.exchanges == before) yield();
  return reinterpret_cast<const T(*)[kMostWords]>(warp.words[before & 1]);
}

// Fails unless the 16 bytes lie in one of the ranges, at a multiple of 16.
inline void check_read(const void* from) {
  const auto begin = reinterpret_cast<uintptr_t>(from);
  if (begin % 16) fail("a read of 16 bytes from an address that is not aligned");
  bool readable = false;
  for (int i = 0; i < run.ranges; ++i) readable = readable || (begin >= run.begin[i] && begin + 16 <= run.end[i]);
  if (!readable) fail("reads outside of the operands");
}

inline void write(const Copy& copy) {
  if (copy.to % 16) fail("cp.async: addresses that are not aligned");
  if (copy.to + 16 > shared_limit) fail("cp.async: beyond the shared memory");
  if (copy.exists) check_read(copy.from);
  if (copy.exists) std::memcpy(shared_memory + copy.to, copy.from, 16);
  else std::memset(shared_memory + copy.to, 0, 16);
}

inline void run_fiber() {
  for (;;) {
    cta.kernel();
    if (early && !cta.fibers[thread].waited) fail("ends without having waited for the kernel before");
    cta.fibers[thread].ended = true;
    ++steps;
    yield();  // until there is another CTA
  }
}

[[gnu::noinline]] inline void resume(int index) {
  Stack& stack = stacks[thread = index];
  if (__builtin_setjmp(scheduler) != 0) return;
  if (stack.runs) go_to(stack.resume);
  stack.runs = true;
  getcontext(&stack.context);
  stack.context.uc_stack.ss_sp = stack.bytes.data();
  stack.context.uc_stack.ss_size = stack.bytes.size();
  makecontext(&stack.context, run_fiber, 0);
  setcontext(&stack.context);
}

// Lets a warp take up to so many steps; false if something failed.
inline bool run_warp(int warp, int most_steps) {
  for (int step = 0; step < most_steps; ++step) {
    const unsigned before = steps;
    for (int lane = 0; lane < 32; ++lane) {
      if (!cta.fibers[32 * warp + lane].ended) resume(32 * warp + lane);
      if (failure) return false;
    }
    if (steps == before) break;  // it waits for other warps
  }
  return true;
}

// Runs the kernel in CTAs of `threads` threads, one CTA after the other, until all have ended or one has failed. Warps take turns in a
// random order, each for as many steps as chance will have it, so that now this and now that one is far ahead of the others.
inline void launch(const Run& as, int threads, unsigned char* shared, std::function<void()> kernel) {
  std::mt19937 generator(as.seed);
  std::vector<int> order(threads / 32);
  for (int i = 0; i < threads / 32; ++i) order[i] = i;
  while (stacks.size() < static_cast<size_t>(threads)) stacks.emplace_back();
  run = as;
  early = static_cast<bool>(kernel_before);
  failure = nullptr;
  blocks = run.ctas;
  shared_memory = shared;
  for (block = 0; block < blocks; ++block) {
    cta = Cta{std::vector<Fiber>(threads), std::vector<Warp>(threads / 32), kernel, std::vector<Turn>(threads / 32), 0, 0};
    std::memset(shared, 0xff, kSharedBytes);
    while (!std::all_of(cta.fibers.begin(), cta.fibers.end(), [](const Fiber& fiber) { return fiber.ended; })) {
      const unsigned before = steps;
      std::shuffle(order.begin(), order.end(), generator);
      for (int warp : order) if (!run_warp(warp, 1 + generator() % 200)) return;
      if (steps == before) {
        failure = "a deadlock";
        for (Stack& stack : stacks) stack.runs = false;
      }
      if (failure) return;
    }
  }
}

struct Index { int x; };

}  // namespace emulated_gpu

#define threadIdx (emulated_gpu::Index{emulated_gpu::thread})
#define blockIdx (emulated_gpu::Index{emulated_gpu::block})
#define gridDim (emulated_gpu::Index{emulated_gpu::blocks})

inline void __syncthreads() { emulated_gpu::barrier(); }
inline void __syncwarp() {
  const uint32_t nothing = 0;
  emulated_gpu::exchange(&nothing, 1);
}
inline int __clz(unsigned bits) { return bits ? __builtin_clz(bits) : 32; }
inline int __ffs(unsigned bits) { return __builtin_ffs(static_cast<int>(bits)); }
inline int __popc(unsigned bits) { return __builtin_popcount(bits); }
inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
  const uint64_t bytes = static_cast<uint64_t>(high) << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) result |= static_cast<uint32_t>(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return result;
}
inline uint32_t shuffle(uint32_t word, int lane) { return emulated_gpu::exchange(&word, 1)[lane][0]; }
inline uint32_t __shfl_sync(unsigned, uint32_t word, int lane) { return shuffle(word, lane % 32); }
inline uint32_t __shfl_up_sync(unsigned, uint32_t word, int by) {
  const int lane = emulated_gpu::thread % 32;
  return shuffle(word, lane < by ? lane : lane - by);
}
inline uint32_t __shfl_xor_sync(unsigned, uint32_t word, int mask) { return shuffle(word, emulated_gpu::thread % 32 ^ mask); }
inline unsigned __reduce_add_sync(unsigned, uint32_t value) {
  const auto values = emulated_gpu::exchange(&value, 1);
  unsigned sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += values[lane][0];
  return sum;
}
inline unsigned __ballot_sync(unsigned, bool vote) {
  const uint32_t own = vote;
  const auto votes = emulated_gpu::exchange(&own, 1);
  unsigned result = 0;
  for (int lane = 0; lane < 32; ++lane) result |= votes[lane][0] << lane;
  return result;
}
