"""What the ranks of a group must agree about in each pass of a layer, and what each must know of the others.

No rank decides alone what another one relies on. Each forward begins with a message to all ranks, in which the numbers of rows travel.
Its header says which layer this is, how many passes this rank has begun in the group, by which path rows travel, and whether gradients are
recorded: these must be equal on all ranks. It also says which gradients are needed here, which may differ: a rank takes part in every trip
that another rank's gradients need. All of it is looked at where the host waits for the numbers of rows anyway.

Shape suffixes: W ranks, N elements of a header.
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from gbmoe import _torch_names
from gbmoe._define_operator import define
from gbmoe.parallel import agreement, failures, groups
from gbmoe.parallel.host_copy import to_device

# A header is [-digest, digest, x, weights, experts, in 16 bits, checkpointed, not checkpointed], int32: the largest of each over all ranks
# tells whether all digests are equal, whether any rank needs a gradient, or rows in 16 bits, and whether some ranks repeat this forward and
# others do not. A compiled rank does not know that, and says neither.
NUMBERS = 8
PASSES_DIFFER = "expert parallelism: expected all ranks of the group to make the same pass of the same layer, in the same order; "


@dataclass(frozen=True)
class Needs:
    """Which gradients are needed: of tokens x, of router weights, and of experts' weights; and whether rows of tokens and of the result's
    gradient are needed as they are, where a recipe of float8 quantises them."""

    x: bool
    weights: bool
    experts: bool
    in_16_bits: bool = True

    @property
    def any(self) -> bool:
        return self.x or self.weights or self.experts


@dataclass(frozen=True)
class Pass:
    """What must be equal on all ranks in one pass.

    Attributes:
        layer: which layer this is, counted in the order of construction, as `next_layer` does; 0 where nobody has counted.
        path: how rows travel, and in what form.
        records: whether gradients are recorded (torch.is_grad_enabled()).
        checkpointed: whether torch.utils.checkpoint will repeat this forward; None in a graph of a compiler.
        number: how many passes this rank has begun in the group.
        backward: the layers whose backward has begun since the pass before, in their order; where rows travel through mapped memory, in
            whose backward ranks send no message of their own.
    """

    layer: int
    path: str
    records: bool
    checkpointed: bool | None
    number: int = 0
    backward: tuple[int, ...] = ()

    def digest(self) -> int:
        """An int32 that differs where any field but `checkpointed` does, except for one case in two thousand million."""
        compared = self.layer, self.path, self.records, self.number, self.backward
        return digest_of(repr(compared))

    def text(self) -> str:
        """All fields, which `in_words` takes apart."""
        return f"{self.layer}\n{self.path!r}\n{self.records}\n{self.checkpointed}\n{self.number}\n{self.backward}"


_NAMES = ("layer", "path", "torch.is_grad_enabled()", "torch.utils.checkpoint", "number of passes begun",
          "layers of the passes of backward since", "pass")


def in_words(text: str) -> dict[str, str]:
    """Each field of a Pass's text by the name that an error shows, and what its last line adds, where it is a pass over mapped memory."""
    return dict(zip(_NAMES, text.split("\n")))


def digest_of(text: str) -> int:
    """An int of 31 bits that differs where the text does, except for one case in two thousand million."""
    return zlib.crc32(text.encode()) & 0x7FFFFFFF


def quantised_by(engine: str | None) -> str:
    """What a path adds where the recipe of this engine quantises rows (gbmoe.engines.FLOAT8_ENGINES)."""
    return "" if engine is None else f" quantised by {engine}"


class _Ranks:
    """The counts of one group on this rank."""

    def __init__(self) -> None:
        self.layers = self.passes = 0
        self.pass_: Pass | None = None
        self.backward: list[int] = []


_RANKS: weakref.WeakKeyDictionary[dist.ProcessGroup, _Ranks] = weakref.WeakKeyDictionary()


def _of(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup, _Ranks]:
    group = groups.whole(group)
    ranks = _RANKS.get(group)
    if ranks is None:
        ranks = _RANKS[group] = _Ranks()
    return group, ranks


