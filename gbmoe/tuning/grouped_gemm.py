"""Which engine and which instance of its kernels computes a grouped GEMM, and where a layer's rows are gathered.

Figures are of one H200, as gbmoe/tuning/__init__.py says.

Words: a CTA computes output tiles of `tile_m` x `tile_n`; a cluster of CTAs side by side along M or N shares the operand that both
read by TMA multicast; a panel is the run of tiles along M that is walked before the next tile along N.

Shape letters: M rows of all groups, E groups (experts), K inner, N columns; H hidden, F ffn hidden, P padded rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch

from gbmoe.problem import Problem, known

TILE_M = 128                      # rows of every tile of the Hopper kernels
WIDE, NARROW, SQUARE = 256, 192, 128  # the widths of tiles that these kernels have instances for


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class SplitConfig:
    """When sums are split along K (split-K), so that CTAs which would otherwise be idle at the end take a part of a long sum.

    Each split is a work item of its own. A k-block is 64 terms of a tile's sum, which take a CTA some 0.5 us.

    Attributes:
        per_sm: the number of tiles' partial sums that the workspace has room for, per multiprocessor; with 0 no sum is split.
        min_k_blocks: the fewest k-blocks of a split.
        cost: what storing a partial sum, or adding one, costs, in k-blocks; used where all groups' sums have the same length.
        most: the most splits of one sum.
        even: sums over groups' rows are not split if whole tiles take at most this multiple of the time of a perfectly even schedule.
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
        ping_pong: the two consumer warpgroups compute different tiles in turns, rather than one tile together.
        panel: the most tiles along M that are walked before the next tile along N.
        even_panels: a group's panels differ by at most one tile; otherwise only the last one is shorter.
        tile_counter: CTAs take their next tile from a counter, rather than computing a fixed share of the tiles.
        most_ahead: k-blocks by which a cluster may be ahead of the mean of all, so that they stay together along K; 0: any number. Clusters
            say every eight k-blocks how many they have loaded. This needs a tile counter, and is only for GEMMs of rows and the first
            GEMM, not in ping-pong.
        split: when sums are split along K; this needs a tile counter.
    """
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    ping_pong: bool = False
    panel: int = 16
    even_panels: bool = False
    tile_counter: bool = False
    most_ahead: int = 0
    split: SplitConfig = WHOLE


@dataclass(frozen=True)
class ExpertsConfig:
    """How the Hopper engine computes a layer's experts.

    Attributes:
        gather_up: the first GEMM reads its rows from the tokens, instead of rows that were gathered before.
        gather_down_backward: the GEMM of the output's gradient with w2, and that of w2's gradient, read their rows from the tokens'
            gradients.
        gather_weight_gradient: the GEMMs of w1's and v1's gradients read their rows from the tokens.
        gather_two_weight_gradients: of a GLU, one GEMM does so for both, rather than one each; see also rows_pay_for_two.
        fuse_activation_gradient: in the GEMM of the output's gradient with w2, warps beside the main loop compute the activation's
            gradient.
    """
    gather_up: bool
    gather_down_backward: bool
    gather_weight_gradient: bool
    gather_two_weight_gradients: bool
    fuse_activation_gradient: bool


# ----------------------------------------------------------------------------------------------------------------- engines


@dataclass(frozen=True)
class _EngineRule:
    """One row of the table: the products that it is for, and the engines to try for them in this order."""
    dtypes: tuple[torch.dtype, ...]
    at_least_flops_a_group: float
    order: tuple[str, ...]
    sizes_on_host: bool = False      # True: only for products whose sizes are on the host
    k_grouped: bool | None = None    # True or False: only for products whose groups do, or do not, divide the inner dimension


_HALF_OR_SINGLE = (torch.float16, torch.float32)
# The first row that takes a product counts. Measured by `python -m gbmoe bench --suite gemm` (results/h200/gemm.json, sustained; cuBLAS
# 13.1, torch 2.11). The loop over cublasGemmEx costs some 10 us a group, and so is faster where one group's GEMM takes longer than that.
# For smaller groups torch's persistent kernel is faster in bfloat16, and cuBLAS' grouped GEMM where torch has none. gbmoe's Hopper kernels
# are faster than all of these nearly everywhere. With few groups of some 400 GFLOP and more (700 for weight gradients) the loop is up to
# 4 % faster, and is taken where the sizes are on the host anyway. For weight gradients of so few groups that their tiles do not fill the
# multiprocessors evenly it is 1.6 % faster if groups are uneven and 3.5 % slower if they are equal; that depends on the data, which are
# not known here.
#
# Where Hopper's kernels do not serve, tensor_core is next. That is a decision, not a measurement: it does not wait for the host, so that
# a step can be one CUDA graph, and it was run on Hopper alone. In float32, where it needs TF32, the loop is faster for large groups and
# slower for small ones (docs/notes/tensor-core-speed.md), and is taken where it does not have to wait.
_ENGINE_ORDER = (
    _EngineRule((torch.bfloat16, torch.float16), 4e11, ("cublas_loop", "hopper"), sizes_on_host=True, k_grouped=False),
    _EngineRule((torch.bfloat16, torch.float16), 7e11, ("cublas_loop", "hopper"), sizes_on_host=True),
    _EngineRule((torch.bfloat16,), 1.2e10, ("hopper", "tensor_core", "cublas_loop", "torch")),
    _EngineRule((torch.bfloat16,), 0, ("hopper", "tensor_core", "torch", "cublas_grouped")),
    _EngineRule((torch.float32,), 2.5e9, ("cublas_loop", "tensor_core"), sizes_on_host=True),
    _EngineRule(_HALF_OR_SINGLE, 2.5e9, ("hopper", "tensor_core", "cublas_loop")),
    _EngineRule(_HALF_OR_SINGLE, 0, ("hopper", "tensor_core", "cublas_grouped")),
    _EngineRule((torch.float64,), 0, ("cublas_loop",)),
)
# torch's bfloat16 kernels leave the sizes on the device too. On Hopper they use wgmma, and are 1.0 to 1.5 times as fast as tensor_core on
# an H200. On data-centre Blackwell (compute capability 10) they use tcgen05.mma, which is twice as fast as wgmma
# (https://docs.nvidia.com/cutlass/media/docs/cpp/blackwell_functionality.html), and mma.sync reaches no more than 0.66 of wgmma's
# peak on an H200 (650 of 989 TFLOP/s); not measured there. So does cuBLAS' loop, in every dtype, and is taken where it does not have to
# wait. Where groups have so few rows that reading the weights is what takes time, tensor_core has kernels for that, and stays ahead.
_TORCH_BEFORE_TENSOR_CORE = (9, 10)
_TCGEN05 = 10


def engine_order(problem: Problem, capability: tuple[int, int] | None) -> tuple[str, ...]:
    """The engines in the order in which "auto" tries them; where none can, the caller takes `reference`.

    `capability` is the compute capability of a CUDA device; None where it is not known, and for any other device.
    """
    if problem.device.type != "cuda":
        return ()
    generation = capability[0] if capability is not None else None
    flops_a_group = 2 * problem.rows * problem.inner * problem.columns / max(1, problem.groups)
    order = next(rule.order for rule in _ENGINE_ORDER if problem.dtype in rule.dtypes
                 and (problem.sizes_on_host or not rule.sizes_on_host)
                 and rule.k_grouped in (None, problem.k_grouped)
                 and (rule.at_least_flops_a_group == 0 or known(flops_a_group >= rule.at_least_flops_a_group)))
    # How many rows there are is asked only where it matters: numbers of rows with different answers share no graph of torch.compile's.
    if generation in _TORCH_BEFORE_TENSOR_CORE and problem.dtype == torch.bfloat16 and (
            generation != _TCGEN05 or not known(few_rows(problem.rows, problem.groups))):
        order = _moved_ahead("torch", order)
    if generation == _TCGEN05 and problem.sizes_on_host and known(flops_a_group >= 2.5e9):
        order = _moved_ahead("cublas_loop", order)
    return order


def _moved_ahead(name: str, order: tuple[str, ...]) -> tuple[str, ...]:
    """The order with that engine directly before tensor_core, if it has both."""
    if name not in order or "tensor_core" not in order:
        return order
    others = [other for other in order if other != name]
    place = others.index("tensor_core")
    return (*others[:place], name, *others[place:])


# ------------------------------------------------------------------------------------------------------- groups of few rows


_MOST_GROUPS_OF_FEW_ROWS = 1024  # each CTA looks through the sizes for its rows, 128 of them at a time; more groups were not measured


def few_rows(rows: int, groups: int) -> bool:
    """Whether the kernels for groups of few rows of any GPU compute an m-grouped GEMM: where what takes time is to read the weights.

    They multiply 8 rows of a group at a time, and read its weights again for the next 8. A layer takes on an H200, in one CUDA graph with a
    cold L2 cache, in microseconds with low tiles of tensor_core's and these kernels: with a 16th of a row a group on average (qwen3, one
    token) 70 and 44, with a quarter 122 and 100 (mixtral, one token, 281 and 206), with a half 175 and 152, with one row 241 and 228
    (mixtral 590 and 537), with two 310 and 288 (dsv3 1,246 and 1,181). With four mixtral takes 712 and 706, and with eight 713 and 984.
    A router that sends all rows to one group was not measured.
    """
    return rows <= 2 * groups <= 2 * _MOST_GROUPS_OF_FEW_ROWS


def few_rows_on_hopper(rows: int, groups: int) -> bool:
    """Whether Hopper's own kernels for groups of few rows compute an m-grouped GEMM. They multiply 32 rows of a group at a time.

    A layer takes on an H200, likewise, in what computed it before (the kernels of any GPU up to two rows a group, low tiles of
    tensor_core's up to four, Hopper's wide tiles beyond) and with these kernels: with two rows a group on average 266 and 250 us (qwen3),
    587 and 573 (mixtral), with four 328 and 292 (qwen3), 717 and 662 (mixtral), 1,456 and 1,254 (64 experts of 7,168 x 2,048), with eight
    325 and 307, 739 and 677, 1,386 and 1,280. With sixteen an earlier form of them took 2 % less to 5 % more on an H100.
    Groups of very different sizes were not measured.
    """
    return rows <= 8 * groups <= 8 * _MOST_GROUPS_OF_FEW_ROWS


def few_rows_linear(rows: int, columns: int) -> bool:
    """Whether a kernel for few rows computes out = x @ weight.T where no sum may be split: a batch-invariant router's logits.

    Each CTA reads the weights of its 8 or 16 columns again for its 8 rows. Microseconds in a graph, on one H100, in Hopper's tiles, low
    tiles of tensor_core's and this kernel (in 16 columns), with 2,048 terms and 128 columns: 256 rows 17, 17 and 9, 1,024 rows 17, 17 and
    21, 2,048 rows 17, 17 and 37; 64 columns, 1,024 rows 16, 18 and 12; 4,096 terms and 8 columns, 4,096 rows 26, 33 and 22; 7,168 terms and
    256 columns, 256 rows 70, 50 and 30, 512 rows 70, 50 and 55. cuBLAS takes 5 to 32 for these; it splits sums.
    All of these with results in bf16.
    """
    return rows * max(16, columns) <= 1 << 16


# --------------------------------------------------------------------------------------------------- tiles of Hopper GEMMs


def _pays_in_pairs(size: int, tile: int) -> bool:
    """Whether CTAs whose tiles are neighbours along a side of `size` should form clusters of two.

    They should if the number of tiles is even, or so large (15) that the one without a partner costs less than sharing saves.
    """
    tiles = _ceil_div(size, tile)
    return tiles % 2 == 0 or tiles >= 15


def _tile_along_n(columns: int) -> GemmConfig:
    """Wide tiles, in clusters of two where that pays, or narrow tiles where these leave less of the last tiles empty.

    A column costs 2 to 5 % more in a narrow tile than in a wide one, and some 7 % more in a wide tile without a cluster than with one:
    narrow tiles take 4,224 columns from 607 to 655 TFLOP/s; 768 columns are as fast in wide ones.
    """
    dearer = 1.07
    paired = _pays_in_pairs(columns, WIDE)
    wide = _ceil_div(columns, 2 * WIDE) * 2 * WIDE if paired else _ceil_div(columns, WIDE) * WIDE * dearer
    if _ceil_div(columns, 2 * NARROW) * 2 * NARROW * dearer < wide:
        return GemmConfig(NARROW, cluster_n=2)
    return GemmConfig(WIDE, cluster_n=2 if paired else 1)


# Clusters that may be no further ahead of the others than this, in k-blocks, find what these have read in the L2 cache. On an H100
# mixtral's gradient of the rows, whose sums have 448 k-blocks, then reads 4.9 GB of memory instead of 9.9, and its second GEMM 2.4 instead
# of 3.7 (with 8). Percent by which the first GEMM, the second and the gradient of the rows are faster, with 4, 8 and 16: mixtral 7.9, 8.3,
# -1.7; -0.1, -0.2, 1.9; 4.3, 2.6, 1.5; 8 experts of 6,144 x 16,384, top-2: 5.3, 4.3, 1.5; 2.5, 0.7, 1.0; 2.7, 2.3, 1.6; 16 of
# 5,120 x 8,192, top-1: 2.1, 1.3, 0.9; 3.3, 2.3, 2.9; 8.3, 7.2, 6.9. In ping-pong, where sums are shorter, less is read twice, and looking
# at the others costs 1 to 6 %; first GEMMs with fewer tiles along N are 1 % faster to 1 % slower. On an H200 whole layers gain up to 1 % of
# a step.
_MOST_AHEAD = 4


def _fills_more_in_square_tiles(rows: int, groups: int, columns: int) -> bool:
    """Whether square tiles, in ping-pong, leave fewer multiprocessors without work than wide ones, where sums are long and none is split.

    That is where wide tiles are more than multiprocessors, of which an H200 has 132, and yet so few that the last ones count. Percent by
    which a batch-invariant layer takes longer than one that splits, on one H200, with the second GEMM in wide and in square tiles: mixtral
    (two routers) 4.4, 4.8 and 3.9, 0.6 with 512 tokens, 2.6, 7.4 and 1.8, 2.0 with 1,024, 3.2, 5.0 and 1.0, 1.3 with 2,048; 8 experts of
    6,144 x 16,384, top-2, 6.1, 5.8 and -0.2, -0.5 with 384, 5.3, 2.5 and 0.9, 2.9 with 1,024. Up to 256 tokens of mixtral, whose 128 wide
    tiles all run at once, square ones take up to 8 % longer. Below 128 rows a group tiles from a counter take up to 4 % longer than fixed
    shares.
    """
    tiles_of_rows = max(rows / TILE_M + groups / 2, min(rows, groups))  # about half of a group's last tile is empty
    return rows >= 4 * groups and tiles_of_rows * columns / WIDE > 132 and tiles_of_rows * columns / SQUARE <= 1 << 11


@functools.lru_cache(maxsize=1024)
def rows_gemm(rows: int, groups: int, inner: int, columns: int, *, splits: bool = True) -> GemmConfig:
    """The configuration of out[rows of e] = a[rows of e] @ b[e]; where two products are summed, `inner` counts the terms of both.

    Ping-pong hides the epilogue of a tile. It saves up to 20 % for sums of at most 4,096 terms (a @ w2 of olmoe 898 -> 836 us, qwen3
    714 -> 659; the gradient of the rows 1,683 -> 1,614). For longer sums it is 0 to 9 % slower, and 22 % slower where groups have less
    than one row on average. A tile counter keeps what CTAs read at the same time close together; without it they drift apart, and what one
    has read has left the L2 cache when another reads it. How much that costs depends on the cache: on an H200 it saves 4 to 7 % at 14,336
    terms, 18 % at 8,192 terms of 64 groups, and nothing at 1,536 and less; on an H100 (50 MB rather than 60) the gradient of qwen3's rows,
    1,536 terms, reads 3.1 GB of 1.2, and takes 1,662 -> 1,392 us, wide's second GEMM (1,024) 4,271 -> 3,522, olmoe's 966 -> 878, qwen3's
    (768) 740 -> 715, that of 128 experts of 4,096 x 1,536 3,732 -> 2,806. Its schedule costs 3 us, which short GEMMs do not get back: on
    the H100 it saves 1.8 % of 26 GFLOP of 512 terms and loses 2.5 % of 13, and of sums of 256 terms it loses up to 3.5 %.

    Where the last CTAs to finish have few tiles, splitting sums along K helps; with 8,192 square tiles and more there is nothing to gain.
    Ping-pong kernels cannot split: for sums of 2,048 terms and more they are only taken where these tiles are many, or no sum may be split;
    for longer sums than 4,096 terms only where no sum may be split.

    splits: whether sums may be split along K. If not, a row's sum is one sequence of k-blocks, whatever other rows there are.
    """
    square_tiles = max(rows / TILE_M, min(rows, groups)) * columns / SQUARE  # approximately, and if no group is empty
    if inner <= 4096:
        ping_pong = rows >= 4 * groups and (inner < 2048 or square_tiles >= 256 or not splits)
        counter = inner >= 2048 or (ping_pong and inner >= 512 and 2 * rows * inner * columns >= 2.5e10)
    else:
        ping_pong = not splits and _fills_more_in_square_tiles(rows, groups, columns)
        counter = not ping_pong or rows >= TILE_M * groups
    if not ping_pong:
        pays = splits and counter and square_tiles <= 1 << 13
        split = SplitConfig(per_sm=2, min_k_blocks=4, cost=2, most=8) if pays else WHOLE
        most_ahead = _MOST_AHEAD if inner > 4096 and square_tiles >= 1024 else 0
        return replace(_tile_along_n(columns), tile_counter=counter, most_ahead=most_ahead, split=split)
    if _pays_in_pairs(columns, SQUARE):
        clusters = (1, 2)
    else:
        # Along M one CTA of a cluster idles where a group has an odd number of tiles, which is always so where it has one.
        clusters = (2, 1) if rows >= TILE_M * groups else (1, 1)
    return GemmConfig(SQUARE, *clusters, ping_pong=True, tile_counter=counter)


@functools.lru_cache(maxsize=1024)
def unrounded_rows_gemm(rows: int, inner: int, columns: int) -> GemmConfig:
    """The configuration of out = a @ b.T of one group where out is float32, a router's logits: square tiles alone have a kernel for that,
    without clusters. A router has few columns, which fill wide tiles badly."""
    return replace(rows_gemm(rows, 1, inner, columns, splits=False), tile_n=SQUARE, cluster_m=1, cluster_n=1, ping_pong=True, most_ahead=0)


def low_tiles_of_one_group(rows: int, groups: int, columns: int) -> bool:
    """Whether the low tiles of the tensor_core engine compute a GEMM of one group on Hopper where no sum may be split: they are more.

    7,168 terms and 256 columns take 50 us instead of 70 with 1,024 rows, 77 instead of 71 with 4,096.
    """
    return groups == 1 and _has_few_low_tiles(rows, columns)


def _has_few_low_tiles(rows: int, columns: int) -> bool:
    """Whether a product of one group has so few tiles of 64 x 128 that they leave half of an H200's multiprocessors without one."""
    return _ceil_div(rows, TENSOR_CORE_LOW.tile_m) * _ceil_div(columns, TENSOR_CORE_LOW.tile_n) <= 64


