// What is fixed when an instance of the grouped GEMM is compiled.
//
// A CTA computes output tiles of kTileM x kTileN, its warps kWarpTileM x kWarpTileN of them each. It sums over k-blocks: slices of
// kBlockK terms, which take 64 bytes of a row. kStages of them are in shared memory or on their way to it.

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

constexpr int kRowBytes = 64;      // of a k-block
constexpr int kChunkBytes = 16;    // what one cp.async copies, and a row of one of ldmatrix's matrices
constexpr int kRowChunks = kRowBytes / kChunkBytes;
constexpr int kSteps = 2;          // mma.sync steps along K in a k-block: 32 bytes of a row each

template <int kM, int kN, int kWarpM, int kWarpN, int kNumberOfStages> struct TileShape {
  static constexpr int kTileM = kM, kTileN = kN, kWarpTileM = kWarpM, kWarpTileN = kWarpN, kStages = kNumberOfStages;
};
// The tiles that there are instances of, under the names of tuning.grouped_gemm.
using WideTile = TileShape<128, 256, 64, 64, 4>;    // 256 threads, 96 KiB of shared memory: one CTA on a multiprocessor
using SquareTile = TileShape<128, 128, 64, 64, 3>;  // 128 threads, 48 KiB: two CTAs on a multiprocessor
using LowTile = TileShape<64, 128, 32, 64, 4>;      // 128 threads, 48 KiB, for groups of few rows

// kMajorA: whether rows of a's tile are contiguous along K, or else along M; likewise b's along K or N.
template <typename Element, typename Output, typename Tile, bool kAIsKMajor, bool kBIsKMajor, bool kKGrouped, EpilogueKind kKind,
          typename Family = void>
struct GemmTraits : Tile {
  using T = Element;
  using Out = Output;
  using ActivationFamily = Family;
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
  static constexpr int kStageBytes = kBytesA + kBytesB, kSharedBytes = Tile::kStages * kStageBytes;
  // Fragments of a warp's tile: 16 rows each along M, 8 columns each along N.
  static constexpr int kFragmentsM = Tile::kWarpTileM / 16, kFragmentsN = Tile::kWarpTileN / 8;

  // The smallest limits since Ampere: 99 KiB for a CTA; 100 KiB for a multiprocessor, of which each CTA takes 1 KiB more than it asks
  // for.
  static constexpr int kStaticBytes = 256;  // at most, of the kernel's own
  static_assert(kCtasPerMultiprocessor * (kSharedBytes + kStaticBytes + 1024) <= 100 << 10);
  static_assert(!kGlu || (kKMajorB && Tile::kWarpTileN == 64));
};

}  // namespace gbmoe::tensor_core
