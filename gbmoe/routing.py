"""RoutingPlan: which row of the padded, expert-major matrix belongs to which token, on the device and without a host wait.

Shape suffixes: T tokens, K slots a token (top-k), R = T * K slots, E experts, P padded rows.
"""

from __future__ import annotations

import functools
from dataclasses import InitVar, dataclass, field, replace

import torch

from gbmoe import extension, reference
from gbmoe._checks import require, require_tensor
from gbmoe._library import define

_NAME = "RoutingPlan.from_experts"
_INT32_MAX = 2**31 - 1


def _fake_routing_plan(experts, num_experts, align, check):
    rows = reference.padded_rows(experts.numel(), num_experts, align)
    sizes = (experts.shape, (rows,), (num_experts,), (num_experts + 1,), (num_experts,))
    return tuple(experts.new_empty(size, dtype=torch.int32) for size in sizes)


@functools.cache
def _max_experts(device: torch.device) -> int:
    return torch.ops.gbmoe_cuda.routing_plan_max_experts(device.index)


def kernels_serve(device: torch.device, num_experts: int) -> bool:
    """True where the CUDA kernels are loaded, and the device has shared memory enough for so many experts."""
    return device.type == "cuda" and extension.loaded() and num_experts <= _max_experts(device)


def _check_values(experts_TK: torch.Tensor, num_experts: int, align: int, check: str) -> None:
    # Inside the operator, where the values are, so that a compiled graph checks them too.
    rows = reference.padded_rows(experts_TK.numel(), num_experts, align)
    require(rows <= _INT32_MAX, _NAME, "experts", f"at most {_INT32_MAX} padded rows (rows are int32)", rows)
    if check == "none" or experts_TK.numel() == 0:
        return
    low, high = experts_TK.aminmax()
    if check == "wait":
        lowest, highest = int(low), int(high)
        require(lowest >= -1 and highest < num_experts, _NAME, "experts", f"ids in [0, {num_experts}), or -1 to drop a slot",
                f"ids from {lowest} to {highest}")
    else:
        torch._assert_async((low >= -1) & (high < num_experts),
                            f"{_NAME}: experts: expected ids in [0, {num_experts}), or -1 to drop a slot")


def _routing_plan_reference(experts, num_experts, align, check):
    _check_values(experts, num_experts, align, check)
    return reference.routing_plan(experts, num_experts, align)


def _routing_plan_cuda(experts, num_experts, align, check):
    if not kernels_serve(experts.device, num_experts):
        return _routing_plan_reference(experts, num_experts, align, check)
    _check_values(experts, num_experts, align, check)
    rows = reference.padded_rows(experts.numel(), num_experts, align)
    return torch.ops.gbmoe_cuda.routing_plan(experts.contiguous(), num_experts, align, rows)


_routing_plan = define(
    "routing_plan(Tensor experts, int num_experts, int align, str check) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_routing_plan_reference, fake=_fake_routing_plan, cuda=_routing_plan_cuda,
    waits=lambda experts, num_experts, align, check: check == "wait",
)


def _check_plan(plan: RoutingPlan) -> None:
    """Raise unless kernels may take the plan's tensors as they are: all but what they hold."""
    name, experts = "RoutingPlan", plan.num_experts
    for argument, least in (("num_experts", 1), ("align", 1)):
        value = getattr(plan, argument)
        require(isinstance(value, int) and value >= least, name, argument, f"an int of at least {least}", value)
    device = getattr(plan.row_of_slot_TK, "device", None)
    for argument, rank in (("row_of_slot_TK", 2), ("slot_of_row_P", 1), ("counts_E", 1), ("offsets_E1", 1), ("padded_counts_E", 1)):
        tensor = getattr(plan, argument)
        require_tensor(tensor, name, argument, rank=rank, dtypes=(torch.int32,), device=device)
        require(tensor.is_contiguous(), name, argument, "a contiguous tensor", "one that is not")
    for argument, size in (("counts_E", experts), ("offsets_E1", experts + 1), ("padded_counts_E", experts)):
        got = getattr(plan, argument).size(0)
        require(got == size, name, argument, lambda: f"{size} entries", got)  # noqa: B023  (called at once)
    require(plan.num_rows % plan.align == 0, name, "slot_of_row_P", lambda: f"a multiple of align == {plan.align} rows", plan.num_rows)
    if plan._host_sizes_E is not None:
        require_tensor(plan._host_sizes_E, name, "_host_sizes_E", rank=1, dtypes=(torch.int64,), device=torch.device("cpu"))
        got = plan._host_sizes_E.size(0)
        require(got == experts, name, "_host_sizes_E", lambda: f"{experts} entries", got)


