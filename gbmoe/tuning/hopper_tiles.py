"""The tiles, clusters and schedules of the Hopper engine's GEMMs in 16 bits.

A CTA computes output tiles of `tile_m` x `tile_n`; a cluster of CTAs side by side along M or N shares the operand that both read
by TMA multicast; a panel is the run of tiles along M that is walked before the next tile along N; a k-block is 64 terms of a
tile's sum.

Fitted on an H200 and an H100. What stands for waves of tiles, for time or for cached bytes is scaled to other GPUs (device.py);
lengths of sums stand for what one multiprocessor does, and are not. The figures are in docs/notes/, named at each rule, and most
in docs/notes/tuning-sustained.md.

Letters: M rows of all groups, E groups (experts), K inner, N columns; H hidden, F ffn hidden.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from gbmoe.tuning.device import FITTED_ON, Device

TILE_M = 128                          # rows of every tile of these kernels
WIDE, NARROW, SQUARE = 256, 192, 128  # the widths of tiles that they have instances for
# Tiles along M. 16 by 8 wide tiles are 2,048 rows by 2,048 columns, and about as many as an H200 has multiprocessors.
PANEL, WEIGHT_GRADIENT_PANEL = 16, 8


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class SplitConfig:
    """When sums are split along K (split-K), so that CTAs which would otherwise be idle at the end take a part of a long sum.

    Each split is a work item of its own. A k-block takes a CTA some 0.5 us.

    Attributes:
        per_sm: the number of tiles' partial sums that the workspace has room for, per multiprocessor; with 0 no sum is split.
        min_k_blocks: the fewest k-blocks of a split.
        cost: what storing a partial sum, or adding one, costs, in k-blocks; used where all groups' sums have the same length.
        most: the most splits of one sum.
        even: sums over groups' rows are not split if whole tiles take at most this multiple of the time of a perfectly even
            schedule.
    """
    per_sm: int = 0
    min_k_blocks: int = 1
    cost: int = 0
    most: int = 1
    even: float = 1.0

    @functools.cached_property
    def splitting(self) -> tuple[float, ...]:
        """A Splitting of csrc/hopper/tiling.cuh, field by field, as a launch takes it."""
        return float(self.min_k_blocks), float(self.cost), float(self.most), float(self.even)


WHOLE = SplitConfig()


@dataclass(frozen=True)
class GemmConfig:
    """How one grouped GEMM of the Hopper engine is divided.

    Attributes:
        tile_n: columns of a CTA's tile.
        cluster_m, cluster_n: CTAs of a cluster along M and along N; at most one of them is 2.
        ping_pong: the two consumer warpgroups compute different tiles in turns, rather than one tile together.
        panel: the most tiles along M (with cluster_m pairs of them) that are walked before the next tile along N.
        even_panels: a group's panels differ by at most one tile; otherwise only the last one is shorter.
        tile_counter: CTAs take their next tile from a counter, rather than computing a fixed share of the tiles.
        most_ahead: k-blocks by which a cluster may be ahead of the mean of all, so that they stay together along K; 0: any
            number. Clusters say every eight k-blocks how many they have loaded. This needs a tile counter, and is only for GEMMs of
            rows and the first GEMM, not in ping-pong.
        split: when sums are split along K; this needs a tile counter.
    """
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    ping_pong: bool = False
    panel: int = PANEL
    even_panels: bool = False
    tile_counter: bool = False
    most_ahead: int = 0
    split: SplitConfig = WHOLE

    @functools.cached_property
    def tiling(self) -> tuple[int, ...]:
        """A Tiling of csrc/hopper/tiling.cuh, field by field, as a launch takes it."""
        return self.tile_n, self.cluster_m, self.cluster_n, self.panel, int(self.even_panels), self.most_ahead


def _pays_in_pairs(size: int, tile: int) -> bool:
    """Whether CTAs whose tiles are neighbours along a side of `size` should form clusters of two: if the number of tiles is even,
    or so large that the one without a partner costs less than sharing saves."""
    tiles = ceil_div(size, tile)
    return tiles % 2 == 0 or tiles >= 15


def _tile_along_n(columns: int) -> GemmConfig:
    """Wide tiles, in clusters of two where that pays, or narrow tiles where these leave less of the last tiles empty. A column
    costs more in a narrow tile, and more still in a wide one without a cluster (docs/notes/hopper-tiles-of-192.md)."""
    dearer = 1.07
    paired = _pays_in_pairs(columns, WIDE)
    wide = ceil_div(columns, 2 * WIDE) * 2 * WIDE if paired else ceil_div(columns, WIDE) * WIDE * dearer
    if ceil_div(columns, 2 * NARROW) * 2 * NARROW * dearer < wide:
        return GemmConfig(NARROW, cluster_n=2)
    return GemmConfig(WIDE, cluster_n=2 if paired else 1)


_MOST_AHEAD = 4  # k-blocks within which clusters find in the L2 what others have read (docs/notes/schedule-pacing.md)


def _terms_in_l2(device: Device) -> int:
    """The most terms of sums for which the L2 holds all that the CTAs of one wave read, a square of PANEL tiles of rows and as
    many columns, so that clusters which drift apart find it there: 4,096 on an H100 and an H200."""
    return device.l2_power_of_two // (2 * 2 * TILE_M * device.panel(PANEL))  # two sides, of elements of two bytes


def _fills_more_in_square_tiles(device: Device, rows: int, groups: int, columns: int) -> bool:
    """Whether square tiles, in ping-pong, leave fewer multiprocessors without work than wide ones, where sums are long and none
    is split: where there are more wide tiles than multiprocessors, and yet so few that the last ones count
    (docs/notes/tiles-without-split-k.md)."""
    tiles_of_rows = max(rows / TILE_M + groups / 2, min(rows, groups))  # about half of a group's last tile is empty
    wide, square = tiles_of_rows * columns / WIDE, tiles_of_rows * columns / SQUARE
    return rows >= 4 * groups and wide > device.multiprocessors and square <= device.tiles(1 << 11)


def _fits_one_square_tile(device: Device, rows: int, groups: int, columns: int) -> bool:
    """Whether columns fill at most one square tile, as the ranks of adapters do, and there are tiles for all multiprocessors. A wide tile
    multiplies and loads twice as many columns of nothing; sharing b with a neighbour along M saves next to nothing, and costs a CTA where
    a group has an odd number of tiles (docs/notes/hopper-second-operands.md; by reckoning, not measured)."""
    return columns <= SQUARE and rows >= 4 * groups and rows >= TILE_M * device.multiprocessors


@functools.lru_cache(maxsize=1024)
def rows_gemm(device: Device, rows: int, groups: int, inner: int, columns: int, *, splits: bool = True) -> GemmConfig:
    """The configuration of out[rows of e] = a[rows of e] @ b[e]; where two products are summed, `inner` counts the terms of both.

    Ping-pong hides the epilogue of a tile, which matters where sums are not long (docs/notes/hopper-pingpong.md). A tile
    counter keeps what CTAs read at the same time close together, so that the L2 still has it. Short GEMMs do not get back the
    time of its schedule (schedule-tile-counter.md).

    Where the last CTAs to finish have few tiles, splitting sums along K helps; with many waves of tiles there is nothing to gain.
    Ping-pong kernels cannot split: for longer sums they are only taken where tiles are some waves, or no sum may be split; for the
    longest only where no sum may be split.

    splits: whether sums may be split along K. If not, a row's sum is one sequence of k-blocks, whatever other rows there are.
    """
    square_tiles = max(rows / TILE_M, min(rows, groups)) * columns / SQUARE  # approximately, and if no group is empty
    panel = device.panel(PANEL)
    large = 2 * rows * inner * columns >= device.flops(2.5e10)
    if _fits_one_square_tile(device, rows, groups, columns):
        return GemmConfig(SQUARE, ping_pong=True, panel=panel, tile_counter=inner >= 2048 or (inner >= 512 and large))
    if inner <= 4096:
        ping_pong = rows >= 4 * groups and (inner < 2048 or square_tiles >= device.tiles(256) or not splits)
        counter = inner >= 2048 or (ping_pong and inner >= 512 and large)
    else:
        ping_pong = not splits and _fills_more_in_square_tiles(device, rows, groups, columns)
        counter = not ping_pong or rows >= TILE_M * groups
    if not ping_pong:
        pays = splits and counter and square_tiles <= device.tiles(1 << 13)
        split = SplitConfig(per_sm=2, min_k_blocks=4, cost=2, most=8) if pays else WHOLE
        paced = counter and inner > _terms_in_l2(device) and square_tiles >= device.tiles(1024)
        most_ahead = _MOST_AHEAD if paced else 0
        return replace(_tile_along_n(columns), panel=panel, tile_counter=counter, most_ahead=most_ahead, split=split)
    if _pays_in_pairs(columns, SQUARE):
        clusters = (1, 2)
    else:
        # Along M one CTA of a cluster idles where a group has an odd number of tiles, which is always so where it has one.
        clusters = (2, 1) if rows >= TILE_M * groups else (1, 1)
    return GemmConfig(SQUARE, *clusters, ping_pong=True, panel=panel, tile_counter=counter)


@functools.lru_cache(maxsize=1024)
def unrounded_rows_gemm(device: Device, rows: int, inner: int, columns: int) -> GemmConfig:
    """The configuration of out = a @ b.T of one group where out is float32, a router's logits: square tiles alone have a kernel
    for that, without clusters. A router has few columns, which fill wide tiles badly."""
    config = rows_gemm(device, rows, 1, inner, columns, splits=False)
    return replace(config, tile_n=SQUARE, cluster_m=1, cluster_n=1, ping_pong=True, most_ahead=0)


@functools.lru_cache(maxsize=64)
def gathered_rows_gemm(device: Device) -> GemmConfig:
    """The configuration of GEMMs that gather their rows in single CTAs: the producer's warps copy them, and no warp is free for a
    counter. In pairs along N CTAs load half of the rows each, by TMA."""
    return GemmConfig(WIDE, panel=device.panel(PANEL))


@functools.lru_cache(maxsize=1024)
def up_gemm(device: Device, rows: int, inner: int, ffn: int, glu: bool, *, gathered: bool = False,
            padded: bool = False, along_f: bool = False) -> GemmConfig:
    """The configuration of an expert's first GEMM with its activation; `gathered`: it reads its rows from the tokens; `padded`:
    some of them may have no token, for which TMA takes longer (docs/notes/gather-lines-by-tma.md); `along_f`: weights are
    contiguous along F, which only pairs of CTAs read.

    In a GLU half of a tile's columns are w1's and half are v1's. Where b is far larger than the L2, a short last
    panel would read all of b for few rows, at the speed of memory: panels of equal height avoid it
    (docs/notes/hopper-panel-height.md). With few tiles along N low panels are faster (memory-traffic.md). A tile counter pays
    for two waves of long sums, and for shorter sums in large GEMMs (schedule-tile-counter.md).
    """
    tiles_n = ceil_div(ffn, _up_tile(glu))
    many = tiles_n * FITTED_ON.l2_power_of_two >= 64 * device.l2_power_of_two
    config = GemmConfig(WIDE, panel=device.panel(20 if many else PANEL), even_panels=many)
    if gathered and (padded or not up_forms_pairs(ffn, glu)):
        return config
    panel = 4 if glu and tiles_n <= 6 else config.panel
    if inner >= 2048:
        large = rows / TILE_M * ffn / WIDE >= device.tiles(256)
    else:
        large = 2 * rows * inner * ffn * (2 if glu else 1) >= device.flops(1.5e11)
    paced = many and large and inner >= max(2048, _terms_in_l2(device))
    return replace(config, panel=panel, cluster_n=2 if along_f or up_forms_pairs(ffn, glu) else 1, tile_counter=large,
                   most_ahead=_MOST_AHEAD if paced else 0)


def up_forms_pairs(ffn: int, glu: bool) -> bool:
    """Whether the CTAs of an expert's first GEMM form clusters of two along N."""
    return _pays_in_pairs(ffn, _up_tile(glu))


