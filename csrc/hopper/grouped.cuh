// One persistent kernel for every grouped product of a layer on Hopper (sm_90a), with the group sizes on the device.
//
// A block walks over tiles of 128 x 256 results, or 128 x 192 where that leaves less of them empty. One warp is its producer: it asks
// the copy engine for 64-wide slices of both operands, kStages of them ahead. Two warpgroups are the consumers: each multiplies its
// own 64 rows by all columns on the tensor cores. Finishing a tile (activation, conversion, stores, which each warp does for its own
// rows) happens while the tensor cores work on the next one: the sums are rounded to 16 bits, which halves their registers, and are
// finished piece by piece behind the products that were started last. Where a group has 64 rows or fewer left, the second warpgroup
// has nothing to multiply, so what is wasted of its time is less than 64 rows a group.
//
// Where kPingPong, tiles have 128 x 128 results, and each warpgroup multiplies whole ones, in turns: while one multiplies, the other
// stores what it has summed up. Nothing is held behind the next tile's products then, and no wait for a tile's last ones leaves the
// tensor cores idle, but every product takes more from the L2: it pays where sums are short.
//
// Groups may begin at any row: a slice that reaches into the next group is harmless, because rows of a group are rows of its
// result only, and are stored only if they belong to it. Where rows are what is summed over (weight gradients), the lines of
// the last slice that belong to the next group are set to zero in shared memory before they are multiplied.
//
//   rows of each group:          out [rows,N] = a [rows,K] @ b[e]        b[e] [N,K], or [K,N] where kTransposedB
//   kWeights, summed over rows:  out[e] [M,N] = a [rows,M].T @ b [rows,N]
//
// Blocks may come in pairs: side by side in N they share their slices of a, side by side in M those of b. One warp of a block or a
// pair finds its tiles ahead of time and hands them out through shared memory, as slices are.
//
// Without a workspace, tiles are dealt out round and round. With one (schedule.cu; kWeights always has one), whoever is ready takes the
// next, the longest sums first where these are over groups; and where kJoins and the workspace has room for parts, tiles that would keep
// few blocks busy for long are summed in parts by several blocks: each leaves its part in the workspace, and the last to come adds them,
// always in the same order. No block waits for another, and results do not depend on who was last. (They do depend on where sums are
// cut, and so on the sizes of all groups.)
//
// Where kGather, a is not in memory: there are four producer warps, which pick its rows from the tokens' matrix, 16 bytes a copy, and
// the copy engine brings b only. Rows without a slot are zeros. Of sums over rows it is then out[e].T that is computed, because a tile
// has half as many rows as columns, and what is gathered should be the lesser part; stores turn it round.
//
// Legend: M, N, K as in out [M,N] = a [M,K] @ b [K,N]; E groups (experts); P rows of all groups.

#pragma once

#include <climits>

#include "../activations.cuh"
#include "../common.cuh"
#include "ptx.cuh"

namespace gbmoe::hopper {

constexpr int kTileM = 128, kTileK = 64, kWidest = 256, kNarrow = 192, kSquare = 128;  // a tile's rows, a slice of K, a tile's columns
constexpr int kConsumers = 2, kConsumerWarps = kConsumers * 4;
constexpr int kThreads = (kConsumers + 1) * 128;
constexpr uint32_t kLine = 128;                    // bytes: 64 elements, the width of the swizzle
constexpr uint32_t kBlock = 64 * kLine;            // 64 lines
constexpr uint32_t kBytesA = kConsumers * kBlock;  // of a slice
constexpr uint32_t kBuffer = 16 * kLine;           // what one warp stores at a time: 16 rows of 64 elements
constexpr unsigned kFull = 0xffffffffu;

enum class Finish {
  kStore,        // out = product
  kAdd,          // fp32 out += product, kWeights only
  kActivate,     // h = product, a = act(h); h only if it is wanted
  kGlu,          // tile columns are 128 of w1 beside 128 of v1: h, g, a = act(h) * g
  kHandOver,     // product = gradient of a: handed to warps that go on with it (differentiate.cuh)
};

struct Maps {
  // [pair of operands that is summed]; b's second is v1 under kGlu
  CUtensorMap a[2], b[2];
  CUtensorMap out[3];  // under kHandOver h and g, which are prefetched
};

// Of a group whose rows are summed over, in the workspace.
struct alignas(16) Group {
  int group, row, rows;    // its number, first row and rows
  int share;               // of its first tile, as in Tile
};

// What schedule.cu leaves in the workspace ahead of a launch. Items are tiles or parts of them.
struct Balance {
  int next;                // item that nobody has taken
  int whole, tail, parts;  // forward: tiles that are summed at once, and behind them those in `parts` parts
};

struct Arguments {
  const void* sizes;       // [E], rows of each group
  bool wide;               // sizes are int64 rather than int32
  int groups;
  int rows;                // P: no group reaches beyond it, whatever its size says
  int columns;             // N of one output tensor
  int features;            // M of kWeights
  int slices;              // of K for one pair of operands, forward
  int pairs;               // of operands that are summed
  int rows_a_panel;        // tiles along M that are walked before the next along N, at the most
  bool even_panels;        // a group's panels differ by as little as can be; else only its last one is smaller
  int activation;
  bool save;               // whether h (and g) are stored
  // The workspace, null without one. Parts of sums are [slot][block of the cluster][consumer warp][a warp's share of a tile].
  Balance* balance;
  Group* by_size;          // [E], kWeights
  int* arrived;            // [slot][block][consumer warp]: parts that have come, by a tile's first slot
  float4* parts;
  void* out[3];            // the tensors behind maps.out, where rows are stored one by one; under kHandOver a, dh and dg
  // kGather: row r of a is line slot_of_row[r] / top_k of `lines`
  const void* lines;
  const int* slot_of_row;  // [P]; what is not in [0, slots) names no slot
  uint32_t slots;          // T * K
  int line_elements;
  uint32_t multiplier, shift;  // 2 * slot * multiplier >> 32 >> shift == slot / top_k
  // kHandOver, beside slot_of_row
  const void *h, *g;       // [P,N]; g null without a gate
  Scalars weights;         // [T,K], of at most four bytes each
  float* dots;             // [64 columns each, P]: the parts of the weights' gradients
};

__host__ __device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// Sizes come from a caller, who may have overwritten them. A size counts as one in [0, P], and a sum of sizes as at most P: groups
// that would reach beyond the last row end there, and the kernels stay inside of every tensor.
__device__ __forceinline__ int size_of_group(const Arguments& args, int group) {
  if (group >= args.groups) return 0;
  const int64_t size = args.wide ? static_cast<const int64_t*>(args.sizes)[group] : static_cast<const int32_t*>(args.sizes)[group];
  return static_cast<int>(min(max(size, int64_t{0}), static_cast<int64_t>(args.rows)));
}
// The sum of two numbers of rows that are at most P each.
__device__ __forceinline__ int add_rows(const Arguments& args, int a, int b) {
  return static_cast<int>(min(static_cast<uint32_t>(a) + static_cast<uint32_t>(b), static_cast<uint32_t>(args.rows)));
}

// One tile, or part of its sum, as the warps of one block see it.
struct alignas(16) Tile {
  int group;           // -1: there are no more
  int row;             // first row in a (forward), or first row that is summed over (weights)
  int rows;            // of the group from `row` on (forward), or that are summed over (weights)
  int m, n;            // first row and column of the result; n is this block's
  int slice, slices;   // of K: the first one and how many (forward)
  int share;           // see below; 0 of a tile that is summed at once

