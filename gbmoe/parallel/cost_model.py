"""Predict what a layer with experts spread over ranks costs: rows that cross each link, and seconds, from the speeds of links and GPUs.

These are pure functions of numbers: nothing here is measured, and nothing runs on a device. scripts/simulate_expert_parallelism.py
prints their predictions for many ranks, and compares them with measurements on two and four GPUs. Times are those of the slowest rank.

    rows      A token of k distinct experts out of E has at least one among m of them with the probability
                  reach(m) = 1 - C(E - m, k) / C(E, k),
              so that each of T tokens is sent to ranks * reach(E / ranks) ranks, and to nodes * reach(E / nodes) nodes.
    products  flops / rate + exposed * (bytes of weights and activations) / bandwidth: GEMMs hide the rest of their traffic.
    kernels   launch + bytes / bandwidth, for each kernel that moves rows.
    links     latency + bytes / rate.
    chunks    With c chunks, each of which takes d seconds to arrive, m to compute and b to go back:
                  d + m + b + (c - 1) * max(d, m, b),
              where GEMMs leave a share of the multiprocessors to the kernels that move rows. In an exchange inside one node nothing
              overlaps: there c chunks take c (d + m + b). A row then travels once to every chunk of every rank that needs it:
              ranks * c * reach(E / ranks / c) trips a token, at least as many as with one chunk.
    popular   An expert that is copied to every rank costs a transfer of its weights in forward and one of its gradients in backward.
              It saves the trips of its rows, and the wait for the one rank that would otherwise compute them all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod

_EQUAL = 1e-9  # loads that differ by less count as equal; a load nearer to 1 counts as this far from it


@dataclass(frozen=True)
class Shape:
    """A layer and the tokens of one rank. `matrices` is 3 for a GLU and 2 for a plain MLP; `itemsize` is the bytes of an element."""

    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    matrices: int = 3
    itemsize: int = 2

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.itemsize

    @property
    def expert_bytes(self) -> int:
        """The weights of one expert."""
        return self.matrices * self.hidden * self.ffn * self.itemsize


@dataclass(frozen=True)
class Gpu:
    """Speeds of one GPU, per second: `flops` of large GEMMs, `bandwidth` of memory in bytes read and written, and `sum_bandwidth` of the
    kernel that sums rows which other GPUs have written.

    `exposed` is the share of the GEMMs' memory traffic that their arithmetic does not hide, `launch` the seconds that a kernel which
    moves rows takes beside its bytes, and `layer` the seconds of a pass outside of the experts (the router).
    """

    flops: float = 700e12
    bandwidth: float = 4.1e12
    sum_bandwidth: float = 2.8e12
    exposed: float = 0.45
    launch: float = 5e-6
    layer: float = 50e-6


# The most ranks of a node with which backward's tokens and sums travel by the copy engines; peer_experts.py says why.
RANKS_WITH_COPY_ENGINES = 4


@dataclass(frozen=True)
class Links:
    """Speeds of the links of each GPU, in bytes a second each way, and latencies in seconds.

    Attributes:
        ranks_per_node: the number of GPUs that the links inside a node connect.
        peer_memory: whether ranks of one node map each other's memory.
        pull: rate at which a kernel reads rows from another rank's memory. A mapping gives it by the bytes of a row; lengths in between
            are interpolated.
        push: rate at which a kernel writes rows to another rank's memory.
        barrier: seconds of a barrier between the ranks of a node, on the device.
        plan: seconds to collect and sort all ranks' choices, with the host's wait for the number of rows.
        exchange: rate of an all-to-all inside a node, which takes `exchange_latency` seconds beside its bytes.
        network: rate of an all-to-all between nodes, which takes `network_latency` seconds, and `message` for every other node, beside
            its bytes.
        beside: the most ranks of a node with which backward's tokens and sums travel by the copy engines while GEMMs run.
        moving: the share of the multiprocessors that moves rows while the others compute another chunk.
    """

    ranks_per_node: int = 8
    peer_memory: bool = True
    pull: float | Mapping[int, float] = 320e9
    push: float = 345e9
    barrier: float = 9e-6
    plan: float = 100e-6
    exchange: float = 325e9
    exchange_latency: float = 75e-6
    network: float = 45e9
    network_latency: float = 30e-6
    message: float = 2e-6
    beside: int = RANKS_WITH_COPY_ENGINES
    moving: float = 0.1

    def pull_of(self, row_bytes: int) -> float:
        """The rate at which rows of `row_bytes` bytes are pulled."""
        if not isinstance(self.pull, Mapping):
            return self.pull
        lengths = sorted(self.pull)
        place = bisect_left(lengths, row_bytes)
        if place == 0 or place == len(lengths):
            return self.pull[lengths[min(place, len(lengths) - 1)]]
        low, high = lengths[place - 1], lengths[place]
        share = (row_bytes - low) / (high - low)
        return self.pull[low] * (1 - share) + self.pull[high] * share


# ---------------------------------------------------------------------------------------------------------------------- rows


def reach(experts: int, held: float, top_k: int) -> float:
    """The probability that a token of `top_k` distinct experts, all equally likely, has at least one among `held` of `experts`."""
    return 1 - prod(max(experts - held - slot, 0) / (experts - slot) for slot in range(top_k))


def expert_loads(experts: int, top_k: int, skew: float = 0.0) -> list[float]:
    """The mean number of a token's slots that go to each expert, the most popular first. They add up to top_k, and none exceeds 1.

    The load of the r-th expert is proportional to r ** -skew, except where that would exceed 1: a token's experts are distinct.
    """
    popularity = [(rank + 1) ** -skew for rank in range(experts)]
    full = 0  # how many of the first experts every token goes to
    while True:
        scale = (top_k - full) / sum(popularity[full:]) if full < experts else 0.0
        if full >= min(top_k, experts) or scale * popularity[full] <= 1:
            return [1.0] * full + [scale * share for share in popularity[full:]]
        full += 1


def reach_of(loads: Sequence[float], held: Collection[int]) -> float:
    """The probability that a token goes to at least one of the experts `held`, given the loads of all experts.

    Each expert is chosen with the odds load / (1 - load), on condition that as many are chosen as the loads add up to. With equal loads
    this is reach().
    """
    top_k = round(sum(loads))
    if max(loads) - min(loads) < _EQUAL:
        return reach(len(loads), len(held), top_k)
    odds = [load / max(1 - load, _EQUAL) for load in loads]
    return 1 - _choices([o for expert, o in enumerate(odds) if expert not in held], top_k) / _choices(odds, top_k)


def _choices(odds: Sequence[float], count: int) -> float:
    """The sum, over all ways to choose `count` experts, of the product of their odds."""
    sums = [1.0] + [0.0] * count
    for each in odds:
        for size in range(count, 0, -1):
            sums[size] += each * sums[size - 1]
    return sums[count]


@dataclass(frozen=True)
class Trips:
    """How often a token's row travels, on average, and what the most loaded rank has to do.

    Attributes:
        ranks: the number of ranks that a token is sent to, its own among them.
        nodes: the number of nodes that it is sent to, its own among them.
        to_rank: how often it is sent to the rank that receives most.
        to_node: how often it is sent to the node that receives most.
        rows: the rows that the most loaded rank computes, for each token of one rank. Where ranks hold shards of experts, a row of a
            shard counts as that share of a row.
    """

    ranks: float
    nodes: float
    to_rank: float
    to_node: float
    rows: float

    @classmethod
    def of(cls, loads: Sequence[float], ranks: int, per_node: int, chunks: int = 1, replicated: int = 0) -> Trips:
        """Count the trips with experts dealt out to ranks and chunks in the order of their popularity.

        Where there are more ranks than experts, a row goes to all ranks that hold a shard of an expert.

        Args:
            loads: the loads of all experts, see expert_loads.
            ranks: the number of ranks of the group.
            per_node: the number of ranks on each node.
            chunks: the number of chunks in which a rank's experts are computed; a row travels once to each chunk that needs it.
            replicated: this many of the first experts are on every rank, and no row travels for them.
        """
        groups = min(ranks, len(loads))
        in_node = min(per_node, groups)
        every_rank = [[_dealt(loads, groups, chunks, rank, chunk, replicated) for chunk in range(chunks)] for rank in range(groups)]
        even = max(loads) - min(loads) < _EQUAL and not replicated
        known: dict[int, float] = {}

        def times(places: Sequence[Sequence[set[int]]]) -> float:
            total = 0.0
            for of_chunk in zip(*places):
                held = set().union(*of_chunk)
                if not even:
                    total += reach_of(loads, held)
                    continue
                if len(held) not in known:
                    known[len(held)] = reach_of(loads, held)
                total += known[len(held)]
            return total

        to_ranks = [times([rank]) for rank in every_rank]
        to_nodes = [times(every_rank[first : first + in_node]) for first in range(0, groups, in_node)]
        busiest = max(sum(loads[expert] for expert in set().union(*rank)) for rank in every_rank)
        nodes = max(ranks // per_node, 1)
        return cls(sum(to_ranks) * ranks / groups, sum(to_nodes) * nodes / len(to_nodes), max(to_ranks), max(to_nodes), busiest * groups)


def _dealt(loads: Sequence[float], groups: int, chunks: int, rank: int, chunk: int, replicated: int) -> set[int]:
    return {expert for expert in range(rank + groups * chunk, len(loads), groups * chunks) if expert >= replicated}


# -------------------------------------------------------------------------------------------------------------------- seconds


def row_pass(gpu: Gpu, moved: float) -> float:
    """Seconds of a kernel that moves rows in memory; `moved` is the bytes read plus the bytes written."""
    return gpu.launch + moved / gpu.bandwidth


def products(shape: Shape, gpu: Gpu, rows: float, experts: float, share: float = 1.0) -> float:
    """Seconds of forward's GEMMs for `rows` rows and `experts` experts, or a `share` of their ffn rows. Backward's take twice as long."""
    ffn = shape.ffn * share
    flops = 2 * rows * shape.hidden * ffn * shape.matrices
    # Forward and backward together move a row's ffn activations 14 times and its hidden ones 6 times; a third of that is forward's.
    activations = rows * (14 * ffn + 6 * shape.hidden) * shape.itemsize / 3
    return flops / gpu.flops + gpu.exposed * (experts * shape.expert_bytes * share + activations) / gpu.bandwidth


def gather(shape: Shape, gpu: Gpu, rows: float, tokens: float | None = None) -> float:
    """Seconds to copy tokens of this rank's memory to the rows of its experts; the weighted scatter takes as long."""
    return row_pass(gpu, ((shape.tokens if tokens is None else tokens) + rows) * shape.row_bytes)


