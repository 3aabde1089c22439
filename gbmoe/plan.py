"""RoutingPlan: which row of the padded, expert-major matrix belongs to which token, on the device and without a host wait.

Shape suffixes: T tokens, K slots a token (top-k), R = T * K slots, E experts, P padded rows.
"""

from __future__ import annotations

from dataclasses import InitVar, dataclass, replace
from typing import cast

import torch

from gbmoe._checks import as_device, require, require_tensor
from gbmoe._define_operator import define, refuse_jit_tracing
from gbmoe.launch import permute
from gbmoe.plain import plain_plan
from gbmoe.slot_map import SlotMap

_OF_EXPERTS = "RoutingPlan.from_experts"
_OF_COUNTS = "RoutingPlan.from_counts"
_INT32_MAX = 2**31 - 1


def _fake_routing_plan(experts, num_experts, align, check):
    rows = plain_plan.padded_rows(experts.numel(), num_experts, align)
    sizes = (experts.shape, (rows,), (num_experts,), (num_experts + 1,), (num_experts,))
    return tuple(experts.new_empty(size, dtype=torch.int32) for size in sizes)


def _numbered(device: torch.device) -> torch.device:
    """The device as tensors that are on it name it: "cuda" alone is the current CUDA device."""
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device


def _resolved_check(operator: str, check: str, device: torch.device) -> str:
    """`check` with "auto" resolved: "wait" for tensors on the CPU, where nothing has to be waited for, and "device" elsewhere."""
    if check in ("wait", "device", "none"):
        return check
    require(check == "auto", operator, "check", "auto, wait, device or none", repr(check))
    return "wait" if device.type == "cpu" else "device"


def _check_values(experts_TK: torch.Tensor, num_experts: int, align: int, check: str) -> None:
    # Called inside the operator, which has the values, so that a compiled graph checks them too.
    rows = plain_plan.padded_rows(experts_TK.numel(), num_experts, align)
    if rows > _INT32_MAX:
        require(False, _OF_EXPERTS, "experts", f"at most {_INT32_MAX} padded rows (rows are int32)", rows)
    if check == "none" or experts_TK.numel() == 0:
        return
    low, high = experts_TK.aminmax()
    if check == "wait":
        lowest, highest = int(low), int(high)
        require(lowest >= -1 and highest < num_experts, _OF_EXPERTS, "experts", f"ids in [0, {num_experts}), or -1 to drop a slot",
                f"ids from {lowest} to {highest}")
    else:
        torch._assert_async((low >= -1) & (high < num_experts),
                            f"{_OF_EXPERTS}: experts: expected ids in [0, {num_experts}), or -1 to drop a slot")


def _routing_plan_reference(experts, num_experts, align, check):
    _check_values(experts, num_experts, align, check)
    return permute.routing_plan(experts, num_experts, align)


_routing_plan = define(
    "routing_plan(Tensor experts, int num_experts, int align, str check) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_routing_plan_reference, fake=_fake_routing_plan,
    waits=lambda experts, num_experts, align, check: check == "wait",
)


def _check_counts(counts_E: torch.Tensor, rows: int, check: str) -> None:
    # Called inside the operators, for the same reason as _check_values.
    require(rows <= _INT32_MAX, _OF_COUNTS, "num_rows", f"at most {_INT32_MAX} (rows are int32)", rows)
    if check == "wait":
        sizes = counts_E.tolist()  # Python's sums do not wrap
        require(min(sizes) >= 0, _OF_COUNTS, "counts", "no negative entry", min(sizes))
        require(sum(sizes) <= rows, _OF_COUNTS, "counts", f"a sum of at most num_rows == {rows}", sum(sizes))
    elif check == "device":
        # In float64, whose sums do not wrap either.
        torch._assert_async((counts_E >= 0).all() & (counts_E.double().sum() <= rows),
                            f"{_OF_COUNTS}: counts: expected no negative entry and a sum of at most num_rows == {rows}")


def _bounded_counts_reference(counts, rows, check):
    _check_counts(counts, rows, check)
    return plain_plan.bounded_counts(counts, rows)


_bounded_counts = define(
    "bounded_counts(Tensor counts, SymInt rows, str check) -> Tensor", reference=_bounded_counts_reference,
    # Without `waits`, because these counts are on the host.
    fake=lambda counts, rows, check: counts.new_empty(counts.shape, dtype=torch.int64),
)


