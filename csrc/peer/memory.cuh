// What the kernels of this folder share, which move rows over the links between GPUs: they pull rows from the memory of the ranks that
// own the tokens, and push sums back into it.
//
// The ranks of an expert-parallel group map each other's memory. The tokens of all ranks have one numbering, rank * capacity +
// index, with room for `capacity` tokens a rank. A plan takes all of them to this rank's experts, and says which rows they have
// here. A row crosses a link once for each rank that needs it, whatever the number of its slots there. CTAs visit the ranks'
// tokens in turns, this rank's own tokens among them, so that links and device memory are busy at the same time.
//
// The kernels do not synchronise ranks: the caller puts a barrier between one rank's write and another's read. All of them are
// bound by memory and links: a pull moves each row that is needed once over a link, and writes it to the rows of its slots.
//
// In the operators `peers` and *_peers are int64 on the CPU: the address, in each rank's memory, of the region that is read or written. Rows
// are aligned to 16 bytes there. S = ranks * capacity is the number of all tokens, Z the number of shards of an expert, `rank` is this rank.

#pragma once

#include "../permute/padded_rows.cuh"

namespace gbmoe {
namespace {

constexpr int kMostPeers = 64;  // bits of a mask of ranks

// The address of a region in the memory of each rank. It is passed to kernels by value.
struct Peers {
  unsigned long long at[kMostPeers];
  int ranks, self;
  int64_t capacity;  // the most tokens of a rank

  template <typename V> __device__ __forceinline__ V* region(int rank) const { return reinterpret_cast<V*>(at[rank]); }
};

// The i-th token that a launch visits. It visits one token of each rank in turns, beginning with this rank.
struct Visited {
  int rank;
  int64_t index, token;

  __device__ __forceinline__ Visited(const Peers& peers, int64_t i)
      : rank((peers.self + static_cast<int>(i % peers.ranks)) % peers.ranks), index(i / peers.ranks),
        token(rank * peers.capacity + index) {}
};

inline Peers make_peers(const Tensor& addresses, int64_t rank_here, int64_t capacity) {
  STD_TORCH_CHECK(addresses.numel() <= kMostPeers, "at most ", kMostPeers, " ranks map each other's memory");
  Peers peers{};
  peers.ranks = static_cast<int>(addresses.numel()), peers.self = static_cast<int>(rank_here), peers.capacity = capacity;
  for (int rank = 0; rank < peers.ranks; ++rank) peers.at[rank] = data<const int64_t>(addresses)[rank];
  return peers;
}

inline unsigned ctas_of(int64_t threads) { return static_cast<unsigned>(ceil_div(threads, kThreads)); }

}  // namespace
}  // namespace gbmoe
