"""Which kernel configuration and which engine serves a product: the one place for every number that a measurement chose.

Every function here is pure: from shapes, dtypes and a Device to a named configuration, without a tensor, so that it is tested on
a CPU. Engines hand the configuration down to the launches (csrc/hopper/), which choose nothing themselves. To tune gbmoe for
another GPU, change this file.

Unless a row says otherwise its figures are of one NVIDIA H200 (132 multiprocessors, 700 W, CUDA 13.0, torch 2.11), bfloat16,
measured in November 2026; docs/notes/ has the races behind them.

Words: a CTA computes output tiles of `tile_m` x `tile_n`; a cluster of CTAs side by side along M or N shares the operand that both
read by TMA multicast; a panel is the run of tiles along M that is walked before the next tile along N.

Shape letters: M rows of all groups, E groups (experts), K inner, N columns; H hidden, F ffn hidden, P padded rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from gbmoe.engines.base import Problem, known

TILE_M = 128                      # rows of every tile of the Hopper kernels
WIDE, NARROW, SQUARE = 256, 192, 128  # the widths that they have instances for


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class SplitConfig:
    """When a sum is split along K, each split a work item of its own, for which CTAs that are done would otherwise wait.

    A k-block is 64 terms of a tile's sum, some 0.5 us of a CTA.

    Attributes:
        per_sm: partial sums of a tile for which the workspace has room, for every multiprocessor; with 0 no sum is split.
        min_k_blocks: of a split.
        cost: of leaving a partial sum, or adding one, in k-blocks; looked at where the groups' sums are of one length.
        most: splits of one sum.
        even: of sums over groups' rows none is split where whole tiles take at most so many times what a perfectly even schedule
            would.
    """
    per_sm: int = 0
    min_k_blocks: int = 1
    cost: int = 0
    most: int = 1
    even: float = 1.0


WHOLE = SplitConfig()


@dataclass(frozen=True)
class GemmConfig:
    """How one grouped GEMM of the Hopper engine is divided; the launches take these fields by name.

    Attributes:
        tile_n: columns of a CTA's tile.
        cluster_m, cluster_n: CTAs of a cluster along M and along N; at most one of them is 2.
        ping_pong: the two consumer warpgroups compute tiles of their own in turns, rather than one together.
        panel: tiles along M that are walked before the next tile along N, at the most.
        even_panels: a group's panels differ by one tile at most; otherwise only the last one is shorter.
        tile_counter: CTAs take their tiles from a counter, rather than a fixed share of them.
        split: when sums are split along K; it takes a tile counter.
    """
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    ping_pong: bool = False
    panel: int = 16
    even_panels: bool = False
    tile_counter: bool = False
    split: SplitConfig = WHOLE


@dataclass(frozen=True)
class ExpertsConfig:
    """How the Hopper engine computes a layer's experts.

    Attributes:
        gather_up: the first GEMM picks its rows from the tokens, instead of reading rows that were gathered before.
        gather_down_backward: so does the GEMM of the output's gradient with w2, and that of w2's gradient.
        gather_weight_gradient: so does the GEMM of w1's and v1's gradients.
        fuse_activation_gradient: warps beside the main loop of that GEMM with w2 compute the activation's gradient.
    """
    gather_up: bool
    gather_down_backward: bool
    gather_weight_gradient: bool
    fuse_activation_gradient: bool


# ----------------------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True)
class _EngineRule:
    """One row of the table: which products, and the engines to try for them in this order."""
    dtypes: tuple[torch.dtype, ...]
    at_least_flops_a_group: float
    order: tuple[str, ...]
    sizes_on_host: bool = False      # for them alone
    variable_k: bool | None = None   # for these, or those, alone


_HALF_OR_SINGLE = (torch.float16, torch.float32)
# Looked through from the top. Measured by `python -m gbmoe bench --suite gemm` (results/h200/gemm.json; cuBLAS 13.1, torch 2.11).
# The loop pays some 10 us a group, and so wins where one group's GEMM lasts longer than that; below, torch's persistent kernel
# does in bfloat16, and cuBLAS' grouped one where torch has none. Our Hopper kernels beat them nearly everywhere. On few groups of
# some 400 GFLOP and more (700, where rows are summed over) the loop is up to 6 % faster, and is taken where nobody has to wait for
# the sizes. It is also faster (734 to 760 against 639 to 684 TFLOP/s) for weight gradients of so few groups that their tiles do not
# fill the multiprocessors evenly, if groups are uneven, and in some runs if they are equal, which only the data tell.
_ENGINE_ORDER = (
    _EngineRule((torch.bfloat16, torch.float16), 4e11, ("cublas_loop", "hopper"), sizes_on_host=True, variable_k=False),
    _EngineRule((torch.bfloat16, torch.float16), 7e11, ("cublas_loop", "hopper"), sizes_on_host=True),
    _EngineRule((torch.bfloat16,), 1.2e10, ("hopper", "cublas_loop", "torch")),
    _EngineRule((torch.bfloat16,), 0, ("hopper", "torch", "cublas_grouped")),
    _EngineRule(_HALF_OR_SINGLE, 2.5e9, ("hopper", "cublas_loop")),
    _EngineRule(_HALF_OR_SINGLE, 0, ("hopper", "cublas_grouped")),
    _EngineRule((torch.float64,), 0, ("cublas_loop",)),
)


def engine_order(problem: Problem) -> tuple[str, ...]:
    """Engines in the order in which "auto" tries them; the caller falls back on `reference`."""
    if problem.device.type != "cuda":
        return ()
    flops_a_group = 2 * problem.rows * problem.inner * problem.columns / max(1, problem.groups)
    return next(rule.order for rule in _ENGINE_ORDER if problem.dtype in rule.dtypes
                and (problem.sizes_on_host or not rule.sizes_on_host)
                and rule.variable_k in (None, problem.variable_k)
                and (rule.at_least_flops_a_group == 0 or known(flops_a_group >= rule.at_least_flops_a_group)))


# --------------------------------------------------------------------------------------------------- tiles of Hopper GEMMs


def _pays_in_pairs(size: int, tile: int) -> bool:
    """Whether CTAs side by side along a side of `size` should form clusters of two.

    The tiles come in pairs, or are so many (15) that the one without a partner costs less than sharing saves.
    """
    tiles = _ceil_div(size, tile)
    return tiles % 2 == 0 or tiles >= 15


def _tile_along_n(columns: int) -> GemmConfig:
    """The widest tile, in pairs where that pays, or narrow ones where these leave less of the result empty.

    A narrow tile's column costs 2 to 5 % more than a wide one's, and wide tiles of one CTA some 7 % more than those of pairs:
    4,224 columns 607 -> 655 TFLOP/s with narrow tiles; 768 columns are as fast in wide ones.
    """
    dearer = 1.07
    paired = _pays_in_pairs(columns, WIDE)
    wide = _ceil_div(columns, 2 * WIDE) * 2 * WIDE if paired else _ceil_div(columns, WIDE) * WIDE * dearer
    if _ceil_div(columns, 2 * NARROW) * 2 * NARROW * dearer < wide:
        return GemmConfig(NARROW, cluster_n=2)
    return GemmConfig(WIDE, cluster_n=2 if paired else 1)


@functools.lru_cache(maxsize=1024)
def rows_gemm(rows: int, groups: int, inner: int, columns: int) -> GemmConfig:
    """out[rows of e] = a[rows of e] @ b[e]; `inner` counts the terms of both products where two are summed.

    Ping-pong hides the epilogue of a tile: up to 20 % of sums of at most 4,096 terms (a @ w2 of olmoe 898 -> 836 us, qwen3 714 ->
    659; the gradient of the rows 1,683 -> 1,614). Beyond that it is 0 to 9 % slower, and 22 % where a group has less than a row.
    A tile counter keeps CTAs close together in what they read, from 2,048 terms on: 4 to 7 % at 14,336 terms, 18 % at 8,192 terms
    of 64 groups; below, it does not earn the 3 us of its schedule. A tail of few tiles is worth splitting along K; with 8,192
    square tiles and more there is nothing to gain. Splits are not combined with ping-pong.
    """
    square_tiles = max(rows / TILE_M, min(rows, groups)) * columns / SQUARE  # about, if no group is empty
    ping_pong = inner <= 4096 and rows >= 4 * groups and (inner < 2048 or square_tiles >= 256)
    counter = inner >= 2048
    if not ping_pong:
        split = SplitConfig(per_sm=2, min_k_blocks=4, cost=2, most=8) if counter and square_tiles <= 1 << 13 else WHOLE
        return replace(_tile_along_n(columns), tile_counter=counter, split=split)
    if _pays_in_pairs(columns, SQUARE):
        clusters = (1, 2)
    else:
        # Along M half of a pair waits for the other where a group has an odd number of tiles, and always where it has one.
        clusters = (2, 1) if rows >= TILE_M * groups else (1, 1)
    return GemmConfig(SQUARE, *clusters, ping_pong=True, tile_counter=counter)


# GEMMs that gather their rows: the producer's warps copy them, which leaves none to share between CTAs or to serve a counter.
GATHERED_ROWS = GemmConfig(WIDE)


@functools.lru_cache(maxsize=1024)
def up_gemm(rows: int, inner: int, ffn: int, glu: bool, *, gathered: bool = False) -> GemmConfig:
    """The first GEMM of an expert with its activation; gathered: it picks its rows from the tokens.

    With a gate half of a tile's columns are w1's and half are v1's. From 64 tiles along N on (mixtral's 14,336 columns, 235 MB of b a
    group) a short last panel would read all of b for few rows of tiles, at the speed of memory: panels of one height, of up to 20
    tiles, take 4 % less time with skewed groups, 1 % with uniform ones. A tile counter takes 4 to 9 % off sums of 2,048 terms
    and more ("wide" 7,303 -> 7,025 us, skewed 7,651 -> 6,971).
    """
    tile = WIDE // 2 if glu else WIDE
    many = _ceil_div(ffn, tile) >= 64
    config = replace(GATHERED_ROWS, panel=20 if many else 16, even_panels=many)
    if gathered:
        return config
    return replace(config, cluster_n=2 if _pays_in_pairs(ffn, tile) else 1,
                   tile_counter=inner >= 2048 and rows / TILE_M * ffn / WIDE >= 256)


@functools.lru_cache(maxsize=1024)
def down_backward_gemm(ffn: int) -> GemmConfig:
    """dz @ w2[e].T with the activation's gradient beside its main loop.

    Narrow tiles in pairs have a fourth stage, which is worth more here than wide tiles of one CTA with three.
    """
    config = _tile_along_n(ffn)
    if ffn % (2 * NARROW) == 0 and config.cluster_n == 1:
        return GemmConfig(NARROW, cluster_n=2)
    return config


@functools.lru_cache(maxsize=1024)
def weight_gradient_gemm(rows: int, groups: int, features: int, columns: int, *, gathered: bool) -> GemmConfig:
    """out[e] = a[rows of e].T @ b[rows of e] with `features` rows and `columns` columns; gathered: a's or b's rows are picked.

    The longest sums come first, from a counter, and those that would end late are split where groups have many rows: up to 25 %
    under a skewed router (nyu-512 507 -> 645 TFLOP/s, olmoe 617 -> 707). Few tiles are split further.
    """
    few = groups * (features / TILE_M) * (columns / WIDE) <= 1 << 10
    split = WHOLE if rows <= 2048 else SplitConfig(per_sm=4 if few else 2, min_k_blocks=16, most=127, even=1.05)
    if _pays_in_pairs(features, TILE_M):
        clusters = (2, 1)
    else:
        clusters = (1, 2) if not gathered and _pays_in_pairs(columns, WIDE) else (1, 1)
    return GemmConfig(WIDE, *clusters, panel=8, tile_counter=True, split=split)


@functools.lru_cache(maxsize=1024)
def experts(hidden: int, ffn: int, activation: str, token_bytes: int) -> ExpertsConfig:
    """Where rows are gathered and where the activation's gradient is computed, by the layer's shape.

    Gathering inside a GEMM saves writing and reading [P,H], time in proportion to H, and costs a tenth of the GEMM's speed, time in
    proportion to H F. First GEMM, fused against gather and GEMM apart: 559 against 691 us at F = 256, 1,575 against 1,496 at 768.
    Backward: for w1's and v1's gradients it pays at F = 512 (482 against 422 us each, one gather of 159 saved) and no longer at
    768; for the output's gradient, which then has the activation's gradient apart from its GEMM, at 256. Gathering GEMMs have an
    instance for sigmoid-like activations only, and number the tokens' 16-byte pieces in 32 bits: 64 GiB.

    The activation's gradient takes about as long as sums of 1,536 terms: from there on it is hidden, by a sixth to a tenth of both
    (1.00 against 1.20 ms at olmoe's shape, 3.2 against 3.65 at mixtral's); at 1,024 or 512 it depends on the routing.
    """
    reachable = token_bytes < 1 << 36
    return ExpertsConfig(
        gather_up=reachable and ffn <= 512 and activation in ("silu", "gelu_tanh"),
        gather_down_backward=reachable and ffn <= 256,
        gather_weight_gradient=reachable and ffn <= 512,
        fuse_activation_gradient=hidden >= 1536,
    )