def next_layer(group: dist.ProcessGroup | None) -> int:
    """The number of a layer that is being made, the same on all ranks: they make their layers in the same order."""
    _, ranks = _of(group)
    ranks.layers += 1
    return ranks.layers


def count(layer: int, path: str, group: dist.ProcessGroup | None, in_graph: bool = False, records: bool | None = None) -> Pass:
    """Count one more pass of this rank; `records` is what the pass says, torch.is_grad_enabled() where that is None."""
    _, ranks = _of(group)
    ranks.passes += 1
    records = torch.is_grad_enabled() if records is None else records
    checkpointed = None if in_graph else _is_checkpointed()
    ranks.pass_ = Pass(layer, path, records, checkpointed, ranks.passes, tuple(ranks.backward))
    ranks.backward.clear()
    return ranks.pass_


def count_backward(layer: int, group: dist.ProcessGroup | None) -> int:
    """A pass of backward begins, of which the next forward tells the other ranks. Returns how many forwards this rank has begun."""
    _, ranks = _of(group)
    ranks.backward.append(layer)
    return ranks.passes


def passes_begun(group: dist.ProcessGroup | None) -> int:
    """How many passes this rank has begun in the group, which is the number of the last one."""
    return _of(group)[1].passes


def go_on(passes: int, group: dist.ProcessGroup | None) -> None:
    """Count on from as many passes as another rank has begun, after a failure."""
    _, ranks = _of(group)
    ranks.passes = max(passes, ranks.passes)
    ranks.backward.clear()


def begin(layer: int, path: str, needs: Needs, group: dist.ProcessGroup | None, in_graph: bool = False) -> list[int]:
    """Count one more pass of this rank, and return its header."""
    pass_ = count(layer, path, group, in_graph)
    digest, checkpointed = pass_.digest(), pass_.checkpointed
    return [-digest, digest, *map(int, (needs.x, needs.weights, needs.experts, needs.in_16_bits, checkpointed is True,
                                        checkpointed is False))]


def check(header_N: list[int], group: dist.ProcessGroup | None) -> Needs:
    """Which gradients any rank needs, from the largest of each element over all ranks' headers.

    Raises:
        ValueError: on all ranks, where their passes differ; it says which ranks differ in what. Then they count their passes alike again,
            so that a caller that catches it may go on.
    """
    least, most, x, weights, experts, in_16_bits, checkpointed, not_checkpointed = header_N
    if -least != most or (checkpointed and not_checkpointed):
        _raise(group)
    return Needs(bool(x), bool(weights), bool(experts), bool(in_16_bits))


def _raise(group: dist.ProcessGroup | None) -> None:
    whole, ranks = _of(group)
    assert ranks.pass_ is not None
    each: list[Any] = [None] * dist.get_world_size(whole)
    failures.guarded(lambda: dist.all_gather_object(each, ranks.pass_, group=whole), whole, "comparing the passes")
    ranks.passes = max(pass_.number for pass_ in each)
    raise refusal([pass_.text() for pass_ in each], whole)


def refusal(texts: Sequence[str], group: dist.ProcessGroup | None) -> ValueError:
    """The error of all ranks where their passes differ, given the text of each rank's."""
    return ValueError(PASSES_DIFFER + "; ".join(agreement.differences([in_words(text) for text in texts], group)))


def saved_tensors_are_packed() -> bool:
    """Whether something takes saved tensors away and brings others back, as torch.utils.checkpoint does, which compares their shapes."""
    return _torch_names.saved_tensors_hooks() is not None


def _is_checkpointed() -> bool:
    """Whether torch.utils.checkpoint packs what is saved now, or repeats it. False where this torch does not tell."""
    hooks = _torch_names.saved_tensors_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


# ----------------------------------------------------------------------------------------------------- for torch.compile
#
# A graph holds no state of Python's, so what it does at each call stands in two operators. It cannot know at trace time which gradients
# other ranks need, and takes part in all trips; its header says so.

EVERY = Needs(True, True, True)


