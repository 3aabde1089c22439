"""Replay: the experts that a forward chose, recorded, and taken again in another one, as reinforcement learning wants.

Shape suffixes: T tokens, L layers, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from gbmoe import _torch_names
from gbmoe._checks import require
from gbmoe.layers.dmoe import dMoE
from gbmoe.layers.router import LearnedRouter

_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}  # what torch's wrappers name the module that they hold
_EAGER = "gbmoe.record_experts and gbmoe.replay_experts are eager: torch.compile breaks its graph there, which fullgraph=True forbids"


@contextlib.contextmanager
def record_experts(model: torch.nn.Module, *, dtype: torch.dtype = torch.int32) -> Iterator[dict[str, list[torch.Tensor]]]:
    """Within this context every forward of a layer of `model` records the ids of its tokens' experts, for replay_experts.

    Layers are the dMoEs of the model, with any router, and LearnedRouters that are not a dMoE's. Each is known by its name in
    `model.named_modules()`, without what DistributedDataParallel, FSDP, torch.compile and checkpoint wrappers add to it. A forward that
    torch.utils.checkpoint repeats in backward records nothing. Where experts are spread over ranks, each rank records its own tokens.

    The ids stay on the device, and nothing waits for them: a layer's forward makes one small copy. Where torch.compile compiles a layer,
    its graph breaks within the context. Forwards of a model run one after the other, in any thread.

    Args:
        model: a module with layers, of which none is in another record_experts or replay_experts.
        dtype: of the ids that are kept: torch.int16, where there are not more than 32,768 experts, torch.int32 or torch.int64.

    Yields:
        {name: [ids [T,K] of each forward, in their order]}, in the order of model.modules(); -1 where a slot has no expert, as padding has.
        T counts tokens as x.reshape(-1, H) does. Within the context LearnedRouters compute as they do with a padding_mask or given
        experts, so that replay gives the same bits. Without either the last bits may be others.

    Raises:
        TypeError, ValueError: naming the argument; where a layer is in such a context already, or the model has none.
        RuntimeError: in a forward that is traced, or in a transform of torch.func, whose ids mean nothing outside.
    """
    layers = _layers(model, "record_experts")
    require(dtype in (torch.int16, torch.int32, torch.int64), "record_experts", "dtype", "torch.int16, torch.int32 or torch.int64", dtype)
    for name, layer in layers.items():
        experts = layer.args.moe_num_experts
        require(experts - 1 <= torch.iinfo(dtype).max, "record_experts", "dtype", f"one that holds the ids of {_said(name)},"
                f" which has {experts} experts", dtype)
    recorded: dict[str, list[torch.Tensor]] = {name: [] for name in layers}
    with _on_layers(layers, {name: _Recorder(name, layer, recorded[name], dtype) for name, layer in layers.items()}, "record_experts"):
        yield recorded


@contextlib.contextmanager
def replay_experts(model: torch.nn.Module, recorded: Mapping[str, Sequence[torch.Tensor]]) -> Iterator[None]:
    """Within this context the forwards of each layer of `model` take the given experts, one forward after the other, instead of choosing.

    Weights are what the router computes for these experts now, and gradients flow through them. Layers, names and the order of tokens
    are record_experts'. Ids outside [0,E), as -1 for padding, leave their slots out. Other arguments, such as padding_mask, are up to the
    caller, as ever.

    A forward that torch.utils.checkpoint repeats in backward, reentrant or not, takes the ids that it took when it first ran, in whatever
    order backward comes to the forwards. The same holds for other functions that first compute without gradients, and again in backward.
    So the backward of checkpoints has to be within the context. Repeated forwards of a reentrant checkpoint that contains checkpoints, or
    is in one, are refused. A layer may run several times in one checkpoint, unless this contains others.

    Where torch.compile compiles a layer, its graph breaks within the context. The forwards of a model run one after the other, in one
    thread; backward may run in others.

    Args:
        model: a module with layers, of which none is in another record_experts or replay_experts.
        recorded: for each layer, by its name, the ids [T,K] of each forward; integers, on the device of x. What record_experts yields, or
            unstack_experts makes of what a generator returns.

    Raises:
        TypeError, ValueError: naming the layer: where names or shapes are not those of the model; in a forward, where its tokens are
            not those of the ids, given_experts are given as well, or there are no ids left; at the end, unless an exception ends the
            context, where ids are left over.
        NotImplementedError: in a repeated forward, where it cannot be told which one it repeats.
        RuntimeError: in a forward that is traced, or in a transform of torch.func.

    Example:
        >>> from gbmoe import Arguments
        >>> layer = dMoE(Arguments(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4,
        ...                        moe_top_k=2, bias=False, fp16=False, device="cpu"))
        >>> x = torch.randn(7, 3, 32)
        >>> with record_experts(layer) as recorded:
        ...     before = layer(x)
        >>> with replay_experts(layer, recorded):
        ...     assert torch.equal(layer(x), before)
    """
    layers = _layers(model, "replay_experts")
    require(isinstance(recorded, Mapping), "replay_experts", "recorded", "a mapping from names of layers to ids", type(recorded), TypeError)
    missing, unknown = [n for n in layers if n not in recorded], [n for n in recorded if n not in layers]
    require(not missing and not unknown, "replay_experts", "recorded", f"ids for each of the layers {list(layers)}",
            f"none for {missing}" if missing else f"some for {unknown}")
    replayers = {}
    for name, layer in layers.items():
        for ids in recorded[name]:
            _require_ids("replay_experts", f"recorded of {_said(name)}", ids, 2, layer.args.moe_top_k)
        replayers[name] = _Replayer(name, [_outside_of_inference(ids) for ids in recorded[name]])
    with _on_layers(layers, replayers, "replay_experts"):
        yield
    for replayer in replayers.values():
        replayer.require_end()
    if any(replayer.may_be_repeated for replayer in replayers.values()) and not any(r.repeated for r in replayers.values()):
        warnings.warn("replay_experts: layers ran in checkpoints, and no backward repeated them within the context; one that comes after it"
                      " lets their routers choose again", stacklevel=3)


def stack_experts(recorded: Mapping[str, Sequence[torch.Tensor]]) -> torch.Tensor:
    """What record_experts yields as one tensor [T,L,K], as generators return it: the tokens of all forwards, one forward after the other.

    A generator that decodes [1, batch] tokens a forward makes the order of tokens [sequence, batch], which is MegaBlocks'.

    Raises:
        ValueError: where there is no layer, or layers differ in T or K; it names them.
    """
    require(bool(recorded), "stack_experts", "recorded", "ids of a layer or more", "none")
    for name, forwards in recorded.items():
        require(len(forwards) > 0, "stack_experts", "recorded", f"at least one forward of {_said(name)}", "none")
    layers = {name: torch.cat(list(forwards)) for name, forwards in recorded.items()}
    first, expected = next((name, list(ids_TK.shape)) for name, ids_TK in layers.items())
    for name, ids_TK in layers.items():
        require(list(ids_TK.shape) == expected, "stack_experts", "recorded", f"as many tokens and experts of {_said(name)} as of"
                f" {_said(first)}, {expected}", list(ids_TK.shape))
    return torch.stack(list(layers.values()), dim=1)


def unstack_experts(model: torch.nn.Module, ids: torch.Tensor, tokens: Sequence[int] | None = None) -> dict[str, list[torch.Tensor]]:
    """What replay_experts takes, of one tensor of ids [T,L,K] with the layers in the order of model.modules().

    Args:
        model: as for replay_experts; it has L layers.
        ids: [T,L,K], integers, on the device of the layers' tokens.
        tokens: the number of tokens of each forward, in their order, as of micro-batches; None for one forward with all of them.

    Returns:
        {name: [ids [T,K] of each forward]}, views of `ids`.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.
    """
    layers = _layers(model, "unstack_experts")
    _require_ids("unstack_experts", "ids", ids, 3)
    require(ids.size(1) == len(layers), "unstack_experts", "ids", f"shape [T,L,K] with the L == {len(layers)} layers {list(layers)}",
            list(ids.shape))
    sizes = [ids.size(0)] if tokens is None else list(tokens)
    require(sum(sizes) == ids.size(0), "unstack_experts", "tokens", f"numbers whose sum is the T == {ids.size(0)} of ids", sizes)
    return {name: list(ids[:, number].split(sizes)) for number, name in enumerate(layers)}


# ------------------------------------------------------------------------------------------------------- layers and their tapes


def _layers(model: torch.nn.Module, operator: str) -> dict[str, Any]:
    """The layers of a model by their names. A dMoE's router is part of it, whatever it is."""
    require(isinstance(model, torch.nn.Module), operator, "model", "a torch.nn.Module", type(model), TypeError)
    while isinstance(model, torch.nn.parallel.DistributedDataParallel):
        model = model.module
    layers: dict[str, Any] = {}
    parts: set[torch.nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, dMoE):
            parts.update(module.modules())
        elif not isinstance(module, LearnedRouter) or module in parts:
            continue
        layers[".".join(part for part in name.split(".") if part not in _WRAPPERS)] = module
    require(bool(layers), operator, "model", "a module with a gbmoe.dMoE or LearnedRouter", type(model).__name__)
    return layers


