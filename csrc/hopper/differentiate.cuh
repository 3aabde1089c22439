// What follows the product d = dz @ w2[e].T of backward: the gradient of the activation, by three warps of their own.
//
// Consumers do not store d. Each hands its rows of a tile, rounded to 16 bits, through its buffers to these warps, and goes on to the next
// tile. They read h and g beside them, and store a', dh and dg (the formulas are activation.cu's) while the tensor cores work: d
// itself never leaves the chip. There are buffers for more than a tile, at the price of a slice, so that neither waits for the other.
//
// The router weights' gradients are sums over all columns of a row, of which a piece has 64: each leaves its part, and
// sum_dots_kernel (down_backward.cu) adds them up in order.

#pragma once

#include "grouped.cuh"

namespace gbmoe::hopper {

// A consumer warp's side. K is a Kernel whose kFinish is Finish::kHandOver.
template <typename T, typename K> struct Handover {
  const uint32_t shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  Pipeline filled;  // buffers

  __device__ explicit Handover(uint32_t shared_) : shared(shared_) {}

  // The warp's rows of a tile, 64 columns a buffer, of which as many as there are are handed over.
  __device__ __forceinline__ void give(const typename K::Sums& sum, int columns) {
#pragma unroll
    for (int chunk = 0; chunk < K::kTileColumns / 64; ++chunk) {
      if (chunk * 64 >= columns) break;
      barrier_wait(K::buffer_read(shared, warp, filled.stage), filled.parity ^ 1);
      const uint32_t buffer = K::buffer(shared, warp, filled.stage);
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const float* of = sum + chunk * 32 + block * 8;
        store_matrices(K::fragment_address(buffer, block), pack<T>(of[0], of[1]), pack<T>(of[2], of[3]), pack<T>(of[4], of[5]),
                       pack<T>(of[6], of[7]));
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(K::buffer_filled(shared, warp, filled.stage));
      filled.template next<K::kBuffersAWarp>();
    }
  }
};

// The other side; kGate where there is g. A piece is what a consumer hands over at a time, 16 rows of 64 columns, of which a lane has 8
// columns in every fourth row. What comes in one buffer is always the same warp's, or a barrier's parity would not tell a piece
// from the one after it. Each has about a third of a tile's pieces, and takes those of its first 64 columns first.
template <typename T, bool kGate, typename K> struct Differentiator {
  static constexpr int kSteps = 4;  // of a piece, four rows each
  static_assert(K::kTileColumns / 64 * kConsumerWarps <= 32, "a lane for every piece of a tile");
  static_assert(K::kBuffersAWarp > K::kTileColumns / 64, "a consumer that waits for a buffer waits for a piece of an earlier tile");

  struct Eight { uint32_t pair[4]; };  // neighbours in a row

  struct Piece {
    int64_t begin;    // of the lane's first row, in bytes; of the tensor where it has nothing in the piece
    int rows;         // from the lane's first on; none where its columns lie behind the last, and none behind the last piece
    int row, chunk;   // the first of 16 rows, and of 64 columns
    int valid;        // rows
    uint32_t buffer, filled, read;  // with its barriers; 0 behind the last piece
    uint32_t parity;                // of the phase in which it is filled with this piece
  };

  const Maps& maps;
  const Arguments& args;
  const uint32_t shared;
  const int lane = threadIdx.x % 32;
  const int which;                // of the warps
  Pipeline tiles;                 // that are handed out
  Tile tile{};
  int warps = 1, inverse = 0;     // that have rows in the tile; n * inverse >> 16 == n / warps, for the tile's pieces
  uint32_t own = 0;               // bit n: piece n of the tile is this warp's, and still to come; its consumer is warp n % warps
  int before = 0, chunks = 0;     // lane l: what consumer warp l handed over of earlier tiles; the tile's

  __device__ Differentiator(const Maps& maps_, const Arguments& args_, uint32_t shared_)
      : maps(maps_), args(args_), shared(shared_), which(threadIdx.x / 32 - kConsumerWarps - K::kProducers) {}

  static __device__ void run(const Maps& maps, const Arguments& args, uint32_t shared) {
    Differentiator self(maps, args, shared);
    with_activation(args.activation, [&](auto kind) { self.template run_with<decltype(kind)::value>(); });
  }

 private:
  // This warp's next piece.
  __device__ __forceinline__ Piece next() {
    while (own == 0) {
      before += lane < warps ? chunks : 0;
      tile = K::take_tile(shared, tiles);
      if (tile.group < 0) return Piece{};
      // Warps without rows hand over nothing, and of columns that do not exist nobody does.
      warps = divide_up(min(tile.rows, kTileM), 16);
      chunks = max(min(divide_up(args.columns - tile.n, 64), K::kTileColumns / 64), 0);
      inverse = divide_up(1 << 16, warps);
      const int chunk = lane * inverse >> 16, warp = lane - chunk * warps;
      const int buffer = (__shfl_sync(kFull, before, warp) + chunk) % K::kBuffersAWarp;
      own = __ballot_sync(kFull, lane < chunks * warps && (warp + buffer) % K::kDifferentiators == which);
      prefetch_piece();
    }
    const int number = __ffs(own) - 1, chunk = number * inverse >> 16, warp = number - chunk * warps;
    own &= own - 1;
    prefetch_piece();
    const int use = __shfl_sync(kFull, before, warp) + chunk, buffer = use % K::kBuffersAWarp;
    Piece piece;
    piece.row = tile.row + warp * 16;
    piece.chunk = tile.n / 64 + chunk;
    piece.valid = tile.rows - warp * 16;
    piece.buffer = K::buffer(shared, warp, buffer);
    piece.filled = K::buffer_filled(shared, warp, buffer);
    piece.read = K::buffer_read(shared, warp, buffer);
    piece.parity = use / K::kBuffersAWarp & 1;
    const int row = lane / 8, column = piece.chunk * 64 + lane % 8 * 8;
    piece.rows = column < args.columns ? piece.valid - row : 0;
    piece.begin = piece.rows > 0 ? (static_cast<int64_t>(piece.row + row) * args.columns + column) * static_cast<int64_t>(sizeof(T)) : 0;
    return piece;
  }
  // Has h and g of the warp's next piece in the tile brought to the cache, well ahead of the loads.
  __device__ __forceinline__ void prefetch_piece() const {
    if (own == 0 || lane > 0) return;
    const int number = __ffs(own) - 1, chunk = number * inverse >> 16;
    const int row = tile.row + (number - chunk * warps) * 16, column = tile.n + chunk * 64;
    prefetch(&maps.out[0], column, row, 0);
    if (kGate) prefetch(&maps.out[1], column, row, 0);
  }

  // Lane l has the slot and the weight of row l of a piece.
  __device__ __forceinline__ int find_slot(const Piece& of) const {
    const int slot = lane < min(of.valid, 16) ? args.slot_of_row[of.row + lane] : -1;
    return static_cast<uint32_t>(slot) < args.slots ? slot : -1;
  }
  // The halves of a weight as it is stored, the same twice where it has 16 bits: to convert it would be to wait for it.
  struct Stored { uint16_t high, low; };
  __device__ __forceinline__ Stored find_weight(int slot) const {
    if (!args.weights.data) return {};
    const int bytes = args.weights.dtype == ScalarType::Float ? 4 : 2;
    const auto* at = static_cast<const uint16_t*>(args.weights.data) + static_cast<int64_t>(max(slot, 0)) * (bytes / 2);
    return {at[bytes / 2 - 1], at[0]};
  }
  __device__ __forceinline__ float weight_of(Stored stored) const {
    if (!args.weights.data) return 1.0f;
    if (args.weights.dtype == ScalarType::Half) return __half2float(__ushort_as_half(stored.low));
    return __uint_as_float(static_cast<uint32_t>(stored.high) << 16 | (args.weights.dtype == ScalarType::Float ? stored.low : 0));
  }

  static __device__ __forceinline__ Eight eight(int4 bits) {
    return {static_cast<uint32_t>(bits.x), static_cast<uint32_t>(bits.y), static_cast<uint32_t>(bits.z), static_cast<uint32_t>(bits.w)};
  }
  // Bytes from the tensor's first to the lane's row of a step; a row again in place of one that does not exist.
  __device__ __forceinline__ int64_t offset(const Piece& of, int step) const {
    return of.begin + static_cast<int64_t>(min(step * 4, max(of.rows - 1, 0))) * (args.columns * static_cast<int>(sizeof(T)));
  }
  // Not under a condition: ptxas would load to registers of its own, and wait for them at once, to move them.
  static __device__ __forceinline__ Eight load(const void* from, int64_t offset) {
    return eight(load_once(static_cast<const char*>(from) + offset));
  }
  static __device__ __forceinline__ void store(void* to, int64_t offset, const Eight& value) {
    *reinterpret_cast<int4*>(static_cast<char*>(to) + offset) = make_int4(
        static_cast<int>(value.pair[0]), static_cast<int>(value.pair[1]), static_cast<int>(value.pair[2]), static_cast<int>(value.pair[3]));
  }

  struct Results { Eight a, dh, dg; };
  template <int kKind>
  static __device__ __forceinline__ Results results(const Eight& h, const Eight& g, const Eight& d, float weight, float& dot) {
    float of_h[8];
    ValueAndSlope<float> act[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 both = unpack<T>(h.pair[i]);
      of_h[2 * i] = both.x, of_h[2 * i + 1] = both.y;
    }
    activations_at<kKind>(of_h, act);
    Results results;
    float2 dots = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 gate = kGate ? unpack<T>(g.pair[i]) : float2{1.0f, 1.0f}, of_d = unpack<T>(d.pair[i]);
      const float2 gated = {act[2 * i].value * gate.x, act[2 * i + 1].value * gate.y}, weighted = {weight * of_d.x, weight * of_d.y};
      dots.x += gated.x * of_d.x, dots.y += gated.y * of_d.y;
      results.a.pair[i] = pack<T>(weight * gated.x, weight * gated.y);
      results.dh.pair[i] = pack<T>(weighted.x * (act[2 * i].slope * gate.x), weighted.y * (act[2 * i + 1].slope * gate.y));
      if (kGate) results.dg.pair[i] = pack<T>(weighted.x * act[2 * i].value, weighted.y * act[2 * i + 1].value);
    }
    dot = dots.x + dots.y;
    return results;
  }

