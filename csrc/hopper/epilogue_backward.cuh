// The activation's backward after the GEMM d = dz @ w2[e].T, by three warps of their own.
//
// Consumers do not store d. Each hands its rows of a tile, rounded to 16 bits, through its epilogue buffers to these warps, and
// goes on to the next tile. They read h and g next to them, and store a', dh and dg (the formulas stand in activation_kernels.cu)
// while the tensor cores work: d itself never leaves the chip. There are buffers for more than a tile, at the price of a stage,
// so that neither side waits for the other.
//
// The router weights' gradients are sums over all columns of a row, of which a patch has 64: each leaves its partial sum, and
// sum_dots_kernel (down_projection_backward.cu) adds them up in order.

#pragma once

#include "tile_scheduler.cuh"

namespace gbmoe::hopper {

// A patch is what a consumer warp hands over at a time, in one epilogue buffer: 16 rows of 64 columns. This is the consumer's
// side.
template <typename Traits> struct GradientSender {
  using Shared = SharedMemory<Traits>;
  using Element = typename Traits::Element;

  const uint32_t shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  PipelineState sent;  // buffers

  __device__ explicit GradientSender(uint32_t shared_) : shared(shared_) {}

  // The warp's rows of a tile, 64 columns a buffer; columns after the last one of the result are left out.
  __device__ __forceinline__ void send(const typename Traits::Accumulators& sum, int columns) {
#pragma unroll
    for (int chunk = 0; chunk < Traits::kTileN / 64; ++chunk) {
      if (chunk * 64 >= columns) break;
      mbarrier_wait(Shared::buffer_empty(shared, warp, sent.stage), sent.parity ^ 1);
      const uint32_t buffer = Shared::buffer(shared, warp, sent.stage);
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const float* of = sum + chunk * 32 + quarter * 8;
        stmatrix(Shared::fragment_address(buffer, quarter), pack<Element>(of[0], of[1]), pack<Element>(of[2], of[3]),
                 pack<Element>(of[4], of[5]), pack<Element>(of[6], of[7]));
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(Shared::buffer_full(shared, warp, sent.stage));
      sent.template advance<Traits::kEpilogueBuffers>();
    }
  }
};

// The other side, kBackwardWarps warps. A lane has 8 columns in every fourth row of a patch. What comes in one buffer is always
// the same warp's, or a barrier's parity would not tell a patch from the one after it. Each has about a third of a tile's
// patches, and takes those of its first 64 columns first.
template <typename Traits> struct ActivationBackward {
  using Shared = SharedMemory<Traits>;
  using Element = typename Traits::Element;
  static constexpr bool kGate = Traits::kGate;  // whether there is g
  static constexpr bool kPairs = Traits::kGateInPairs;  // h and g are one tensor; Eight h and g are then its first 8 elements and its next
  static constexpr int kSteps = 4;              // of a patch, four rows each

  static_assert(Traits::kTileN / 64 * kConsumerWarps <= 32, "one lane for each patch of a tile");
  static_assert(Traits::kEpilogueBuffers > Traits::kTileN / 64,
                "a consumer that waits for a buffer waits for a patch of an earlier tile");

  struct Eight { uint32_t pair[4]; };  // elements, neighbours in a row

  struct Patch {
    // The byte offset of the lane's elements in its first row, and the group's rows from that one on. Both are 0 if the lane's
    // columns do not exist, and after the last patch; the offset also if the group has ended before (rows <= 0).
    int64_t begin;
    int rows;
    int row, chunk;                // the first of the 16 rows, and which 64 columns
    int valid;                     // rows that belong to the group
    uint32_t buffer, full, empty;  // the epilogue buffer and its barriers; 0 after the last patch
    uint32_t parity;               // of the phase in which the buffer is filled with this patch
  };

  const TensorMaps& maps;
  const Arguments& args;
  const uint32_t shared;
  const int lane = threadIdx.x % 32;
  const int index;             // which of the kBackwardWarps this is
  PipelineState tiles;
  Tile tile{};
  int warps = 1, inverse = 0;  // consumer warps that have rows in the tile; n / warps is n * inverse >> 16 for the tile's patches
  // Bit n: patch n of the tile, which comes from consumer warp n % warps, is this warp's and still to come.
  uint32_t own = 0;
  int before = 0, chunks = 0;  // lane l: patches of earlier tiles from consumer warp l; chunks of this tile

  __device__ ActivationBackward(const TensorMaps& maps_, const Arguments& args_, uint32_t shared_)
      : maps(maps_), args(args_), shared(shared_), index(threadIdx.x / 32 - kConsumerWarps - Traits::kProducerWarps) {}

  static __device__ void run(const TensorMaps& maps, const Arguments& args, uint32_t shared) {
    ActivationBackward self(maps, args, shared);
    const auto run_with = [&](auto kind) { self.template run_with<decltype(kind)::value>(); };
    if constexpr (kPairs) with_activation_of_pairs(args.activation.kind, run_with);
    else with_activation(args.activation.kind, run_with);
  }

 private:
  // This warp's next patch.
  __device__ __forceinline__ Patch next() {
    while (own == 0) {
      before += lane < warps ? chunks : 0;
      tile = receive_tile<Traits>(shared, tiles);
      if (tile.group < 0) return Patch{};
      // Warps without rows hand over nothing, and no warp hands over columns that do not exist.
      warps = ceil_div(min(tile.rows, kTileM), 16);
      chunks = max(min(ceil_div(args.size_n - tile.n, 64), Traits::kTileN / 64), 0);
      inverse = ceil_div(1 << 16, warps);
      const int chunk = lane * inverse >> 16, warp = lane - chunk * warps;
      const int buffer = (__shfl_sync(kFullWarp, before, warp) + chunk) % Traits::kEpilogueBuffers;
      own = __ballot_sync(kFullWarp, lane < chunks * warps && (warp + buffer) % Traits::kBackwardWarps == index);
      prefetch_patch();
    }
    const int number = __ffs(own) - 1, chunk = number * inverse >> 16, warp = number - chunk * warps;
    own &= own - 1;
    prefetch_patch();
    const int use = __shfl_sync(kFullWarp, before, warp) + chunk, buffer = use % Traits::kEpilogueBuffers;
    Patch patch;
    patch.row = tile.row + warp * 16;
    patch.chunk = tile.n / 64 + chunk;
    patch.valid = tile.rows - warp * 16;
    patch.buffer = Shared::buffer(shared, warp, buffer);
    patch.full = Shared::buffer_full(shared, warp, buffer);
    patch.empty = Shared::buffer_empty(shared, warp, buffer);
    patch.parity = use / Traits::kEpilogueBuffers & 1;
    const int row = lane / 8, column = patch.chunk * 64 + lane % 8 * 8;
    patch.rows = column < args.size_n ? patch.valid - row : 0;
    constexpr int64_t kBytes = sizeof(Element);
    patch.begin = patch.rows > 0 ? (static_cast<int64_t>(patch.row + row) * args.size_n + column) * kBytes : 0;
    return patch;
  }

  // Has TMA bring h and g of the warp's next patch in the tile to the L2, well ahead of the loads.
  __device__ __forceinline__ void prefetch_patch() const {
    if (own == 0 || lane > 0) return;
    const int number = __ffs(own) - 1, chunk = number * inverse >> 16;
    const int row = tile.row + (number - chunk * warps) * 16, column = tile.n + chunk * 64;
    if constexpr (kPairs) {
      tma_prefetch(&maps.out[0], 2 * column, row, 0);
      tma_prefetch(&maps.out[0], 2 * column + 64, row, 0);
      return;
    }
    tma_prefetch(&maps.out[0], column, row, 0);
    if (kGate) tma_prefetch(&maps.out[1], column, row, 0);
  }

  // Lane l has the slot and the weight of row l of a patch.
  __device__ __forceinline__ int find_slot(const Patch& of) const {
    const int slot = lane < min(of.valid, 16) ? args.slot_of_row[of.row + lane] : -1;
    return static_cast<uint32_t>(slot) < args.slots ? slot : -1;
  }
  // The 16-bit halves of a weight as it is stored, twice the same where it has 16 bits. To convert it here would be to wait for
  // the load.
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
    return {static_cast<uint32_t>(bits.x), static_cast<uint32_t>(bits.y), static_cast<uint32_t>(bits.z),
            static_cast<uint32_t>(bits.w)};
  }
  // Bytes from the tensor's begin to the lane's row of a step; where that row does not exist, to the last one that does.
  __device__ __forceinline__ int64_t offset(const Patch& of, int step) const {
    return of.begin + static_cast<int64_t>(min(step * 4, max(of.rows - 1, 0))) * (args.size_n * static_cast<int>(sizeof(Element)));
  }
  // Not under a condition: ptxas would load to registers of its own, and wait for them at once in order to move them.
  static __device__ __forceinline__ Eight load(const void* from, int64_t offset) {
    return eight(load_global_16_once(static_cast<const char*>(from) + offset));
  }
  static __device__ __forceinline__ void store(void* to, int64_t offset, const Eight& value) {
    *reinterpret_cast<int4*>(static_cast<char*>(to) + offset) =
        make_int4(static_cast<int>(value.pair[0]), static_cast<int>(value.pair[1]), static_cast<int>(value.pair[2]),
                  static_cast<int>(value.pair[3]));
  }