# GEMMs that gather their rows in single CTAs: the producer's warps copy them, and no warp is free for a counter. In pairs along N CTAs load
# half of the rows each, by TMA.
GATHERED_ROWS = GemmConfig(WIDE)


@functools.lru_cache(maxsize=1024)
def up_gemm(rows: int, inner: int, ffn: int, glu: bool, *, gathered: bool = False, padded: bool = False) -> GemmConfig:
    """The configuration of an expert's first GEMM with its activation; `gathered`: it reads its rows from the tokens; `padded`: some of
    them may have no token, for which TMA takes nine times as long as for others.

    In a GLU half of a tile's columns are w1's and half are v1's. With 64 tiles along N and more (mixtral's 14,336 columns, 235 MB of b
    a group) a short last panel would read all of b for few rows, at the speed of memory: panels of equal height, of up to 20 tiles,
    take 4 % less time with skewed groups, and 1 % less with uniform ones. With six tiles along N (qwen3) panels of four make a layer's
    forward and backward 1.7 % faster; with eight (olmoe, wide) they make no difference. A tile counter saves 4 to 9 % for sums of 2,048
    terms and more ("wide" 7,303 -> 7,025 us, skewed 7,651 -> 6,971; on an H100 up to 28 %), and 2 % of shorter ones in large GEMMs (fine,
    1,536 terms and 309 GFLOP; of 26 GFLOP it costs 2 %).
    """
    tile = _up_tile(glu)
    many, in_pairs = _ceil_div(ffn, tile) >= 64, _pays_in_pairs(ffn, tile)
    config = replace(GATHERED_ROWS, panel=20 if many else 16, even_panels=many)
    if gathered and (padded or not in_pairs):
        return config
    panel = 4 if glu and _ceil_div(ffn, tile) <= 6 else config.panel
    large = rows / TILE_M * ffn / WIDE >= 256 if inner >= 2048 else 2 * rows * inner * ffn * (2 if glu else 1) >= 1.5e11
    return replace(config, panel=panel, cluster_n=2 if in_pairs else 1, tile_counter=large,
                   most_ahead=_MOST_AHEAD if many and large and inner >= 4096 else 0)


