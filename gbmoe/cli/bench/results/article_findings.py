"""The article's findings, each compared with the rows of `--suite article`: what was measured, and whether it reproduces.

The article is "Improving MoE Inference with Variable-Sized Batched GEMM Kernels" (NYU, V100 with 16 GB, fp16 and fp32). Its own
implementation is a loop of cublasGemmEx; gbmoe's engine cublas_loop is the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from gbmoe.cli.bench.measurements.base import FORWARD, TRAINING
from gbmoe.testing.moe_shapes import NYU_LARGEST_CASE, NYU_TRITON_CASE

REPRODUCED, NOT_REPRODUCED, NOT_MEASURED = "reproduced", "does not reproduce", "not measured"
_KERNEL = "gbmoe-cublas_loop"
# The largest differences at which a share of passed cases counts as the article's, and two losses as equal.
_SAME_SHARE, _SAME_LOSS = 0.05, 1e-3


@dataclass(frozen=True)
class Finding:
    """What the article says, what was measured here, and whether the two agree."""
    article: str
    measured: str
    verdict: str

    def describe(self) -> dict:
        return asdict(self)


def findings(content: dict) -> list[Finding]:
    """All findings, in the article's order."""
    rows = _Rows(content)
    return [
        _share(rows, "bmm", "torch.bmm passes 70 % of the cases.", lambda share: abs(share - 0.7) <= _SAME_SHARE),
        *(_share(rows, by, f"Its own implementation passes all cases (here {by}).", lambda share: share == 1)
          for by in rows.engines()),
        *(_share(rows, by, f"So does MegaBlocks {by.removeprefix('megablocks-')}.", lambda share: share == 1)
          for by in ("megablocks-sparse", "megablocks-grouped")),
        _speed(rows, "bmm", "Its kernel is faster than torch.bmm.", faster=True),
        _speed(rows, "megablocks-sparse", "Its kernel is faster than MegaBlocks sparse.", faster=True),
        _speed(rows, "megablocks-grouped", "Its kernel is slower than MegaBlocks grouped.", faster=False),
        _splits(rows), _triton(rows),
        _losses(rows, 0, "The loss is that of torch.bmm."),
        _losses(rows, 1, "The loss after backward is that of torch.bmm."),
    ]


class _Rows:
    """The rows of a result file, as the findings ask for them."""

    def __init__(self, content: dict):
        self.rows, self.runs = content["rows"], content["runs"]
        self.on_cpu = any(run["machine"]["device"] == "cpu" for run in self.runs)

    def engines(self) -> list[str]:
        return list(dict.fromkeys(row["by"] for row in self.of_kind("layer") if row["implementation"] == "gbmoe"))

    def layers(self, by: str, computation: str, capped: bool) -> dict[str, dict]:
        """The layer rows of `by`, by case, without the cases that the implementation is not made for."""
        return {_case(row): row for row in self.rows
                if row["kind"] == "layer" and row["by"] == by and row["computation"] == computation
                and bool(row["memory_limit"]) == capped and row["outcome"] != "left out"}

    def of_kind(self, kind: str) -> list[dict]:
        return [row for row in self.rows if row["kind"] == kind]

    def why_absent(self, by: str) -> str:
        reasons = {run["peers_left_out"].get(by) for run in self.runs} | {
            run["engines_left_out"].get(by.removeprefix("gbmoe-")) for run in self.runs}
        return "; ".join(sorted(filter(None, reasons))) or "it did not take part"


def _case(row: dict) -> str:
    return row["case"].removesuffix("-small")


def _share(rows: _Rows, by: str, article: str, holds: Callable[[float], bool]) -> Finding:
    """Which cases an implementation passes, forward and with backward, in as much memory as the article's GPU has and in all memory."""
    texts, share = [], None
    for computation in (FORWARD, TRAINING):
        for capped in (True, False):
            layers = rows.layers(by, computation, capped)
            if not layers:
                continue
            # The article's own runs ended at the case that it calls its largest; its list has one that is larger still.
            counted = {case: row for case, row in layers.items() if _within_reach(row)}
            if not counted:
                continue
            passed = [case for case, row in counted.items() if row["verified"]]
            # The verdict goes by the first share, forward in the memory of the article's GPU: the article is about inference.
            verdict = " (the verdict goes by this)" if share is None else ""
            if share is None:
                share = len(passed) / len(counted)
            limit = f"in {next(iter(layers.values()))['memory_limit']:g} GiB" if capped else "in all memory"
            if capped and rows.on_cpu:
                limit += " (but no limit holds on a CPU)"
            texts.append(f"{computation} {limit}: {len(passed)} of {len(counted)} ({len(passed) / len(counted):.0%})"
                         + verdict + _failures(layers))
    if share is None:
        return Finding(article, rows.why_absent(by), NOT_MEASURED)
    return Finding(article, "; ".join(texts), REPRODUCED if holds(share) else NOT_REPRODUCED)