  __device__ __forceinline__ int4 first_piece() const { return make_int4(group, row, rows, m); }
  __device__ __forceinline__ int4 second_piece() const { return make_int4(n, slice, slices, share); }
  static __device__ __forceinline__ Tile of(int4 a, int4 b) { return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}; }
};
constexpr int kTiles = 4;  // that are handed out ahead

// Into how many parts a sum is cut, which of them this is, and the first one's slot in the workspace, in one number.
constexpr int kMostParts = 127;
__host__ __device__ __forceinline__ int share_of(int parts, int part, int slot) { return parts << 24 | part << 16 | slot; }
__device__ __forceinline__ int parts_of(int share) { return share >> 24; }
__device__ __forceinline__ int part_of(int share) { return share >> 16 & 0xff; }
__device__ __forceinline__ int slot_of(int share) { return share & 0xffff; }

// Finds the tiles of a cluster, one after the other; a warp's 32 lanes hold 32 consecutive groups.
template <bool kWeights, int kClusterM, int kClusterN, int kTileColumns> struct Schedule {
  const Arguments& args;
  int lane, tiles_n, tiles_m_fixed;
  int upcoming;                         // item to take next, without a workspace
  int base = -32;                       // group of lane 0, or its place by size
  int lane_group = 0, lane_rows = 0, lane_row = 0, lane_item = 0, lane_share = 0;  // of this lane's group: first row, first item
  int first_item = 0, next_row = 0, next_item = 0;                                 // of the 32 groups, and behind them

  __device__ explicit Schedule(const Arguments& arguments) : args(arguments) {
    lane = threadIdx.x % 32;
    tiles_n = divide_up(args.columns, kTileColumns * kClusterN);
    tiles_m_fixed = divide_up(args.features, kTileM * kClusterM);
    upcoming = blockIdx.x / (kClusterM * kClusterN);
  }

  // The next tile, as block 0 of the cluster sees it; its group is -1 behind the last.
  __device__ Tile next() {
    Tile tile{};
    tile.slices = args.slices * args.pairs;
    int item = take_item();
    if (!kWeights && args.balance) item = cut_tail(item, tile);
    if (item < first_item) base = -32, first_item = next_row = next_item = 0;
    while (item >= next_item) {
      if (base + 32 >= args.groups) {
        tile.group = -1;
        return tile;
      }
      advance();
    }
    const int owner = 31 - __clz(__ballot_sync(kFull, lane_item <= item && base + lane < args.groups));
    tile.group = __shfl_sync(kFull, lane_group, owner);
    tile.row = __shfl_sync(kFull, lane_row, owner);
    tile.rows = __shfl_sync(kFull, lane_rows, owner);
    int local = item - __shfl_sync(kFull, lane_item, owner);
    const int along_m = tiles_m(tile.rows), most = args.rows_a_panel;
    const int rows_a_panel = !kWeights && args.even_panels ? divide_up(along_m, divide_up(along_m, most)) : most;
    const int a_panel = rows_a_panel * tiles_n;
    if constexpr (kWeights) local = cut_rows(local, along_m * tiles_n, __shfl_sync(kFull, lane_share, owner), tile);
    const int panel = local / a_panel, first_m = panel * rows_a_panel;
    const int height = min(rows_a_panel, along_m - first_m), in_panel = local - panel * a_panel;
    tile.m = (first_m + in_panel % height) * kClusterM * kTileM;
    tile.n = in_panel / height * kClusterN * kTileColumns;
    if (!kWeights) tile.row += tile.m, tile.rows -= tile.m;
    return tile;
  }

  // The same tile as block `rank` sees it.
  static __device__ __forceinline__ Tile seen_by(int rank, Tile tile) {
    const int m = kClusterM > 1 ? rank * kTileM : 0;
    tile.m += m;
    tile.n += kClusterN > 1 ? rank * kTileColumns : 0;
    if (!kWeights) tile.row += m, tile.rows -= m;
    return tile;
  }

 private:
  __device__ __forceinline__ int tiles_m(int rows) const { return kWeights ? tiles_m_fixed : divide_up(rows, kTileM * kClusterM); }

  __device__ __forceinline__ int take_item() {
    int item = upcoming;
    if (!args.balance) {
      upcoming += gridDim.x / (kClusterM * kClusterN);
      return item;
    }
    if (lane == 0) item = atomicAdd(&args.balance->next, 1);
    return __shfl_sync(kFull, item, 0);
  }

  // The tile that an item is, or is a part of: first all tiles' first parts, then all second ones.
  __device__ __forceinline__ int cut_tail(int item, Tile& tile) const {
    const int whole = args.balance->whole, tail = args.balance->tail, parts = args.balance->parts, slices = tile.slices;
    if (tail == 0 || item < whole) return item;
    const int part = (item - whole) / tail, of_tail = item - whole - part * tail;
    if (part >= parts) return INT_MAX;
    tile.slice = part * slices / parts;
    tile.slices = (part + 1) * slices / parts - tile.slice;
    tile.share = share_of(parts, part, of_tail * parts);
    return whole + of_tail;
  }

  // The same for one of a group's items, whose parts are rows to sum over: first all its tiles' first parts, and so on.
  static __device__ __forceinline__ int cut_rows(int local, int tiles, int share, Tile& tile) {
    const int parts = parts_of(share);
    if (parts <= 1) return local;
    const int part = local / tiles, of_group = local - part * tiles;
    const uint32_t slices = divide_up(tile.rows, kTileK);  // at most 2^25, and kMostParts times that is below 2^32
    const int first = part * slices / parts * kTileK, last = min(static_cast<int>((part + 1) * slices / parts) * kTileK, tile.rows);
    tile.row += first;
    tile.rows = last - first;
    tile.share = share_of(parts, part, slot_of(share) + of_group * parts);
    return of_group;
  }

  // On to the next 32 groups.
  __device__ void advance() {
    base += 32;
    const int place = base + lane;
    const bool exists = place < args.groups;
    lane_rows = 0;
    if (kWeights && exists) {
      const Group of = args.by_size[place];
      lane_group = of.group, lane_row = of.row, lane_rows = of.rows, lane_share = of.share;
    } else if (!kWeights) {
      lane_group = place;
      int row_end = size_of_group(args, place);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int row = __shfl_up_sync(kFull, row_end, step);
        if (lane >= step) row_end = add_rows(args, row_end, row);
      }
      row_end = add_rows(args, row_end, next_row);
      const int row_before = __shfl_up_sync(kFull, row_end, 1);
      lane_row = lane == 0 ? next_row : row_before;
      lane_rows = row_end - lane_row;
      next_row = __shfl_sync(kFull, row_end, 31);
    }
    const int items = exists ? tiles_m(lane_rows) * tiles_n * max(parts_of(lane_share), 1) : 0;
    int item_end = items;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int item = __shfl_up_sync(kFull, item_end, step);
      if (lane >= step) item_end += item;
    }
    lane_item = next_item + item_end - items;
    first_item = next_item;
    next_item += __shfl_sync(kFull, item_end, 31);
  }
};

