// The epilogue: one warp's 16 rows of a tile, from its sums to memory (EpilogueKind says what becomes of them).
//
// A tile is stored in chunks of 64 columns, and a chunk in kChunkSteps steps. One step follows each k-block of the next tile,
// until all are done. Code is unrolled for one chunk only, because that of all would not stay in the instruction cache. The activation
// after scaled operands takes no steps: it stores its tile at once (epilogue_scaled.cuh).

#pragma once

#include "arguments.cuh"
#include "shared_memory.cuh"

namespace gbmoe::hopper {

template <typename Traits> struct Epilogue {
  using Shared = SharedMemory<Traits>;
  using Element = typename Traits::Output;
  using Accumulators = typename Traits::Accumulators;
  static constexpr EpilogueKind kKind = Traits::kEpilogue;
  static constexpr bool kGlu = Traits::kGlu, kPairs = Traits::kPairs, kGroupedK = Traits::kGroupedK;
  static constexpr int kBuffers = Traits::kEpilogueBuffers, kHeld = Traits::kPackedAccumulators;
  static constexpr int kChunks = kGlu || kPairs ? 2 : Traits::kTileN / 64;
  static constexpr int kChunkColumns = kPairs ? 128 : 64;  // of the product
  static constexpr int kChunkSteps = kGlu || kPairs ? 6 : kKind == EpilogueKind::kActivation ? 5 : 1;
  // Steps after the next tile's k-blocks; none where the epilogue holds nothing.
  static constexpr int kTileSteps =
      kKind == EpilogueKind::kAccumulate || Traits::kActivationBackward || Traits::kPingPong ? 0 : kChunks * kChunkSteps;

  const TensorMaps& maps;
  const Arguments& args;
  uint32_t buffers;                  // kBuffers of this warp
  int lane = threadIdx.x % 32, row_in_tile = threadIdx.x / 32 * 16;
  uint32_t next = 0, activated = 0;  // the buffer to take next, and the one that is filled quarter by quarter
  // Whether a tile is held, which is still to be stored; the tile, and its chunk to store next.
  bool held = false;
  int chunk = 0;
  Tile tile = {};  // under kTransposedOut n is counted in its own output
  int second = 0;  // kTransposedOut: whether that is the second one
  // Its sums, of which steps leave those from that chunk on; two columns each: [chunk][quarter][row half of column half].
  uint32_t pair[kHeld];

  __device__ Epilogue(const TensorMaps& maps_, const Arguments& args_, uint32_t shared)
      : maps(maps_), args(args_), buffers(Shared::buffer(shared, threadIdx.x / 32, 0)) {}

  // kBias: two columns each, of which the warp's lanes have those of the whole tile.
  struct Bias { uint32_t pair[Traits::kTileN / 64]; };

  // Those of a tile, loaded well before they are needed; zeros without a bias.
  __device__ __forceinline__ Bias bias_of(const Tile& of) const {
    Bias bias;
#pragma unroll
    for (int i = 0; i < Traits::kTileN / 64; ++i) {
      const int column = of.n + (i * 32 + lane) * 2;
      const auto* from = static_cast<const Element*>(args.bias) + static_cast<int64_t>(of.group) * args.size_n + column;
      bias.pair[i] = args.bias && column < args.size_n ? *reinterpret_cast<const uint32_t*>(from) : 0u;
    }
    return bias;
  }

  // Takes a tile's sums with their bias, rounded to 16 bits. Without one nothing is added: the next tile's products wait for this.
  __device__ __forceinline__ void hold(const Tile& of, const Accumulators& sum, const Bias& bias) {
    if (!args.bias) return hold(of, sum);
    tile = of;
    held = true;
    chunk = 0;
#pragma unroll
    for (int i = 0; i < Traits::kTileN / 8; ++i) {
      const float2 add = unpack<Element>(__shfl_sync(kFullWarp, bias.pair[i / 8], i % 8 * 4 + lane % 4));
      pair[2 * i] = pack<Element>(sum[4 * i] + add.x, sum[4 * i + 1] + add.y);
      pair[2 * i + 1] = pack<Element>(sum[4 * i + 2] + add.x, sum[4 * i + 3] + add.y);
    }
  }

  // Takes a tile's sums, rounded to 16 bits.
  __device__ __forceinline__ void hold(const Tile& of, const Accumulators& sum) {
    tile = of;
    held = true;
    chunk = 0;
    if constexpr (Traits::kTransposedOut) {
      second = of.n >= args.second_n;
      if (second) tile.n -= args.second_n;
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) pair[i] = kGroupedK && of.rows == 0 ? 0u : pack<Element>(sum[2 * i], sum[2 * i + 1]);
  }

  // All steps of the tile that is held.
  __device__ __forceinline__ void finish() {
    if (!held) return;
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < kChunkSteps; ++i) step(i);
      end_chunk();
    }
  }

  // One step of the chunk that is next.
  __device__ __forceinline__ void step(int number) {
    if (!held || tile.n + chunk * kChunkColumns >= args.size_n) return;
    if constexpr (kPairs) {
      if (number < 4) activate_pairs(number);
      else if (args.save && tile.n + chunk * kChunkColumns + (number - 4) * 64 < args.size_n) store_pairs(number - 4);
    } else if constexpr (kKind == EpilogueKind::kStore) {
      store_chunk(second, 0);
    } else if constexpr (kKind == EpilogueKind::kActivation || kGlu) {
      if (number < 4) activate_quarter(number);
      else if (args.save) store_chunk(number - 3, (number - 4) * 32);
    }
  }

  // On to the next chunk.
  __device__ __forceinline__ void end_chunk() {
    constexpr int kOfOne = kGlu ? 32 : kHeld;  // of each of h and g, or in all
    constexpr int kOfChunk = kChunkColumns / 4;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      if (i % kOfOne + kOfChunk < kOfOne) pair[i] = pair[i + kOfChunk];
    }
    if (++chunk == kChunks) held = false;
  }

  // kActivation and kGlu: the columns of chunk `number` of h (and g), at once, of a tile that has taken no steps.
  __device__ __forceinline__ void store_saved(int number) {
    chunk = number;
    if (tile.n + chunk * 64 >= args.size_n) return;
    store_chunk(1, number * 16);
    if constexpr (kGlu) store_chunk(2, 32 + number * 16);
  }

  // kStoreFloat: fp32 sums, straight from the registers: four lanes side by side store 32 bytes of a row.
  __device__ __forceinline__ void store_float(const Tile& of, const Accumulators& sum) {
    const int first_row = row_in_tile + lane / 4;
    float* out = static_cast<float*>(args.out[0]) + static_cast<int64_t>(of.row + first_row) * args.size_n;
#pragma unroll
    for (int i = 0; i < Traits::kTileN / 4; ++i) {  // two columns each of row lane / 4 and of that 8 rows on
      const int column = of.n + i / 2 * 8 + lane % 4 * 2, further = i % 2 * 8;
      if (first_row + further >= of.rows || column >= args.size_n) continue;
      *reinterpret_cast<float2*>(out + static_cast<int64_t>(further) * args.size_n + column) = {sum[2 * i], sum[2 * i + 1]};
    }
  }

  // kAccumulate: fp32 sums, added to the output: at once, since they cannot be held.
  __device__ __forceinline__ void accumulate(const Tile& of, const Accumulators& sum) {
#pragma unroll
    for (int c = 0; c < Traits::kTileN / 32; ++c) {
      const int column = of.n + c * 32;
      if (column >= args.size_n) break;
      const uint32_t buffer = take_buffer();
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // two columns each of rows lane / 4 and 8 rows on
        const int line = lane / 4 + i % 2 * 8, byte = i / 2 * 32 + lane % 4 * 8;
        asm volatile("st.shared.v2.f32 [%0], {%1, %2};"
                     ::"r"(buffer + line * kLineBytes + ((byte >> 4 ^ (line & 7)) << 4) + byte % 16),
                     "f"(sum[c * 16 + i * 2]), "f"(sum[c * 16 + i * 2 + 1])
                     : "memory");
      }
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        tma_reduce_add(&maps.out[0], buffer, column, of.m + row_in_tile, of.group);
        tma_store_commit();
      }
    }
  }

  // The warp's buffers in turn; each waits until its last contents have left.
  __device__ __forceinline__ uint32_t take_buffer() {
    if (lane == 0) tma_store_wait_read<kBuffers - 1>();
    __syncwarp();
    const uint32_t buffer = buffers + next * kEpilogueBufferBytes;
    next = next + 1 == kBuffers ? 0 : next + 1;
    return buffer;
  }

 private:
  // A full buffer to the chunk's columns of an output.
  __device__ __forceinline__ void store_buffer(int output, uint32_t buffer) {
    store_buffer(output, buffer, tile.n + chunk * 64, args.size_n);
  }

  // A full buffer to an output of `columns`, from `column` on: by TMA, or row by row where rows after the valid ones belong to the next
  // group.
  __device__ __forceinline__ void store_buffer(int output, uint32_t buffer, int column, int columns) {
    fence_proxy_async();
    __syncwarp();
    if constexpr (Traits::kTransposedOut) {
      if (lane == 0) {
        if (args.out_along_n) tma_store(&maps.out[output], buffer, column, tile.m + row_in_tile, tile.group);
        else tma_store(&maps.out[output], buffer, tile.m + row_in_tile, column, tile.group);
        tma_store_commit();
      }
      return;
    }
    const int valid = kGroupedK ? 16 : tile.rows - row_in_tile;
    if (valid >= 16) {
      if (lane == 0) {
        if (kGroupedK && args.adds) tma_reduce_add(&maps.out[output], buffer, column, tile.m + row_in_tile, tile.group);
        else if (kGroupedK) tma_store(&maps.out[output], buffer, column, tile.m + row_in_tile, tile.group);
        else tma_store(&maps.out[output], buffer, column, tile.row + row_in_tile, 0);
        tma_store_commit();
      }
      return;
    }
    const int vector = lane % 8;
#pragma unroll 1
    for (int line = lane / 8; line < valid; line += 4) {
      const int4 value = load_shared_16(buffer + line * kLineBytes + ((vector ^ (line & 7)) << 4));
      if (column + vector * 8 < columns) {
        const int64_t element = static_cast<int64_t>(tile.row + row_in_tile + line) * columns + column + vector * 8;
        *reinterpret_cast<int4*>(static_cast<Element*>(args.out[output]) + element) = value;
      }
    }
    if (lane == 0) tma_store_commit();  // an empty group of stores, so that take_buffer counts this one too
    __syncwarp();
  }

  // The chunk's columns of an output, from held sums, `first` and on.
  __device__ __forceinline__ void store_chunk(int output, int first) {
    const uint32_t buffer = take_buffer();
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const uint32_t* m = pair + first + quarter * 4;
      if (Traits::kTransposedOut && !args.out_along_n) {
        stmatrix_transposed(Shared::transposed_fragment_address(buffer, quarter), m[0], m[1], m[2], m[3]);
      } else {
        stmatrix(Shared::fragment_address(buffer, quarter), m[0], m[1], m[2], m[3]);
      }
    }
    store_buffer(output, buffer);
  }

  __device__ __forceinline__ void unpack_quarter(int first, float (&elements)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 two = unpack<Element>(pair[first + i]);
      elements[2 * i] = two.x, elements[2 * i + 1] = two.y;
    }
  }

  // act(h), or act(h) * g, of a quarter of the chunk: 16 columns. The last one stores the chunk.
  __device__ __forceinline__ void activate_quarter(int quarter) {
    if (quarter == 0) activated = take_buffer();
    const typename Traits::ActivationFamily activation(args.activation);
    float a[8], g[8];
    unpack_quarter(quarter * 4, a);
    if constexpr (kGlu) {
      unpack_quarter(32 + quarter * 4, g);
      gated_values(activation, a, g);
    } else {
#pragma unroll
      for (float& one : a) one = activation.value(one);
    }
    uint32_t m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) m[i] = pack<Element>(a[2 * i], a[2 * i + 1]);
    stmatrix(Shared::fragment_address(activated, quarter), m[0], m[1], m[2], m[3]);
    if (quarter == 3) store_buffer(0, activated);
  }

  // kPairs: act(h) * g of a quarter of the chunk: 32 columns, of which 16 are made. The last one stores them.
  __device__ __forceinline__ void activate_pairs(int quarter) {
    if (quarter == 0) activated = take_buffer();
    const typename Traits::ActivationFamily activation(args.activation);
    float a[8], g[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 both = unpack<Element>(pair[quarter * 8 + i]);
      a[i] = both.x, g[i] = both.y;
    }
    gated_values(activation, a, g);
    uint32_t m[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // 8 columns of 8 rows: rows 0-7 and 8-15 of the first 8 columns, then of the others
      const int first = i / 2 * 4 + i % 2;  // column lane % 4; the fourth one after it is two further
      m[i] = neighbours(pack<Element>(a[first], a[first + 2]));
    }
    stmatrix(Shared::fragment_address(activated, quarter), m[0], m[1], m[2], m[3]);
    if (quarter == 3) store_buffer(0, activated, (tile.n + chunk * kChunkColumns) / 2, args.size_n / 2);
  }

  // Of columns lane % 4 (the low half) and lane % 4 + 4 of a row of 8 columns, which four lanes have: columns lane % 4 * 2 and the next.
  __device__ __forceinline__ uint32_t neighbours(uint32_t columns) const {
    const int from = lane / 4 * 4 + lane % 2 * 2;
    const uint32_t left = __shfl_sync(kFullWarp, columns, from), right = __shfl_sync(kFullWarp, columns, from + 1);
    return __byte_perm(left, right, lane % 4 < 2 ? 0x5410 : 0x7632);
  }

  // kPairs: half `half` of the chunk's columns of the product.
  __device__ __forceinline__ void store_pairs(int half) {
    const uint32_t buffer = take_buffer();
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const uint32_t* m = pair + half * 16 + quarter * 4;
      stmatrix(Shared::fragment_address(buffer, quarter), m[0], m[1], m[2], m[3]);
    }
    store_buffer(1, buffer, tile.n + chunk * kChunkColumns + half * 64, args.size_n);
  }
};

}  // namespace gbmoe::hopper