def _begin(like: torch.Tensor, group_name: str, layer: int, path: str, records: bool) -> torch.Tensor:
    group = _torch_names.process_group(group_name)
    needs = EVERY if records else Needs(False, False, False)
    with torch.set_grad_enabled(records):
        header = begin(layer, path, needs, group, in_graph=True)
    return to_device(torch.tensor(header, dtype=torch.int32, device="cpu"), like.device)


def _check(messages: torch.Tensor, group_name: str) -> torch.Tensor:
    check(messages[:, :NUMBERS].amax(0).tolist(), _torch_names.process_group(group_name))
    return messages[:, NUMBERS:].clone()


begin_in_graph = define(
    "begin_pass(Tensor like, str group_name, int layer, str path, bool records) -> Tensor",
    reference=_begin, fake=lambda like, *_: like.new_empty(NUMBERS, dtype=torch.int32),
    waits=lambda *_: True)  # no replay of a CUDA graph counts a pass
check_in_graph = define("check_pass(Tensor messages, str group_name) -> Tensor", reference=_check,
                        fake=lambda messages, _: messages.new_empty(messages.size(0), messages.size(1) - NUMBERS))


def header(path: str, layer: int, x_TH: torch.Tensor, weights_TK: torch.Tensor, trains: bool, group: dist.ProcessGroup | None,
           engine: str | None = None, in_16_bits: bool = True) -> torch.Tensor:
    """Begin a pass: its header, int32 [N] on the device of x. `trains`: whether the experts may have gradients of their own. `engine`: that
    of a recipe of float8. `in_16_bits`: Needs.in_16_bits of this rank.

    What each row and slot is as it travels belongs to the path: under an autocast of one rank alone rows have another dtype.
    """
    path += (f" of {x_TH.size(1)} x {x_TH.dtype} a row{quantised_by(engine)} and {weights_TK.size(1)} x {weights_TK.dtype} router weights"
             " a token")
    records = torch.is_grad_enabled()
    if torch.compiler.is_compiling():
        return begin_in_graph(x_TH, groups.whole(group).group_name, layer, path, records)
    needs = Needs(records and x_TH.requires_grad, records and weights_TK.requires_grad, records and trains, in_16_bits)
    return to_device(torch.tensor(begin(layer, path, needs, group), dtype=torch.int32, device="cpu"), x_TH.device)


def checked(messages_WX: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, Needs]:
    """(the messages without the headers that they begin with, what any rank needs), of messages on the host. Raises as `check` does."""
    if torch.compiler.is_compiling():
        records = torch.is_grad_enabled()
        return check_in_graph(messages_WX, groups.whole(group).group_name), Needs(records, records, records)
    needs = check(messages_WX[:, :NUMBERS].amax(0).tolist(), group)
    return messages_WX[:, NUMBERS:], needs


# ------------------------------------------------------------------------------------------- trips that another rank needs


_ANCHORS: dict[tuple, torch.Tensor] = {}  # by type and index of the device


def make_anchor(device: torch.device) -> None:
    """Make what `joined` needs on a device. Not within a trace, where a compiler takes no new tensor that requires a gradient."""
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type != "meta" and (device.type, device.index) not in _ANCHORS:
        with torch.inference_mode(False):
            _ANCHORS[device.type, device.index] = torch.zeros((), device=device, dtype=torch.float32, requires_grad=True)


class _Joined(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, anchor):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return None, None


def joined(x: torch.Tensor, needed: bool) -> torch.Tensor:
    """x, which requires a gradient if `needed`, so that this rank takes part in backward's trips. Where x needs none of its own, the
    gradient ends here."""
    if not needed or x.requires_grad or not torch.is_grad_enabled():
        return x
    if not torch.compiler.is_compiling():
        make_anchor(x.device)
    elif (x.device.type, x.device.index) not in _ANCHORS:  # of a layer that was made on another device
        from gbmoe.parallel import uncompiled
        uncompiled.make_anchor(x.device)
    return _Joined.apply(x, _ANCHORS[x.device.type, x.device.index])
