// The instances of the grouped GEMM, by the settings in which they differ from the defaults (GemmSettings).
//
// 227 KiB of shared memory hold four stages of the wide tile, or six of the square one, and 32 KiB of epilogue buffers.

#pragma once

#include "traits.cuh"

namespace gbmoe::hopper {

// m-grouped: out = a @ b[e], cooperative.
template <typename T, bool kTransposedB_, int kTileN_, int kClusterN_> struct RowsSettings : GemmSettings {
  using Element = T;
  static constexpr bool kTransposedB = kTransposedB_;
  static constexpr int kTileN = kTileN_, kClusterN = kClusterN_;
};

// m-grouped: out = a @ b[e] + bias[e], in pairs of CTAs.
template <typename T, bool kTransposedB_> struct BiasedRowsSettings : RowsSettings<T, kTransposedB_, kWideTileN, 2> {
  static constexpr bool kBias = true;
};

// m-grouped: out = a @ b[e], in ping-pong.
template <typename T, bool kTransposedB_, int kClusterM_, int kClusterN_> struct PingPongRowsSettings : GemmSettings {
  using Element = T;
  static constexpr bool kTransposedB = kTransposedB_, kPingPong = true;
  static constexpr int kTileN = kSquareTileN, kStages = 6, kClusterM = kClusterM_, kClusterN = kClusterN_;
};

// m-grouped: out = a @ b[e] + bias[e], in ping-pong, in pairs of CTAs.
template <typename T, bool kTransposedB_> struct BiasedPingPongRowsSettings : PingPongRowsSettings<T, kTransposedB_, 1, 2> {
  static constexpr bool kBias = true;
};

// m-grouped: out = a @ b[e], in ping-pong, in fp32: a router's logits.
template <typename T> struct FloatRowsSettings : PingPongRowsSettings<T, false, 1, 1> {
  static constexpr EpilogueKind kEpilogue = EpilogueKind::kStoreFloat;
};

// m-grouped: out = tokens[slot / top_k] @ b[e].
template <typename T> struct GatheredRowsSettings : GemmSettings {
  using Element = T;
  static constexpr bool kGatherA = true;
};

// m-grouped: the first GEMM of an expert with its activation.
template <typename T, EpilogueKind kKind, typename Family, bool kTransposedB_, bool kGather, int kClusterN_>
struct UpSettings : GemmSettings {
  using Element = T;
  using ActivationFamily = Family;
  static constexpr EpilogueKind kEpilogue = kKind;
  static constexpr bool kTransposedB = kTransposedB_, kGatherA = kGather;
  static constexpr int kClusterN = kClusterN_;
};

// m-grouped: the same of weights whose columns are pairs of h's and g's, which lie contiguous along F. A bias takes registers of the whole
// main loop, and rows that have one are gathered ahead.
template <typename T, typename Family, bool kGather>
struct UpPairsSettings : UpSettings<T, EpilogueKind::kPairs, Family, true, kGather, 2> {
  static constexpr bool kBias = !kGather;
};

// m-grouped: back through the second GEMM and the activation. The shared memory that three stages (four with narrow tiles) leave
// free holds buffers for a whole tile and some of the next.
template <typename T, bool kTransposedB_, bool kGate_, int kTileN_, int kClusterN_> struct DownBackwardSettings : GemmSettings {
  using Element = T;
  static constexpr bool kTransposedB = kTransposedB_;
  static constexpr EpilogueKind kEpilogue = EpilogueKind::kActivationBackward;
  static constexpr bool kGate = kGate_;
  static constexpr int kTileN = kTileN_, kClusterN = kClusterN_;
  static constexpr int kStages = kTileN == kNarrowTileN ? 4 : 3, kEpilogueBuffers = kTileN == kNarrowTileN ? 4 : 5;
};

// The same where h and g are pairs.
template <typename T, int kTileN_> struct DownBackwardPairsSettings : DownBackwardSettings<T, false, true, kTileN_, 2> {
  static constexpr bool kGateInPairs = true;
};

// m-grouped, scaled e4m3: out = a @ b[e], in T; or the first GEMM of an expert with its activation.
template <typename T, EpilogueKind kKind, typename Family, int kTileN_, int kClusterN_> struct ScaledSettings : GemmSettings {
  using Element = Float8;
  using Output = T;
  using ActivationFamily = Family;
  static constexpr EpilogueKind kEpilogue = kKind;
  static constexpr int kTileN = kTileN_, kClusterN = kClusterN_;
};

// k-grouped: out[e] = a[rows of e].T @ b[rows of e], or += in fp32.
template <typename T, EpilogueKind kKind, int kClusterM_, int kClusterN_> struct WeightsSettings : GemmSettings {
  using Element = T;
  static constexpr EpilogueKind kEpilogue = kKind;
  static constexpr bool kGroupedK = true;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_;
};

// k-grouped, scaled e4m3: out[e] = a[rows of e].T @ b[rows of e], in T.
template <typename T> struct ScaledWeightsSettings : GemmSettings {
  using Element = Float8;
  using Output = T;
  static constexpr bool kGroupedK = true;
  static constexpr int kEpilogueBuffers = 1;
};

// k-grouped: out[e].T = tokens[slot / top_k].T @ b[rows of e].
template <typename T, int kClusterM_, int kClusterN_> struct GatheredWeightsSettings : GemmSettings {
  using Element = T;
  static constexpr bool kGroupedK = true, kGatherA = true;
  static constexpr int kClusterM = kClusterM_, kClusterN = kClusterN_;
};

}  // namespace gbmoe::hopper