def _up_tile(glu: bool) -> int:
    """Columns of one weight in a tile of an expert's first GEMM."""
    return WIDE // 2 if glu else WIDE


# GEMMs of e4m3 operands with scales: a k-block has 128 terms.


@functools.lru_cache(maxsize=1024)
def scaled_rows_gemm(rows: int, inner: int, columns: int) -> GemmConfig:
    """The configuration of out[rows of e] = a[rows of e] @ b[e].T of scaled e4m3 operands; where two products are summed, `inner` counts
    the terms of both.

    Narrow tiles are faster where they leave no more columns empty than wide ones: 1,166 and 1,150 TFLOP/s with mixtral's 14,336 columns,
    996 and 993 with qwen3's 768; with 4,096 and 2,048 columns, where their last tile has a third, 1,157 and 1,178, 832 and 848, and with
    olmoe's 1,024 943 and 1,023. There are no clusters: CTAs in pairs made at most 1 % more and up to 18 % less (wide tiles in pairs and
    alone: mixtral 1,125 and 1,150, 1,145 and 1,178, qwen3 816 and 993, 857 and 848, olmoe 1,026 and 1,023, 926 and 915). A tile counter
    gains 3 to 8 % at 7,168 terms and 14,336, 3 % at 2,048 with 768 columns, and is within 1 % elsewhere. On an H100, where rows_gemm says
    more of it, it gains 1.5 to 10.6 % of sums of 768 to 1,536 terms in large GEMMs, and loses 3 % of one (qwen3 526 -> 476 and 866 -> 850
    us, olmoe 593 -> 612, "wide" 2,405 -> 2,320, 128 experts of 4,096 x 1,536 1,727 -> 1,702).
    """
    narrow, wide = _ceil_div(columns, NARROW) * NARROW, _ceil_div(columns, WIDE) * WIDE
    counter = inner >= 2048 or (inner >= 512 and 2 * rows * inner * columns >= 1e11)
    return GemmConfig(NARROW if narrow <= 1.02 * wide else WIDE, tile_counter=counter)


