// Where an operand's part of a k-block lies in shared memory, and how a warp reads its fragments from there.
//
// K-major: each row of the tile has kRowBytes, four or eight chunks. MN-major: each of the kBlockK rows along K has the tile's elements
// along M or N. Chunks are permuted within a row (swizzled), so that neither cp.async's stores nor the reads below meet in a bank.

#pragma once

#include "ptx.cuh"
#include "traits.cuh"

namespace gbmoe::tensor_core {

// kSize: the tile's elements along M or N.
template <typename T, int kSize, int kRowBytes, bool kKMajor> struct OperandTile {
  static constexpr int kPitch = kKMajor ? kRowBytes : kSize * static_cast<int>(sizeof(T));  // bytes from a row to the next
  static constexpr int kChunksOfRow = kPitch / kChunkBytes;
  static constexpr int kRows = kSize * kRowBytes / kPitch;
  static constexpr int kSwizzlePeriod = !kKMajor && sizeof(T) == 4 ? 4 : 8;  // rows so far apart have the same swizzle

  static __device__ __forceinline__ uint32_t offset(int row, int chunk) {
    return row * kPitch + (chunk ^ swizzle(row)) * kChunkBytes;
  }

 private:
  static __device__ __forceinline__ int swizzle(int row) {
    if constexpr (kKMajor && kRowBytes == 64) return row >> 1 & 3;  // two rows fill the banks once
    else if constexpr (kKMajor) return row & 7;                     // each row does
    else if constexpr (sizeof(T) == 2) return row & 7;              // ldmatrix reads one chunk of eight rows
    else return (row & 3) << 1;                                     // 32 lanes read 8 words, two chunks, of four rows
  }
};

// A 16 x 32-byte fragment of a: rows from `first` on, of the k-block's step.
template <typename T, int kSize, int kRowBytes, bool kKMajor>
__device__ __forceinline__ void load_fragment_a(uint32_t (&fragment)[4], uint32_t operand, int first, int step) {
  using Layout = OperandTile<T, kSize, kRowBytes, kKMajor>;
  const int lane = threadIdx.x % 32;
  if constexpr (kKMajor) {
    ldmatrix_x4(fragment, operand + Layout::offset(first + lane % 16, 2 * step + lane / 16));
  } else if constexpr (sizeof(T) == 2) {
    ldmatrix_x4_transposed(fragment, operand + Layout::offset(16 * step + lane / 16 * 8 + lane % 8, first / 8 + lane / 8 % 2));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 8 * step + i / 2 * 4 + lane % 4, m = first + i % 2 * 8 + lane / 4;
      fragment[i] = load_shared_4(operand + Layout::offset(k, m / 4) + m % 4 * 4);
    }
  }
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragment[i] = round_to_tf32(fragment[i]);
  }
}

// Two fragments of b, of 8 columns each, from column `first` on: registers 0 and 1 are the first one's.
template <typename T, int kSize, int kRowBytes, bool kKMajor>
__device__ __forceinline__ void load_fragments_b(uint32_t (&fragments)[4], uint32_t operand, int first, int step) {
  using Layout = OperandTile<T, kSize, kRowBytes, kKMajor>;
  const int lane = threadIdx.x % 32;
  if constexpr (kKMajor) {
    ldmatrix_x4(fragments, operand + Layout::offset(first + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
  } else if constexpr (sizeof(T) == 2) {
    ldmatrix_x4_transposed(fragments, operand + Layout::offset(16 * step + lane % 16, first / 8 + lane / 16));
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int k = 8 * step + i % 2 * 4 + lane % 4, n = first + i / 2 * 8 + lane / 4;
      fragments[i] = load_shared_4(operand + Layout::offset(k, n / 4) + n % 4 * 4);
    }
  }
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) fragments[i] = round_to_tf32(fragments[i]);
  }
}

}  // namespace gbmoe::tensor_core