@contextlib.contextmanager
def _on_layers(layers: dict[str, Any], tapes: Mapping[str, _Tape], operator: str) -> Iterator[None]:
    """Each layer has its tape, and has none again at the end."""
    for name, layer in layers.items():
        require(layer._tape is None, operator, "model", f"layers in no other record_experts or replay_experts, but {_said(name)} is in one",
                type(layer).__name__)
    try:
        for name, layer in layers.items():
            layer.__dict__["_tape"] = tapes[name]
        yield
    finally:
        for layer in layers.values():
            layer.__dict__.pop("_tape", None)


def _said(name: str) -> str:
    return f"layer {name}" if name else "the layer"


def _require_ids(operator: str, argument: str, ids: Any, rank: int, top_k: int | None = None) -> None:
    """Raise unless `ids` is a tensor of integers of this rank, with so many slots a token."""
    require(isinstance(ids, torch.Tensor), operator, argument, "tensors of ids", type(ids), TypeError)
    require(ids.dtype in _INTEGERS, operator, argument, "ids of an integer dtype", ids.dtype, TypeError)
    require(ids.dim() == rank and top_k in (None, ids.size(-1)), operator, argument,
            "shape [T,L,K]" if rank == 3 else f"shape [T,K] with K == {top_k}", list(ids.shape))