@dataclass(eq=False)
class RoutingPlan:
    """Where each slot's row is. Built once a layer call; gather, products, scatter and their gradients all read it.

    Slot t * K + j is token t's j-th choice. Rows are expert-major; inside an expert they follow slot order (the sort is
    stable). Each expert's rows start at a multiple of `align` and are padded to one. All tensors are int32, on the device of
    the ids:

        row_of_slot_TK     row of each slot, -1 where the slot is dropped (its id names no expert)
        slot_of_row_P      slot of each row, -1 where the row is an expert's padding, -2 behind the last expert
        counts_E           rows of each expert, without padding
        offsets_E1         first row of each expert; offsets_E1[E] is the end of the last one
        padded_counts_E    rows of each expert with its padding: the sizes of the grouped products

    counts_E is for callers, and nothing here reads it again: it may be reduced over ranks in place (load statistics) between
    forward and backward. The other tensors are what kernels and autograd read, and must not be written to.

    P is a bound that holds for every routing, so that building the plan needs no host wait; `exact=True` waits once and cuts
    the plan to the rows in use.

    A plan may be made by hand. Its tensors must have those shapes, int32 and contiguous, on one device, or TypeError or ValueError
    says which does not. What they hold is not looked at: an entry outside its range (a row beyond P, a slot beyond T * K) counts
    as none, and no operator reads or writes outside its tensors, but rows on which row_of_slot and slot_of_row do not agree may
    come out as anything.

    Example:
        >>> plan = RoutingPlan.from_experts(torch.tensor([[1, 0], [1, 2]]), num_experts=3)
        >>> plan.slot_of_row_P.tolist()
        [1, 0, 2, 3]
    """

    num_experts: int
    align: int
    row_of_slot_TK: torch.Tensor
    slot_of_row_P: torch.Tensor
    counts_E: torch.Tensor
    offsets_E1: torch.Tensor
    padded_counts_E: torch.Tensor
    _host_sizes_E: torch.Tensor | None = field(default=None, repr=False)
    _trusted: InitVar[bool] = False  # not made by hand: the check would be several us of every layer

    def __post_init__(self, _trusted: bool) -> None:
        if not _trusted:
            _check_plan(self)

    @classmethod
    def from_experts(
        cls, experts_TK: torch.Tensor, num_experts: int, *, align: int = 1, exact: bool = False, check: str = "auto"
    ) -> RoutingPlan:
        """Build the plan from expert ids.

        Args:
            experts_TK: ids [T,K] (or [T], one slot a token), int32 or int64, any device. -1 drops a slot.
            num_experts: E, at least 1.
            align: each expert's rows are padded to a multiple of this, at least 1.
            exact: cut P to the rows in use; waits for the device once.
            check: what happens to ids outside [-1, E). "wait" reads them back and raises ValueError; "device" raises a
                device-side assertion without a wait; "none" drops their slots. "auto" is "wait" on the CPU, where nothing
                has to be waited for, and "device" elsewhere. Whatever is chosen, no row out of bounds is ever touched.
        """
        require_tensor(experts_TK, _NAME, "experts", rank=(1, 2), dtypes=(torch.int32, torch.int64))
        require(isinstance(num_experts, int) and num_experts >= 1, _NAME, "num_experts", "an int of at least 1", num_experts)
        require(isinstance(align, int) and align >= 1, _NAME, "align", "an int of at least 1", align)
        require(check in ("auto", "wait", "device", "none"), _NAME, "check", "auto, wait, device or none", repr(check))
        if experts_TK.dim() == 1:
            experts_TK = experts_TK.unsqueeze(1)
        if check == "auto":
            check = "wait" if experts_TK.device.type == "cpu" else "device"
        plan = cls(num_experts, align, *_routing_plan(experts_TK, num_experts, align, check), _trusted=True)  # type: ignore[misc]
        return plan.exact() if exact else plan

    @property
    def num_tokens(self) -> int:
        return self.row_of_slot_TK.size(0)

    @property
    def top_k(self) -> int:
        return self.row_of_slot_TK.size(1)

    @property
    def num_rows(self) -> int:
        """The rows of the padded matrix, P."""
        return self.slot_of_row_P.size(0)

    @property
    def expert_of_tile(self) -> torch.Tensor:
        """Expert of each run of `align` rows, int32 [P / align], -1 behind the last expert. Computed at every access."""
        first_rows = torch.arange(0, self.num_rows, self.align, dtype=torch.int32, device=self.offsets_E1.device)
        experts = torch.searchsorted(self.offsets_E1[1:], first_rows, right=True, out_int32=True)
        return torch.where(first_rows < self.offsets_E1[-1], experts, -1)

    @property
    def has_host_sizes(self) -> bool:
        """True where host_sizes() waits for nothing, because it has been asked for before."""
        return self._host_sizes_E is not None

    def host_sizes(self) -> torch.Tensor:
        """padded_counts_E as int64 on the CPU, for engines that need it there. Waits for the device, once a plan.

        Raises:
            ValueError: on the meta device, where there are no numbers.
        """
        if self._host_sizes_E is None:
            require(self.counts_E.device.type != "meta", "RoutingPlan.host_sizes", "device", "one that has the plan's numbers",
                    self.counts_E.device)
            self._host_sizes_E = self.padded_counts_E.to("cpu", torch.int64)
        elif not torch.compiler.is_compiling() and self._host_sizes_E.is_inference() and not torch.is_inference_mode_enabled():
            self._host_sizes_E = self._host_sizes_E.clone()  # the plan serves training now, and autograd saves no such tensor
        return self._host_sizes_E

    def exact(self) -> RoutingPlan:
        """The same plan without the rows behind the last expert. Waits for the device, once a plan."""
        rows = int(self.host_sizes().sum())
        return replace(self, slot_of_row_P=self.slot_of_row_P[:rows], _trusted=True)