@functools.lru_cache(maxsize=1024)
def scaled_up_gemm(rows: int, inner: int, ffn: int, glu: bool) -> GemmConfig:
    """The configuration of an expert's first GEMM of scaled e4m3 operands, with its activation.

    Clusters of two gain 1 to 3 % (TFLOP/s without and with them, sustained: mixtral 1,013 and 1,026, qwen3 846 and 870, olmoe 873 and 896),
    and with the main loop before, a tile counter gained 3 to 4 % beside them.
    """
    return replace(up_gemm(rows, inner, ffn, glu), tile_counter=inner >= 2048, most_ahead=0)


def scaled_weight_gradient_gemm() -> GemmConfig:
    """The configuration of out[e] = a[rows of e].T @ b[rows of e] of scaled e4m3 operands, in k-blocks of 128 rows.

    The longest sums come first, from a counter, as of weight_gradient_gemm. The kernels have no clusters and do not split sums; what either
    would gain is not known.
    """
    return GemmConfig(WIDE, panel=8, tile_counter=True)


@functools.lru_cache(maxsize=1024)
def down_backward_gemm(ffn: int) -> GemmConfig:
    """The configuration of dz @ w2[e].T with the activation's gradient beside its main loop.

    Narrow tiles in clusters of two leave room for a fourth stage. That is worth more here than wide tiles without clusters and with
    three stages. With four wide tiles along N, low panels make it up to 7.5 % faster: microseconds in panels of 16 and of 2, sustained,
    on two H200s, "wide" 4,060 and 3,760, 4,141 and 3,821, olmoe 1,198 and 1,133, 1,170 and 1,169. Narrow tiles (qwen3 924 and 938) and six
    wide ones (2,955 and 3,187) lose by them.
    """
    config = _tile_along_n(ffn)
    if ffn % (2 * NARROW) == 0 and config.cluster_n == 1:
        return GemmConfig(NARROW, cluster_n=2)
    low = config.tile_n == WIDE and config.cluster_n == 2 and _ceil_div(ffn, WIDE) == 4
    return replace(config, panel=2) if low else config


