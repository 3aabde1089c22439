// What an instance of the grouped GEMM is: the settings that it names, and what follows from them.

#pragma once

#include <cstdint>

#include <cuda_fp8.h>

#include "../activation_formulas.cuh"
#include "../common.cuh"

namespace gbmoe::hopper {

// A CTA makes tiles of kTileM rows, 64 for each consumer warpgroup. K is walked in k-blocks, whose lines in shared memory have
// kLineBytes: kBlockK elements of 16 bits, or kFloat8BlockK of e4m3, which are also what has a scale of its own.
constexpr int kTileM = 128, kBlockK = 64, kFloat8BlockK = 128;
constexpr int kWideTileN = 256, kNarrowTileN = 192, kSquareTileN = 128;
constexpr int kConsumerWarpgroups = 2, kConsumerWarps = kConsumerWarpgroups * 4;
constexpr int kThreads = (kConsumerWarpgroups + 1) * 128;

// Shared memory under the 128-byte swizzle: a line holds 64 elements of 16 bits, a swizzle atom 8 lines. Operands lie in subtiles
// of 64 lines, so of 64 x 64 elements.
constexpr uint32_t kLineBytes = 128;
constexpr uint32_t kSwizzleAtomBytes = 8 * kLineBytes;
constexpr uint32_t kSubtileBytes = 8 * kSwizzleAtomBytes;
constexpr uint32_t kStageBytesA = kConsumerWarpgroups * kSubtileBytes;
// What one warp stores at a time: 16 rows of 64 elements.
constexpr uint32_t kEpilogueBufferBytes = 2 * kSwizzleAtomBytes;

enum class EpilogueKind {
  kStore,               // out = product
  kStoreFloat,          // fp32 out = product, in ping-pong only
  kAccumulate,          // fp32 out += product, k-grouped only
  kActivation,          // h = product, a = act(h); h is stored only if it is wanted
  kGlu,                 // a tile's columns are 128 of w1 next to 128 of v1: h, g, a = act(h) * g
  kPairs,               // the product's columns are pairs of h and g: pairs, a = act(h) * g of half as many columns
  kActivationBackward,  // product = gradient of a, handed to warps that go on with it (epilogue_backward.cuh)
};

using Float8 = __nv_fp8_e4m3;

// What an instance may set, and its defaults. An instance derives from this, names its Element type and what differs
// (instances.cuh).
struct GemmSettings {
  static constexpr bool kGroupedK = false;     // groups divide K, as in gradients of weights (k-grouped); else M (m-grouped)
  static constexpr bool kTransposedB = false;  // b[e] is [K,N] rather than [N,K], m-grouped
  static constexpr bool kGatherA = false;      // a is not in memory: its rows are gathered from the tokens' matrix
  static constexpr EpilogueKind kEpilogue = EpilogueKind::kStore;
  static constexpr bool kBias = false;         // m-grouped: whether b's columns may have a bias, which is added before sums are rounded
  using ActivationFamily = void;               // kActivation, kGlu and kPairs: a family of activation_formulas.cuh
  static constexpr bool kGate = false;         // kActivationBackward: whether there is g
  static constexpr bool kGateInPairs = false;  // kActivationBackward: whether h and g are one tensor, element by element, as kPairs stores
  static constexpr bool kPingPong = false;     // each warpgroup makes whole tiles, in turns; else both share each tile
  static constexpr int kTileN = kWideTileN;
  static constexpr int kStages = 4;            // k-blocks that are loaded ahead
  static constexpr int kEpilogueBuffers = 2;   // of a consumer warp
  static constexpr int kClusterM = 1, kClusterN = 1;  // CTAs of a cluster along M share b, those along N share a
  using Output = void;                         // of what is stored, where that is not Element
};

// The settings with what follows from them. Every part of the kernel is a template over this.
template <typename Settings> struct GemmTraits : Settings {
  using typename Settings::Element;
  using Settings::kGroupedK, Settings::kTransposedB, Settings::kGatherA, Settings::kEpilogue, Settings::kPingPong, Settings::kTileN,
      Settings::kStages, Settings::kEpilogueBuffers, Settings::kClusterM, Settings::kClusterN;

  using Output = std::conditional_t<std::is_void_v<typename Settings::Output>, Element, typename Settings::Output>;
  static constexpr int kClusterSize = kClusterM * kClusterN;  // CTAs
  static constexpr bool kScaled = std::is_same_v<Element, Float8>;  // e4m3 operands, with scales (mainloop_scaled.cuh)
  static constexpr bool kScaledK = kScaled && kGroupedK;  // scales come by TMA (mainloop_scaled_weights.cuh)
  static constexpr bool kScaledRows = kScaled && !kGroupedK;  // a warp copies scales (scale_loader.cuh)
  static constexpr int kBlockK = kScaled ? kFloat8BlockK : hopper::kBlockK;
  // How a is gathered: line by line by TMA where CTAs share it (line_producer.cuh), else by cp.async (gather_producer.cuh).
  static constexpr bool kGatherLines = kGatherA && kClusterN > 1, kGatherCopies = kGatherA && kClusterN == 1;
  static constexpr bool kGlu = kEpilogue == EpilogueKind::kGlu, kPairs = kEpilogue == EpilogueKind::kPairs;
  static constexpr bool kActivationBackward = kEpilogue == EpilogueKind::kActivationBackward;
  static constexpr bool kTransposedOut = kGroupedK && kGatherA;      // makes tiles of out[e].T, of which it stores out[e]
  static constexpr int kOutputTileN = kGlu ? kTileN / 2 : kTileN;    // a tile's columns of one output tensor
  static constexpr uint32_t kStageBytesB = kTileN / 64 * kSubtileBytes, kStageBytes = kStageBytesA + kStageBytesB;
  // A stage's scales: a's, of each row or (kScaledK) column, then b's, of two runs of 128 columns or (kScaledK) of each column.
  static constexpr uint32_t kScaleBytes = !kScaled ? 0 : (kTileM + (kScaledK ? kTileN : 4)) * sizeof(float);
  // Whether sums may be split; without it each is made at once.
  static constexpr bool kSplitK =
      (kEpilogue == EpilogueKind::kStore || kEpilogue == EpilogueKind::kAccumulate) && !kPingPong && !kScaled;
  // Whether three pairs of operands may be summed, and whether a GLU's sums may be of two pairs: launches of other instances have no more
  // than two, and one, so that their producer asks for no more.
  static constexpr bool kThreePairs =
      !kGroupedK && !kGatherA && !kScaled && kEpilogue == EpilogueKind::kStore && !Settings::kBias;
  static constexpr bool kGluOfTwoPairs = kGlu && !kGatherCopies && !kScaled;
  // Whether clusters may be kept together along K (pacing.cuh).
  static constexpr bool kPaced = !kGroupedK && !kPingPong && !kActivationBackward && !kScaled && !kGatherCopies;

  // The third warpgroup: producer warps first, after them those that load lines, those of the activation's backward or those that copy
  // and look through scales, and one that schedules.
  static constexpr int kProducerWarps = kGatherCopies ? 4 : 1;
  static constexpr int kLineWarps = kGatherLines ? 2 : 0;
  static constexpr int kBackwardWarps = kActivationBackward ? 3 : 0;
  static constexpr int kScaleWarps = kScaledRows ? 1 : 0, kScanWarps = kScaled ? 1 : 0;
  static constexpr bool kProducerSchedules = kGatherCopies || kActivationBackward;  // no warp is left to be the scheduler alone
  static constexpr int kSchedulerWarp = kConsumerWarps + (kActivationBackward ? 0 : 3);
  // Warps of a CTA that receive tiles.
  static constexpr int kTileReaders = kConsumerWarps + kProducerWarps + kLineWarps + kBackwardWarps + kScaleWarps + kScanWarps;
  // Registers per thread of the third warpgroup (setmaxnreg); the three warpgroups share 504. Under kActivationBackward all keep
  // the 168 with which they start.
  static constexpr int kProducerRegisters = kActivationBackward ? 168 : 40;
  static constexpr int kConsumerRegisters = (504 - kProducerRegisters) / 2;

  using Accumulators = float[kTileN / 2];               // one thread's, of 64 rows by kTileN
  static constexpr int kPackedAccumulators = kTileN / 4;  // the same rounded to 16 bits, in pairs

  static_assert(kTileN == kWideTileN || (!kGroupedK && !kGlu && !kPairs), "gradients of weights, and gates, need the widest tile");
  static_assert(!Settings::kBias || (!kGroupedK && !kScaled && !kGlu), "one tensor has the biases of all columns");
  static_assert(
      !kActivationBackward || (!kGroupedK && !kGatherA), "the activation's backward follows plain m-grouped GEMMs only");
  static_assert(!kGatherLines || (kClusterM == 1 && kClusterN == 2), "two CTAs load half of the lines each");
  static_assert(
      !kScaled || (!kGatherA && !kTransposedB && !kPingPong && !kActivationBackward &&
                   (kTileN == kWideTileN || (kTileN == kNarrowTileN && kEpilogue == EpilogueKind::kStore))),
      "scaled operands are for GEMMs with both operands contiguous along K, in the widest tile or, where results are only stored, in "
      "narrow ones");
  static_assert(
      !kScaledK || (kClusterSize == 1 && kEpilogue == EpilogueKind::kStore),
      "gradients of weights of scaled operands are stored, by CTAs on their own");
  static_assert(
      !kPingPong || (!kGroupedK && !kGatherA && kTileN == kSquareTileN &&
                     (kEpilogue == EpilogueKind::kStore || kEpilogue == EpilogueKind::kStoreFloat)),
      "ping-pong is for plain m-grouped GEMMs in square tiles");
  static_assert(kEpilogue != EpilogueKind::kStoreFloat || kPingPong, "sums are stored in fp32 in ping-pong only");
};

}  // namespace gbmoe::hopper
