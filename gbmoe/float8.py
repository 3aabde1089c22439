"""Blockwise-scaled e4m3: the recipe, its numbers to the bit in plain PyTorch, the tensors that hold them, and weights quantised once.

Numbers that share a scale form a tile: 128 of a row of activations or gradients, or 128 x 128 of a weight; the last ones of a row or
weight may be smaller. For a sum over rows a tile is 128 rows of an expert in one column. With the largest magnitude m of a tile,
encode = 448 / m, each number is stored as e4m3(number * encode), rounded to nearest even, and stands for that times decode = 1 / encode,
all in float32. Only decode is kept. A tile of zeros has scales of one. A tile that holds NaN or infinity has a decoding scale of NaN, so
that all that is computed from it is NaN. csrc/hopper/float8/float8.cuh is the same in CUDA, except for the sign of a NaN.

Shape suffixes: T tokens, P rows, K columns, E experts, F and H the sides of a weight; C tiles of a row, ceil(K / 128); B k-blocks of
R = 128 rows; Y bytes.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gbmoe._checks import names_the_nearest_field, require

FLOAT8 = torch.float8_e4m3fn
TILE = 128
_LARGEST = 448.0  # of e4m3
_FLOAT32_LARGEST = torch.finfo(torch.float32).max


@names_the_nearest_field
@dataclass(frozen=True)
class Float8BlockScaling:
    """The recipe of DeepSeek-V3: e4m3, with a scale for 1 x 128 activations and gradients, and for 128 x 128 weights.

    Named after TransformerEngine's Float8BlockScaling. Products of rows are computed in float8: both GEMMs of forward, and those of
    backward that give gradients of rows. Each 128 terms are summed by the tensor cores and then added up in float32. Parameters,
    pre-activations and all gradients are stored in the layer's dtype, and gradients of weights are products in that dtype, unless
    float8_weight_gradients.

    Args:
        power_2_scale: round scales to powers of two, so that scaling a number changes its exponent alone. Numbers then use a range up to
            448 down to 224, which costs up to one bit.
        float8_weight_gradients: compute gradients of weights in float8 too. Their sums run over an expert's rows; so both operands are
            quantised once more, with a scale for 128 x 1: the same column of 128 rows.
        keep_weights: quantise weights for backward in forward, from the same read, and keep them until backward: a byte for each number,
            for each forward whose backward is still to come. Without it backward reads and quantises them anew. Results have the same
            bits. It is for expert_mlp, grouped_mlp and layers, and has no effect where x needs no gradient, for an activation without
            a kernel, in the exact mode of expert parallelism over the exchange, and for weights that cached_weights keeps.
            A change of the weights between forward and backward raises if torch counts it. One that it does not count, such as a fused
            optimizer's, is not noticed, as with any of torch's operators: kept weights are forward's, others are what is there then.

    Example:
        >>> Float8BlockScaling(power_2_scale=True).engine
        'float8_block_power_2'
    """
    power_2_scale: bool = False
    float8_weight_gradients: bool = False
    keep_weights: bool = True

    def __post_init__(self):
        for name in ("power_2_scale", "float8_weight_gradients", "keep_weights"):
            value = getattr(self, name)
            require(isinstance(value, bool), "Float8BlockScaling", name, "a bool", repr(value), TypeError)

    @property
    def engine(self) -> str:
        """The name of the engine that computes this (gbmoe.engines.FLOAT8_ENGINES)."""
        scale = "float8_block_power_2" if self.power_2_scale else "float8_block"
        return f"{scale}_weights" if self.float8_weight_gradients else scale


@dataclass(frozen=True)
class ScaledRows:
    """Rows in e4m3 with their scales.

    Attributes:
        values_PK: [P,K], float8_e4m3fn, contiguous.
        scales_PC: the decoding scales, float32 [P,C].
    """
    values_PK: torch.Tensor
    scales_PC: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The numbers that this stands for, float32 [P,K]."""
        return self.values_PK.float() * _spread(self.scales_PC, 1, self.values_PK.size(1))


