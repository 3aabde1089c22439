"""Weights that are quantised once and kept: within a context, until they change, or from forward to backward.

Shape suffixes: E experts, F and H the sides of a weight, N and K those as a product takes it.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from gbmoe._checks import require
from gbmoe.float8.recipe import Float8BlockScaling
from gbmoe.float8.scaled_tensors import ScaledWeights
from gbmoe.separate_weights import Stack


class _WeightCache:
    """Weights in both orientations, quantised when they are first used. Safe to use from several threads.

    It holds the weights' storages, so that their memory and their identities are not given to other tensors. Other tensors are not kept:
    a copy that lives for one product would stay in memory, and what is written to its memory later would be taken for it.
    """

    def __init__(self, weights: Iterable[tuple[str, torch.Tensor]], check: bool):
        self.checks = check
        self._lock = threading.Lock()
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._weights: dict[int, list[tuple[int, str, torch.Tensor]]] = {}  # of each storage, by their first bytes
        for name, weight in weights:
            storage = weight.untyped_storage()
            self._storages[id(storage)] = storage
            self._weights.setdefault(id(storage), []).append((_first_byte(weight), name, weight.detach()))
        for of_storage in self._weights.values():
            of_storage.sort(key=_FIRST_BYTE)
        self._kept: dict[tuple, tuple[tuple, tuple[ScaledWeights, ScaledWeights]]] = {}

    def find(self, w_EFH: Stack, power_2_scale: bool, quantize: Callable[[], tuple[ScaledWeights, ScaledWeights]], check: bool,
             ) -> tuple[ScaledWeights, ScaledWeights] | None:
        # Work on another stream would not wait for the kernel that quantises.
        stream = torch.cuda.current_stream(w_EFH.device).cuda_stream if w_EFH.device.type == "cuda" else None
        view, tensors = (w_EFH, ()) if isinstance(w_EFH, torch.Tensor) else (w_EFH.lowest, w_EFH.tensors)
        which = (*map(_place, (view, *tensors)), view.shape, view.stride(), w_EFH.dtype, power_2_scale, stream)
        with self._lock:
            if not self.holds(w_EFH):
                return None  # the context has ended meanwhile
            # Taken before the weight is read, so that a change that comes meanwhile counts. What gbmoe.stacked makes of a list counts no
            # changes of the list's tensors.
            state = (_unseen_changes, *map(_state, tensors or (view, *(weight for _, _, weight in self._within(view)))))
            known = self._kept.get(which)
            if known is None or known[0] != state:
                known = self._kept[which] = (state, quantize())
            elif check and not all(map(_same_bits, known[1], quantize())):
                raise RuntimeError(f"cached_weights: {self._name(w_EFH)}: expected the values that were quantised, got others, written in"
                                   " a way that torch does not count: call gbmoe.float8.weights_changed() after it")
            return known[1]

    def holds(self, weight: Stack) -> bool:
        """Whether this is in the memory of weights that are kept, or will be when they are first used."""
        storages = map(torch.Tensor.untyped_storage, _tensors(weight))
        return all(self._storages.get(id(storage)) is storage for storage in storages)

    def clear(self) -> None:
        with self._lock:
            self._storages, self._weights, self._kept = {}, {}, {}

    def _within(self, tensor: torch.Tensor) -> list[tuple[int, str, torch.Tensor]]:
        """The last weight that begins where this tensor does, or before, and those that begin within it."""
        known, begin = self._weights[id(tensor.untyped_storage())], _first_byte(tensor)
        last = begin + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) * tensor.element_size()
        first = max(bisect_right(known, begin, key=_FIRST_BYTE) - 1, 0)
        return known[first:max(first + 1, bisect_right(known, last, key=_FIRST_BYTE))]

    def _name(self, weight: Stack) -> str:
        tensors = _tensors(weight)
        first, last = self._within(tensors[0])[0][1], self._within(tensors[-1])[-1][1]
        return first if first == last else f"{first} to {last}"


_FIRST_BYTE = itemgetter(0)


def _tensors(weight: Stack) -> tuple[torch.Tensor, ...]:
    return (weight,) if isinstance(weight, torch.Tensor) else weight.tensors


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    return id(tensor.untyped_storage()), int(tensor.storage_offset())


def _state(tensor: torch.Tensor) -> tuple[int, int | None]:
    """What changes with the tensor's values, as far as torch counts, or with its memory."""
    return tensor.data_ptr(), None if tensor.is_inference() else tensor._version


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
    besides the weight's own memory. Results have the same bits with it and without.

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
    - what an optimizer's step writes after it has stepped another optimizer, until it ends;
    - writes of a hook of all optimizers that was registered after the first context, if another one has used the weight before;
    - a storage that is freed and filled again at the same address, which is what FSDP does. FSDP2's parameters are an error.

    Only tensors in the memory of `weights` are kept, among them parts of one and lists of several. A copy in another dtype, which autocast
    makes for each forward, is quantised as without the context. While a CUDA graph is captured nothing kept is used, so that its replays
    quantise what the weights then are. In a function that torch.compile compiles entering has no effect; enter it outside.

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


def cached(w_EFH: Stack, power_2_scale: bool, quantize: Callable[[], tuple[ScaledWeights, ScaledWeights]],
           ) -> tuple[ScaledWeights, ScaledWeights] | None:
    """A weight as it is and transposed, from a context that keeps it; `quantize` is called where it is not kept yet. None without one."""
    caches = _caches
    if not caches or _in_a_step or (w_EFH.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return None
    holding = [cache for cache in caches if cache.holds(w_EFH)]
    return holding[0].find(w_EFH, power_2_scale, quantize, any(cache.checks for cache in holding)) if holding else None
