// One kernel for a product, up to three gradients, or both: tiles of a product and of gradients that read the same wide operand follow one
// another through the groups in step, so that what one reads from memory the other finds in the L2.
//
// Neither waits for the other, and a sum has the same bits whatever else the launch computes.

#pragma once

#include "rank_gradient.cuh"
#include "rank_product.cuh"

namespace gbmoe::low_rank {

constexpr int kMostGradients = 3;

struct Arguments {
  Rows rows;
  uint64_t share;  // of products among the CTAs, in units of 2^-32, rounded up
  Product product;
  Gradient gradients[kMostGradients];
  int stages_of_gradients;
  int gradient_tiles;  // of a group
};

// Instances for products and gradients of at most so many ranks.
template <int kMostRanks> struct Traits {
  using OfProduct = ProductTraits<kMostRanks>;
  using OfGradient = GradientTraits<kMostRanks>;
  // That registers leave room for; shared memory leaves room for as many CTAs with gradients alone.
  static constexpr int kCtas = kMostRanks > 32 ? 4 : kMostRanks > 16 ? 5 : 6;
};

// A launch's grid, and the shared memory of its CTAs.
struct Launch {
  int64_t ctas;
  int shared_bytes;
};

// Completes the arguments of a product (that has rows) and gradients (that have columns), for a GPU of so many multiprocessors with so much
// shared memory each. A ring has as many stages as leave room for all CTAs at once; where there are too many, as few as are enough.
template <typename Traits> Launch launch_of(Arguments& args, int multiprocessors, int multiprocessor_bytes) {
  using OfProduct = typename Traits::OfProduct;
  using OfGradient = typename Traits::OfGradient;
  static_assert(
      OfProduct::kStages * OfProduct::kStageBytes <= kMostBytes && OfGradient::kStages * OfGradient::kStageBytes <= kMostBytes);
  // As many as there may be tiles, whatever the sizes are: each group's last one may have a single row.
  const int64_t products =
      args.product.out ? int64_t{args.rows.rows} / OfProduct::kTileRows + std::min(args.rows.groups, args.rows.rows) : 0;
  args.gradient_tiles = 0;
  for (const Gradient& gradient : args.gradients) args.gradient_tiles += ceil_div(gradient.columns, OfGradient::kColumns);
  const int64_t ctas = products + int64_t{args.rows.groups} * args.gradient_tiles;
  if (ctas == 0) return {0, 0};
  args.share = ((static_cast<uint64_t>(products) << 32) + ctas - 1) / ctas;

  int least = 0, most = 0;
  const auto with = [&](int stages, int stage_bytes) {
    least = std::max(least, stages * stage_bytes);
    most = std::max(most, std::min(kMostStages, kMostBytes / stage_bytes) * stage_bytes);
  };
  if (products > 0) with(OfProduct::kStages, OfProduct::kStageBytes);
  if (args.gradient_tiles > 0) with(OfGradient::kStages, OfGradient::kStageBytes);
  constexpr int kReserved = 1 << 10;  // of each CTA, by the system
  const int64_t room = multiprocessor_bytes / ceil_div(ctas, int64_t{multiprocessors}) - kReserved;
  const int ring_bytes = static_cast<int>(std::clamp(room, int64_t{least}, int64_t{most}));
  args.product.stages = std::min(kMostStages, ring_bytes / OfProduct::kStageBytes);
  args.stages_of_gradients = std::min(kMostStages, ring_bytes / OfGradient::kStageBytes);
  return {
      ctas, std::max(
                products > 0 ? args.product.stages * OfProduct::kStageBytes : 0,
                args.gradient_tiles > 0 ? args.stages_of_gradients * OfGradient::kStageBytes : 0)};
}

template <typename Traits>
__global__ void __launch_bounds__(kThreads, Traits::kCtas) low_rank_kernel(const __grid_constant__ Arguments args) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
  // Products among the CTAs before this one, and among those up to it. The share of all CTAs is all products: what it is rounded up by is
  // less than 2^-32 of a product, and CTAs are fewer than 2^31.
  const int product = static_cast<int>(blockIdx.x * args.share >> 32);
  if (static_cast<int>((blockIdx.x + uint64_t{1}) * args.share >> 32) > product) {
    multiply_rows<typename Traits::OfProduct>(args.rows, args.product, product);
    return;
  }
  const int number = static_cast<int>(blockIdx.x) - product, group = number / args.gradient_tiles;
  int tile = number % args.gradient_tiles, which = 0;
#pragma unroll
  for (int i = 0; i < kMostGradients - 1; ++i) {
    const int tiles = ceil_div(args.gradients[i].columns, Traits::OfGradient::kColumns);
    if (which == i && tile >= tiles) tile -= tiles, ++which;
  }
  sum_over_rows<typename Traits::OfGradient>(
      args.rows, args.gradients[which], args.stages_of_gradients, group, tile * Traits::OfGradient::kColumns);
#endif
}

}  // namespace gbmoe::low_rank
