// The activation's result in e4m3, after the first GEMM of an expert with scaled operands: each row of 128 columns gets its scale
// here, so that no other kernel has to read it. The numbers are those that quantize.cu makes of the result in 16 bits.

#pragma once

#include "../epilogue.cuh"
#include "float8.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct Float8Activation {
  using Shared = SharedMemory<Traits>;
  using T = typename Traits::Output;
  static constexpr int kPairs = 32;  // of a thread: two columns each, in its two rows by turns, of 128 columns
  static constexpr int kTogether = 8;  // pairs whose activations are computed side by side

  // act(h), or act(h) * g, of 128 columns of the tile that the epilogue holds, those from column `first` of the tile on; and h and g
  // themselves, if they are wanted. Each 64 columns' h and g leave their buffers while the activation of these columns is computed.
  static __device__ __forceinline__ void store(Epilogue<Traits>& epilogue, int first) {
    const Tile& tile = epilogue.tile;
    const Arguments& args = epilogue.args;
    uint32_t a[kPairs], largest[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (args.save) epilogue.store_saved(first / 64 + half);
#pragma unroll
      for (int i = half * kPairs / 2; i < (half + 1) * kPairs / 2; i += kTogether) {
        activate(epilogue, first / 4 + i, a + i);
#pragma unroll
        for (int j = i; j < i + kTogether; ++j) {
          // Of magnitudes, which as integers are in the same order.
          largest[j % 2] = __vmaxu2(largest[j % 2], a[j] & 0x7fff7fffu);
        }
      }
    }
    const int lane = threadIdx.x % 32, valid = tile.rows - epilogue.row_in_tile, column = tile.n + first;
    const uint32_t buffer = epilogue.take_buffer();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t of_quad = max(largest[i] & 0xffffu, largest[i] >> 16);
      of_quad = max(of_quad, __shfl_xor_sync(kFullWarp, of_quad, 1));
      of_quad = max(of_quad, __shfl_xor_sync(kFullWarp, of_quad, 2));
      const TileScale scale = tile_scale(unpack<T>(of_quad).x, args.power_of_two);
      const int line = lane / 4 + i * 8;
      if (lane % 4 == 0 && line < valid) {
        const int64_t row = tile.row + epilogue.row_in_tile + line;
        args.scales_out[row * ceil_div(args.size_n, kScaledColumns) + column / kScaledColumns] = scale.decode;
      }
#pragma unroll
      for (int j = 0; j < kPairs / 2; ++j) {
        const float2 value = unpack<T>(a[2 * j + i]);
        const uint32_t to = buffer + line * kLineBytes + ((j / 2 ^ (line & 7)) << 4) + j % 2 * 8 + lane % 4 * 2;
        asm volatile("st.shared.b16 [%0], %1;" ::"r"(to), "h"(pack_float8(value.x * scale.encode, value.y * scale.encode)) : "memory");
      }
    }
    __syncwarp();
    const int vector = lane % 8;
#pragma unroll
    for (int line = lane / 8; line < 16; line += 4) {
      const int4 value = load_shared_16(buffer + line * kLineBytes + ((vector ^ (line & 7)) << 4));
      if (line >= valid || column + vector * 16 >= args.size_n) continue;
      const int64_t row = tile.row + epilogue.row_in_tile + line;
      *reinterpret_cast<int4*>(static_cast<char*>(args.out[0]) + row * args.size_n + column + vector * 16) = value;
    }
    if (lane == 0) tma_store_commit();  // an empty group, which take_buffer counts
    __syncwarp();
  }

 private:
  // kTogether pairs of a, rounded, from the epilogue's pairs of h from number `from` on (and those of g).
  static __device__ __forceinline__ void activate(const Epilogue<Traits>& epilogue, int from, uint32_t* a) {
    float value[2 * kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      const float2 h = unpack<T>(epilogue.pair[from + i]);
      value[2 * i] = h.x, value[2 * i + 1] = h.y;
    }
    const typename Traits::ActivationFamily activation(epilogue.args.activation);
    values(activation, value);
#pragma unroll
    for (int i = 0; i < kTogether; ++i) {
      if constexpr (Traits::kGlu) {
        const float2 g = unpack<T>(epilogue.pair[kPairs + from + i]);
        value[2 * i] *= activation.gate(g.x), value[2 * i + 1] *= activation.gate(g.y);
      }
      a[i] = pack<T>(value[2 * i], value[2 * i + 1]);
    }
  }
};

// Stores all of the tile that the epilogue holds.
template <typename Traits> __device__ __forceinline__ void store_activation_in_float8(Epilogue<Traits>& epilogue) {
#pragma unroll
  for (int first = 0; first < Traits::kOutputTileN; first += kScaledColumns) {
    if (epilogue.tile.n + first < epilogue.args.size_n) Float8Activation<Traits>::store(epilogue, first);
  }
  epilogue.held = false;
}

}  // namespace gbmoe::hopper