  template <int kKind> __device__ __forceinline__ void run_with() {
    Piece piece = next();
    int slot = find_slot(piece);
    Stored stored = find_weight(slot);
    Eight h[kSteps], g[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      h[step] = load(args.h, offset(piece, step));
      if (kGate) g[step] = load(args.g, offset(piece, step));
    }
#pragma unroll 1
    while (piece.filled) {
      const Piece upcoming = next();
      const int upcoming_slot = find_slot(upcoming);
      const float weight = weight_of(stored);
      const uint32_t without_slot = __ballot_sync(kFull, slot < 0);
      float dot[kSteps];
      barrier_wait(piece.filled, piece.parity);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int line = step * 4 + lane / 8;
        const Eight d = eight(load_piece(piece.buffer + line * kLine + ((lane % 8 ^ (line & 7)) << 4)));
        Results of = results<kKind>(h[step], g[step], d, __shfl_sync(kFull, weight, line), dot[step]);
        const int64_t ahead = offset(upcoming, step);
        h[step] = load(args.h, ahead);
        if (kGate) g[step] = load(args.g, ahead);
        if ((without_slot & 0xffff) && without_slot >> line & 1) of = Results{};  // whatever the operands held
        if (step * 4 < piece.rows) {
          const int64_t here = offset(piece, step);
          store(args.out[0], here, of.a);
          store(args.out[1], here, of.dh);
          if (kGate) store(args.out[2], here, of.dg);
        } else {
          dot[step] = 0.0f;
        }
        if (step == 1) stored = find_weight(upcoming_slot);
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(piece.read);
      if (args.dots) leave_dots(dot, piece);
      piece = upcoming, slot = upcoming_slot;
    }
  }

  // Eight lanes have a part of each of four rows' dots: sums them, and leaves them in the workspace.
  __device__ __forceinline__ void leave_dots(const float (&dot)[kSteps], const Piece& of) const {
    const bool high = lane & 4, odd = lane & 2;
    float low_pair[2], sum;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // rows of steps 0 and 1 where lane & 4 is not set, of 2 and 3 where it is
      low_pair[i] = (high ? dot[2 + i] : dot[i]) + __shfl_xor_sync(kFull, high ? dot[i] : dot[2 + i], 4);
    }
    sum = (odd ? low_pair[1] : low_pair[0]) + __shfl_xor_sync(kFull, odd ? low_pair[0] : low_pair[1], 2);
    sum += __shfl_xor_sync(kFull, sum, 1);
    const int row = (high ? 8 : 0) + (odd ? 4 : 0) + lane / 8;
    if (lane % 2 == 0 && row < of.valid) args.dots[static_cast<int64_t>(of.chunk) * args.rows + of.row + row] = sum;
  }
};

}  // namespace gbmoe::hopper
