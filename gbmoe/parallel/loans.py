"""The loans of a step, by which ranks that map each other's memory have about as many rows to compute: what one costs, and what the device
has decided (gbmoe/plain/plain_loans.py says how).

Shape suffixes: W ranks, A experts of all ranks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from gbmoe.parallel import automatic_chunks
from gbmoe.plain.plain_loans import Loan, Price


@dataclass(frozen=True)
class _Cost:
    """What a loan costs its lender or its borrower, of the bytes of an expert's weights: how often they cross a link while nothing is
    computed, and how often memory reads or writes them; the seconds of its launches; the products of a row with each matrix; and the
    seconds that a pass with loans takes longer, however many they are."""

    over_links: float
    in_memory: int
    launches: float
    products: int
    entry: float


# Forward waits for w1 and v1, two thirds of the weights, and backward for the last gradient. Launches and the entry are as small
# experts showed them over two H200s (results/h200-x2/gpu-tests.txt): without a backward the host has little time for them.
_FORWARD = _Cost(2 / 3, 2, 60e-6, 1, 300e-6)
_TRAINING = _Cost(1.0, 5, 10e-6, 3, 400e-6)


@functools.lru_cache(maxsize=64)
def price_in_rows(elements: int, itemsize: int, device_type: str, backward: bool) -> Price:
    """The rows that a rank could compute in the time that a loan takes its lender or its borrower, and in that by which loans, however
    many, lengthen a pass, by the speeds of automatic_chunks; 0 on a type of device for which there are none. The same on all ranks,
    whatever GPUs they have.

    Args:
        elements: of an expert's weights.
        itemsize: bytes of an element.
        backward: whether there is one.
    """
    if device_type not in automatic_chunks.SPEEDS:
        return Price()
    gpu, links = automatic_chunks.SPEEDS[device_type]
    cost = _TRAINING if backward else _FORWARD
    loan = cost.launches + elements * itemsize * (cost.over_links / links.exchange + cost.in_memory / gpu.bandwidth)
    rows_a_second = gpu.flops / (2 * cost.products * elements)
    return Price(math.ceil(loan * rows_a_second), math.ceil(cost.entry * rows_a_second))


def read(number: int, ranks_WA: torch.Tensor, experts_per_rank: int) -> list[Loan]:
    """The loans by which each rank's slots of each expert are computed by these ranks, by expert and borrower; `number` of them.

    Args:
        number: 0 where the table need not be looked at, as in most steps.
        ranks_WA: int32 on the CPU.
        experts_per_rank: rank r holds the experts from r * experts_per_rank on.
    """
    if not number:
        return []
    sources_of: dict[tuple[int, int], list[int]] = {}
    for source, ranks_A in enumerate(ranks_WA.tolist()):
        for expert, rank in enumerate(ranks_A):
            if rank != expert // experts_per_rank:
                sources_of.setdefault((expert, rank), []).append(source)
    return [Loan(expert, borrower, tuple(sources)) for (expert, borrower), sources in sorted(sources_of.items())]
