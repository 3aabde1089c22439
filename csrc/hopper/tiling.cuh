// How a result is divided among CTAs: the choice of tile, of cluster and of the order in which tiles are walked, by shape alone.
// The figures were measured on an H200.

#pragma once

#include "arguments.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

// CTAs that work side by side: along N they share a's k-blocks, along M those of b.
enum class Cluster { kSingle, kTwoAlongN, kTwoAlongM };

struct Tiling {
  int tile_n;  // kSquareTileN is made in ping-pong
  Cluster cluster;
};

// Tiles along M in a panel. What CTAs read at a time should fit the cache: measured, on mixtral's and olmoe's shapes. m-grouped a
// few per cent better than 8, because b's tiles are read once for groups of up to 2048 rows, or 2560 with even panels. (Twice as
// many in clusters along M.)
constexpr int kPanelOfRows = 16, kEvenPanelOfRows = 20, kPanelOfWeights = 8;

// Whether a group's panels should be even. A last panel of one or two tiles along M, with so many along N, would read all of b
// again, faster than memory delivers it.
inline bool wants_even_panels(int columns, int tile_n) { return divide_up(columns, tile_n) >= 64; }

// Whether two CTAs work side by side along a side of `size`, and share what they both read: where its tiles come in pairs, or are
// so many that the one without a partner is worth less than what sharing saves.
inline bool in_pairs(int size, int tile) {
  const int tiles = divide_up(size, tile);
  return tiles % 2 == 0 || tiles >= 15;
}
inline Cluster cluster_along_n(int columns, int tile_n) {
  return in_pairs(columns, tile_n) ? Cluster::kTwoAlongN : Cluster::kSingle;
}

// m-grouped, cooperative. Narrow tiles, in pairs, where they leave so much less of the result empty that they pay: each of their
// columns costs 2 to 5 % more, and they should win clearly. Wide tiles of one CTA cost some 7 % more than those of two, which
// share a's k-blocks.
inline Tiling tiling_of_rows(int columns) {
  constexpr double kDearer = 1.07;
  const auto padded = [&](int width) { return divide_up(columns, width) * width; };
  const Cluster cluster = cluster_along_n(columns, kWideTileN);
  const double wide = cluster == Cluster::kTwoAlongN ? padded(2 * kWideTileN) : padded(kWideTileN) * kDearer;
  if (padded(2 * kNarrowTileN) * kDearer < wide) return {kNarrowTileN, Cluster::kTwoAlongN};
  return {kWideTileN, cluster};
}

// m-grouped, in ping-pong.
inline Tiling tiling_of_rows_ping_pong(int columns, int64_t rows, int groups) {
  if (in_pairs(columns, kSquareTileN)) return {kSquareTileN, Cluster::kTwoAlongN};
  // Along M half a cluster waits for the other where a group's tiles are odd in number, and of one tile always.
  return {kSquareTileN, rows >= int64_t{kTileM} * groups ? Cluster::kTwoAlongM : Cluster::kSingle};
}

// m-grouped with the activation's backward. With four stages narrow tiles in pairs are worth more here than wide ones on their
// own with three.
inline Tiling tiling_of_activation_backward(int columns) {
  const Tiling tiling = tiling_of_rows(columns);
  if (columns % (2 * kNarrowTileN) == 0 && tiling.cluster == Cluster::kSingle) return {kNarrowTileN, Cluster::kTwoAlongN};
  return tiling;
}

// k-grouped: two CTAs share b's k-blocks where tiles along M come in pairs, else a's where those along N do. What is gathered is
// not shared.
inline Cluster cluster_of_weights(int size_m, int size_n, bool gathered) {
  if (in_pairs(size_m, kTileM)) return Cluster::kTwoAlongM;
  return gathered ? Cluster::kSingle : cluster_along_n(size_n, kWideTileN);
}

}  // namespace gbmoe::hopper