def _plan_of_counts_reference(counts, rows, check):
    _check_counts(counts, rows, check)
    return plain_plan.plan_of_counts(counts, rows)


def _fake_plan_of_counts(counts, rows, check):
    experts = counts.size(0)
    return tuple(counts.new_empty(size, dtype=torch.int32) for size in ((rows, 1), (rows,), (experts,), (experts + 1,), (experts,)))


_plan_of_counts = define(
    "plan_of_counts(Tensor counts, SymInt rows, str check) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_plan_of_counts_reference, fake=_fake_plan_of_counts, waits=lambda counts, rows, check: check == "wait",
)


def _check_plan(plan: RoutingPlan) -> None:
    """Raise unless kernels can take the plan's tensors as they are. Their values are not checked."""
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


@dataclass(slots=True)
class _Known:
    """What gbmoe knows of a plan beyond its attributes: made when the plan is built or checked, and never changed.

    It is about certain tensors, which are here too: where an attribute was assigned since, nothing is known any more. In a copy, which
    has this value and its tensors copied alike, it still holds.
    """

    num_experts: int
    align: int
    row_of_slot_TK: torch.Tensor
    slot_of_row_P: torch.Tensor
    offsets_E1: torch.Tensor
    padded_counts_E: torch.Tensor
    has_no_gaps: bool = False       # a row without a slot lies after the last expert, or is padding that `align` asks for
    in_expert_order: bool = False   # row r is token r, up to the first row that has no expert
    sizes_E: torch.Tensor | None = None  # padded_counts_E as int64 on the CPU

    def is_about(self, plan: RoutingPlan) -> bool:
        """Whether the plan has the attributes that this was learnt from. counts_E is not among them, because no operator reads it."""
        return (self.row_of_slot_TK is plan.row_of_slot_TK and self.slot_of_row_P is plan.slot_of_row_P
                and self.padded_counts_E is plan.padded_counts_E and self.offsets_E1 is plan.offsets_E1
                and self.num_experts == plan.num_experts and self.align == plan.align)


# Of a plan before it is checked, and of one that another version has pickled.
_NOTHING_KNOWN = _Known(0, 0, *(cast("torch.Tensor", None),) * 4)


