// Decides which experts ranks lend each other for a pass, and numbers the slots that this rank computes by it.
//
// gbmoe/plain/plain_loans.py says what is decided, and is the same algorithm: integers alone, so that all ranks decide alike. One CTA decides:
// as long as that helps, the rank with the most rows lends an expert to the one with the fewest. Its threads look at one expert each. A pass
// has a few loans, each of which takes some microseconds, and the counts before and the numbers after are read and written once.
//
// Letters: W ranks, A experts of all ranks, S tokens of all ranks, K slots a token.

#include <climits>

#include "../operators.h"
#include "memory.cuh"

namespace gbmoe {
namespace {

constexpr int kSharedCounts = 4096;  // experts of all ranks up to which a CTA counts in shared memory

// The slots that the tokens of rank blockIdx.y have of each expert, added to counts [W,A].
__global__ void __launch_bounds__(kThreads)
    count_slots_kernel(const int* __restrict__ ids_SK, int64_t slots_of_rank, int experts, int* __restrict__ counts_WA) {
  __shared__ int here_A[kSharedCounts];
  const int rank = blockIdx.y;
  int* of_rank_A = counts_WA + static_cast<int64_t>(rank) * experts;
  const bool shared = experts <= kSharedCounts;
  int* into_A = shared ? here_A : of_rank_A;
  if (shared) {
    for (int expert = threadIdx.x; expert < experts; expert += kThreads) here_A[expert] = 0;
    __syncthreads();
  }
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; i < slots_of_rank; i += gridDim.x * kThreads) {
    const int id = ids_SK[rank * slots_of_rank + i];
    if (id >= 0 && id < experts) atomicAdd(&into_A[id], 1);
  }
  if (!shared) return;
  __syncthreads();
  for (int expert = threadIdx.x; expert < experts; expert += kThreads) {
    if (here_A[expert]) atomicAdd(&of_rank_A[expert], here_A[expert]);
  }
}

// An expert that a rank may lend: which ranks' tokens it would lend it for, their rows, and what both ranks would then compute above the
// mean, times W. Without sources it is none.
struct Offer {
  int64_t above;
  unsigned long long sources;
  int64_t rows, cost;
  int expert;
  bool without_borrower;  // the borrower's own tokens are not among the sources

  __device__ __forceinline__ bool better_than(const Offer& other) const {
    if (!sources || !other.sources) return sources != 0;
    if (above != other.above) return above < other.above;
    if (without_borrower != other.without_borrower) return other.without_borrower;
    return expert < other.expert;
  }
};

// All ranks' rows with the loans so far, and their loads, which are these with what loans cost. In shared memory.
struct Market {
  int64_t rows_W[kMostPeers], loads_W[kMostPeers], total, most_before;
  int borrowed_W[kMostPeers], lent_W[kMostPeers];
  int lender, borrower, made;
  Offer offers[kThreads];

