"""Predict what a layer with experts spread over ranks costs: rows that cross each link, and seconds, from the speeds of links and GPUs.

simulate_expert_parallelism.py prints these predictions for many ranks, and compares them with measurements on two and four GPUs. The rows
that travel with even loads, GEMMs, kernels, links and chunks are those of gbmoe.parallel.cost_model, by which gbmoe itself chooses; what no
layer asks for is here: mapped memory, experts that are unevenly popular, and popular ones on all ranks.

    popular   An expert that is copied to every rank costs a transfer of its weights in forward and one of its gradients in backward.
              It saves the trips of its rows, and the wait for the one rank that would otherwise compute them all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from gbmoe.parallel import cost_model
from gbmoe.parallel.cost_model import Load, Shape, between_nodes, exchange, gather, nodes_of, products, reach, row_pass
from gbmoe.parallel.peer_memory import MOST_RANKS, RANKS_WITH_COPY_ENGINES

_EQUAL = 1e-9  # loads that differ by less count as equal; a load nearer to 1 counts as this far from it


@dataclass(frozen=True)
class Gpu(cost_model.Gpu):
    """Further speeds of one GPU: `sum_bandwidth` of the kernel that sums rows which other GPUs have written, and `layer`, the seconds of a
    pass outside of the experts (the router)."""

    sum_bandwidth: float = 2.8e12
    layer: float = 50e-6


@dataclass(frozen=True)
class Links(cost_model.Links):
    """Further links of each GPU.

    Attributes:
        peer_memory: whether ranks of one node map each other's memory.
        pull: rate at which a kernel reads rows from another rank's memory. A mapping gives it by the bytes of a row; lengths in between
            are interpolated.
        push: rate at which a kernel writes rows to another rank's memory.
        barrier: seconds of a barrier between the ranks of a node, on the device.
        plan: seconds to collect and sort all ranks' choices, with the host's wait for the number of rows.
        copy_engine_ranks: the most ranks of a node with which backward's tokens and sums travel by the copy engines while GEMMs run.
    """

    peer_memory: bool = True
    pull: float | Mapping[int, float] = 320e9
    push: float = 345e9
    barrier: float = 9e-6
    plan: float = 100e-6
    copy_engine_ranks: int = RANKS_WITH_COPY_ENGINES

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
    def of(cls, loads: Sequence[float], ranks: int, per_node: int, chunks: int = 1, shadows: int = 0) -> Trips:
        """Count the trips with experts dealt out to ranks and chunks in the order of their popularity.

        Where there are more ranks than experts, a row goes to all ranks that hold a shard of an expert.

        Args:
            loads: the loads of all experts, see expert_loads.
            ranks: the number of ranks of the group.
            per_node: the number of ranks on each node.
            chunks: the number of chunks in which a rank's experts are computed; a row travels once to each chunk that needs it.
            shadows: this many of the first experts are on every rank, and no row travels for them.
        """
        groups = min(ranks, len(loads))
        in_node = min(per_node, groups)
        every_rank = [[_dealt(loads, groups, chunks, rank, chunk, shadows) for chunk in range(chunks)] for rank in range(groups)]
        even = max(loads) - min(loads) < _EQUAL and not shadows
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


def _dealt(loads: Sequence[float], groups: int, chunks: int, rank: int, chunk: int, shadows: int) -> set[int]:
    return {expert for expert in range(rank + groups * chunk, len(loads), groups * chunks) if expert >= shadows}


# -------------------------------------------------------------------------------------------------------------------- seconds


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
        shadows: how many of the most popular experts every rank has.
    """

    seconds: float
    products: float
    weights: float
    network_rows: float
    node_rows: float
    imbalance: float
    chunks: int
    shadows: int

    @property
    def others(self) -> float:
        """The seconds of everything but the GEMMs and the weights of shadows: moving rows, waiting, planning."""
        return self.seconds - self.products - self.weights