  // h and g at the lane's row of a step.
  __device__ __forceinline__ void load_both(int64_t at, Eight& h, Eight& g) const {
    h = load(args.h, kPairs ? 2 * at : at);
    if constexpr (kPairs) g = load(args.h, 2 * at + static_cast<int64_t>(sizeof(Eight)));
    else if (kGate) g = load(args.g, at);
  }

  // Elements 2 * i and the next of h and of g.
  static __device__ __forceinline__ float2 two_of_h(const Eight& h, const Eight& g, int i) {
    if constexpr (!kPairs) return unpack<Element>(h.pair[i]);
    const uint32_t* pair = i < 2 ? h.pair + 2 * i : g.pair + 2 * i - 4;
    return {unpack<Element>(pair[0]).x, unpack<Element>(pair[1]).x};
  }
  static __device__ __forceinline__ float2 two_of_g(const Eight& h, const Eight& g, int i) {
    if constexpr (!kPairs) return unpack<Element>(g.pair[i]);
    const uint32_t* pair = i < 2 ? h.pair + 2 * i : g.pair + 2 * i - 4;
    return {unpack<Element>(pair[0]).y, unpack<Element>(pair[1]).y};
  }

  struct Results { Eight a, dh, dg; };
  template <int kKind>
  __device__ __forceinline__ Results results(const Eight& h, const Eight& g, const Eight& d, float weight, float& dot) const {
    float of_h[8];
    ValueAndSlope<float> act[8];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 both = two_of_h(h, g, i);
      of_h[2 * i] = both.x, of_h[2 * i + 1] = both.y;
    }
    activations_at<kKind>(of_h, act, args.activation);
    Results results;
    float2 dots = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 of_g = kGate ? two_of_g(h, g, i) : float2{1.0f, 1.0f}, of_d = unpack<Element>(d.pair[i]);
      ValueAndSlope<float> gates[2] = {{of_g.x, 1.0f}, {of_g.y, 1.0f}};
      if constexpr (kGate && changes_gate(kKind))
        gates[0] = gate_at<kKind>(of_g.x, args.activation), gates[1] = gate_at<kKind>(of_g.y, args.activation);
      const float2 gate = {gates[0].value, gates[1].value};
      const float2 gated = {act[2 * i].value * gate.x, act[2 * i + 1].value * gate.y};
      const float2 weighted = {weight * of_d.x, weight * of_d.y};
      dots.x += gated.x * of_d.x, dots.y += gated.y * of_d.y;
      results.a.pair[i] = pack<Element>(weight * gated.x, weight * gated.y);
      const float2 dh = {weighted.x * (act[2 * i].slope * gate.x), weighted.y * (act[2 * i + 1].slope * gate.y)};
      float2 dg = {weighted.x * act[2 * i].value, weighted.y * act[2 * i + 1].value};
      if constexpr (changes_gate(kKind)) dg.x *= gates[0].slope, dg.y *= gates[1].slope;
      if constexpr (kPairs) {
        uint32_t* pair = i < 2 ? results.dh.pair + 2 * i : results.dg.pair + 2 * i - 4;
        pair[0] = pack<Element>(dh.x, dg.x), pair[1] = pack<Element>(dh.y, dg.y);
      } else {
        results.dh.pair[i] = pack<Element>(dh.x, dh.y);
        if (kGate) results.dg.pair[i] = pack<Element>(dg.x, dg.y);
      }
    }
    dot = dots.x + dots.y;
    return results;
  }

  template <int kKind> __device__ __forceinline__ void run_with() {
    Patch patch = next();
    int slot = find_slot(patch);
    Stored stored = find_weight(slot);
    Eight h[kSteps], g[kSteps];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) load_both(offset(patch, step), h[step], g[step]);