def _within_reach(row: dict) -> bool:
    return row["tokens"] * row["top_k"] * row["hidden"] <= NYU_LARGEST_CASE.slots * NYU_LARGEST_CASE.hidden


def _failures(layers: dict[str, dict]) -> str:
    failed: dict[str, list[str]] = {}
    for case, row in layers.items():
        if not row["verified"]:
            failed.setdefault(row["outcome"], []).append(case.removeprefix("nyu-"))
    return "".join(f", {outcome}: {' '.join(cases)}" for outcome, cases in failed.items())


def _speed(rows: _Rows, against: str, article: str, faster: bool) -> Finding:
    theirs = rows.layers(against, FORWARD, capped=False)
    texts, kernel = [], None
    for by in rows.engines():
        ours = rows.layers(by, FORWARD, capped=False)
        ratios = {case: theirs[case]["median"] / row["median"] for case, row in ours.items()
                  if row.get("median") and theirs.get(case, {}).get("median")}
        if ratios:
            mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
            texts.append(f"{by} {mean:.2f} times as fast ({min(ratios.values()):.2f} to {max(ratios.values()):.2f},"
                         f" {len(ratios)} cases)")
            kernel = mean if by == _KERNEL else kernel
    if kernel is None:
        reason = rows.why_absent(against) if not theirs else "no case of the kernel's has a time beside it"
        return Finding(article, "; ".join([reason, *texts]), NOT_MEASURED)
    return Finding(article, "; ".join(texts), REPRODUCED if (kernel > 1) == faster else NOT_REPRODUCED)


def _splits(rows: _Rows) -> Finding:
    article = "An uneven split of (64,1024,512,8,8) is faster than the even one."
    rates: dict[str, dict[str, dict]] = {}
    for row in rows.of_kind("product"):
        if row.get("median") and row["implementation"] != "dense":
            rates.setdefault(row["by"], {})[row["routing"]] = row
    pairs = {by: (both["equal"], both["uneven"]) for by, both in rates.items() if {"equal", "uneven"} <= both.keys()}
    texts = [f"{by} {even['tflops']:#.3g} TFLOP/s even, {uneven['tflops']:#.3g} uneven"
             f" ({uneven['tflops'] / even['tflops'] - 1:+.1%})" for by, (even, uneven) in pairs.items()]
    if _KERNEL not in pairs:
        return Finding(article, "; ".join([rows.why_absent(_KERNEL), *texts]), NOT_MEASURED)
    even, uneven = pairs[_KERNEL]
    # The slower quartile of the one must be faster than the faster quartile of the other. Times are divided by operations, because the
    # article's split has a few rows less.
    is_faster = uneven["quartiles"][1] / uneven["flops"] < even["quartiles"][0] / even["flops"]
    return Finding(article, "; ".join(texts), REPRODUCED if is_faster else NOT_REPRODUCED)


def _triton(rows: _Rows) -> Finding:
    article = "MegaBlocks' Triton kernels fail at (32,512,512,8,4) with an illegal memory access."
    layers = [found[NYU_TRITON_CASE.name] for capped in (False, True) for computation in (FORWARD, TRAINING)
              if NYU_TRITON_CASE.name in (found := rows.layers("megablocks-sparse", computation, capped))]
    if not layers:
        return Finding(article, rows.why_absent("megablocks-sparse"), NOT_MEASURED)
    texts = [f"{row['computation']}{' capped' if row['memory_limit'] else ''}: {row['outcome']}"
             f"{': ' + row['problem'] if row['problem'] else ''}" for row in layers]
    failed = any("illegal memory access" in (row["problem"] or "") for row in layers)
    return Finding(article, "; ".join(dict.fromkeys(texts)), REPRODUCED if failed else NOT_REPRODUCED)


def _losses(rows: _Rows, which: int, article: str) -> Finding:
    losses: dict[str, dict[str, float]] = {}
    for row in rows.of_kind("training"):
        if row["outcome"] in ("verified", "wrong"):
            losses.setdefault(_case(row), {})[row["by"]] = row["losses"][which]
    differences: dict[str, float] = {}
    for by_loss in losses.values():
        for by, loss in by_loss.items():
            if "bmm" in by_loss and by.startswith("gbmoe"):
                right = by_loss["bmm"]
                differences[by] = max(differences.get(by, 0.0), abs(loss / right - 1) if right else math.inf)
    if not differences:
        return Finding(article, rows.why_absent("bmm"), NOT_MEASURED)
    texts = [f"{by} differs by {difference:.1e} at most" for by, difference in differences.items()]
    same = max(differences.values()) <= _SAME_LOSS
    return Finding(article, f"{len(losses)} cases; " + "; ".join(texts), REPRODUCED if same else NOT_REPRODUCED)