def _outside_of_inference(ids: torch.Tensor) -> torch.Tensor:
    """The ids, so that autograd may keep them: a generator's may be of torch.inference_mode."""
    return ids.clone() if ids.is_inference() and not torch.is_inference_mode_enabled() else ids


class _Tape:
    """What a layer calls around its router: `before` returns the padding_mask and the given_experts that this is given, `after` sees the
    experts that it returned.

    torch.compile does not trace what is done with them: the state of a tape would become a part of the graph.
    """

    operator = ""
    _call: Any  # what `before` or `after` of a class of tapes does, outside of compiled graphs

    def __init__(self, name: str):
        self.name = name
        self._called = torch.compiler.disable(self._call, reason=_EAGER)

    def before(self, x: torch.Tensor, padding_mask: torch.Tensor | None, given_experts: torch.Tensor | None,
               ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return padding_mask, given_experts

    def after(self, experts_TK: torch.Tensor) -> None:
        pass

    def _require_eager(self) -> None:
        if _torch_names.is_transformed() or _torch_names.current_trace() is not None:
            raise RuntimeError(f"{self.operator}: {_said(self.name)}: expected forwards that are neither traced (torch.export,"
                               " torch.jit.trace, make_fx, FakeTensorMode) nor in a transform of torch.func")

    def __reduce__(self):
        return type(None), ()  # a copy of a layer is in no context


class _Recorder(_Tape):
    operator = "record_experts"

    def __init__(self, name: str, layer: dMoE | LearnedRouter, forwards: list[torch.Tensor], dtype: torch.dtype):
        super().__init__(name)
        self._forwards, self._dtype = forwards, dtype
        self._is_learned = isinstance(getattr(layer, "router", layer), LearnedRouter)

    def before(self, x, padding_mask, given_experts):
        # A softmax and the highest have a path of their own, which may round otherwise than the one that takes given experts. A mask
        # without padding makes the router take the latter, so that replay gives the same bits.
        if padding_mask is None and given_experts is None and self._is_learned:
            padding_mask = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
        return padding_mask, given_experts

    def after(self, experts_TK):
        (self._called if torch.compiler.is_dynamo_compiling() else self._call)(experts_TK)

    def _call(self, experts_TK):
        self._require_eager()
        # A copy: autograd keeps the ids themselves, and memory of a CUDA graph is written again. A repeated forward makes it too, because
        # selective checkpoints count the operators of both.
        ids_TK = experts_TK.to(self._dtype, copy=True)
        if not _torch_names.is_in_backward():
            self._forwards.append(ids_TK)


class _Forward(NamedTuple):
    """A forward that took ids: the number of autograd's next node then, and whether a checkpoint ran it, by an autograd.Function
    (reentrant), or with hooks of saved tensors (non-reentrant), by which the forwards of one checkpoint are known."""
    node: int
    reentrant: bool
    checkpoint: weakref.ref | None


class _Replayer(_Tape):
    """Gives a layer the ids of its forwards.

    A forward that backward repeats is told by the node of autograd's graph that asks for it, since nodes are numbered in the order
    in which they are made. A reentrant checkpoint's node is made before its function runs: it repeats the first forward after it. A
    non-reentrant one is repeated for a node that its function made after the layer's router began, because backward comes to later nodes
    first: it repeats the last forward before it, from the first one on that ran in the same checkpoint. Forwards that are repeated for
    the same node follow each other.
    """

    operator = "replay_experts"

    def __init__(self, name: str, ids: list[torch.Tensor]):
        super().__init__(name)
        self._ids, self._forwards = ids, list[_Forward]()
        self._last = 0  # the last repeated forward, and for what it was repeated
        self._last_for: tuple[int, int] | None = None
        self.repeated = self.may_be_repeated = False

    def before(self, x, padding_mask, given_experts):
        return padding_mask, (self._called if torch.compiler.is_dynamo_compiling() else self._call)(x, given_experts)

    def _call(self, x, given_experts):
        self._require_eager()
        require(given_experts is None, "replay_experts", "given_experts", f"None for {_said(self.name)}, whose ids are replayed",
                "ids as well")
        forward = self._repeated_forward() if _torch_names.is_in_backward() else self._next_forward()
        ids_TK = self._ids[forward]
        tokens = x.numel() // max(x.size(-1), 1)
        require(ids_TK.size(0) == tokens, "replay_experts", f"recorded of {_said(self.name)}",
                f"ids of {tokens} tokens for forward {forward}", list(ids_TK.shape))
        require(ids_TK.device == x.device, "replay_experts", f"recorded of {_said(self.name)}", f"ids on {x.device}", ids_TK.device)
        if ids_TK.dtype not in (torch.int32, torch.int64):
            ids_TK = ids_TK.to(torch.int32)
        return ids_TK.reshape(*x.shape[:-1], ids_TK.size(1))

    def _next_forward(self) -> int:
        number = len(self._forwards)
        require(number < len(self._ids), "replay_experts", f"recorded of {_said(self.name)}", f"ids for forward {number}",
                f"those of {len(self._ids)} forwards")
        reentrant, checkpoint = _torch_names.is_in_a_function(), _checkpoint()
        self.may_be_repeated |= reentrant or checkpoint is not None
        self._forwards.append(_Forward(_torch_names.next_node(), reentrant, checkpoint))
        return number

    def _repeated_forward(self) -> int:
        self.repeated = True
        require(bool(self._forwards), "replay_experts", f"recorded of {_said(self.name)}", "the forward that backward repeats in the same"
                " context", "none")
        if len(self._forwards) == 1:
            return 0
        repeated_for = _torch_names.repeated_for()
        if repeated_for is None:
            raise NotImplementedError(f"replay_experts: {_said(self.name)}: it ran {len(self._forwards)} times, and this torch does not"
                                      " tell which of these backward repeats: use one context for each forward and its backward")
        span = self._span(repeated_for[1])
        follows = repeated_for == self._last_for and self._last + 1 in span
        self._last, self._last_for = self._last + 1 if follows else span[0], repeated_for
        # Where it will be repeated once more, it will be for a node that is made now, whose number says nothing.
        if _torch_names.is_in_a_function() or (self._forwards[self._last].reentrant and _checkpoint() is not None):
            self._refuse("a reentrant checkpoint contains another one, or is in one")
        return self._last

    def _span(self, node: int) -> range:
        """The forwards that may be repeated for this node, in their order."""
        forwards = self._forwards
        after = next((number for number, forward in enumerate(forwards) if forward.node > node), len(forwards))
        if after < len(forwards) and forwards[after].reentrant:
            if after > 0 and forwards[after - 1].checkpoint is not None:
                self._refuse("it ran in a reentrant checkpoint and in another one")
            return range(after, len(forwards))
        first = max(after - 1, 0)
        end, checkpoint = first + 1, forwards[first].checkpoint
        while first > 0 and checkpoint is not None and forwards[first - 1].checkpoint == checkpoint:
            first -= 1
        while end < len(forwards) and checkpoint is not None and forwards[end].checkpoint == checkpoint:
            end += 1
        return range(first, end)

    def _refuse(self, why: str) -> None:
        raise NotImplementedError(f"replay_experts: {_said(self.name)}: {why}, so that it cannot be told which forward is repeated: use"
                                  " torch.utils.checkpoint with use_reentrant=False")

    def require_end(self) -> None:
        require(len(self._forwards) == len(self._ids), "replay_experts", f"recorded of {_said(self.name)}",
                f"ids of the {len(self._forwards)} forwards that ran", f"those of {len(self._ids)}")


def _checkpoint() -> weakref.ref | None:
    """What stands for the non-reentrant checkpoint whose function runs now for the first time; None outside."""
    hooks = _torch_names.saved_tensors_hooks()
    # References to one function are the same object, also after it.
    return weakref.ref(hooks[0]) if hooks is not None and _torch_names.is_of_a_checkpoint(hooks[0]) else None