// The two sides of kHandOver.
template <typename T, typename K> struct Handover;
template <typename T, bool kGate, typename K> struct Differentiator;

struct Pipeline {
  uint32_t stage = 0, parity = 0;
  template <int kStages> __device__ __forceinline__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  template <int kStages> __device__ __forceinline__ void skip(int steps) {
    const uint32_t to = stage + steps, rounds = to / kStages;
    stage = to - rounds * kStages;
    parity ^= rounds & 1;
  }
};

// `Activation` is a type of activations.cuh, under kHandOver std::bool_constant, whether there is a gate, and else void.
template <typename T, bool kWeights, bool kTransposedB, bool kGather, Finish kFinish, typename Activation, int kTileN, int kStages,
          int kBuffers, int kClusterM, int kClusterN, bool kPingPong = false>
struct Kernel {
  static constexpr int kRows = kClusterM, kColumns = kClusterN, kCluster = kRows * kColumns;  // blocks of a cluster
  static constexpr bool kSums = kWeights, kTurned = kWeights && kGather;  // stores out[e] from tiles of out[e].T
  static constexpr bool kGlu = kFinish == Finish::kGlu, kHandsOver = kFinish == Finish::kHandOver;
  static constexpr int kTileColumns = kGlu ? kTileN / 2 : kTileN;  // of one output tensor
  static constexpr uint32_t kBytesB = kTileN / 64 * kBlock, kBytesStage = kBytesA + kBytesB;  // of a slice
  static constexpr uint32_t kStaging = kStages * kBytesStage;
  static constexpr uint32_t kBarriers = kStaging + kConsumerWarps * kBuffers * kBuffer;
  static constexpr uint32_t kTileBarriers = kBarriers + 2 * kStages * 8, kBufferBarriers = kTileBarriers + 2 * kTiles * 8;
  static constexpr uint32_t kTurnBarriers = kBufferBarriers + (kHandsOver ? 2 * kConsumerWarps * kBuffers * 8 : 0);
  static constexpr uint32_t kTileRing = kTurnBarriers + (kPingPong ? kConsumers * 8 : 0);
  static constexpr uint32_t kSharedBytes = kTileRing + kTiles * sizeof(Tile) + 1024;  // and room to align
  static constexpr int kProducers = kGather ? 4 : 1;     // warps
  static constexpr int kDifferentiators = kHandsOver ? 3 : 0;  // warps, behind the producer
  static constexpr int kTakers = kConsumerWarps + kProducers + kDifferentiators;  // warps that take tiles
  static constexpr bool kProducerFinds = kGather || kHandsOver;   // where no warp is left for it
  static constexpr int kFinder = kConsumerWarps + (kHandsOver ? 0 : 3);           // the warp that finds tiles
  static constexpr int kBuffersAWarp = kBuffers;
  // Of those that are not consumers, of 504 for a thread of each warpgroup; kHandOver leaves all with what they start with.
  static constexpr int kRegisters = kHandsOver ? 168 : 40;
  static constexpr bool kJoins = (kFinish == Finish::kStore || kFinish == Finish::kAdd) && !kPingPong;  // sums may be in parts
  static_assert(kTileN == kWidest || (!kWeights && !kGlu), "weights and gates need the widest tile");
  static_assert(!kHandsOver || (!kWeights && !kGather), "only plain products of rows are handed over");
  static_assert(!kGather || kClusterN == 1, "what is gathered is not shared");
  static_assert(!kPingPong || (!kWeights && !kGather && kFinish == Finish::kStore && kTileN == kSquare), "the rest takes no turns");
  using Sums = float[kTileN / 2];             // one thread's, of its warp's 16 rows of a tile
  static constexpr int kHeld = kTileN / 4;    // the same in pairs
  using Walk = Schedule<kWeights, kClusterM, kClusterN, kTileColumns>;

  // ------------------------------------------------------------------------------------------------------- producer

  // Finds the tiles, one after the other, for all warps of the cluster that take them. In one warp of the first block, kFinder.
  struct Finder {
    Walk walk;
    int found = 0;          // tiles
    bool more_ahead = true; // whether the last one is so short that the next may be late if it is found only when that one is taken

    __device__ explicit Finder(const Arguments& args) : walk(args) {}

