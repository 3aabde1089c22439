#!/usr/bin/env python3
"""Predict how long a layer takes with its experts spread over 8 to 4,096 ranks, from the speeds of links and GPUs. Measures nothing.

    python scripts/simulate_expert_parallelism.py                              # Mixtral and DeepSeek-V3 on nodes of 8 GPUs
    python scripts/simulate_expert_parallelism.py --shape 16384,2048,768,128,8 --network 90 --skew 0.5 --shadows 4
    python scripts/simulate_expert_parallelism.py --check                      # compare with measurements on two and four GPUs

Each line is forward and backward of one layer on the slowest rank. The formulas are at the top of gbmoe/parallel/cost_model.py, which
gbmoe itself chooses by, and of expert_parallel_costs.py. Inside a node gbmoe pulls rows from mapped memory, which is in one chunk.

By default a group has at most as many ranks as there are experts, and more ranks form several such groups. --group all spreads
the experts over all ranks: then several ranks hold shards of the same expert, and a row goes to each of them. Groups over which gbmoe does
not spread the layer are refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

import expert_parallel_costs as costs
from expert_parallel_costs import Gpu, Links, Shape

from gbmoe.cli.text_table import print_table
from gbmoe.parallel import cost_model
from gbmoe.parallel.placement import sharding
from gbmoe.testing.moe_shapes import PARALLEL_CASES

CASES = {case.name: Shape(case.tokens, case.hidden, case.ffn, case.experts, case.top_k) for case in PARALLEL_CASES}
SHAPES = {"mixtral": CASES["mixtral"], "deepseek-v3": replace(CASES["dsv3"], experts=256)}
RANKS = tuple(2**power for power in range(3, 13))

# Measured on H200s with 18 NVLinks, for each case: milliseconds of forward and backward (on two GPUs and on one of them,
# results/h200-x2; on four, and on four by the exchange, results/h200-x4), and microseconds of single kernels. Pulls are those of
# results/h200-x4's two GPUs; the other kernels are of an earlier commit, to which the defaults of Gpu and Links were fitted. The times
# of four GPUs they predicted.
MEASURED = {
    "mixtral": (CASES["mixtral"], {"two GPUs": 28.3, "one GPU": 27.7, "four GPUs": 28.7, "four GPUs, exchange": 30.2},
                {"pull": 161, "push": 149, "sum of ranks": 62, "local gather": 55, "local scatter": 58, "publish": 35}),
    "qwen3": (CASES["qwen3"], {"two GPUs": 7.6, "one GPU": 7.3, "four GPUs": 8.4, "four GPUs, exchange": 10.4},
              {"pull": 208, "push": 189, "sum of ranks": 71, "local gather": 163, "local scatter": 141}),
    "dsv3": (CASES["dsv3"], {"two GPUs": 15.8, "one GPU": 16.2, "four GPUs": 15.9, "four GPUs, exchange": 17.7},
             {"pull": 183, "push": 188, "sum of ranks": 60, "local gather": 141, "local scatter": 126}),
}
MEASURED_LINKS = Links(ranks_per_node=2, pull={4096: 322e9, 8192: 326e9, 14336: 321e9})
# The rate of an all-to-all in GB/s out of each GPU, by the MiB that each GPU sends.
ALL_TO_ALL = {16: 141, 64: 233, 256: 278, 1024: 329}
TOLERANCE = 0.10


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 100:  # beyond it every share but the first is 0 in a float
        raise argparse.ArgumentTypeError(f"expected a number from 0 to 100, got {text!r}")
    return value


def _counts(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected whole numbers above 0 with commas between them, got {text!r}")
    return tuple(map(int, parts))


def _shape(text: str) -> Shape:
    sizes = _counts(text)
    if len(sizes) != 5 or sizes[4] > sizes[3]:
        raise argparse.ArgumentTypeError(f"expected TOKENS,HIDDEN,FFN,EXPERTS,TOP_K with no more slots than experts, got {text!r}")
    return Shape(*sizes)


def _group(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of ranks above 0, or all, got {text!r}")
    return int(text)


def _pull(text: str) -> float | dict[int, float]:
    """The argument of --pull: a rate in GB/s, or BYTES:GB/s pairs with commas between them."""
    try:
        if ":" not in text:
            return _positive(text) * 1e9
        pairs = [pair.split(":") for pair in text.split(",")]
        return {int(length): _positive(rate) * 1e9 for length, rate in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected GB/s, or BYTES:GB/s with commas between them, got {text!r}") from None


def arguments_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """The parsed command line."""
    gpu, links = Gpu(), Links()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=_shape, metavar="T,H,F,E,K", help="a GLU layer, and T tokens a rank (default: Mixtral"
                        " and DeepSeek-V3)")
    parser.add_argument("--ranks", type=_counts, default=RANKS, metavar="N,M", help="numbers of ranks (default: 8 to 4096)")
    parser.add_argument("--group", type=_group, default=0, metavar="N|all",
                        help="ranks that share the experts (default: as many as there are experts, at most)")
    options = (
        ("--tflops", gpu.flops / 1e12, "TFLOP/s of large GEMMs"), ("--bandwidth", gpu.bandwidth / 1e12, "TB/s of memory"),
        ("--exposed", gpu.exposed, "share of the GEMMs' traffic that their arithmetic does not hide"),
        ("--push", links.push / 1e9, "GB/s written over NVLink"),
        ("--exchange", links.exchange / 1e9, "GB/s of an all-to-all inside a node"),
        ("--exchange-latency", links.exchange_latency * 1e6, "its latency in microseconds"),
        ("--network", links.network / 1e9, "GB/s of each GPU between nodes"),
        ("--network-latency", links.network_latency * 1e6, "latency between nodes in microseconds"),
        ("--message", links.message * 1e6, "further microseconds for every other node"),
        ("--barrier", links.barrier * 1e6, "microseconds of a barrier of the ranks of a node"),
        ("--plan", links.plan * 1e6, "microseconds to collect and sort all ranks' choices"),
    )
    parser.add_argument("--pull", type=_pull, default=links.pull, metavar="X|B:X,..",
                        help="GB/s read over NVLink, or by the bytes of a row (default: 320)")
    for name, default, words in options:
        parser.add_argument(name, type=_positive, default=default, metavar="X", help=f"{words} (default: {default:g})")
    parser.add_argument("--ranks-per-node", type=int, choices=(1, 2, 4, 8, 16, 32, 64, 72), default=links.ranks_per_node,
                        help="GPUs with links to each other (default: 8)")
    parser.add_argument("--no-peer-memory", action="store_true", help="use an all-to-all inside a node too, not mapped memory")
    parser.add_argument("--skew", type=_not_negative, default=0.0, metavar="S",
                        help="the r-th most popular expert has a share proportional to r ** -S (default: 0, all equal)")
    parser.add_argument("--chunks", type=int, default=0, metavar="N", help="chunks of a rank's experts (default: the best number)")
    parser.add_argument("--shadows", type=int, default=0, metavar="N", help="copy up to N of the most popular experts to all ranks, as"
                        " many as make a layer fastest (default: 0)")
    parser.add_argument("--check", action="store_true",
                        help="compare with measurements on two and four GPUs; fails if they differ by over 10 %%")
    arguments = parser.parse_args(argv)
    for name in ("chunks", "shadows"):
        if getattr(arguments, name) < 0:
            parser.error(f"--{name}: expected a number of at least 0, got {getattr(arguments, name)}")
    for shape in shapes_of(arguments).values():
        for ranks in arguments.ranks:
            try:
                require_possible(shape, ranks, group_of(shape, ranks, arguments), arguments)
            except ValueError as error:
                parser.error(f"--ranks {ranks}: {error}")
    return arguments


def shapes_of(arguments: argparse.Namespace) -> dict[str, Shape]:
    """The layers, by name."""
    return {"the shape": arguments.shape} if arguments.shape else SHAPES


def group_of(shape: Shape, ranks: int, arguments: argparse.Namespace) -> int:
    """How many of the ranks share the experts."""
    return ranks if arguments.group is None else min(ranks, arguments.group or shape.experts)


def require_possible(shape: Shape, ranks: int, group: int, arguments: argparse.Namespace) -> None:
    """Raise ValueError, as gbmoe does, unless the experts can be spread over groups of so many of the ranks."""
    if ranks % group:
        raise ValueError(f"--group: expected a divisor of {ranks} ranks, got {group}")
    _, shards = sharding(group, shape.experts, shape.ffn)
    if group > arguments.ranks_per_node and group % arguments.ranks_per_node:
        raise ValueError(f"--ranks-per-node: expected a divisor of the group's {group} ranks, got {arguments.ranks_per_node}")
    if arguments.shadows and shards > 1:
        raise ValueError(f"--shadows: expected 0 where ranks share an expert ({group} ranks, {shape.experts} experts), got"
                         f" {arguments.shadows}")


def simulate(shape: Shape, gpu: Gpu, links: Links, arguments: argparse.Namespace) -> list[list[str]]:
    """The lines of the table, one for each number of ranks."""
    lines = []
    for ranks in arguments.ranks:
        group = group_of(shape, ranks, arguments)
        chunks = arguments.chunks or costs.best_chunks(shape, gpu, links, group, arguments.skew)
        shadows = costs.best_shadows(shape, gpu, links, group, arguments.skew, chunks, arguments.shadows)
        cost = costs.layer(shape, gpu, links, group, arguments.skew, chunks, shadows)
        flops = 6 * shape.matrices * shape.tokens * shape.top_k * shape.hidden * shape.ffn
        times = [f"{seconds * 1e3:.2f}" for seconds in (cost.products, cost.weights, cost.seconds)]
        trips = [f"{number:.2f}" for number in (cost.node_rows, cost.network_rows, cost.imbalance)]
        lines.append([str(ranks), str(group), *trips, str(cost.chunks), str(cost.shadows), *times, f"{flops / cost.seconds / 1e12:.0f}"])
    return lines


HEADINGS = ("ranks", "in a group", "rows/token in node", "between nodes", "busiest/mean", "chunks", "shadows", "products ms",
            "weights ms", "layer ms", "TFLOP/s a GPU")


def comparisons(gpu: Gpu, links: Links) -> list[tuple[str, float, float]]:
    """(name, modelled, measured) for everything that was measured."""
    found = [("barrier, us", links.barrier * 1e6, 9.0)]
    for name, (shape, layers, kernels) in MEASURED.items():
        loads = costs.expert_loads(shape.experts, shape.top_k)
        trips = costs.Trips.of(loads, 2, 2)
        rows, slots = shape.tokens * trips.to_rank, shape.tokens * shape.top_k
        of_four = replace(links, ranks_per_node=4)
        seconds = {"two GPUs": costs.layer(shape, gpu, links, 2).seconds, "one GPU": costs.one_gpu(shape, gpu),
                   "four GPUs": costs.layer(shape, gpu, of_four, 4).seconds,
                   "four GPUs, exchange": costs.layer(shape, gpu, replace(of_four, peer_memory=False), 4).seconds,
                   "pull": costs.pull(shape, links, rows), "push": costs.push(shape, links, rows),
                   "sum of ranks": costs.sum_of_ranks(shape, gpu, trips.ranks), "publish": costs.publish(shape, gpu),
                   "local gather": cost_model.gather(shape, gpu, slots), "local scatter": cost_model.gather(shape, gpu, slots)}
        found += [(f"{name}, {what}, {unit}", seconds[what] * scale, measured)
                  for unit, scale, each in (("ms", 1e3, layers), ("us", 1e6, kernels)) for what, measured in each.items()]
    row = MEASURED["mixtral"][0]
    for mebibytes, measured in ALL_TO_ALL.items():
        moved = mebibytes * 2**20
        seconds_there = cost_model.all_to_all(row, links, moved / row.row_bytes)
        found.append((f"all-to-all of {mebibytes} MiB, GB/s", moved / seconds_there / 1e9, measured))
    return found


def check(gpu: Gpu, links: Links) -> int:
    """Print the modelled and measured figures. Return 1 if any of them differ by more than TOLERANCE."""
    found = comparisons(gpu, links)
    print_table([("", "<"), ("model", ">"), ("measured", ">"), ("error", ">")],
                [[what, f"{modelled:.4g}", f"{measured:.4g}", f"{modelled / measured - 1:+.1%}"] for what, modelled, measured in found])
    off = [what for what, modelled, measured in found if abs(modelled / measured - 1) > TOLERANCE]
    for what in off:
        print(f"more than {TOLERANCE:.0%} off: {what}", file=sys.stderr)
    return 1 if off else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables. Returns 1 if --check finds a difference that is too large."""
    arguments = arguments_of(argv)
    gpu = Gpu(flops=arguments.tflops * 1e12, bandwidth=arguments.bandwidth * 1e12, exposed=arguments.exposed)
    links = Links(
        ranks_per_node=arguments.ranks_per_node, peer_memory=not arguments.no_peer_memory, pull=arguments.pull, push=arguments.push * 1e9,
        barrier=arguments.barrier / 1e6, plan=arguments.plan / 1e6, exchange=arguments.exchange * 1e9,
        exchange_latency=arguments.exchange_latency / 1e6, network=arguments.network * 1e9,
        network_latency=arguments.network_latency / 1e6, message=arguments.message / 1e6)
    if arguments.check:
        pull = MEASURED_LINKS.pull if arguments.pull == Links().pull else arguments.pull
        return check(gpu, replace(links, ranks_per_node=2, pull=pull))
    for name, shape in shapes_of(arguments).items():
        one = costs.one_gpu(shape, gpu)
        print(f"{name}: {shape.tokens} tokens a rank, hidden {shape.hidden}, ffn {shape.ffn}, {shape.experts} experts, top {shape.top_k};"
              f" all experts on one GPU would take {one * 1e3:.2f} ms")
        print_table([(heading, ">") for heading in HEADINGS], simulate(shape, gpu, links, arguments))
    return 0


if __name__ == "__main__":
    sys.exit(main())