def one_gpu(shape: Shape, gpu: Gpu) -> float:
    """Seconds of forward and backward with all experts on the rank's own GPU."""
    rows = shape.tokens * shape.top_k
    return 3 * products(shape, gpu, rows, shape.experts) + 5 * gather(shape, gpu, rows) + 2 * gpu.layer


def publish(shape: Shape, gpu: Gpu) -> float:
    """Seconds to copy the tokens to where other ranks may read them."""
    return row_pass(gpu, 2 * shape.tokens * shape.row_bytes)


def pull(shape: Shape, links: Links, rows: float) -> float:
    """Seconds to read `rows` rows from other ranks of the node and to write them to the rows of their slots."""
    return rows * shape.row_bytes / links.pull_of(shape.row_bytes)


def push(shape: Shape, links: Links, rows: float) -> float:
    """Seconds to sum the rows of `rows` tokens here and to write the sums to other ranks of the node."""
    return rows * shape.row_bytes / links.push


def sum_of_ranks(shape: Shape, gpu: Gpu, ranks: float) -> float:
    """Seconds to add up the sums that `ranks` ranks have pushed for each token."""
    return (ranks + 1) * shape.tokens * shape.row_bytes / gpu.sum_bandwidth


def all_to_all(shape: Shape, links: Links, rows: float) -> float:
    """Seconds of an all-to-all in which each GPU sends `rows` rows to others of its node."""
    return links.exchange_latency + rows * shape.row_bytes / links.exchange


