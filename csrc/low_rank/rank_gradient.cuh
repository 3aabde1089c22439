// Gradients of factors: out[e] = left[rows of e].T @ right[rows of e], [E,R,N], of left [P,R] with R <= 64 and right [P,N], whose rows may
// be gathered from tokens. Exactly 0 for a group without rows.
//
// What takes time is to read right. A CTA has 128 columns of one group, and walks its rows in blocks of 32: 256 bytes of each row of right and
// left's whole rows come by cp.async, and each warp multiplies 32 columns. CTAs side by side in the grid read the same rows. Several run on
// a multiprocessor: while one finds its rows or stores, the others' copies keep the memory busy.
//
// Each sum is one sequence of 16 rows after 16 from the group's first row on; what is missing in the last 16 counts as zeros. No sum is
// split, and none depends on other groups.

#pragma once

#include "narrow_rows.cuh"

namespace gbmoe::low_rank {

struct Gradient {
  int ranks, columns;  // R and N, multiples of 8; no columns: there is none
  const void *left, *right;  // right is [P,N], or with slots the tokens [T,N]
  void* out;
  Pitch pitch_out;
};

template <int kMostRanks> struct GradientTraits {
  static constexpr int kRanks = kMostRanks, kColumns = 128, kBlockRows = 32;
  static constexpr int kStages = 4;  // at the least, as for products
  using TileRight = tensor_core::OperandTile<Bits, kColumns, 2 * kBlockRows, false>;
  static constexpr int kBytesRight = kBlockRows * kColumns * 2, kStageBytes = kBytesRight + kBlockRows * kRanks * 2;
};

// The columns of a group from `first_column` on.
template <typename Traits>
__device__ __forceinline__ void sum_over_rows(const Rows& rows, const Gradient& args, int stages, int group, int first_column) {
  using TileRight = typename Traits::TileRight;
  using NarrowLeft = NarrowRows<Traits::kRanks>;
  constexpr int kBlockRows = Traits::kBlockRows, kFragmentsM = Traits::kRanks / 16, kOfWarp = Traits::kColumns / kWarps;
  static_assert(kOfWarp == 32 && kBlockRows == 32, "a warp stores four fragments side by side, and its lanes know a row's slot each");
  extern __shared__ __align__(128) unsigned char shared_bytes[];
  const TileOfRows of_group = rows_of_group(rows, group);

  const uint32_t shared = tensor_core::shared_address(shared_bytes);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // The slot of this lane's row of the block that is copied next: it is on its way while a block is multiplied.
  const auto slot_in_block = [&](int block) {
    const int row = block * kBlockRows + lane;
    return rows.slot_of_row && row < of_group.rows ? rows.slot_of_row[of_group.row + row] : -1;
  };
  int slot = slot_in_block(0);

  const auto copy = [&](int block, int stage) {
    const int row = of_group.row + block * kBlockRows, left_over = of_group.rows - block * kBlockRows;
    const uint32_t to_right = shared + stage * Traits::kStageBytes, to_left = to_right + Traits::kBytesRight;
    const int line = threadIdx.x / 16, chunk = threadIdx.x % 16, column = first_column + chunk * 8;
    const Bits* right = static_cast<const Bits*>(args.right) + column;
    // The row of right that this lane's row of the block is, or -1.
    int of_lane = row + lane;
    if (rows.slot_of_row) {
      of_lane = token_of_slot(rows, slot);
      slot = slot_in_block(block + 1);
    }
#pragma unroll
    for (int i = 0; i < kBlockRows / 8; ++i) {
      const int from = __shfl_sync(kFullWarp, of_lane, line + 8 * i);
      const bool exists = line + 8 * i < left_over && column < args.columns && from >= 0;
      tensor_core::cp_async_16(to_right + TileRight::offset(line + 8 * i, chunk), right + static_cast<int64_t>(from) * args.columns, exists);
    }
    constexpr int kChunks = NarrowLeft::kChunksOfRow, kAll = kBlockRows * kChunks;
#pragma unroll
    for (int first = 0; first < kAll; first += kThreads) {
      const int number = first + static_cast<int>(threadIdx.x), of_left = number / kChunks, of_row = number % kChunks;
      if (kAll % kThreads != 0 && number >= kAll) break;
      tensor_core::cp_async_16(
          to_left + NarrowLeft::offset(of_left, of_row),
          static_cast<const Bits*>(args.left) + static_cast<int64_t>(row + of_left) * args.ranks + of_row * 8,
          of_left < left_over && of_row * 8 < args.ranks);
    }
  };

  float sums[kFragmentsM][4][4] = {};
  const bool works = first_column + warp * kOfWarp < args.columns;
  const auto multiply_as = [&](int stage, auto element) {
    using T = decltype(element);
    if (!works) return;
    const uint32_t of_right = shared + stage * Traits::kStageBytes, of_left = of_right + Traits::kBytesRight;
#pragma unroll
    for (int step = 0; step < kBlockRows / 16; ++step) {
      uint32_t b[2][4];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        tensor_core::load_fragments_b<Bits, Traits::kColumns, 2 * kBlockRows, false>(b[j], of_right, warp * kOfWarp + 16 * j, step);
      }
#pragma unroll
      for (int i = 0; i < kFragmentsM; ++i) {
        uint32_t a[4];
        tensor_core::ldmatrix_x4_transposed(
            a, of_left + NarrowLeft::offset(16 * step + lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
#pragma unroll
        for (int j = 0; j < 4; ++j) tensor_core::mma<T>(sums[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  };
  // One branch a block, so that both dtypes share an instance.
  const auto multiply = [&](int stage) {
    if (rows.is_half) multiply_as(stage, __half());
    else multiply_as(stage, __nv_bfloat16());
  };
  for_blocks(stages, ceil_div(of_group.rows, kBlockRows), copy, multiply);
  if (!works) return;

  Bits* out = static_cast<Bits*>(args.out) + group * args.pitch_out.group;
  const int column = first_column + warp * kOfWarp + 8 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 2 * kFragmentsM; ++i) {
    uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) words[j] = pack(sums[i / 2][j][i % 2 * 2], sums[i / 2][j][i % 2 * 2 + 1], rows.is_half);
    tensor_core::transpose_among_four_lanes(words);
    const int rank = 8 * i + lane / 4;
    if (rank < args.ranks && column < args.columns) {
      *reinterpret_cast<uint4*>(out + static_cast<int64_t>(rank) * args.pitch_out.row + column) = {words[0], words[1], words[2], words[3]};
    }
  }
}

}  // namespace gbmoe::low_rank
