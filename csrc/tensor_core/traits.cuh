// What is fixed when an instance of the grouped GEMM is compiled.
//
// A CTA computes output tiles of kTileM x kTileN, its warps kWarpTileM x kWarpTileN of them each. It sums over k-blocks: slices of
// kBlockK terms, which take kRowBytes of a row. kStages of them are in shared memory or on their way to it.

#pragma once

#include "../activation_formulas.cuh"
#include "../common.cuh"

namespace gbmoe::tensor_core {

enum class EpilogueKind {
  kStore,       // out = sums
  kAccumulate,  // out += sums; out is fp32
  kActivation,  // h = sums, a = act(h)
  kGlu,         // of a warp's 64 columns 32 are w1's, h, and 32 are the same columns of v1's, g: a = act(h) * g
};

constexpr int kChunkBytes = 16;  // what one cp.async copies, and a row of one of ldmatrix's matrices
constexpr int kStepBytes = 32;   // of a row that one step along K multiplies: the K of mma.sync

// Multiprocessors have 100 KiB of shared memory (compute capability 8.6, 8.9, 12), or 164 and more (8.0, 8.7, 9, 10, 11). On those with
// more a k-block takes 128 bytes of a row. That halves the number of barriers; and as cp.async writes the pieces of different 128-byte
// lines one after the other, it halves the time of the copies' writes to shared memory where rows are contiguous along K.
enum class Memory { kSmall, kLarge };
constexpr int shared_memory_bytes(Memory memory) { return (memory == Memory::kLarge ? 164 : 100) << 10; }
// Whether code for compute capability `arch` (80, 86, ...) holds the instances for that memory. Code for 8.0 runs on 8.6 and 8.9 too.
constexpr bool has_instances(int arch, Memory memory) {
  const bool large = arch == 80 || arch == 87 || (arch >= 90 && arch < 120);
  return memory == Memory::kLarge ? large : arch >= 80 && (arch == 80 || !large);
}

template <int kM, int kN, int kWarpM, int kWarpN, int kStagesOfSmall, int kStagesOfLarge> struct TileShape {
  static constexpr int kTileM = kM, kTileN = kN, kWarpTileM = kWarpM, kWarpTileN = kWarpN;
  static constexpr int stages(Memory memory) { return memory == Memory::kLarge ? kStagesOfLarge : kStagesOfSmall; }
};
// The tiles that there are instances of, under the names of tuning.tensor_core_tiles.
using WideTile = TileShape<128, 256, 64, 64, 4, 3>;    // 256 threads, 96 or 144 KiB of shared memory: one CTA on a multiprocessor
using SquareTile = TileShape<128, 128, 64, 64, 3, 2>;  // 128 threads, 48 or 64 KiB: two CTAs on a multiprocessor
using LowTile = TileShape<64, 128, 32, 64, 4, 3>;      // 128 threads, 48 or 72 KiB, for groups of few rows

// kMajorA: whether rows of a's tile are contiguous along K, or else along M; likewise b's along K or N.
template <typename Element, typename Output, typename Tile, Memory kOfMemory, bool kAIsKMajor, bool kBIsKMajor, bool kKGrouped,
          EpilogueKind kKind, typename Family = void>
struct GemmTraits : Tile {
  using T = Element;
  using Out = Output;
  using ActivationFamily = Family;
  static constexpr Memory kMemory = kOfMemory;
  static constexpr int kRowBytes = kMemory == Memory::kLarge ? 128 : 64, kStages = Tile::stages(kMemory);
  static constexpr int kSteps = kRowBytes / kStepBytes;  // along K in a k-block
  static constexpr bool kKMajorA = kAIsKMajor, kKMajorB = kBIsKMajor, kGroupedK = kKGrouped;
  static constexpr EpilogueKind kEpilogue = kKind;
  static constexpr bool kGlu = kKind == EpilogueKind::kGlu;

  static constexpr int kBlockK = kRowBytes / static_cast<int>(sizeof(T));
  static constexpr int kChunk = kChunkBytes / static_cast<int>(sizeof(T));  // elements
  static constexpr int kWarpsM = Tile::kTileM / Tile::kWarpTileM, kWarpsN = Tile::kTileN / Tile::kWarpTileN;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  static constexpr int kCtasPerMultiprocessor = kThreads <= 128 ? 2 : 1;
  static constexpr int kOutputTileN = kGlu ? Tile::kTileN / 2 : Tile::kTileN;  // a tile's columns of one output tensor
  static constexpr int kBytesA = Tile::kTileM * kRowBytes, kBytesB = Tile::kTileN * kRowBytes;
  static constexpr int kStageBytes = kBytesA + kBytesB, kSharedBytes = kStages * kStageBytes;
  // Fragments of a warp's tile: 16 rows each along M, 8 columns each along N.
  static constexpr int kFragmentsM = Tile::kWarpTileM / 16, kFragmentsN = Tile::kWarpTileN / 8;

  // A CTA takes 1 KiB more than it asks for.
  static constexpr int kStaticBytes = 768;  // at most, of the kernel's own
  static_assert(kCtasPerMultiprocessor * (kSharedBytes + kStaticBytes + 1024) <= shared_memory_bytes(kMemory));
  static_assert(!kGlu || (kKMajorB && Tile::kWarpTileN == 64));
};

}  // namespace gbmoe::tensor_core