  // What two ranks' rows are above the mean, times W.
  __device__ __forceinline__ int64_t above(int64_t one, int64_t other, int ranks) const {
    const int64_t a = one * ranks - total, b = other * ranks - total;
    return (a > 0 ? a : 0) + (b > 0 ? b : 0);
  }
  // Makes the first of the ranks with the most load the lender.
  __device__ __forceinline__ void find_lender(int ranks) {
    lender = 0;
    for (int rank = 1; rank < ranks; ++rank) {
      if (loads_W[rank] > loads_W[lender]) lender = rank;
    }
    borrower = -1;
  }
  // Makes the rank with the next least load the borrower, or none where a loan to it cannot pay.
  __device__ __forceinline__ void find_next_borrower(int ranks, int64_t price) {
    const int last = borrower;
    int next = -1;
    for (int rank = 0; rank < ranks; ++rank) {
      const bool later = last < 0 || loads_W[rank] > loads_W[last] || (loads_W[rank] == loads_W[last] && rank > last);
      if (later && (next < 0 || loads_W[rank] < loads_W[next])) next = rank;
    }
    borrower = next >= 0 && loads_W[lender] - loads_W[next] > price ? next : -1;
  }
};

struct Terms {
  int ranks, each, most;  // a rank holds `each` experts, lends at most so many, and borrows at most so many
  int64_t price;  // the rows that a loan costs both of its ranks
  int64_t entry;  // the rows by which all loans together have to lower the most load
};

// The best that a thread finds among its experts of the lender.
__device__ __forceinline__ Offer best_offer(
    const Market& market, const Terms& terms, const int* counts_WA, const int* ranks_WA, const unsigned long long* borrowers_A) {
  const int experts = terms.ranks * terms.each, lender = market.lender, borrower = market.borrower;
  const int64_t rows_there = market.rows_W[lender], rows_here = market.rows_W[borrower];
  const int64_t before = market.above(rows_there, rows_here, terms.ranks);
  Offer best{};
  for (int of_lender = threadIdx.x; of_lender < terms.each; of_lender += kThreads) {
    const int expert = lender * terms.each + of_lender;
    const unsigned long long borrowers = borrowers_A[expert];
    const bool has_copy = borrowers >> borrower & 1;
    const bool may_copy = market.borrowed_W[borrower] < terms.most && (borrowers || market.lent_W[lender] < terms.most);
    if (!has_copy && !may_copy) continue;
    Offer offer{before, 0, 0, has_copy ? 0 : terms.price, expert, true};
    for (int turn = 0; turn < terms.ranks; ++turn) {  // the borrower's own tokens first, then in the order of ranks
      const int source = turn == 0 ? borrower : turn <= borrower ? turn - 1 : turn;
      const int64_t at = static_cast<int64_t>(source) * experts + expert;
      const int count = ranks_WA[at] == lender ? counts_WA[at] : 0;
      if (!count) continue;
      const int64_t above = market.above(rows_there - offer.rows - count, rows_here + offer.rows + count, terms.ranks);
      if (above >= offer.above) continue;
      offer.sources |= 1ull << source, offer.rows += count, offer.above = above;
      if (source == borrower) offer.without_borrower = false;
    }
    const int64_t there = market.loads_W[lender], here = market.loads_W[borrower];
    const int64_t most = (there - offer.rows > here + offer.rows ? there - offer.rows : here + offer.rows) + offer.cost;
    if (offer.above < before && most < there && offer.better_than(best)) best = offer;
  }
  return best;
}

// Reduces the threads' offers to the best, which all of them get.
__device__ __forceinline__ Offer best_of_all(Market& market, const Offer& mine) {
  market.offers[threadIdx.x] = mine;
  for (int half = kThreads / 2; half; half /= 2) {
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < half && market.offers[threadIdx.x + half].better_than(market.offers[threadIdx.x])) {
      market.offers[threadIdx.x] = market.offers[threadIdx.x + half];
    }
  }
  __syncthreads();
  const Offer best = market.offers[0];
  __syncthreads();
  return best;
}