@functools.lru_cache(maxsize=1024)
def weight_gradient_gemm(rows: int, groups: int, features: int, columns: int, *, gathered: bool, padded: bool = False,
                         two: bool = False) -> GemmConfig:
    """The configuration of out[e] = a[rows of e].T @ b[rows of e], [features,columns] for each group; `gathered`: b's rows are read from
    the tokens, and the kernel computes out[e].T, with `two` of two a side by side; `padded` as in up_gemm.

    CTAs take the longest sums first, from a counter, and where groups have many rows the sums that would end last are split. With a
    skewed router this gains up to 25 % (nyu-512 507 -> 645 TFLOP/s, olmoe 617 -> 707). Where there are few tiles, sums are split into
    more parts.
    """
    few = (2 if two else 1) * groups * (features / TILE_M) * (columns / WIDE) <= 1 << 10
    split = WHOLE if rows <= 2048 else SplitConfig(per_sm=4 if few else 2, min_k_blocks=16, most=127, even=1.05)
    if gathered and not padded and (two or _pays_in_pairs(features, WIDE)):  # two have an even number of tiles
        clusters = (1, 2)
    elif _pays_in_pairs(columns if gathered else features, TILE_M):
        clusters = (2, 1)
    else:
        clusters = (1, 2) if not gathered and _pays_in_pairs(columns, WIDE) else (1, 1)
    return GemmConfig(WIDE, *clusters, panel=8, tile_counter=True, split=split)