#pragma unroll 1
    while (patch.full) {
      const Patch upcoming = next();
      const int upcoming_slot = find_slot(upcoming);
      const float weight = weight_of(stored);
      const uint32_t without_slot = __ballot_sync(kFullWarp, slot < 0);
      float dot[kSteps];
      mbarrier_wait(patch.full, patch.parity);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const int line = step * 4 + lane / 8;
        const Eight d = eight(load_shared_16(patch.buffer + line * kLineBytes + ((lane % 8 ^ (line & 7)) << 4)));
        Results of = results<kKind>(h[step], g[step], d, __shfl_sync(kFullWarp, weight, line), dot[step]);
        load_both(offset(upcoming, step), h[step], g[step]);
        if ((without_slot & 0xffff) && without_slot >> line & 1) of = Results{};  // whatever the operands held
        if (step * 4 < patch.rows) {
          const int64_t here = offset(patch, step);
          store(args.out[0], here, of.a);
          store(args.out[1], kPairs ? 2 * here : here, of.dh);
          if constexpr (kPairs) store(args.out[1], 2 * here + static_cast<int64_t>(sizeof(Eight)), of.dg);
          else if (kGate) store(args.out[2], here, of.dg);
        } else {
          dot[step] = 0.0f;
        }
        if (step == 1) stored = find_weight(upcoming_slot);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(patch.empty);
      if (args.dots) leave_dots(dot, patch);
      patch = upcoming, slot = upcoming_slot;
    }
  }

  // Eight lanes have a partial dot product of each of four rows: adds them up, and leaves the sums in args.dots.
  __device__ __forceinline__ void leave_dots(const float (&dot)[kSteps], const Patch& of) const {
    const bool high = lane & 4, odd = lane & 2;
    float low_pair[2], sum;
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // rows of steps 0 and 1 where lane & 4 is not set, of 2 and 3 where it is
      low_pair[i] = (high ? dot[2 + i] : dot[i]) + __shfl_xor_sync(kFullWarp, high ? dot[i] : dot[2 + i], 4);
    }
    sum = (odd ? low_pair[1] : low_pair[0]) + __shfl_xor_sync(kFullWarp, odd ? low_pair[0] : low_pair[1], 2);
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    const int row = (high ? 8 : 0) + (odd ? 4 : 0) + lane / 8;
    if (lane % 2 == 0 && row < of.valid) args.dots[static_cast<int64_t>(of.chunk) * args.rows + of.row + row] = sum;
  }
};

}  // namespace gbmoe::hopper