// ranks [W,A]: who computes each rank's slots of each expert; local [W,A]: which of this rank's own and then borrowed experts does, or
// kNone; made: the number of loans. borrowers [A] is for the kernel alone. One CTA.
constexpr int kNone = -1;
__global__ void __launch_bounds__(kThreads) choose_loans_kernel(
    const int* counts_WA, const __grid_constant__ Terms terms, int self, unsigned long long* borrowers_A, int* ranks_WA,
    int* local_WA, int* made) {
  __shared__ Market market;
  __shared__ int rows_W[kMostPeers];
  const int ranks = terms.ranks, experts = ranks * terms.each;
  for (int expert = threadIdx.x; expert < experts; expert += kThreads) borrowers_A[expert] = 0;
  if (threadIdx.x < kMostPeers) rows_W[threadIdx.x] = 0, market.borrowed_W[threadIdx.x] = market.lent_W[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < ranks * experts; i += kThreads) {
    const int owner = i % experts / terms.each;
    ranks_WA[i] = owner;
    if (counts_WA[i]) atomicAdd(&rows_W[owner], counts_WA[i]);
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    market.total = 0, market.made = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      market.rows_W[rank] = market.loads_W[rank] = rows_W[rank];
      market.total += rows_W[rank];
    }
    market.find_lender(ranks);
    market.most_before = market.loads_W[market.lender];
    // Loans cannot lower the most load below the mean: where it is less than `entry` above that, they do not pay.
    if (market.most_before * ranks - market.total >= terms.entry * ranks) market.find_next_borrower(ranks, terms.price);
  }
  __syncthreads();
  while (market.borrower >= 0) {
    const Offer offer = best_of_all(market, best_offer(market, terms, counts_WA, ranks_WA, borrowers_A));
    if (threadIdx.x == 0) {
      const int lender = market.lender, borrower = market.borrower;
      if (offer.sources) {
        for (int source = 0; source < ranks; ++source) {
          if (offer.sources >> source & 1) ranks_WA[static_cast<int64_t>(source) * experts + offer.expert] = borrower;
        }
        market.rows_W[lender] -= offer.rows, market.rows_W[borrower] += offer.rows;
        market.loads_W[lender] += offer.cost - offer.rows, market.loads_W[borrower] += offer.cost + offer.rows;
        unsigned long long& borrowers = borrowers_A[offer.expert];
        if (!(borrowers >> borrower & 1)) {
          if (!borrowers) ++market.lent_W[lender];
          borrowers |= 1ull << borrower;
          ++market.borrowed_W[borrower], ++market.made;
        }
        market.find_lender(ranks);
      }
      market.find_next_borrower(ranks, terms.price);
    }
    __syncthreads();
  }
  if (market.made && market.most_before - market.loads_W[market.lender] < terms.entry) {
    for (int expert = threadIdx.x; expert < experts; expert += kThreads) borrowers_A[expert] = 0;
    for (int i = threadIdx.x; i < ranks * experts; i += kThreads) ranks_WA[i] = i % experts / terms.each;
    __syncthreads();
    if (threadIdx.x == 0) market.made = 0;
  }
  if (threadIdx.x == 0) *made = market.made;
  if (threadIdx.x >= 32) return;
  int borrowed = 0;  // before the experts of this turn
  for (int first = 0; first < experts; first += 32) {
    const int expert = first + static_cast<int>(threadIdx.x);
    const bool exists = expert < experts, own = exists && expert / terms.each == self;
    const bool mine = exists && (borrowers_A[expert] >> self & 1);
    const unsigned of_warp = __ballot_sync(kFullWarp, mine);
    const int place = own ? expert - self * terms.each : terms.each + borrowed + __popc(of_warp & ((1u << threadIdx.x) - 1));
    for (int source = 0; exists && source < ranks; ++source) {
      const int64_t at = static_cast<int64_t>(source) * experts + expert;
      local_WA[at] = (own || mine) && ranks_WA[at] == self ? place : kNone;
    }
    borrowed += __popc(of_warp);
  }
}

// Ids of all ranks' experts become those of this rank's; slots that others compute have none, and no weight.
__global__ void __launch_bounds__(kThreads) number_slots_kernel(
    const int* __restrict__ local_WA, int64_t slots, int64_t slots_of_rank, int experts, int* __restrict__ ids_SK,
    float* __restrict__ weights_SK) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= slots) return;
  const int id = ids_SK[slot];
  const int local = id >= 0 && id < experts ? local_WA[slot / slots_of_rank * experts + id] : kNone;
  ids_SK[slot] = local;
  if (weights_SK && local < 0) weights_SK[slot] = 0.f;
}