_GATHERING_ACTIVATIONS = ("silu", "gelu_tanh")  # of the family that the first GEMM has instances for which gather
_MOST_TO_GATHER_IN_PAIRS = 2048  # F; with 3,072 and 4,096 forward gained 2 %, and a step nothing
_MOST_TO_GATHER_FOR_TWO = 1024  # F; with 1,408 the gradients of w1 and v1 took 5 % longer
_LITTLE_TO_GATHER_FOR_TWO = 512  # F up to which the alternative is two GEMMs that gather


def always_gathers_in_up(ffn: int, activation: str, token_bytes: int) -> bool:
    """Whether ExpertsConfig.gather_up holds even if the rows are to be kept; also for a graph that is traced, which may not know the
    bytes."""
    return ffn <= 512 and activation in _GATHERING_ACTIVATIONS and known(token_bytes < 1 << 36)


def rows_pay_for_two(rows: int, groups: int, ffn: int) -> bool:
    """Whether groups have enough rows for ExpertsConfig.gather_two_weight_gradients.

    Where they have few, what takes time is to store the gradients, and a GEMM that gathers stores them in lines of 32 bytes. Microseconds
    on one H100, in a graph, of gather and two GEMMs, two that gather, and one that does: 64 rows a group (qwen3) 370, 382, 383, 128 (olmoe)
    273, 300, 290, 256 (qwen3) 561, 610, 552, 512 (olmoe) 573, 580, 566; with F = 256 4 rows 93, 106, 96, 16 rows 100, 111, 97.
    """
    return ffn <= _LITTLE_TO_GATHER_FOR_TWO or rows >= 256 * groups


