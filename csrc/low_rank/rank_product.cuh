// Products with R <= 64 columns: out[rows of e] = a[rows of e] @ b[e].T (+ a2[rows of e] @ b2[e].T), of a [P,K] and b [E,R,K].
//
// What takes time is to read a. A CTA has a tile of rows of one group and all R columns, and walks K in blocks of 64 terms: the rows'
// 128 bytes and b's come by cp.async, and each warp multiplies 16 or 32 rows. Several CTAs run on a multiprocessor, which all of a shape's
// CTAs often fit on at once.
//
// Each sum is one sequence of 16 terms after 16 in the order of K, first a's and then a2's, whatever other rows there are. On Hopper that
// gives it the bits of all kernels that split no sum (docs/numerics.md).

#pragma once

#include "narrow_rows.cuh"

namespace gbmoe::low_rank {

struct Product {
  int inner, ranks;  // K and R, multiples of 8
  int pairs;  // of operands that are summed
  bool along_r;  // whether b is contiguous along R, [E,K,R]; otherwise along K, [E,R,K]
  int stages;
  const void *a[2], *b[2];  // a is [P,K], or with slots the tokens [T,K]
  Pitch pitch_b;  // of both b
  bool to_float;  // whether out is fp32, which rounds nothing
  void* out;  // [P,R]
};

template <int kMostRanks> struct ProductTraits {
  static constexpr int kRanks = kMostRanks, kBlockK = 64;  // columns, which are zeros from R on
  // With more columns a CTA has more rows: it reads b from the L2 as often as there are tiles, and a fragment of b for each 16 rows or 32.
  static constexpr int kFragmentsM = kRanks > 32 ? 2 : 1, kTileRows = kWarps * 16 * kFragmentsM;
  // At the least: as few as leave enough bytes on their way where CTAs are many, of which a multiprocessor then has more.
  static constexpr int kStages = kRanks > 16 ? 3 : 4;
  using TileA = tensor_core::OperandTile<Bits, kTileRows, 128, true>;
  using TileB = tensor_core::OperandTile<Bits, kRanks, 128, true>;
  using NarrowB = NarrowRows<kRanks>;
  static constexpr int kBytesA = kTileRows * 128, kStageBytes = kBytesA + kRanks * 128;
};

// Tile `number` of those that the groups' rows are cut into; nothing where there are fewer.
template <typename Traits> __device__ __forceinline__ void multiply_rows(const Rows& rows, const Product& args, int number) {
  using TileA = typename Traits::TileA;
  using TileB = typename Traits::TileB;
  using NarrowB = typename Traits::NarrowB;
  constexpr int kBlockK = Traits::kBlockK, kFragmentsM = Traits::kFragmentsM, kPairsOfN = Traits::kRanks / 16;
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const TileOfRows tile = find_rows<Traits::kTileRows>(rows, number);
  if (tile.group < 0) return;

  const uint32_t shared = tensor_core::shared_address(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first_row = warp * 16 * kFragmentsM;
  const int blocks_of_pair = ceil_div(args.inner, kBlockK);
  // A warp copies up to 32 rows of a block: each lane knows one of them, or -1, and tells the lanes that copy its chunks.
  const int line = threadIdx.x / 8, chunk = threadIdx.x % 8;
  const int of_tile = 4 * warp + lane % 4 + lane / 4 * 16;
  int of_lane = tile.row + of_tile;
  if (of_tile >= tile.rows) of_lane = -1;
  else if (rows.slot_of_row) of_lane = token_of_slot(rows, rows.slot_of_row[of_lane]);

  const auto copy = [&](int block, int stage) {
    const bool second = block >= blocks_of_pair;
    const int k = (second ? block - blocks_of_pair : block) * kBlockK;
    const uint32_t to_a = shared + stage * Traits::kStageBytes, to_b = to_a + Traits::kBytesA;
    const bool inside = k + chunk * 8 < args.inner;
    const Bits* a = static_cast<const Bits*>(second ? args.a[1] : args.a[0]) + k + chunk * 8;
#pragma unroll
    for (int i = 0; i < Traits::kTileRows / 16; ++i) {
      const int from = __shfl_sync(kFullWarp, of_lane, 4 * i + lane / 8);
      tensor_core::cp_async_16(
          to_a + TileA::offset(line + 16 * i, chunk), a + static_cast<int64_t>(from) * args.inner, inside && from >= 0);
    }
    const Bits* b = static_cast<const Bits*>(second ? args.b[1] : args.b[0]) + tile.group * args.pitch_b.group;
    if (!args.along_r) {
      b += static_cast<int64_t>(line) * args.pitch_b.row + k + chunk * 8;
#pragma unroll
      for (int i = 0; i < Traits::kRanks / 16; ++i) {
        tensor_core::cp_async_16(to_b + TileB::offset(line + 16 * i, chunk), b + static_cast<int64_t>(args.pitch_b.row) * (16 * i),
                                 inside && line + 16 * i < args.ranks);
      }
    } else {
      constexpr int kChunks = NarrowB::kChunksOfRow, kRowStep = kThreads / kChunks;
      const int row = threadIdx.x / kChunks, of_row = threadIdx.x % kChunks;
      b += static_cast<int64_t>(k + row) * args.pitch_b.row + of_row * 8;
#pragma unroll
      for (int i = 0; i < kBlockK / kRowStep; ++i) {
        tensor_core::cp_async_16(to_b + NarrowB::offset(row + kRowStep * i, of_row),
                                 b + static_cast<int64_t>(args.pitch_b.row) * (kRowStep * i),
                                 k + row + kRowStep * i < args.inner && of_row * 8 < args.ranks);
      }
    }
  };

  float sums[kFragmentsM][2 * kPairsOfN][4] = {};
  const auto multiply_as = [&](int stage, auto element, auto along_r) {
    using T = decltype(element);
    if (first_row >= tile.rows) return;
    const uint32_t of_a = shared + stage * Traits::kStageBytes, of_b = of_a + Traits::kBytesA;
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      uint32_t a[kFragmentsM][4], b[kPairsOfN][4];
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        tensor_core::load_fragment_a<Bits, Traits::kTileRows, 128, true>(a[i], of_a, first_row + 16 * i, step);
      }
#pragma unroll
      for (int j = 0; j < kPairsOfN; ++j) {
        if constexpr (along_r.value) {
          tensor_core::ldmatrix_x4_transposed(b[j], of_b + NarrowB::offset(16 * step + lane % 16, 2 * j + lane / 16));
        } else {
          tensor_core::load_fragments_b<Bits, Traits::kRanks, 128, true>(b[j], of_b, 16 * j, step);
        }
      }
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
#pragma unroll
        for (int j = 0; j < 2 * kPairsOfN; ++j)
          tensor_core::mma<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  };
  // Two branches a block, so that dtypes and orders of b share an instance.
  const auto multiply_of = [&](int stage, auto along_r) {
    if (rows.is_half) multiply_as(stage, __half(), along_r);
    else multiply_as(stage, __nv_bfloat16(), along_r);
  };
  const auto multiply = [&](int stage) {
    if (args.along_r) multiply_of(stage, std::true_type());
    else multiply_of(stage, std::false_type());
  };
  for_blocks(args.stages, args.pairs * blocks_of_pair, copy, multiply);

#pragma unroll
  for (int i = 0; i < 2 * kFragmentsM; ++i) {
    const int row = first_row + 8 * i + lane / 4;
    if (row >= tile.rows) continue;
    const int64_t first = static_cast<int64_t>(tile.row + row) * args.ranks;
#pragma unroll
    for (int j = 0; j < 2 * kPairsOfN; ++j) {
      const float(&of_lane)[4] = sums[i / 2][j];
      const int column = 8 * j + 2 * (lane % 4);
      if (column >= args.ranks) continue;
      const float one = of_lane[i % 2 * 2], other = of_lane[i % 2 * 2 + 1];
      if (args.to_float) *reinterpret_cast<float2*>(static_cast<float*>(args.out) + first + column) = {one, other};
      else *reinterpret_cast<uint32_t*>(static_cast<Bits*>(args.out) + first + column) = pack(one, other, rows.is_half);
    }
  }
}

}  // namespace gbmoe::low_rank
