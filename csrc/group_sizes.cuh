// The sizes of the groups of a grouped GEMM, as kernels read them on the device. `args` are a GEMM's arguments, with the fields
//
//   sizes            [E], rows of each group; null: one group has all rows
//   sizes_are_int64  else int32
//   groups           E
//   rows             P: no group reaches beyond it, whatever its size says

#pragma once

#include "common.cuh"

namespace gbmoe {

// Sizes come from a caller, who may have overwritten them. A size counts as one in [0, P], and a sum of sizes as at most P:
// groups that would reach beyond the last row end there, and the kernels stay inside of every tensor.
template <typename Arguments> __device__ __forceinline__ int size_of_group(const Arguments& args, int group) {
  if (group >= args.groups) return 0;
  if (!args.sizes) return args.rows;
  const int64_t size =
      args.sizes_are_int64 ? static_cast<const int64_t*>(args.sizes)[group] : static_cast<const int32_t*>(args.sizes)[group];
  return static_cast<int>(min(max(size, int64_t{0}), static_cast<int64_t>(args.rows)));
}
// The sum of two numbers of rows that are at most P each.
template <typename Arguments> __device__ __forceinline__ int add_rows(const Arguments& args, int a, int b) {
  return static_cast<int>(min(static_cast<uint32_t>(a) + static_cast<uint32_t>(b), static_cast<uint32_t>(args.rows)));
}

}  // namespace gbmoe