    // False behind the last tile.
    __device__ __forceinline__ bool hand_out(uint32_t shared) {
      const uint32_t full = shared + kTileBarriers, empty = full + kTiles * 8;
      const int lane = threadIdx.x % 32, slot = found % kTiles;
      // What is taken from the counter is out of reach for other clusters: no sooner than needed, or the longest are not first.
      const int taken = found - (walk.args.balance && !more_ahead ? 1 : kTiles);
      if (taken >= 0) barrier_wait(empty + taken % kTiles * 8, taken / kTiles & 1);
      const Tile tile = walk.next();
      if (lane == 0) {
        const uint32_t to = shared + kTileRing + slot * sizeof(Tile), barrier = full + slot * 8;
        if constexpr (kCluster == 1) {
          store_piece(to, tile.first_piece());
          store_piece(to + 16, tile.second_piece());
          barrier_arrive(barrier);
        } else {
#pragma unroll
          for (int rank = 0; rank < kCluster; ++rank) {
            const Tile theirs = Walk::seen_by(rank, tile);
            barrier_expect_bytes_remote(barrier, sizeof(Tile), rank);
            store_piece_remote(to, theirs.first_piece(), barrier, rank);
            store_piece_remote(to + 16, theirs.second_piece(), barrier, rank);
          }
        }
      }
      __syncwarp();
      ++found;
      more_ahead = (kWeights ? divide_up(tile.rows, kTileK) : tile.slices) < 12;
      return tile.group >= 0;
    }
    // Until the other block's warps, which arrive here, have taken all but the last, which nobody says that it has taken.
    __device__ __forceinline__ void stay(uint32_t shared) const {
      for (int taken = max(found - kTiles, 0); taken < found - 1; ++taken) {
        barrier_wait(shared + kTileBarriers + (kTiles + taken % kTiles) * 8, taken / kTiles & 1);
      }
    }
  };

  // The next tile, in all warps that take tiles.
  static __device__ __forceinline__ Tile take_tile(uint32_t shared, Pipeline& at) {
    const uint32_t full = shared + kTileBarriers + at.stage * 8, from = shared + kTileRing + at.stage * sizeof(Tile);
    barrier_wait(full, at.parity);
    const Tile tile = Tile::of(load_piece(from), load_piece(from + 16));
    __syncwarp();
    // Nobody waits for the last one's, and the first block may be gone.
    if (threadIdx.x % 32 == 0 && tile.group >= 0) {
      if constexpr (kCluster == 1) barrier_arrive(full + kTiles * 8);
      else barrier_arrive_remote(full + kTiles * 8, 0);
    }
    at.template next<kTiles>();
    return tile;
  }

  // Slices are asked for whole: of a tile at a group's end they reach into the next group, which is harmless. (Asking for half of
  // one under a condition is what ptxas 13.0 has compiled to a copy from a row that it had not set.)
  static __device__ void produce(const Maps& maps, const Arguments& args, uint32_t shared) {
    const uint32_t rank = kCluster > 1 ? cluster_rank() : 0;
    const bool asks = threadIdx.x == kConsumerWarps * 32, finds = kProducerFinds && threadIdx.x / 32 == kFinder && rank == 0;
    const uint32_t full = shared + kBarriers, empty = full + kStages * 8;
    Finder finder(args);
    Pipeline at, tiles;
    if (finds) finder.hand_out(shared);
    for (;;) {
      const Tile tile = take_tile(shared, tiles);
      if (tile.group < 0) break;
      if (finds && !kTurned) finder.hand_out(shared);  // one ahead
      const int slices = kWeights ? divide_up(tile.rows, kTileK) : tile.slices;
      Lines lines;
      if constexpr (kGather && !kWeights) lines = find_lines(args, tile);
      int slot = kTurned ? slot_of_line(args, tile, 0) : 0;
      if (asks || kGather) {
#pragma unroll 1
        for (int i = 0; i < slices; ++i) {
          if constexpr (kTurned) {
            lines = lines_of(args, slot);
            slot = slot_of_line(args, tile, i + 1);
          }
          barrier_wait(empty + at.stage * 8, at.parity ^ 1);
          const uint32_t arrived = full + at.stage * 8, a = shared + at.stage * kBytesStage, b = a + kBytesA;
          const int slice = tile.slice + i, pair = !kWeights && slice >= args.slices;
          const int k = kWeights ? tile.row + i * kTileK : (slice - pair * args.slices) * kTileK;
          if (asks) {
            barrier_expect_bytes(arrived, (kGather ? 0 : kBytesA) + kBytesB);
            if constexpr (!kGather) ask_for_a(maps, tile, rank, pair, k, arrived, a);
            ask_for_b(maps, tile, rank, pair, k, arrived, b);
          }
          if constexpr (kGather) {
            gather_lines(lines, args, kTurned ? tile.m + threadIdx.x % 128 / 64 * 64 : k, a);
            barrier_arrive_on_copies(arrived);
          }
          at.template next<kStages>();
        }
      }
      // With a counter a tile is found only when the one before has been taken, which this warp must not wait for before it gathers.
      if (finds && kTurned) finder.hand_out(shared);
      __syncwarp();
    }
    if (kCluster > 1 && finds) finder.stay(shared);
    if (kCluster > 1 && asks) {
      // The other block's consumers arrive here: stay until they have.
      for (int i = 0; i < kStages; ++i) {
        barrier_wait(empty + at.stage * 8, at.parity ^ 1);
        at.template next<kStages>();
      }
    }
  }

  // Of a, blocks that share it load half each, for both; a block on its own loads boxes of kTileM rows.
  static __device__ __forceinline__ void ask_for_a(
      const Maps& maps, const Tile& tile, uint32_t rank, int pair, int k, uint32_t arrived, uint32_t to) {
    const CUtensorMap* map = &maps.a[pair];
    if constexpr (kClusterN > 1) {
      if constexpr (kWeights) copy_in_multicast(map, arrived, to + rank * kBlock, tile.m + rank * 64, k, 0, 0b11);
      else copy_in_multicast(map, arrived, to + rank * kBlock, k, tile.row + rank * 64, 0, 0b11);
    } else if constexpr (kWeights) {
      copy_in(map, arrived, to, tile.m, k, 0);
      copy_in(map, arrived, to + kBlock, tile.m + 64, k, 0);
    } else {
      copy_in(map, arrived, to, k, tile.row, 0);
    }
  }