def between_nodes(shape: Shape, links: Links, rows: float, nodes: int) -> float:
    """Seconds of an all-to-all in which each GPU sends `rows` rows to other nodes."""
    return 0.0 if nodes == 1 else links.network_latency + (nodes - 1) * links.message + rows * shape.row_bytes / links.network


def pipelined(coming: float, computing: float, going: float, chunks: int, moving: float = 0.0) -> float:
    """Seconds of `chunks` chunks that overlap, each of which takes `coming` to arrive, `computing` to compute and `going` to go back.

    With several chunks, the share `moving` of the multiprocessors moves rows, and the others compute.
    """
    computing = computing if chunks == 1 else computing / (1 - moving)
    return coming + computing + going + (chunks - 1) * max(coming, computing, going)


@dataclass(frozen=True)
class Cost:
    """What one call of a layer costs on the slowest rank, forward and backward together.

    Attributes:
        seconds: all of it.
        products: the seconds of the GEMMs.
        weights: the seconds to bring popular experts to all ranks, and their gradients back.
        network_rows: rows that leave a node, for each token and direction.
        node_rows: rows that travel inside nodes, for each token and direction.
        imbalance: rows of the most loaded rank over the mean.
        chunks: the number of chunks in which a rank's experts are computed.
        replicated: how many of the most popular experts every rank has.
    """

    seconds: float
    products: float
    weights: float
    network_rows: float
    node_rows: float
    imbalance: float
    chunks: int
    replicated: int

    @property
    def others(self) -> float:
        """The seconds beside the GEMMs and the replicated weights: moving rows, waiting, planning."""
        return self.seconds - self.products - self.weights


