// Launches an instance of the grouped GEMM. Only these functions know a tile's size as a number; the kernels have it as a type.
//
// The operators of tensor_core/ need compute capability 8.0 or later, row lengths that are multiples of 8, and int32 or int64 sizes on the
// device. `tiling` is a TensorCoreConfig.tiling.

#pragma once

#include "../operators.h"
#include "../places_of.h"
#include "grouped_gemm.cuh"

namespace gbmoe::tensor_core {

// tuning.tensor_core_tiles.TensorCoreConfig.tiling, field by field.
struct Tiling {
  int64_t tile_m, tile_n, panel;
};

inline Tiling tiling_of(const std::vector<int64_t>& fields) {
  STD_TORCH_CHECK(fields.size() == 3, "tiling: expected the 3 fields of a Tiling, got ", fields.size());
  return {fields[0], fields[1], fields[2]};
}

// `rows` of all groups, `columns` of one output tensor.
inline Arguments arguments(const std::optional<Tensor>& sizes, int64_t rows, int64_t columns, const Tiling& tiling) {
  Arguments args{};
  args.sizes = sizes ? sizes->data_ptr() : nullptr;
  args.sizes_are_int64 = sizes && sizes->scalar_type() == ScalarType::Long;
  args.groups = sizes ? static_cast<int>(sizes->numel()) : 1;
  args.rows = static_cast<int>(rows);
  args.size_n = static_cast<int>(columns);
  args.operand_pairs = 1;
  args.panel_tiles = static_cast<int>(tiling.panel);
  return args;
}

// Rows are stored 16 bytes at a time.
inline void check_output(const char* name, const Tensor& out, ScalarType dtype) {
  STD_TORCH_CHECK(out.scalar_type() == dtype, name, ": out has another dtype than the result");
  STD_TORCH_CHECK(aligned_16(out), name, ": expected out at a multiple of 16 bytes");
}

inline void* pointer(const std::optional<Tensor>& tensor) { return tensor ? tensor->data_ptr() : nullptr; }

// b [E,R,C], whose rows are contiguous, and a second one with the same strides.
inline void set_b(
    Arguments& args, const char* name, const Tensor& b, const std::optional<Tensor>& second, const std::vector<int64_t>& places) {
  args.places = places_of(name, places, args.groups);
  args.b[0] = b.data_ptr(), args.b[1] = pointer(second);
  args.pitch_b = common_pitch(name, b, second);
  if (args.places.count > 0) args.pitch_b.group = b.stride(0);
}

// The instances for a device: those for its shared memory, or for less where the code that it runs has no others (as code for 8.6 on a
// later device). None where there is no code for it: PTX for 8.7 and for 9.0 to 11 has no instances for 100 KiB.
std::optional<Memory> memory_of(int device);

// As many CTAs as are at work at the same time, on the multiprocessors that it may take.
template <typename Traits> void launch_instance(const Arguments& args, const Tensor& on) {
  constexpr auto kernel = grouped_gemm_kernel<Traits>;
  allow_dynamic_shared_memory<kernel>(on.get_device_index());
  const int ctas = multiprocessors_to_take(on.get_device_index()) * Traits::kCtasPerMultiprocessor;
  kernel<<<ctas, Traits::kThreads, Traits::kSharedBytes, current_stream(on)>>>(args);
  STD_CUDA_CHECK(cudaGetLastError());
}

template <typename Element, typename Output, typename Tile, bool kKMajorA, bool kKMajorB, bool kGroupedK, EpilogueKind kEpilogue,
          typename Family = void>
void launch(const Arguments& args, const Tensor& on) {
  const auto of = [&](auto memory) {
    launch_instance<GemmTraits<Element, Output, Tile, memory.value, kKMajorA, kKMajorB, kGroupedK, kEpilogue, Family>>(args, on);
  };
  if (memory_of(on.get_device_index()) == Memory::kLarge) of(std::integral_constant<Memory, Memory::kLarge>());
  else of(std::integral_constant<Memory, Memory::kSmall>());
}

// Calls f with an instance of the tile that was asked for, one of `Tiles`.
template <typename... Tiles, typename F> void with_tile(const char* name, const Tiling& tiling, const F& f) {
  const bool found = ((tiling.tile_m == Tiles::kTileM && tiling.tile_n == Tiles::kTileN ? (f(Tiles()), true) : false) || ...);
  STD_TORCH_CHECK(found, name, ": no kernel has tiles of ", tiling.tile_m, " x ", tiling.tile_n);
}

// Runs body with T bound to the C++ type of `dtype`; float's operands are rounded to TF32.
#define GBMOE_DISPATCH_TENSOR_CORE(dtype, name, ...)                                       \
  do {                                                                                     \
    if (dtype == ScalarType::Float) { using T = float; __VA_ARGS__; }                      \
    else GBMOE_DISPATCH_16_BIT(dtype, name, __VA_ARGS__);                                  \
  } while (0)

}  // namespace gbmoe::tensor_core
