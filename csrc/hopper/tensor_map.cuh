// Tensor maps, which tell TMA where a tensor is and which boxes of it are loaded and stored.

#pragma once

#include <cudaTypedefs.h>

#include "../common.cuh"
#include "../places.cuh"
#include "traits.cuh"

namespace gbmoe::hopper {

inline PFN_cuTensorMapEncodeTiled_v12000 encode_function() {
  static const PFN_cuTensorMapEncodeTiled_v12000 function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult status;
    STD_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &status));
    STD_TORCH_CHECK(status == cudaDriverEntryPointSuccess, "hopper: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry);
  }();
  return function;
}

inline CUtensorMapDataType map_type(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
    case ScalarType::BFloat16: return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case ScalarType::Half: return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    default: return CU_TENSOR_MAP_DATA_TYPE_UINT8;  // e4m3, whose bits TMA only moves
  }
}

inline CUtensorMap encoded(
    const Tensor& tensor, int rank, const cuuint64_t* shape, const cuuint64_t* strides, const cuuint32_t* box,
    const cuuint32_t* steps, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion) {
  CUtensorMap map;
  const CUresult result = encode_function()(
      &map, map_type(tensor.scalar_type()), rank, tensor.data_ptr(), shape, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      swizzle, promotion,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);  // zeros
  STD_TORCH_CHECK(result == CUDA_SUCCESS, "hopper: cuTensorMapEncodeTiled returned ", static_cast<int>(result), " for a tensor [",
                  rank == 3 ? shape[2] : 1, ",", shape[1], ",", shape[0], "]");
  return map;
}

constexpr CUtensorMapL2promotion kTwoLines = CU_TENSOR_MAP_L2_PROMOTION_L2_256B, kOneLine = CU_TENSOR_MAP_L2_PROMOTION_L2_128B;

// The map of a tensor [groups, lines, width] (groups absent from a matrix) in boxes of `box_lines` lines of 128 bytes under the 128-byte
// swizzle, or of another number of bytes without one. Lines are contiguous; lines and groups may lie any multiple of 16 bytes apart.
// `promotion`: what the L2 cache reads from memory at a time; `transposed`: the tensor is [groups, width, lines]; `places`: where the
// matrices of a tensor [1, lines, width] are, whose stride is the distance. It may be less than a matrix.
inline CUtensorMap tensor_map(
    const Tensor& tensor, int box_lines, uint32_t box_bytes = kLineBytes, CUtensorMapL2promotion promotion = kTwoLines,
    bool transposed = false, const Places* places = nullptr) {
  const int64_t rank = tensor.dim(), along = rank - (transposed ? 2 : 1), across = rank - (transposed ? 1 : 2);
  const cuuint64_t bytes = tensor.element_size();
  const bool anywhere = places && places->count > 0;
  const int64_t groups = anywhere ? int64_t{places->last()} + 1 : rank == 3 ? tensor.size(0) : 1;
  const cuuint64_t shape[3] = {
      static_cast<cuuint64_t>(tensor.size(along)), static_cast<cuuint64_t>(tensor.size(across)), static_cast<cuuint64_t>(groups)};
  // Of a single line or group the stride says nothing, and may be anything.
  const auto pitch = [&](int64_t dim, cuuint64_t packed) {
    return tensor.size(dim) > 1 ? static_cast<cuuint64_t>(tensor.stride(dim)) * bytes : packed;
  };
  const cuuint64_t line = pitch(across, shape[0] * bytes);
  const cuuint64_t distance = anywhere    ? static_cast<cuuint64_t>(tensor.stride(0)) * bytes
                              : rank == 3 ? pitch(0, line * shape[1])
                                          : line * shape[1];
  const cuuint64_t strides[2] = {line, distance};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(box_bytes / bytes), static_cast<cuuint32_t>(box_lines), 1}, steps[3] = {1, 1, 1};
  const CUtensorMapSwizzle swizzle = box_bytes == kLineBytes ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
  return encoded(tensor, 3, shape, strides, box, steps, swizzle, promotion);
}

// Lines of a box. The producer loads a and b, and the epilogue stores, in these.
constexpr int kBoxContiguousMN = 64;  // of an operand whose M or N is contiguous
constexpr int kBoxOut = 16;           // a warp's rows of a tile
constexpr int box_of_b(int tile_n) { return tile_n / 2; }  // of b [N,K]

// Whether the matrices of weights [E,N,K] lie contiguous along N rather than along K.
inline bool contiguous_along_n(const Tensor& weights) { return weights.stride(2) != 1; }

// The map of weights [E,N,K] that lie contiguous along K or along N, for tiles of `tile_n` columns.
inline CUtensorMap weight_map(const Tensor& weights, int tile_n, const Places& places) {
  return contiguous_along_n(weights) ? tensor_map(weights, kBoxContiguousMN, kLineBytes, kTwoLines, true, &places)
                                     : tensor_map(weights, box_of_b(tile_n), kLineBytes, kTwoLines, false, &places);
}

// The map of a matrix [lines, width] in boxes of one line of 128 bytes under the 128-byte swizzle.
inline CUtensorMap line_map(const Tensor& matrix, CUtensorMapL2promotion promotion = kTwoLines) {
  const cuuint64_t bytes = matrix.element_size();
  const cuuint64_t shape[2] = {static_cast<cuuint64_t>(matrix.size(1)), static_cast<cuuint64_t>(matrix.size(0))};
  const cuuint64_t strides[1] = {shape[0] * bytes};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kLineBytes / bytes), 1}, steps[2] = {1, 1};
  return encoded(matrix, 2, shape, strides, box, steps, CU_TENSOR_MAP_SWIZZLE_128B, promotion);
}

}  // namespace gbmoe::hopper