def layer(shape: Shape, gpu: Gpu, links: Links, ranks: int, skew: float = 0.0, chunks: int = 1, replicated: int = 0) -> Cost:
    """The cost of forward and backward of a layer whose experts are spread over `ranks` ranks.

    Args:
        shape: the layer, with the tokens of one rank.
        gpu, links: the speeds of each rank's GPU and of its links.
        ranks: the number of ranks, a multiple of links.ranks_per_node or fewer than it.
        skew: how unevenly popular the experts are, see expert_loads.
        chunks: the number of chunks in which each rank computes its experts; reduced to the number of its experts, and to one where rows
            are pulled from mapped memory.
        replicated: how many of the most popular experts are on all ranks.
    """
    loads = expert_loads(shape.experts, shape.top_k, skew)
    per_node = min(ranks, links.ranks_per_node)
    nodes, groups = max(ranks // per_node, 1), min(ranks, shape.experts)
    by_memory = links.peer_memory and nodes == 1
    chunks = 1 if by_memory else max(min(chunks, shape.experts // groups), 1)
    trips = Trips.of(loads, ranks, per_node, chunks, replicated)
    share = groups / ranks  # of an expert's ffn rows that a rank holds; below 1 where ranks share experts
    here = _Here(nodes, chunks, trips, rows=shape.tokens * trips.rows / share, arriving=shape.tokens * ranks * trips.to_rank,
                 crossing=shape.tokens * (nodes - 1) * trips.to_node)
    staying = sum(loads[:replicated])
    computed = products(shape, gpu, here.rows, shape.experts / groups, share)
    if replicated:
        computed += products(shape, gpu, shape.tokens * staying, replicated)
    seconds = (_by_peer_memory if by_memory else _by_exchange)(shape, gpu, links, ranks, here, computed)
    weights = replicas(shape, gpu, links, ranks, replicated)
    return Cost(seconds + weights, 3 * computed, weights, trips.nodes * (nodes - 1) / nodes, trips.ranks * (per_node - 1) / per_node,
                (trips.rows + staying) / shape.top_k, chunks, replicated)


@dataclass(frozen=True)
class _Here:
    """The load of the busiest rank: `rows` it computes, rows `arriving` for it (its own tokens' among them), and rows `crossing` to its
    node from others, which it hands on to its neighbours too."""

    nodes: int
    chunks: int
    trips: Trips
    rows: float
    arriving: float
    crossing: float


def _by_peer_memory(shape: Shape, gpu: Gpu, links: Links, ranks: int, here: _Here, computed: float) -> float:
    """Seconds where rows are pulled and sums pushed. Backward needs x once more: on few ranks copy engines bring it while GEMMs run, and it
    is gathered from the copy; otherwise it is pulled again."""
    remote = here.arriving * (ranks - 1) / ranks
    pulled, pushed = pull(shape, links, remote), push(shape, links, remote)
    summed = sum_of_ranks(shape, gpu, here.trips.ranks)
    meet = publish(shape, gpu) + links.barrier
    both = 2 * (meet + links.barrier + summed) + links.barrier + links.plan + 2 * gpu.layer
    forward = pulled + computed + pushed
    if ranks <= links.beside:
        return both + forward + pulled + 2 * computed + 2 * gather(shape, gpu, here.rows, here.arriving)
    return both + forward + publish(shape, gpu) + 2 * pulled + 2 * computed + pushed


def _by_exchange(shape: Shape, gpu: Gpu, links: Links, ranks: int, here: _Here, computed: float) -> float:
    """Seconds where rows are gathered by rank, sent between nodes and inside them, and gathered by expert, and sums go back the same
    way. Backward does the same, and gathers x by expert once more."""
    nodes, chunks, trips = here.nodes, here.chunks, here.trips
    per_node = ranks // nodes
    sent = shape.tokens * (trips.nodes if nodes > 1 else trips.ranks) / chunks
    trip = gather(shape, gpu, sent, shape.tokens / chunks) + between_nodes(shape, links, here.crossing / chunks, nodes)
    if nodes > 1 and per_node > 1:  # the rank of the node that rows came to hands them on
        trip += gather(shape, gpu, here.arriving / chunks, sent)
    if per_node > 1:
        trip += all_to_all(shape, links, here.arriving * (per_node - 1) / per_node / chunks)
    by_expert = gather(shape, gpu, here.rows / chunks, here.arriving / chunks)
    forward, backward = computed / chunks + 2 * by_expert, 2 * computed / chunks + 3 * by_expert
    if nodes == 1:
        # What moves rows inside a node are kernels, and a persistent GEMM leaves them no multiprocessor: nothing overlaps.
        forward, backward = (chunks * (2 * trip + computing) for computing in (forward, backward))
    else:
        forward, backward = (pipelined(trip, computing, trip, chunks, links.moving) for computing in (forward, backward))
    counts = links.exchange_latency + between_nodes(shape, links, 0, nodes)
    return forward + backward + links.plan + counts + 2 * gpu.layer


def replicas(shape: Shape, gpu: Gpu, links: Links, ranks: int, replicated: int) -> float:
    """Seconds to bring `replicated` experts to all ranks and to add up their gradients. Broadcast and reduction are pipelined, so that
    the slowest link carries an expert's bytes once each way."""
    if not replicated or ranks == 1:
        return 0.0
    rate = links.exchange if ranks <= links.ranks_per_node else min(links.exchange, links.network * min(ranks, links.ranks_per_node))
    latency = links.exchange_latency + (links.network_latency if ranks > links.ranks_per_node else 0.0)
    moved = replicated * shape.expert_bytes
    return 2 * (latency + moved / rate) + row_pass(gpu, 3 * moved)


# ----------------------------------------------------------------------------------------------------------------------- choices


def best_chunks(shape: Shape, gpu: Gpu, links: Links, ranks: int, skew: float = 0.0, most: int = 8) -> int:
    """The number of chunks that makes a layer fastest: 1 where overlap gains less than the additional trips of rows cost."""
    local = max(shape.experts // ranks, 1)
    candidates = [1, *(chunks for chunks in range(2, min(most, local) + 1) if local % chunks == 0)]
    return min(candidates, key=lambda chunks: layer(shape, gpu, links, ranks, skew, chunks).seconds)


def best_replicated(shape: Shape, gpu: Gpu, links: Links, ranks: int, skew: float, chunks: int = 1, most: int = 8) -> int:
    """How many of the most popular experts to copy to all ranks for the fastest layer: 0 where moving weights costs more than it saves."""
    return min(range(min(most, shape.experts) + 1), key=lambda count: layer(shape, gpu, links, ranks, skew, chunks, count).seconds)


def best(shape: Shape, gpu: Gpu, links: Links, ranks: int, skew: float = 0.0, most_replicated: int = 0) -> Cost:
    """The cost with the best number of chunks and, after that, the best number of replicated experts."""
    chunks = best_chunks(shape, gpu, links, ranks, skew)
    replicated = best_replicated(shape, gpu, links, ranks, skew, chunks, most_replicated)
    return layer(shape, gpu, links, ranks, skew, chunks, replicated)