@dataclass(eq=False)
class RoutingPlan:
    """Where each slot's row is. It is built once a layer call; gather, products, scatter and their gradients all read it.

    Slot t * K + j is token t's j-th choice. Rows are expert-major; inside an expert they follow slot order (the sort is
    stable). Each expert's rows start at a multiple of `align` and are padded to a multiple of it. All tensors are int32, on the
    device of the ids:

        row_of_slot_TK     row of each slot, -1 where it is dropped (its id names no expert)
        slot_of_row_P      slot of each row, -1 where the row is an expert's padding,
                           -2 after the last expert
        counts_E           rows of each expert, without padding
        offsets_E1         first row of each expert; offsets_E1[E] is the end of the last one
        padded_counts_E    rows of each expert with its padding: the sizes of the grouped GEMMs

    counts_E is for callers, and no operator reads it: it may be reduced over ranks in place (load statistics) between
    forward and backward. Kernels and autograd read the other tensors, which must not be written to.

    P is a bound that holds for every routing, so that building the plan needs no host wait; `exact=True` waits once and cuts
    the plan to the rows in use.

    A plan may be made by hand. Its tensors must have those shapes, be int32 and contiguous, and lie on one device; otherwise TypeError
    or ValueError names the one that does not. Their values are not checked. An entry outside its range (a row beyond P, a slot beyond T *
    K) counts as none, and no operator reads or writes outside its tensors. But rows on which row_of_slot and slot_of_row do not agree may
    hold anything. A plan of which a tensor is replaced, by dataclasses.replace or by an assignment, is checked in the same way; an
    assignment by the next operator that takes the plan.

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
    _built: InitVar[_Known | None] = None  # given by gbmoe: the check, which takes several us, is then left out

    _known = _NOTHING_KNOWN  # no field: dataclasses.replace must not pass it on

    def __post_init__(self, _built: _Known | None) -> None:
        if _built is None:
            self._check_tables()
        else:
            self._known = _built

    @classmethod
    def _of(cls, known: _Known, counts_E: torch.Tensor) -> RoutingPlan:
        return cls(known.num_experts, known.align, known.row_of_slot_TK, known.slot_of_row_P, counts_E, known.offsets_E1,
                   known.padded_counts_E, known)

    def _check_tables(self) -> _Known:
        _check_plan(self)
        self._known = _Known(self.num_experts, self.align, self.row_of_slot_TK, self.slot_of_row_P, self.offsets_E1, self.padded_counts_E)
        return self._known

    def _checked(self) -> _Known:
        """What is known of the plan, after a check of its tables where an attribute was assigned since the last one."""
        known = self._known
        return known if known.is_about(self) else self._check_tables()

    def check(self) -> None:
        """Raise TypeError or ValueError unless kernels can take the plan's tensors as they are; operators call it.

        What has been checked, or was built by gbmoe, is not looked at again.
        """
        self._checked()

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
            check: what happens to ids outside [-1, E). "wait" reads the ids back and raises ValueError; "device" raises a
                device-side assertion without a wait; "none" drops their slots. "auto" is "wait" on the CPU, where nothing has to be
                waited for, and "device" elsewhere. Whichever it is, no row out of bounds is ever touched.
        """
        require_tensor(experts_TK, _OF_EXPERTS, "experts", rank=(1, 2), dtypes=(torch.int32, torch.int64))
        for argument, value in (("num_experts", num_experts), ("align", align)):
            if not isinstance(value, int) or value < 1:
                require(False, _OF_EXPERTS, argument, "an int of at least 1", repr(value))
        check = _resolved_check(_OF_EXPERTS, check, experts_TK.device)
        if experts_TK.dim() == 1:
            experts_TK = experts_TK.unsqueeze(1)
        row_of_slot_TK, slot_of_row_P, counts_E, offsets_E1, padded_counts_E = _routing_plan(experts_TK, num_experts, align, check)
        plan = cls._of(_Known(num_experts, align, row_of_slot_TK, slot_of_row_P, offsets_E1, padded_counts_E, has_no_gaps=True), counts_E)
        return plan.exact() if exact else plan

    @classmethod
    def from_counts(
        cls, counts_E: torch.Tensor, num_rows: int, *, device: torch.device | str | None = None, check: str = "auto",
    ) -> RoutingPlan:
        """The plan of rows that are in expert order already: each row is a token with one slot, and stays where it is.

        Nothing is gathered and nothing padded: expert_mlp computes with such rows as they lie, and its weights are [num_rows,1].
        Rows after the sum of the counts have no expert: they come out as zeros and get gradients of zero. No host wait, unless
        `check` asks for one.

        Args:
            counts_E: rows of each expert, int32 or int64 [E], E at least 1; on the plan's device, or on the CPU, from where they
                are copied without a wait.
            num_rows: R, at least the sum of the counts.
            device: of the rows; that of the counts by default.
            check: what happens to a negative count, and to counts whose sum is more than num_rows. "wait" reads them and raises
                ValueError; "device" fails an assertion on the device; "none" takes negative counts for 0 and cuts off what is beyond
                num_rows. "auto" is "wait" for counts on the CPU, where nothing has to be waited for, and "device" elsewhere.

        Raises:
            TypeError, ValueError: naming the argument, what was expected and what came.

        Example:
            >>> plan = RoutingPlan.from_counts(torch.tensor([2, 0, 1]), num_rows=4)
            >>> plan.slot_of_row_P.tolist()
            [0, 1, 2, -2]
        """
        require_tensor(counts_E, _OF_COUNTS, "counts", rank=1, dtypes=(torch.int32, torch.int64))
        require(counts_E.size(0) >= 1, _OF_COUNTS, "counts", "at least one expert", 0)
        if isinstance(num_rows, torch.Tensor):  # as sizes are inside torch.jit.trace
            refuse_jit_tracing(_OF_COUNTS)
        require(isinstance(num_rows, (int, torch.SymInt)), _OF_COUNTS, "num_rows", "an int", type(num_rows).__name__, TypeError)
        require(num_rows >= 0, _OF_COUNTS, "num_rows", "at least 0", num_rows)
        check = _resolved_check(_OF_COUNTS, check, counts_E.device)
        device = counts_E.device if device is None else _numbered(as_device(device, _OF_COUNTS))
        require(counts_E.device.type == "cpu" or counts_E.device == device, _OF_COUNTS, "counts",
                lambda: "device cpu" if device.type == "cpu" else f"device cpu or {device}", counts_E.device)
        host_sizes_E = None
        if counts_E.device != device:
            host_sizes_E = _bounded_counts(counts_E, num_rows, check)
            counts_E, check = host_sizes_E.to(device, non_blocking=True), "none"
        row_of_slot_TK, slot_of_row_P, counts_E, offsets_E1, padded_counts_E = _plan_of_counts(counts_E, num_rows, check)
        return cls._of(_Known(counts_E.size(0), 1, row_of_slot_TK, slot_of_row_P, offsets_E1, padded_counts_E, has_no_gaps=True,
                              in_expert_order=True, sizes_E=host_sizes_E), counts_E)

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.row_of_slot_TK.size(0)

    @property
    def top_k(self) -> int:
        """K."""
        return self.row_of_slot_TK.size(1)

    @property
    def num_rows(self) -> int:
        """The rows of the padded matrix, P."""
        return self.slot_of_row_P.size(0)

    @property
    def slot_map(self) -> SlotMap:
        """Both directions between slots and rows, as gathers and scatters take them."""
        return SlotMap(self.row_of_slot_TK, self.slot_of_row_P)

    @property
    def expert_of_tile(self) -> torch.Tensor:
        """Expert of each run of `align` rows, int32 [P / align], -1 after the last expert. Computed at every access."""
        first_rows = torch.arange(0, self.num_rows, self.align, dtype=torch.int32, device=self.offsets_E1.device)
        experts = torch.searchsorted(self.offsets_E1[1:], first_rows, right=True, out_int32=True)
        return torch.where(first_rows < self.offsets_E1[-1], experts, -1)

    @property
    def pads_within_experts(self) -> bool:
        """Whether rows without a slot may lie among an expert's rows. If not, all of them lie after the last expert, and no grouped
        product reads them."""
        return self.align > 1 or not (self._known.has_no_gaps and self._known.is_about(self))

    @property
    def is_in_expert_order(self) -> bool:
        """True where the tokens are the rows. Then token r's one slot has row r or none, and tokens without a row come last."""
        return self._known.in_expert_order and self._known.is_about(self)

    @property
    def has_host_sizes(self) -> bool:
        """True where host_sizes() does not wait, because the sizes are on the host already."""
        return self._known.sizes_E is not None and self._known.is_about(self)

    def host_sizes(self) -> torch.Tensor:
        """padded_counts_E as int64 on the CPU, for engines that need it there. Waits for the device once for each plan.

        Raises:
            ValueError: on the meta device, where there are no values.
        """
        sizes_E = self._checked().sizes_E
        if sizes_E is None:
            require(self.padded_counts_E.device.type != "meta", "RoutingPlan.host_sizes", "device", "one that has the plan's values",
                    self.padded_counts_E.device)
            sizes_E = self.padded_counts_E.to("cpu", torch.int64)
        elif torch.compiler.is_compiling() or not sizes_E.is_inference() or torch.is_inference_mode_enabled():
            return sizes_E
        else:
            sizes_E = sizes_E.clone()  # autograd cannot save a tensor that was made in inference mode
        self._known = replace(self._checked(), sizes_E=sizes_E)
        return sizes_E

    def exact(self) -> RoutingPlan:
        """The same plan without the rows after the last expert. Waits for the device once for each plan."""
        refuse_jit_tracing("RoutingPlan.exact")
        return self.first_rows(int(self.host_sizes().sum()))

    def first_rows(self, rows: int, sizes_E: torch.Tensor | None = None) -> RoutingPlan:
        """The same plan with its first `rows` rows alone; no slot may have a row after them. `sizes_E` is its padded_counts_E as int64 on
        the CPU, unchecked, where the caller has it."""
        known = self._checked()
        sizes_E = known.sizes_E if sizes_E is None else sizes_E
        return self._of(replace(known, slot_of_row_P=self.slot_of_row_P[:rows], in_expert_order=False, sizes_E=sizes_E), self.counts_E)

    def with_host_sizes(self, sizes_E: torch.Tensor) -> RoutingPlan:
        """The same plan, given its padded_counts_E as int64 on the CPU, so that host_sizes() does not wait."""
        name = "RoutingPlan.with_host_sizes"
        require_tensor(sizes_E, name, "sizes", rank=1, dtypes=(torch.int64,), device=torch.device("cpu"))
        require(sizes_E.size(0) == self.num_experts, name, "sizes", lambda: f"{self.num_experts} entries", sizes_E.size(0))
        return self._of(replace(self._checked(), sizes_E=sizes_E), self.counts_E)