def layer(shape: Shape, gpu: Gpu, links: Links, ranks: int, skew: float = 0.0, chunks: int = 1, shadows: int = 0) -> Cost:
    """The cost of forward and backward of a layer whose experts are spread over `ranks` ranks.

    Args:
        shape: the layer, with the tokens of one rank.
        gpu, links: the speeds of each rank's GPU and of its links.
        ranks: the number of ranks, a multiple of links.ranks_per_node or fewer than it.
        skew: how unevenly popular the experts are, see expert_loads.
        chunks: the number of chunks in which each rank computes its experts; reduced to the number of its experts, and to one where rows
            are pulled from mapped memory.
        shadows: how many of the most popular experts are on all ranks.
    """
    loads = expert_loads(shape.experts, shape.top_k, skew)
    nodes, per_node = nodes_of(ranks, links)
    groups = min(ranks, shape.experts)
    by_memory = links.peer_memory and nodes == 1 and ranks <= MOST_RANKS
    chunks = 1 if by_memory else max(min(chunks, shape.experts // groups), 1)
    trips = Trips.of(loads, ranks, per_node, chunks, shadows)
    share = groups / ranks  # of an expert's ffn rows that a rank holds; below 1 where ranks share experts
    load = Load(sent=shape.tokens * (trips.nodes if nodes > 1 else trips.ranks), arriving=shape.tokens * ranks * trips.to_rank,
                crossing=shape.tokens * (nodes - 1) * trips.to_node, rows=shape.tokens * trips.rows / share,
                experts=shape.experts / groups, share=share)
    staying = sum(loads[:shadows])
    computed = products(shape, gpu, load.rows, load.experts, load.share)
    if shadows:
        computed += products(shape, gpu, shape.tokens * staying, shadows)
    if by_memory:
        seconds = _by_peer_memory(shape, gpu, links, ranks, load, trips.ranks, computed)
    else:
        counts = links.exchange_latency + between_nodes(shape, links, 0, nodes)
        seconds = exchange(shape, gpu, links, ranks, chunks, load, computed) + links.plan + counts + 2 * gpu.layer
    weights = seconds_of_shadows(shape, gpu, links, ranks, shadows)
    return Cost(seconds + weights, 3 * computed, weights, trips.nodes * (nodes - 1) / nodes, trips.ranks * (per_node - 1) / per_node,
                (trips.rows + staying) / shape.top_k, chunks, shadows)


def _by_peer_memory(shape: Shape, gpu: Gpu, links: Links, ranks: int, load: Load, summands: float,
                    computed: float) -> float:
    """Seconds where rows are pulled and sums pushed. Backward needs x once more: on few ranks copy engines bring it while GEMMs run, and it
    is gathered from the copy; otherwise it is pulled again. Each token is the sum of `summands` ranks' rows."""
    remote = load.arriving * (ranks - 1) / ranks
    pulled, pushed = pull(shape, links, remote), push(shape, links, remote)
    summed = sum_of_ranks(shape, gpu, summands)
    meet = publish(shape, gpu) + links.barrier
    both = 2 * (meet + links.barrier + summed) + links.barrier + links.plan + 2 * gpu.layer
    forward = pulled + computed + pushed
    if ranks <= links.copy_engine_ranks:
        return both + forward + pulled + 2 * computed + 2 * gather(shape, gpu, load.rows, load.arriving)
    return both + forward + publish(shape, gpu) + 2 * pulled + 2 * computed + pushed


def seconds_of_shadows(shape: Shape, gpu: Gpu, links: Links, ranks: int, shadows: int) -> float:
    """Seconds to bring `shadows` experts to all ranks and to add up their gradients. Broadcast and reduction are pipelined, so that
    the slowest link carries an expert's bytes once each way."""
    if not shadows or ranks == 1:
        return 0.0
    rate = links.exchange if ranks <= links.ranks_per_node else min(links.exchange, links.network * min(ranks, links.ranks_per_node))
    latency = links.exchange_latency + (links.network_latency if ranks > links.ranks_per_node else 0.0)
    moved = shadows * shape.expert_bytes
    return 2 * (latency + moved / rate) + row_pass(gpu, 3 * moved)


# ----------------------------------------------------------------------------------------------------------------------- choices


def best_chunks(shape: Shape, gpu: Gpu, links: Links, ranks: int, skew: float = 0.0, most: int = 8) -> int:
    """The number of chunks that makes a layer fastest: 1 where overlap gains less than the additional trips of rows cost."""
    return min(cost_model.chunk_counts(shape, ranks, most), key=lambda chunks: layer(shape, gpu, links, ranks, skew, chunks).seconds)


def best_shadows(shape: Shape, gpu: Gpu, links: Links, ranks: int, skew: float, chunks: int = 1, most: int = 8) -> int:
    """How many of the most popular experts to copy to all ranks for the fastest layer: 0 where moving weights costs more than it saves."""
    return min(range(min(most, shape.experts) + 1), key=lambda count: layer(shape, gpu, links, ranks, skew, chunks, count).seconds)