@dataclass(frozen=True)
class ScaledWeights:
    """A weight of each expert in e4m3 with its scales.

    Attributes:
        values_ENK: [E,N,K], float8_e4m3fn, contiguous: out = rows @ values[e].T.
        scales: the decoding scales, float32 [E, ceil(N / 128), C].
        dtype: of the weight, and of the products that are computed with it.
    """
    values_ENK: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def in_memory(cls, memory_Y: torch.Tensor, shape_ENK: Sequence[int], dtype: torch.dtype) -> ScaledWeights:
        """One whose values and scales are views of `memory_Y`, uint8, which is not written; Y = bytes_of(shape_ENK)."""
        values = math.prod(shape_ENK)
        scales = memory_Y[_scales_begin(shape_ENK) :].view(torch.float32)
        return cls(memory_Y[:values].view(FLOAT8).view(*shape_ENK), scales.view(shape_ENK[0], *map(_tiles, shape_ENK[1:])), dtype)

    @staticmethod
    def bytes_of(shape_ENK: Sequence[int]) -> int:
        """The bytes that values and scales of this shape take."""
        return _scales_begin(shape_ENK) + 4 * shape_ENK[0] * math.prod(map(_tiles, shape_ENK[1:]))

    def new_rows(self, rows: int) -> torch.Tensor:
        """A tensor for rows @ values[e].T, [rows,N], that is not initialised."""
        return self.values_ENK.new_empty(rows, self.values_ENK.size(1), dtype=self.dtype)

    def dequantized(self) -> torch.Tensor:
        """The numbers that this stands for, float32 [E,N,K]."""
        lines = _spread(self.scales, 1, self.values_ENK.size(1))
        return self.values_ENK.float() * _spread(lines, 2, self.values_ENK.size(2))


@dataclass(frozen=True)
class ScaledKBlocks:
    """Rows of each expert in e4m3 for a sum over them, cut into k-blocks of 128 rows, each column of which has a scale.

    The rows of each expert begin a k-block of their own, and zeros fill up its last one. There is room for ceil(P / 128) + E k-blocks,
    which is enough for any sizes. Those behind the last expert's may hold anything.

    Attributes:
        values_BKR: [B,K,128], float8_e4m3fn, contiguous: each k-block is transposed.
        scales_BK: the decoding scales, float32 [B,K].
        filled_rows_E: the rows of each expert with those that fill up its last k-block, int32 [E].
    """
    values_BKR: torch.Tensor
    scales_BK: torch.Tensor
    filled_rows_E: torch.Tensor

    def dequantized(self) -> torch.Tensor:
        """The numbers that this stands for, as rows: float32 [128 B, K], of which expert e has filled_rows_E[e]."""
        columns = self.values_BKR.size(1)
        return (self.values_BKR.float() * self.scales_BK.unsqueeze(-1)).transpose(1, 2).reshape(-1, columns)


def k_blocks(rows: int, experts: int) -> int:
    """The number of k-blocks that is enough for `rows` rows of so many experts, whatever their sizes."""
    return _tiles(rows) + experts