@functools.lru_cache(maxsize=1024)
def experts(hidden: int, ffn: int, glu: bool, activation: str, token_bytes: int, padded: bool) -> ExpertsConfig:
    """Where a layer's rows are gathered, and where its activation's gradient is computed; `padded` as in up_gemm.

    Gathering inside a GEMM saves writing and reading [P,H], which takes time proportional to H. It costs a part of the GEMM's speed,
    which is time proportional to H F. The first GEMM can gather for sigmoid-like activations only. In pairs of CTAs, which load rows by
    TMA, it pays up to F = 2,048. Microseconds, sustained, of the gather, of the first GEMM behind it, and of the first GEMM that gathers:

        qwen3 165, 1,380, 1,460   olmoe 163, 1,782, 1,831   wide 643, 6,937, 7,065   mixtral 55, 5,947, 6,411
        16 experts of 4,096 x 4,096, top-2: 55, 1,860, 1,820

    A layer's forward is 2.4 to 6.8 % faster (fine 6.6, 64 experts of 2,048 x 512 6.8, qwen3 5.3, olmoe 3.8, wide 4.6, 32 experts of
    7,168 x 2,048 3.1, 128 of 4,096 x 1,536 2.4), and of a plain MLP (64 experts of 2,048 x 1,024) 5.1 %. In single CTAs, whose warps copy
    rows by cp.async, it costs a tenth of the speed, and pays up to 512 (559 us against 691 us apart at F = 256).

    The gradients of w1 and v1 both read x's rows, so that one gather serves two GEMMs, each of which is slower where it gathers (in pairs
    qwen3 864 and 687 us, olmoe 955 and 867, wide 3,730 and 3,448): it pays at F = 512 and no longer at 768. One GEMM for both, whose tiles
    always form pairs, pays up to 1,024. Microseconds on one H100, sustained, of gather and two GEMMs, two that gather, and one that does:

        fine 840, 663, 584   64 experts of 2,048 x 512, top-8: 1,093, 995, 962   qwen3 1,521, 1,610, 1,478   olmoe 1,901, 1,884, 1,824
        wide 7,303, 7,197, 7,015   64 of 2,048 x 1,408, top-6: 1,905, 2,095, 2,045   128 of 4,096 x 1,536, top-8: 5,551, 5,814, 5,732

    For the output's gradient, whose GEMM then cannot fuse the activation's gradient, it pays at 256. Single CTAs count the tokens' vectors
    of 16 bytes in 32 bits, so that GEMMs gather from at most 64 GiB.

    The activation's gradient takes about as long as the GEMM does for sums of 1,536 terms. From there on the GEMM hides it, which saves
    a tenth to a sixth of both (1.00 against 1.20 ms at olmoe's shape, 3.2 against 3.65 at mixtral's); with 1,024 or 512 terms it
    depends on the routing.
    """
    reachable = token_bytes < 1 << 36
    in_pairs = not padded and ffn <= _MOST_TO_GATHER_IN_PAIRS and _pays_in_pairs(ffn, _up_tile(glu))
    return ExpertsConfig(
        gather_up=reachable and (in_pairs or ffn <= 512) and activation in _GATHERING_ACTIVATIONS,
        gather_down_backward=reachable and ffn <= 256,
        gather_weight_gradient=reachable and ffn <= 512,
        gather_two_weight_gradients=reachable and not padded and ffn <= _MOST_TO_GATHER_FOR_TWO,
        fuse_activation_gradient=hidden >= 1536,
    )