  // Of b, blocks that share it load a part each, for both.
  static __device__ __forceinline__ void ask_for_b(
      const Maps& maps, const Tile& tile, uint32_t rank, int pair, int k, uint32_t arrived, uint32_t b) {
    constexpr int kParts = kWeights || kTransposedB ? kTileN / 64 : 2, kShare = kParts / kClusterM;
    const int first = kClusterM > 1 ? rank * kShare : 0;
#pragma unroll
    for (int i = 0; i < kShare; ++i) {
      const int part = first + i, along_n = tile.n + (kGlu ? 0 : part * (kTileN / kParts));
      const uint32_t to = b + part * (kBytesB / kParts);
      const CUtensorMap* map = &maps.b[kGlu ? part : pair];
      const int x = kWeights || kTransposedB ? along_n : k, y = kWeights || kTransposedB ? k : along_n;
      const int z = kWeights ? 0 : tile.group;
      if constexpr (kClusterM > 1) copy_in_multicast(map, arrived, to, x, y, z, 0b11);
      else copy_in(map, arrived, to, x, y, z);
    }
  }

  // What a thread copies of every slice: its 16 bytes of eight lines, four lines apart. Lines are named by their distance from the
  // first token's, in pieces of 16 bytes (which 64 GiB of tokens have 2^32 of); kNone where there is none.
  static constexpr uint32_t kNone = ~0u;
  struct Lines {
    uint32_t place[8];
    bool whole;  // no line of the warp's is kNone
  };
  // Each of four warps has 32 lines of the tile.
  static __device__ __forceinline__ Lines find_lines(const Arguments& args, const Tile& tile) {
    const int line = threadIdx.x % 128;
    return lines_of(args, line < tile.rows ? args.slot_of_row[tile.row + line] : -1);
  }
  // Of sums over rows a slice's rows are 64 lines, and two warps each have those of 64 columns.
  static __device__ __forceinline__ int slot_of_line(const Arguments& args, const Tile& tile, int slice) {
    const int row = slice * kTileK + threadIdx.x % 64;
    return row < tile.rows ? args.slot_of_row[tile.row + row] : -1;
  }
  // With the slot of each lane's line.
  static __device__ __forceinline__ Lines lines_of(const Arguments& args, int slot) {
    const int lane = threadIdx.x % 32;
    const uint32_t token = __umulhi(2 * static_cast<uint32_t>(slot), args.multiplier) >> args.shift;
    const bool exists = static_cast<uint32_t>(slot) < args.slots;
    const uint32_t place = exists ? token * static_cast<uint32_t>(args.line_elements / 8) : kNone;
    Lines lines;
    lines.whole = __all_sync(kFull, exists);
#pragma unroll
    for (int i = 0; i < 8; ++i) lines.place[i] = __shfl_sync(kFull, place, i * 4 + lane / 8);
    return lines;
  }
  // Starts copying 64 columns, from `column` on.
  static __device__ __forceinline__ void gather_lines(const Lines& lines, const Arguments& args, int column, uint32_t to) {
    const int lane = threadIdx.x % 32, piece = lane % 8, line = lane / 8;
    const char* from = reinterpret_cast<const char*>(static_cast<const T*>(args.lines) + column + piece * 8);
    to += (threadIdx.x % 128 / 32 * 32 + line) * kLine;
    // Where the swizzle puts this piece of lines 0-3 and 4-7 of eight.
    const uint32_t low = to + ((piece ^ line) << 4), high = to + 4 * kLine + ((piece ^ (line + 4)) << 4);
    if (lines.whole && column + 64 <= args.line_elements) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        copy_piece((i % 2 ? high : low) + i / 2 * 8 * kLine, from + static_cast<uint64_t>(lines.place[i]) * 16);
      }
    } else {
      const bool inside = column + piece * 8 < args.line_elements;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool there = inside && lines.place[i] != kNone;
        copy_piece_or_zeros((i % 2 ? high : low) + i / 2 * 8 * kLine, there ? from + static_cast<uint64_t>(lines.place[i]) * 16 : args.lines,
                            there);
      }
    }
  }

  // ---------------------------------------------------------------------------------------------------------- finishing

  // Where lane l puts (or finds) its line of the 16 x 16 block number `block` of a buffer: matrices are (rows 0-7, columns 0-7),
  // (rows 8-15, columns 0-7), then the same of columns 8-15; 16-byte pieces of a line change places with the line's number.
  static __device__ __forceinline__ uint32_t fragment_address(uint32_t buffer, int block) {
    const int lane = threadIdx.x % 32, line = lane % 16, piece = block * 2 + lane / 16;
    return buffer + line * kLine + ((piece ^ (line & 7)) << 4);
  }

  // The same where columns become lines, of 16 elements: matrix l / 8 has columns 0-7 or 8-15, and rows 0-7 or 8-15 as its piece.
  static __device__ __forceinline__ uint32_t turned_address(uint32_t buffer, int block) {
    const int lane = threadIdx.x % 32;
    return buffer + (block * 16 + lane / 16 * 8 + lane % 8) * 32 + lane / 8 % 2 * 16;
  }

  // A consumer warp's buffers. Where kHandOver, each has two barriers: that it has been filled, and that it has been read.
  static __device__ __forceinline__ uint32_t buffer(uint32_t shared, int warp, int number) {
    return shared + kStaging + (warp * kBuffers + number) * kBuffer;
  }
  static __device__ __forceinline__ uint32_t buffer_filled(uint32_t shared, int warp, int number) {
    return shared + kBufferBarriers + (warp * kBuffers + number) * 16;
  }
  static __device__ __forceinline__ uint32_t buffer_read(uint32_t shared, int warp, int number) {
    return buffer_filled(shared, warp, number) + 8;
  }

  // A tile is finished 64 columns, a chunk, at a time, and a chunk in kParts pieces; 16 columns are a block. Code is unrolled for
  // one chunk only: that of all of them would not stay in the instruction cache.
  static constexpr int kChunks = kGlu ? 2 : kTileN / 64;
  static constexpr int kParts = kGlu ? 6 : kFinish == Finish::kActivate ? 5 : 1;
  static constexpr int kPieces = kFinish == Finish::kAdd || kHandsOver || kPingPong ? 0 : kChunks * kParts;

  // One warp's rows of a tile, from its sums to memory.
  struct Finisher {
    const Maps& maps;
    const Arguments& args;
    uint32_t staging;                 // kBuffers buffers
    int lane = threadIdx.x % 32, row_in_tile = threadIdx.x / 32 * 16;
    uint32_t next = 0, activated = 0;  // the buffer to take next, and the one that is filled block by block
    bool held = false;                // whether there is a tile to finish
    int chunk = 0;                    // that is next
    Tile tile = {};
    uint32_t pair[kHeld];             // its sums from that chunk on, two columns each: [chunk][block][row half of column half]

    __device__ Finisher(const Maps& maps_, const Arguments& args_, uint32_t shared)
        : maps(maps_), args(args_), staging(buffer(shared, threadIdx.x / 32, 0)) {}

    __device__ __forceinline__ void hold(const Tile& of, const Sums& sum) {
      tile = of;
      held = true;
      chunk = 0;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) pair[i] = kWeights && of.rows == 0 ? 0u : pack<T>(sum[2 * i], sum[2 * i + 1]);
    }
    __device__ __forceinline__ void all() {
      if (!held) return;
#pragma unroll 1
      for (int c = 0; c < kChunks; ++c) {
#pragma unroll
        for (int part = 0; part < kParts; ++part) piece(part);
        end_chunk();
      }
    }
    __device__ __forceinline__ void piece(int part) {
      if (!held || tile.n + chunk * 64 >= args.columns) return;
      if constexpr (kFinish == Finish::kStore) {
        put(0, 0);
      } else if constexpr (kFinish == Finish::kActivate || kGlu) {
        if (part < 4) put_activated(part);
        else if (args.save) put(part - 3, (part - 4) * 32);
      }
    }
    __device__ __forceinline__ void end_chunk() {
      constexpr int kOfOne = kGlu ? 32 : kHeld;  // of each of h and g, or in all
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (i % kOfOne + 16 < kOfOne) pair[i] = pair[i + 16];
      }
      if (++chunk == kChunks) held = false;
    }
    // The warp's buffers in turn; each waits until its last contents have left.
    __device__ __forceinline__ uint32_t take() {
      if (lane == 0) wait_copies_read<kBuffers - 1>();
      __syncwarp();
      const uint32_t buffer = staging + next * kBuffer;
      next = next + 1 == kBuffers ? 0 : next + 1;
      return buffer;
    }

    // A full buffer to the chunk's columns of an output.
    __device__ __forceinline__ void send(int output, uint32_t buffer) {
      const int column = tile.n + chunk * 64;
      fence_async();
      __syncwarp();
      if constexpr (kTurned) {
        if (lane == 0) {
          copy_out(&maps.out[output], buffer, tile.m + row_in_tile, column, tile.group);
          commit_copies();
        }
        return;
      }
      const int valid = kWeights ? 16 : tile.rows - row_in_tile;
      if (valid >= 16) {
        if (lane == 0) {
          if constexpr (kWeights) copy_out(&maps.out[output], buffer, column, tile.m + row_in_tile, tile.group);
          else copy_out(&maps.out[output], buffer, column, tile.row + row_in_tile, 0);
          commit_copies();
        }
        return;
      }
      // Rows behind these belong to the next group.
      const int piece = lane % 8;
#pragma unroll 1
      for (int line = lane / 8; line < valid; line += 4) {
        const int4 value = load_piece(buffer + line * kLine + ((piece ^ (line & 7)) << 4));
        if (column + piece * 8 < args.columns) {
          const int64_t element = static_cast<int64_t>(tile.row + row_in_tile + line) * args.columns + column + piece * 8;
          *reinterpret_cast<int4*>(static_cast<T*>(args.out[output]) + element) = value;
        }
      }
      if (lane == 0) commit_copies();  // an empty group keeps the count of buffers in turn
      __syncwarp();
    }

    // Held sums from `first` on.
    __device__ __forceinline__ void put(int output, int first) {
      const uint32_t buffer = take();
#pragma unroll
      for (int block = 0; block < 4; ++block) {
        const uint32_t* m = pair + first + block * 4;
        if constexpr (kTurned) store_matrices_turned(turned_address(buffer, block), m[0], m[1], m[2], m[3]);
        else store_matrices(fragment_address(buffer, block), m[0], m[1], m[2], m[3]);
      }
      send(output, buffer);
    }

    __device__ __forceinline__ void put_activated(int block) {
      if (block == 0) activated = take();
      const Activation activation(args.activation);
      uint32_t m[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 h = unpack<T>(pair[block * 4 + i]);
        float2 a = {activation.value(h.x), activation.value(h.y)};
        if constexpr (kGlu) {
          const float2 g = unpack<T>(pair[32 + block * 4 + i]);
          a.x *= g.x, a.y *= g.y;
        }
        m[i] = pack<T>(a.x, a.y);
      }
      store_matrices(fragment_address(activated, block), m[0], m[1], m[2], m[3]);
      if (block == 3) send(0, activated);
    }

    // fp32 sums, added to the output: at once, since they cannot be held.
    __device__ __forceinline__ void add(const Tile& of, const Sums& sum) {
#pragma unroll
      for (int c = 0; c < kTileN / 32; ++c) {
        const int column = of.n + c * 32;
        if (column >= args.columns) break;
        const uint32_t buffer = take();
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // two columns each of rows lane / 4 and 8 rows on
          const int line = lane / 4 + i % 2 * 8, byte = i / 2 * 32 + lane % 4 * 8;
          asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(buffer + line * kLine + ((byte >> 4 ^ (line & 7)) << 4) + byte % 16),
                       "f"(sum[c * 16 + i * 2]), "f"(sum[c * 16 + i * 2 + 1])
                       : "memory");
        }
        fence_async();
        __syncwarp();
        if (lane == 0) {
          add_out(&maps.out[0], buffer, column, of.m + row_in_tile, of.group);
          commit_copies();
        }
      }
    }
  };

  // ------------------------------------------------------------------------------------------------------- consumers

  // Until a slice is there. What was gathered came by ordinary copies, whose results the tensor cores see behind a fence.
  static __device__ __forceinline__ void await(uint32_t full, uint32_t parity) {
    barrier_wait(full, parity);
    if constexpr (kGather) fence_async();
  }

  static __device__ __forceinline__ void release(uint32_t empty) {
    const int lane = threadIdx.x % 32;
    if constexpr (kCluster == 1) {
      if (lane == 0) barrier_arrive(empty);
    } else {
      if (lane < kCluster) barrier_arrive_remote(empty, lane);
    }
  }

  // Lines of a slice from `valid` on belong to the next group: both operands' become zero (one could be, were there no NaN).
  static __device__ void clear_lines(uint32_t stage, int valid) {
    const int consumer = threadIdx.x / 128;
    constexpr int kBlocksB = kTileN / 64 / kConsumers;
    for (int block = 0; block < 1 + kBlocksB; ++block) {
      const uint32_t base = block == 0 ? stage + consumer * kBlock : stage + kBytesA + (consumer * kBlocksB + block - 1) * kBlock;
      for (uint32_t byte = valid * kLine + threadIdx.x % 128 * 16; byte < kBlock; byte += 128 * 16) {
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(base + byte), "r"(0) : "memory");
      }
    }
    fence_async();
    named_barrier(1, kConsumers * 128);
  }

  // The products of one slice: 64 rows, the first or the second, by all columns. Whoever calls it begins and commits.
  static __device__ __forceinline__ void multiply_slice(Sums& sum, uint32_t stage, int half, bool add) {
    constexpr uint32_t kStepA = kWeights ? 16 * kLine : 32, kStepB = kWeights || kTransposedB ? 16 * kLine : 32;
    const uint64_t a = matrix(stage + half * kBlock, kBlock, 1024), b = matrix(stage + kBytesA, kBlock, 1024);
#pragma unroll
    for (int step = 0; step < kTileK / 16; ++step) {
      product<T, kWeights, kWeights || kTransposedB>(sum, a + (step * kStepA >> 4), b + (step * kStepB >> 4), step > 0 || add);
    }
  }

  // Starts those of this warpgroup's rows.
  static __device__ __forceinline__ void start_slice(Sums& sum, uint32_t stage, int consumer, bool add) {
    products_begin();
    multiply_slice(sum, stage, consumer, add);
    products_commit();
  }

  // The sums of a tile, which are undefined where nothing is summed; meanwhile finishes what is held of the tile before.
  static __device__ __forceinline__ void multiply(Sums& sum, Finisher& finisher, const Tile& tile, int consumer, uint32_t shared,
                                                  Pipeline& at, Tile& upcoming, Pipeline& tiles) {
    const uint32_t full = shared + kBarriers, empty = full + kStages * 8;
    const int slices = kWeights ? tile.rows / kTileK : tile.slices;
    uint32_t previous = 0;
    int slice = 0;
    if (slices >= kPieces) {
#pragma unroll 1
      for (int chunk = 0; chunk < kPieces / kParts; ++chunk) {
#pragma unroll
        for (int part = 0; part < kParts; ++part, ++slice) {
          await(full + at.stage * 8, at.parity);
          start_slice(sum, shared + at.stage * kBytesStage, consumer, slice > 0);
          finisher.piece(part);
          products_wait<1>();
          if (slice > 0) release(empty + previous * 8);
          previous = at.stage;
          at.template next<kStages>();
        }
        finisher.end_chunk();
      }
    } else {
      finisher.all();
    }
#pragma unroll 1
    for (; slice < slices; ++slice) {
      await(full + at.stage * 8, at.parity);
      start_slice(sum, shared + at.stage * kBytesStage, consumer, slice > 0);
      products_wait<1>();
      if (slice > 0) release(empty + previous * 8);
      previous = at.stage;
      at.template next<kStages>();
    }
    if constexpr (kWeights) {
      const int valid = tile.rows % kTileK;
      if (valid > 0) {
        await(full + at.stage * 8, at.parity);
        clear_lines(shared + at.stage * kBytesStage, valid);
        start_slice(sum, shared + at.stage * kBytesStage, consumer, slices > 0);
        products_wait<1>();
        if (slices > 0) release(empty + previous * 8);
        previous = at.stage;
        at.template next<kStages>();
      }
    }
    upcoming = take_tile(shared, tiles);
    products_wait<0>();
    fence_registers(sum);
    if (!kWeights || tile.rows > 0) release(empty + previous * 8);
  }

  // The same where a warpgroup has no rows in the tile.
  static __device__ __forceinline__ void pass(const Tile& tile, uint32_t shared, Pipeline& at) {
    const uint32_t full = shared + kBarriers, empty = full + kStages * 8;
#pragma unroll 1
    for (int slice = 0; slice < tile.slices; ++slice) {
      barrier_wait(full + at.stage * 8, at.parity);
      release(empty + at.stage * 8);
      at.template next<kStages>();
    }
  }

  // Leaves this warp's part of the sums of a tile in the workspace. True in the warp that was the last to do so for these rows of the
  // tile: `sum` is the whole then, added up in the order of the parts.
  static __device__ __forceinline__ bool join(Sums& sum, const Arguments& args, const Tile& tile, uint32_t rank) {
    constexpr int kPart = 16 * kTileN / 4;  // float4s of one warp
    const int lane = threadIdx.x % 32, warp = (slot_of(tile.share) * kCluster + rank) * kConsumerWarps + threadIdx.x / 32;
    float4* first = args.parts + static_cast<int64_t>(warp) * kPart + lane;
    constexpr int kDistance = kCluster * kConsumerWarps * kPart;  // of two parts
    float4* own = first + part_of(tile.share) * kDistance;
#pragma unroll
    for (int i = 0; i < kTileN / 8; ++i) __stcg(own + i * 32, make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
    __syncwarp();
    int before = 0;
    if (lane == 0) {
      __threadfence();
      before = atomicAdd(args.arrived + warp, 1);
      __threadfence();
    }
    if (__shfl_sync(kFull, before, 0) + 1 < parts_of(tile.share)) return false;
    __syncwarp();
#pragma unroll
    for (int chunk = 0; chunk < kTileN / 2; chunk += 32) {
#pragma unroll
      for (int i = 0; i < 32; ++i) sum[chunk + i] = 0.0f;
#pragma unroll 1
      for (int part = 0; part < parts_of(tile.share); ++part) {
        float4 read[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) read[i] = __ldcg(first + part * kDistance + (chunk / 4 + i) * 32);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          sum[chunk + 4 * i] += read[i].x, sum[chunk + 4 * i + 1] += read[i].y;
          sum[chunk + 4 * i + 2] += read[i].z, sum[chunk + 4 * i + 3] += read[i].w;
        }
      }
    }
    return true;
  }

  static __device__ void consume(const Maps& maps, const Arguments& args, uint32_t shared) {
    const uint32_t rank = kCluster > 1 ? cluster_rank() : 0;
    const int consumer = __shfl_sync(kFull, threadIdx.x / 128, 0), warp = __shfl_sync(kFull, threadIdx.x / 32, 0);
    Pipeline at, tiles;
    Finisher finisher(maps, args, shared);
    std::conditional_t<kHandsOver, Handover<T, Kernel>, int> handover(shared);
    Tile upcoming = take_tile(shared, tiles);
    for (;;) {
      const Tile tile = upcoming;
      if (tile.group < 0) break;
      if (!kWeights && consumer * 64 >= tile.rows) {
        finisher.all();
        pass(tile, shared, at);
        upcoming = take_tile(shared, tiles);
        continue;
      }
      Sums sum;
      multiply(sum, finisher, tile, consumer, shared, at, upcoming, tiles);
      const bool results = warp * 16 < (kWeights ? args.features - tile.m : tile.rows) && tile.n < args.columns;
      if (!results) continue;
      if constexpr (kJoins) {
        if (parts_of(tile.share) > 1 && !join(sum, args, tile, rank)) continue;
      }
      if constexpr (kHandsOver) handover.give(sum, args.columns - tile.n);
      else if constexpr (kFinish != Finish::kAdd) finisher.hold(tile, sum);
      else if (tile.rows > 0) finisher.add(tile, sum);
    }
    finisher.all();
    if (threadIdx.x % 32 == 0) wait_copies<0>();
  }

  // The same in turns. Each warpgroup has a barrier, at which the other's warps arrive once they have started the last products of their
  // tile. Only then may it wait for slices of its own: until then their barriers can be two phases behind, which a parity does not tell.
  static __device__ void consume_ping_pong(const Maps& maps, const Arguments& args, uint32_t shared) {
    const int consumer = __shfl_sync(kFull, threadIdx.x / 128, 0), first_row = __shfl_sync(kFull, threadIdx.x / 32 % 4, 0) * 16;
    const uint32_t own_turn = shared + kTurnBarriers + consumer * 8, others_turn = shared + kTurnBarriers + (1 - consumer) * 8;
    Pipeline at, tiles;
    Finisher finisher(maps, args, shared);
    uint32_t parity = consumer == 0;  // the first turn is there
    Tile tile = take_tile(shared, tiles);
    for (int number = 0; tile.group >= 0; ++number) {
      if (number % kConsumers != consumer) {
        at.template skip<kStages>(tile.slices);
        tile = take_tile(shared, tiles);
        continue;
      }
      barrier_wait(own_turn, parity);
      parity ^= 1;
      Sums sum[2];
      if (tile.rows > 64) multiply_whole<2>(sum, tile, shared, at, others_turn);
      else if (tile.rows > 0) multiply_whole<1>(sum, tile, shared, at, others_turn);
      else pass(tile, shared, at), end_turn(others_turn);  // the second of a pair along M
      const Tile upcoming = take_tile(shared, tiles);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        finisher.row_in_tile = half * 64 + first_row;
        if (finisher.row_in_tile >= tile.rows || tile.n >= args.columns) continue;
        finisher.hold(tile, sum[half]);
        finisher.all();
      }
      tile = upcoming;
    }
    if (threadIdx.x % 32 == 0) wait_copies<0>();
  }

  // The sums of a tile's first kHalves * 64 rows.
  template <int kHalves>
  static __device__ __forceinline__ void multiply_whole(
      Sums (&sum)[2], const Tile& tile, uint32_t shared, Pipeline& at, uint32_t others_turn) {
    const uint32_t full = shared + kBarriers, empty = full + kStages * 8;
    uint32_t previous = 0;
#pragma unroll 1
    for (int slice = 0; slice < tile.slices; ++slice) {
      await(full + at.stage * 8, at.parity);
      products_begin();
#pragma unroll
      for (int half = 0; half < kHalves; ++half) multiply_slice(sum[half], shared + at.stage * kBytesStage, half, slice > 0);
      products_commit();
      products_wait<1>();
      if (slice > 0) release(empty + previous * 8);
      previous = at.stage;
      at.template next<kStages>();
    }
    end_turn(others_turn);
    products_wait<0>();
#pragma unroll
    for (int half = 0; half < kHalves; ++half) fence_registers(sum[half]);
    release(empty + previous * 8);
  }

  static __device__ __forceinline__ void end_turn(uint32_t others_turn) {
    if (threadIdx.x % 32 == 0) barrier_arrive(others_turn);
  }

  static __device__ void run(const Maps& maps, const Arguments& args) {
    extern __shared__ uint8_t unaligned[];
    const uint32_t shared = (shared_address(unaligned) + 1023) & ~1023u;
    if (threadIdx.x == 0) {
      const uint32_t full = shared + kBarriers, empty = full + kStages * 8;
      for (int i = 0; i < kStages; ++i) {
        barrier_init(full + i * 8, kGather ? 1 + 128 : 1);
        barrier_init(empty + i * 8, (kPingPong ? 4 : kConsumerWarps) * kCluster);
      }
      for (int i = 0; i < kTiles; ++i) {
        barrier_init(shared + kTileBarriers + i * 8, 1);
        barrier_init(shared + kTileBarriers + (kTiles + i) * 8, kTakers * kCluster);
      }
      for (int i = 0; kHandsOver && i < kConsumerWarps * kBuffers; ++i) {
        barrier_init(buffer_filled(shared, 0, i), 1);
        barrier_init(buffer_read(shared, 0, i), 1);
      }
      for (int i = 0; kPingPong && i < kConsumers; ++i) barrier_init(shared + kTurnBarriers + i * 8, 4);
      fence_barrier_init();
    }
    if (kCluster > 1) cluster_sync(); else __syncthreads();
    if (threadIdx.x / 128 == kConsumers) {
      const int warp = threadIdx.x / 32;
      lower_registers<kRegisters>();
      if (warp < kConsumerWarps + kProducers) {
        produce(maps, args, shared);
      } else if constexpr (kHandsOver) {
        Differentiator<T, Activation::value, Kernel>::run(maps, args, shared);
      } else if (warp == kFinder && (kCluster == 1 || cluster_rank() == 0)) {
        Finder finder(args);
        while (finder.hand_out(shared)) {}
        finder.stay(shared);
      }
    } else {
      raise_registers<(504 - kRegisters) / 2>();
      if constexpr (kPingPong) consume_ping_pong(maps, args, shared);
      else consume(maps, args, shared);
    }
  }
};

template <typename K> __global__ void __launch_bounds__(kThreads, 1) grouped_kernel(
    const __grid_constant__ Maps maps, const __grid_constant__ Arguments args) {
#ifdef GBMOE_HOPPER  // set where this is compiled for sm_90a
  K::run(maps, args);
#endif
}

}  // namespace gbmoe::hopper