// Each id becomes that of the first expert of the rank that computes the slot.
__global__ void __launch_bounds__(kThreads) ids_of_computing_ranks_kernel(
    const int64_t* __restrict__ ids_TK, int64_t slots, const int* __restrict__ ranks_A, int experts, int each,
    int64_t* __restrict__ out_TK) {
  const int64_t slot = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (slot >= slots) return;
  const int64_t id = ids_TK[slot];
  out_TK[slot] = id >= 0 && id < experts ? static_cast<int64_t>(ranks_A[id]) * each : kNone;
}

}  // namespace

// ids [S,K] int32 of all ranks' experts, weights float32 [S,K] -> the same of this rank's own and borrowed experts; decided int32 [1 + W * A],
// the number of loans and who computes each rank's slots of each expert. scratch is int64 [A + W * A].
void lend_experts(
    int64_t world, int64_t experts_per_rank, int64_t most, int64_t price, int64_t entry, int64_t rank, Tensor ids,
    std::optional<Tensor> weights, Tensor scratch, Tensor decided) {
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  const int64_t experts = world * experts_per_rank, slots = ids.numel(), of_rank = slots / world;
  auto* borrowers_A = data<unsigned long long>(scratch);
  int* counts_WA = reinterpret_cast<int*>(borrowers_A + experts);
  int* local_WA = counts_WA + world * experts;
  STD_TORCH_CHECK(world <= kMostPeers, "at most ", kMostPeers, " ranks lend each other experts");
  STD_TORCH_CHECK(world * experts <= INT_MAX, "at most ", INT_MAX, " numbers of all ranks and experts");
  const cudaStream_t stream = current_stream(ids);
  STD_CUDA_CHECK(cudaMemsetAsync(counts_WA, 0, world * experts * sizeof(int), stream));
  const int64_t most_ctas = ceil_div(2 * multiprocessors(ids.get_device_index()), world);
  const dim3 grid(
      static_cast<unsigned>(std::clamp<int64_t>(ceil_div(of_rank, 4 * kThreads), 1, most_ctas)), static_cast<unsigned>(world));
  count_slots_kernel<<<grid, kThreads, 0, stream>>>(data<const int>(ids), of_rank, static_cast<int>(experts), counts_WA);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  const Terms terms{static_cast<int>(world), static_cast<int>(experts_per_rank), static_cast<int>(most), price, entry};
  choose_loans_kernel<<<1, kThreads, 0, stream>>>(
      counts_WA, terms, static_cast<int>(rank), borrowers_A, data<int>(decided) + 1, local_WA, data<int>(decided));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  number_slots_kernel<<<ctas_of(std::max<int64_t>(slots, 1)), kThreads, 0, stream>>>(
      local_WA, slots, of_rank, static_cast<int>(experts), data<int>(ids), data<float>(weights));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

// ids int64 [T,K] of all ranks' experts, ranks int32 [A] that compute them -> out int64 [T,K], ids of experts that these ranks hold
void ids_of_computing_ranks(Tensor ids, Tensor ranks, int64_t experts_per_rank, Tensor out) {
  const torch::stable::accelerator::DeviceGuard guard(ids.get_device_index());
  ids_of_computing_ranks_kernel<<<ctas_of(std::max<int64_t>(ids.numel(), 1)), kThreads, 0, current_stream(ids)>>>(
      data<const int64_t>(ids), ids.numel(), data<const int>(ranks), static_cast<int>(ranks.numel()),
      static_cast<int>(experts_per_rank), data<int64_t>(out));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

GBMOE_OPERATOR(
    lend_experts,
    "(int ranks, int experts_per_rank, int most, int price, int entry, int rank, Tensor(a!) ids, Tensor(b!)? weights, "
    "Tensor(c!) scratch, Tensor(d!) decided) -> ()");
GBMOE_OPERATOR(ids_of_computing_ranks, "(Tensor ids, Tensor ranks, int experts_per_rank, Tensor(a!) out) -> ()");

}  // namespace gbmoe