# ------------------------------------------------------------------------------------------- tiles of the tensor_core engine
#
# Measured on one H200, which is not what this engine is for (docs/notes/tensor-core-speed.md). TFLOP/s in wide | square | low tiles,
# sustained: mixtral's first product 446 | 389 | 303, qwen3's 394 | 347 | 299, its weight gradient 390 | 319; with 32 rows a group
# 95 | 78 | 108.


@dataclass(frozen=True)
class TensorCoreConfig:
    """How one grouped GEMM of the tensor_core engine is divided; the launches take these fields by name.

    Attributes:
        tile_m, tile_n: the size of a CTA's tile; csrc/tensor_core/traits.cuh names those that there are.
        panel: the most tiles along M that are walked before the next tile along N.
    """
    tile_m: int
    tile_n: int
    panel: int = 16


TENSOR_CORE_WIDE, TENSOR_CORE_SQUARE, TENSOR_CORE_LOW = TensorCoreConfig(128, 256), TensorCoreConfig(128, 128), TensorCoreConfig(64, 128)
# With fewer wide tiles than this an H200, which has 132 multiprocessors, has some without one.
_FEWEST_WIDE_TILES = 128
# A column in a square tile takes this many times as long as one in a wide tile.
_WIDE_IS_FASTER = 1.1


def _tensor_core_tile(tiles_m: float, columns: int) -> TensorCoreConfig:
    """Wide tiles, which read a quarter less of their operands for each term, where there are enough and the last one is not too empty."""
    wide = _ceil_div(columns, WIDE)
    fits = wide * WIDE < _ceil_div(columns, SQUARE) * SQUARE * _WIDE_IS_FASTER
    return TENSOR_CORE_WIDE if fits and tiles_m * wide >= _FEWEST_WIDE_TILES else TENSOR_CORE_SQUARE


@functools.lru_cache(maxsize=1024)
def tensor_core_rows_gemm(rows: int, groups: int, columns: int) -> TensorCoreConfig:
    """The configuration of out[rows of e] = a[rows of e] @ b[e]: low tiles where groups have at most 64 rows on average, or for one group
    that has few of them. A router's logits of 4,096 tokens, 2,048 terms and 128 columns, take 17 us on one H100 in low tiles, 27 in square
    ones, 37 in wide ones."""
    if rows <= 64 * groups or (groups == 1 and _has_few_low_tiles(rows, columns)):
        return TENSOR_CORE_LOW
    return _tensor_core_tile(rows / TILE_M, columns)


@functools.lru_cache(maxsize=1024)
def tensor_core_up_gemm(rows: int, groups: int) -> TensorCoreConfig:
    """The configuration of an expert's first GEMM with its activation, which has no square tiles."""
    return TENSOR_CORE_LOW if rows <= 64 * groups else TENSOR_CORE_WIDE


@functools.lru_cache(maxsize=1024)
def tensor_core_weight_gradient_gemm(groups: int, features: int, columns: int) -> TensorCoreConfig:
    """The configuration of out[e] = a[rows of e].T @ b[rows of e], [features,columns] for each group."""
    return replace(_tensor_core_tile(groups * _ceil_div(features, TILE_M), columns), panel=8)
