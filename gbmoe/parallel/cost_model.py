"""Predict what experts that are spread over ranks by an exchange cost in each number of chunks, from the speeds of links and GPUs.

These are pure functions of numbers: nothing here is measured, and nothing runs on a device. automatic_chunks.py chooses by them.
scripts/expert_parallel_costs.py goes on from them: mapped memory, uneven loads, experts on all ranks. Times are those of the slowest rank.

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
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


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
    """Speeds of one GPU, per second: `flops` of large GEMMs, and `bandwidth` of memory in bytes read and written.

    `exposed` is the share of the GEMMs' memory traffic that their arithmetic does not hide, and `launch` the seconds that a kernel which
    moves rows takes besides its bytes.
    """

    flops: float = 700e12
    bandwidth: float = 4.1e12
    exposed: float = 0.45
    launch: float = 5e-6


@dataclass(frozen=True)
class Links:
    """Speeds of the links of each GPU, in bytes a second each way, and latencies in seconds.

    Attributes:
        ranks_per_node: the number of GPUs that the links inside a node connect.
        exchange: rate of an all-to-all inside a node, which takes `exchange_latency` seconds besides its bytes.
        network: rate of an all-to-all between nodes, which takes `network_latency` seconds, and `message` for every other node, besides
            its bytes.
        moving: the share of the multiprocessors that moves rows while the others compute another chunk.
    """

    ranks_per_node: int = 8
    exchange: float = 325e9
    exchange_latency: float = 75e-6
    network: float = 45e9
    network_latency: float = 30e-6
    message: float = 2e-6
    moving: float = 0.1


@dataclass(frozen=True)
class Load:
    """What the busiest rank has to do in a pass.

    Attributes:
        sent: rows that it sends: one for each token and node where there are several nodes, else for each token and rank.
        arriving: rows that come for it, its own tokens' among them.
        crossing: rows that come to its node from others, which it hands on to its neighbours too.
        rows: rows that it computes.
        experts: the experts whose weights, or shards of them, it holds.
        share: the share of these experts' ffn rows that it holds; below 1 where ranks share experts.
    """

    sent: float
    arriving: float
    crossing: float
    rows: float
    experts: float
    share: float


def reach(experts: int, held: float, top_k: int) -> float:
    """The probability that a token of `top_k` distinct experts, all equally likely, has at least one among `held` of `experts`."""
    return 1 - prod(max(experts - held - slot, 0) / (experts - slot) for slot in range(top_k))


def nodes_of(ranks: int, links: Links) -> tuple[int, int]:
    """(the number of nodes, ranks on each)."""
    per_node = min(ranks, links.ranks_per_node)
    return max(ranks // per_node, 1), per_node


def even_load(shape: Shape, links: Links, ranks: int, chunks: int = 1) -> Load:
    """The load of every rank where all experts are equally popular."""
    nodes, per_node = nodes_of(ranks, links)
    groups = min(ranks, shape.experts)  # ranks that hold different experts; further ones hold shards of the same
    held = shape.experts / groups / chunks
    to_rank = chunks * reach(shape.experts, held, shape.top_k)
    to_node = chunks * reach(shape.experts, held * min(per_node, groups), shape.top_k)
    share = groups / ranks
    return Load(sent=shape.tokens * (nodes * to_node if nodes > 1 else ranks * to_rank), arriving=shape.tokens * ranks * to_rank,
                crossing=shape.tokens * (nodes - 1) * to_node, rows=shape.tokens * shape.top_k / share,
                experts=shape.experts / groups, share=share)


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


def exchange(shape: Shape, gpu: Gpu, links: Links, ranks: int, chunks: int, load: Load, computed: float | None = None) -> float:
    """Seconds of forward and backward where rows are gathered by rank, sent between nodes and inside them, and gathered by expert, and
    sums go back the same way. Backward does the same, and gathers x by expert once more. What is the same for every number of chunks
    (counts, plans, the router) is left out.

    `computed` is the seconds of forward's GEMMs, by default those of the load.
    """
    nodes, per_node = nodes_of(ranks, links)
    if computed is None:
        computed = products(shape, gpu, load.rows, load.experts, load.share)
    trip = gather(shape, gpu, load.sent / chunks, shape.tokens / chunks) + between_nodes(shape, links, load.crossing / chunks, nodes)
    if nodes > 1 and per_node > 1:  # the rank of the node that rows came to hands them on
        trip += gather(shape, gpu, load.arriving / chunks, load.sent / chunks)
    if per_node > 1:
        trip += all_to_all(shape, links, load.arriving * (per_node - 1) / per_node / chunks)
    by_expert = gather(shape, gpu, load.rows / chunks, load.arriving / chunks)
    forward, backward = computed / chunks + 2 * by_expert, 2 * computed / chunks + 3 * by_expert
    if nodes == 1:
        # What moves rows inside a node are kernels, and a persistent GEMM leaves them no multiprocessor: nothing overlaps.
        return sum(chunks * (2 * trip + computing) for computing in (forward, backward))
    return sum(pipelined(trip, computing, trip, chunks, links.moving) for computing in (forward, backward))


def chunk_counts(shape: Shape, ranks: int, most: int = 8) -> list[int]:
    """The numbers of chunks, `most` at most, that divide each rank's experts evenly."""
    local = max(shape.experts // ranks, 1)
    return [chunks for chunks in range(1, min(most, local) + 1) if local % chunks == 0]


def best_chunks(shape: Shape, gpu: Gpu, links: Links, ranks: int, most: int = 8) -> int:
    """The number of chunks that makes an exchange fastest: 1 where overlap gains less than the additional trips of rows cost."""
    return min(chunk_counts(shape, ranks, most),
               key=lambda chunks: exchange(shape, gpu, links, ranks, chunks, even_load(shape, links, ranks, chunks)))