def _up_tile(glu: bool) -> int:
    """Columns of one weight in a tile of an expert's first GEMM."""
    return WIDE // 2 if glu else WIDE


@functools.lru_cache(maxsize=1024)
def down_backward_gemm(device: Device, ffn: int) -> GemmConfig:
    """The configuration of dz @ w2[e].T with the activation's gradient next to its main loop.

    Narrow tiles in clusters of two leave room for a fourth stage. That is worth more here than wide tiles without clusters and
    with three stages. For which shapes low panels pay was measured (docs/notes/memory-traffic.md).
    """
    config = _tile_along_n(ffn)
    if ffn % (2 * NARROW) == 0 and config.cluster_n == 1:
        config = GemmConfig(NARROW, cluster_n=2)
    low = config.tile_n == WIDE and config.cluster_n == 2 and ceil_div(ffn, WIDE) == 4
    return replace(config, panel=2 if low else device.panel(PANEL))


def down_backward_pairs_gemm(device: Device, ffn: int) -> GemmConfig:
    """down_backward_gemm where h and g are pairs: the same tiles, always in clusters of two."""
    return replace(down_backward_gemm(device, ffn), cluster_n=2)


@functools.lru_cache(maxsize=1024)
def biased_rows_gemm(device: Device, rows: int, groups: int, inner: int, columns: int, *, splits: bool = True) -> GemmConfig:
    """The configuration of out[rows of e] = a[rows of e] @ b[e] + bias[e]: rows_gemm's rules, for the tiles that add them, square ones in
    ping-pong and wide ones, both in pairs along N."""
    config = rows_gemm(device, rows, groups, inner, columns, splits=splits)
    if config.ping_pong:
        return replace(config, cluster_m=1, cluster_n=2)
    square_tiles = max(rows / TILE_M, min(rows, groups)) * columns / SQUARE
    counter = inner >= 2048
    pays = splits and counter and square_tiles <= device.tiles(1 << 13)
    split = SplitConfig(per_sm=2, min_k_blocks=4, cost=2, most=8) if pays else WHOLE
    return GemmConfig(WIDE, cluster_n=2, panel=device.panel(PANEL), tile_counter=counter, split=split)