def _tiles(size: int) -> int:
    return -(-size // TILE)


def _scales_begin(shape_ENK: Sequence[int]) -> int:
    return -(-math.prod(shape_ENK) // 16) * 16  # bytes; aligned for any access


def _spread(scales: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Each scale once for every one of the 128 numbers along `dim` that share it; `size` numbers in all."""
    return scales.repeat_interleave(TILE, dim).narrow(dim, 0, size)


def tile_scales(largest: torch.Tensor, power_2_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(encode, decode), float32, of tiles with these largest magnitudes, float32."""
    # A division by torch.div is rounded once; a number divided by a tensor is the number times a reciprocal, rounded twice.
    encode = torch.div(torch.full_like(largest, _LARGEST), largest).clamp(max=_FLOAT32_LARGEST)
    if power_2_scale:
        encode = (encode.view(torch.int32) & 0x7F800000).view(torch.float32)
    encode = torch.where(largest == 0, 1.0, encode)
    finite = largest <= _FLOAT32_LARGEST
    return torch.where(finite, encode, 0.0), torch.where(finite, torch.div(torch.ones_like(encode), encode), torch.nan)


def quantize_rows(x_PK: torch.Tensor, power_2_scale: bool = False) -> ScaledRows:
    """Rows [P,K], any floating dtype, in e4m3."""
    rows, columns = x_PK.shape
    tiles = _tiles(columns)
    padded = torch.nn.functional.pad(x_PK.float(), (0, tiles * TILE - columns)).view(rows, tiles, TILE)
    encode, decode = tile_scales(padded.abs().amax(-1), power_2_scale)
    values = (padded * encode.unsqueeze(-1)).view(rows, tiles * TILE)[:, :columns].to(FLOAT8)
    return ScaledRows(values.contiguous(), decode)


def quantize_weights(w_EFH: torch.Tensor, power_2_scale: bool = False, transpose: bool = False) -> ScaledWeights:
    """A weight [E,F,H], any floating dtype, in e4m3; with `transpose` as [E,H,F]."""
    w = (w_EFH.transpose(1, 2) if transpose else w_EFH).float()
    experts, lines, columns = w.shape
    blocks = _tiles(lines), _tiles(columns)
    padded = torch.nn.functional.pad(w, (0, blocks[1] * TILE - columns, 0, blocks[0] * TILE - lines))
    padded = padded.view(experts, blocks[0], TILE, blocks[1], TILE)
    encode, decode = tile_scales(padded.abs().amax((2, 4)), power_2_scale)
    values = (padded * encode[:, :, None, :, None]).view(experts, blocks[0] * TILE, blocks[1] * TILE)[:, :lines, :columns].to(FLOAT8)
    return ScaledWeights(values.contiguous(), decode, w_EFH.dtype)


def quantize_k_blocks(x_PK: torch.Tensor, sizes_E: torch.Tensor, power_2_scale: bool = False) -> ScaledKBlocks:
    """The rows [P,K] of experts with these sizes, any floating dtype, in e4m3 for a sum over them.

    Sizes that go beyond the rows are cut at the last row, and negative ones count as 0. k-blocks that are not in use are zeros. Waits for
    sizes that are on a device.
    """
    rows, columns = x_PK.shape
    filled_PK = torch.zeros(k_blocks(rows, sizes_E.numel()) * TILE, columns, dtype=torch.float32, device=x_PK.device)
    filled_rows: list[int] = []
    row = 0
    for size in sizes_E.tolist():
        size = min(max(size, 0), rows - row)
        first = sum(filled_rows)
        filled_PK[first : first + size] = x_PK[row : row + size]
        filled_rows.append(_tiles(size) * TILE)
        row += size
    x_BKR = filled_PK.view(-1, TILE, columns).transpose(1, 2)
    encode, decode = tile_scales(x_BKR.abs().amax(-1), power_2_scale)
    values = (x_BKR * encode.unsqueeze(-1)).to(FLOAT8)
    return ScaledKBlocks(values.contiguous(), decode, torch.tensor(filled_rows, dtype=torch.int32, device=x_PK.device))


# ------------------------------------------------------------------------------------------------- weights quantised once


class _WeightCache:
    """Weights in both orientations, quantised when they are first used. Safe to use from several threads.

    It holds the weights' storages, so that their memory and their identities are not given to other tensors. Other tensors are not kept:
    a copy that lives for one product would stay in memory, and what is written to its memory later would be taken for it.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], check: bool):
        self.checks = check
        self._lock = threading.Lock()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._names: dict[int, list[tuple[int, str]]] = {}  # of each storage's weights, after the first byte
        for name, weight in weights:
            storage = weight.untyped_storage()
            self._storages[id(storage)] = storage
            self._names.setdefault(id(storage), []).append((_first_byte(weight), name))
        self._kept: dict[tuple, tuple[tuple, tuple[ScaledWeights, ScaledWeights]]] = {}

    def find(self, w_EFH: torch.Tensor, power_2_scale: bool, quantize: Callable[[], tuple[ScaledWeights, ScaledWeights]], check: bool,
             ) -> tuple[ScaledWeights, ScaledWeights] | None:
        storage = w_EFH.untyped_storage()
        # Work on another stream would not wait for the kernel that quantises.
        stream = torch.cuda.current_stream(w_EFH.device).cuda_stream if w_EFH.is_cuda else None
        which = (id(storage), w_EFH.storage_offset(), w_EFH.shape, w_EFH.stride(), w_EFH.dtype, power_2_scale, stream)
        with self._lock:
            if not self.holds(w_EFH):
                return None  # the context has ended meanwhile
            # Taken before the weight is read, so that a change that comes meanwhile counts.
            state = (w_EFH.data_ptr(), None if w_EFH.is_inference() else w_EFH._version, _unseen_changes)
            known = self._kept.get(which)
            if known is None or known[0] != state:
                known = self._kept[which] = (state, quantize())
            elif check and not all(map(_same_bits, known[1], quantize())):
                raise RuntimeError(f"cached_weights: {self._name(w_EFH)}: expected the numbers that were quantised, got others, written in"
                                   " a way that torch does not count: call gbmoe.float8.weights_changed() after it")
            return known[1]

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether this is in the memory of a weight that is kept, or will be when it is first used."""
        storage = weight.untyped_storage()
        return self._storages.get(id(storage)) is storage

    def clear(self) -> None:
        with self._lock:
            self._storages, self._kept = {}, {}

    def _name(self, weight: torch.Tensor) -> str:
        """That of the last weight that begins where this one does, or before."""
        names = self._names[id(weight.untyped_storage())]
        return max((known for known in names if known[0] <= _first_byte(weight)), default=min(names))[1]


def _first_byte(weight: torch.Tensor) -> int:
    return int(weight.storage_offset()) * weight.element_size()


def _same_bits(first: ScaledWeights, second: ScaledWeights) -> bool:
    return (torch.equal(first.values_ENK.view(torch.uint8), second.values_ENK.view(torch.uint8))
            and torch.equal(first.scales.view(torch.int32), second.scales.view(torch.int32)))


# Of all threads, because autograd computes gradients on CUDA in threads of its own. Replaced, never changed in place.
_caches: tuple[_WeightCache, ...] = ()
_any_caches = False  # what a compiler may guard on: it compiles once within contexts and once outside, however many there are
_caches_lock = threading.Lock()

# Another object after each change of weights that torch may not have counted. The hooks below write these two and read nothing, so that
# a compiler that traces an optimizer's step has nothing to guard on.
_unseen_changes = object()
_in_a_step = False  # An optimizer's: until its end weights may change between any two uses. After one that raised, until the next one's.
_optimizers_are_hooked = False


def weights_changed() -> None:
    """Have every weight that cached_weights keeps, in any context, quantised anew at its next use. It costs nothing else.

    To be called after weights were written to in a way that neither torch counts nor an optimizer's step makes known; cached_weights lists
    the ways.

    Example:
        >>> w1 = torch.randn(4, 32, 16, dtype=torch.bfloat16)
        >>> with cached_weights([w1]):
        ...     _ = w1.data.mul_(0.5)
        ...     weights_changed()
    """
    global _unseen_changes
    _unseen_changes = object()


def _step_begins(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    global _in_a_step
    _in_a_step = True


def _step_ends(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
    global _in_a_step
    _in_a_step = False
    weights_changed()


def _hook_optimizers() -> None:
    """Have the steps of all optimizers make changes known, because fused ones do not count them.

    From the first context on, and for good: torch goes through its hooks without a lock, so that to take one away would raise an error in
    another thread whose optimizer steps; and an optimizer that torch.compile has compiled would be compiled again with each context.
    """
    global _optimizers_are_hooked
    if not _optimizers_are_hooked:
        register_optimizer_step_pre_hook(_step_begins)
        register_optimizer_step_post_hook(_step_ends)
        _optimizers_are_hooked = True


@contextlib.contextmanager
def cached_weights(weights: torch.nn.Module | Iterable[torch.Tensor], *, check: bool = False) -> Iterator[None]:
    """Within it, each of these weights is quantised once: for forward and backward, for all micro-batches, in all threads.

    It pays where weights are used more than once before they change, as by the micro-batches between two steps of an optimizer. The
    first use of a weight quantises it in both orientations, from one read, and keeps them until the context ends: 2 bytes for each number
    beside the weight's own memory. Results have the same bits with it and without.

    A weight is quantised again after each change that can be seen:

    - what torch counts (its `_version`): changes in place by torch's operators, through views too;
    - memory that has moved;
    - the step of any torch.optim.Optimizer, whatever it writes to, and its hooks. Fused ones (`fused=True`) count nothing. During a step,
      as in its closure, nothing kept is used.

    What cannot be seen, and after which `weights_changed` has to be called:

    - steps of optimizers that are no torch.optim.Optimizer, such as the outer classes of Megatron-LM and DeepSpeed, unless they step
      one and then write before the weights are used; and fused kernels that are called without an optimizer;
    - other writes through `.data`, to inference tensors, by NumPy or another library, or by kernels that do not declare them;
    - replays of a CUDA graph that contains an optimizer's step, or any other write;
    - writes of a hook of all optimizers that was registered after the first context, if another one has used the weight before;
    - a storage that is freed and filled again at the same address, which is what FSDP does. FSDP2's parameters are an error.

    Only tensors in the memory of `weights` are kept. A copy in another dtype, which autocast makes for each forward, or one with other
    strides is quantised as without the context. While a CUDA graph is captured nothing kept is used, so that its replays quantise what the
    weights then are. In a function that torch.compile compiles entering has no effect; enter it outside.

    Contexts may be nested and used in several threads at a time. A weight that is in several of them is kept by the one entered first.

    Args:
        weights: a module, for all of its parameters, or tensors.
        check: for debugging: at each use quantise the weight once more, and raise if it is not what is kept. The host waits for it.

    Raises:
        TypeError: for what is not a tensor, and for a DTensor, whose gathered memory comes and goes.
        RuntimeError: with `check`, from the operator that uses a weight which was changed unseen, naming the weight.

    Example:
        >>> w1, w2 = torch.randn(2, 4, 32, 16, dtype=torch.bfloat16)
        >>> with cached_weights([w1, w2]):
        ...     pass  # forward and backward of each micro-batch
    """
    global _caches, _any_caches
    if torch.compiler.is_compiling():
        yield
        return
    require(isinstance(check, bool), "cached_weights", "check", "a bool", repr(check), TypeError)
    named: list[tuple[str, torch.Tensor]]
    if isinstance(weights, torch.nn.Module):
        named = list(weights.named_parameters())
    else:
        named = [(f"weights[{i}]", weight) for i, weight in enumerate(weights)]
    for _, weight in named:
        require(isinstance(weight, torch.Tensor), "cached_weights", "weights", "a module or tensors", type(weight).__name__, TypeError)
        require(not hasattr(weight, "to_local"), "cached_weights", "weights", "plain tensors, whose memory stays", type(weight).__name__,
                TypeError)
    cache = _WeightCache(named, check)
    with _caches_lock:
        _hook_optimizers()
        _caches, _any_caches = (*_caches, cache), True
    try:
        yield
    finally:
        with _caches_lock:
            _caches = tuple(other for other in _caches if other is not cache)
            _any_caches = len(_caches) > 0
        cache.clear()  # an exception's traceback may hold it


def keeps_weights(recipe: Float8BlockScaling | None, weights: Iterable[torch.Tensor]) -> bool:
    """Whether forward is to quantise weights for backward: the recipe says so, and no context of cached_weights keeps one of these. (Where
    a compiler traces, which cannot ask a context, that there is none.)"""
    if recipe is None or not recipe.keep_weights:
        return False
    if not _any_caches:
        return True
    if torch.compiler.is_compiling():
        return False
    if _in_a_step or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return True
    caches = _caches
    return not any(cache.holds(weight) for weight in weights for cache in caches)


def cached(w_EFH: torch.Tensor, power_2_scale: bool, quantize: Callable[[], tuple[ScaledWeights, ScaledWeights]],
           ) -> tuple[ScaledWeights, ScaledWeights] | None:
    """A weight as it is and transposed, from a context that keeps it; `quantize` is called where it is not kept yet. None without one."""
    caches = _caches
    if not caches or _in_a_step or (w_EFH.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    holding = [cache for cache in caches if cache.holds(w_EFH)]
    return holding[0].find(w_EFH, power_2_scale, quantize, any(cache.checks for cache in holding)) if holding else None