@functools.lru_cache(maxsize=1024)
def weight_gradient_gemm(device: Device, rows: int, groups: int, features: int, columns: int, *, gathered: bool,
                         padded: bool = False, two: bool = False) -> GemmConfig:
    """The configuration of out[e] = a[rows of e].T @ b[rows of e], [features,columns] for each group; `gathered`: b's rows are
    read from the tokens, and the kernel computes out[e].T, with `two` of two a next to each other; `padded` as in up_gemm.

    CTAs take the longest sums first, from a counter, and where groups have many rows the sums that would end last are split: into
    more parts where there are few waves of tiles (docs/notes/schedule-split-k.md).
    """
    few = (2 if two else 1) * groups * (features / TILE_M) * (columns / WIDE) <= device.tiles(1 << 10)
    split = WHOLE if rows <= 2048 else SplitConfig(per_sm=4 if few else 2, min_k_blocks=16, most=127, even=1.05)
    if gathered and not padded and (two or _pays_in_pairs(features, WIDE)):  # two have an even number of tiles
        clusters = (1, 2)
    elif _pays_in_pairs(columns if gathered else features, TILE_M):
        clusters = (2, 1)
    else:
        clusters = (1, 2) if not gathered and _pays_in_pairs(columns, WIDE) else (1, 1)
    return GemmConfig(WIDE, *clusters, panel=device.panel(WEIGHT_GRADIENT_PANEL), tile_counter=True, split=split)
