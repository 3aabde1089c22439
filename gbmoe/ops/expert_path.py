"""expert_path: which engine computes a call of expert_mlp, whether the host waits for the device in it, what it copies, and why any of it
is composed of separate kernels.

Shape suffixes: T tokens, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from gbmoe import engines
from gbmoe._checks import require
from gbmoe.engines.base import Engine
from gbmoe.engines.own_kernels import OwnKernels
from gbmoe.float8 import Float8BlockScaling
from gbmoe.ops.expert_arguments import checked_call
from gbmoe.ops.gmm import computed_dtype
from gbmoe.ops.separate_experts import NAMES, NO_TABLE, in_place, stacks_and_lists
from gbmoe.plan import RoutingPlan
from gbmoe.separate_weights import StackOrList, why_stacked
from gbmoe.stacked_weights import lie_as_a_stack
from gbmoe.weight_layout import MEGABLOCKS, WeightLayout


class ExpertPath(NamedTuple):
    """How a call of expert_mlp is computed.

    Attributes:
        engine: the name of the engine, or of the two or more that share the layer's products.
        reasons: why forward is not one fused kernel for each product that reads the weights where they lie; one sentence each. Empty
            where it is.
        host_waits: whether the host waits for the device in forward, because the engine reads the sizes of the groups on the host and
            the plan has them on the device alone. Once they have been read, the plan keeps them, and backward does not wait.
    """

    engine: str
    reasons: tuple[str, ...]
    host_waits: bool


def expert_path(
    x_TH: torch.Tensor, plan: RoutingPlan, w1_EFH: StackOrList, w2_EFH: StackOrList, v1_EFH: StackOrList | None = None,
    *, activation: str | Callable = "silu", engine: str = "auto", batch_invariant: bool = False,
    fp8_recipe: Float8BlockScaling | None = None, layout: WeightLayout = MEGABLOCKS, w1_bias: torch.Tensor | None = None,
    w2_bias: torch.Tensor | None = None, v1_bias: torch.Tensor | None = None, weights_on: str = "output",
) -> ExpertPath:
    """How expert_mlp would compute these tensors, which are not read. It computes nothing and waits for nothing.

    Args:
        as expert_mlp; not on the meta device. Of its further ones, lora, and a weight_gradient_scale that is no power of two, have lists of
            matrices copied.

    Raises:
        TypeError, ValueError: as expert_mlp.

    Example:
        >>> x, w1, w2 = torch.randn(6, 16), torch.randn(4, 32, 16), torch.randn(4, 32, 16)
        >>> plan = RoutingPlan.from_experts(torch.randint(4, (6, 2)), num_experts=4)
        >>> path = expert_path(x, plan, w1, w2)
        >>> path.engine, path.reasons[0]
        ('reference', 'no engine with kernels of its own runs on cpu')
        >>> path.host_waits  # on a CPU there is no device to wait for
        False
    """
    w1, w2, v1, apart = stacks_and_lists(w1_EFH, w2_EFH, v1_EFH)
    shape_EFH, name, engine = checked_call(x_TH, plan, layout, w1, w2, v1, None, (w1_bias, w2_bias, v1_bias), activation, weights_on,
                                           fp8_recipe, engine, batch_invariant)
    require(not x_TH.is_meta, "expert_path", "x", "a tensor on a device that computes", "one on meta")
    on_host = x_TH.device.type == "cpu" or plan.has_host_sizes
    call = (x_TH.device, computed_dtype(x_TH), plan.num_rows, tuple(shape_EFH))
    resolved = engines.resolve(engine, *call, on_host, batch_invariant)
    host_waits = resolved.needs_host_sizes and not on_host
    if host_waits:  # after it the sizes are on the host, which may decide between engines that take them there
        resolved = engines.resolve(engine, *call, True, batch_invariant)
    experts = resolved.engine
    assert experts is not None
    reasons = list(_of_choice(experts, engine, *call, on_host))
    if weights_on == "input":
        reasons.append("router weights on the input: rows are gathered and weighed before the experts, and summed after them, apart")
    if name is None:
        reasons.append("the activation has no kernel: it is called between products, with rows that are gathered first")
    weights: Any = (w1, w2, v1)
    if apart:
        why, found = why_stacked(experts, call[1], apart) if name is not None else "the activation has no kernel", None
        if why is None and not all(map(lie_as_a_stack, apart.values())):
            found = in_place(apart, dict(zip(NAMES, weights)))
            why = None if found is not None else NO_TABLE
        if why is not None:
            reasons.append(f"lists of matrices are copied into one tensor in each call: {why}")
        weights = [found[of] if found is not None and of in found else w.new_empty(w.shape, device="meta") if of in apart else w
                   for of, w in zip(NAMES, weights)]
    w1, w2, v1 = weights
    reasons += of_weights(experts, layout, w1, w2, v1, name, plan.num_rows, w1_bias is not None or v1_bias is not None,
                          w2_bias is not None)
    return ExpertPath(" and ".join(_names(experts)), tuple(reasons), host_waits)


def of_weights(experts: Engine, layout: WeightLayout, w1: torch.Tensor, w2: torch.Tensor, v1: torch.Tensor | None, activation: str | None,
               rows: int, up_biased: bool = False, down_biased: bool = False) -> Iterator[str]:
    """The reasons that an engine has for weights that lie so, of P = `rows` rows. `activation` is activation_name's. The weights may be on
    any device, meta too, and SeparateWeights; only their strides and addresses count."""
    gate, down, up = layout.matrices(w1, w2, v1)
    paired = layout.is_paired and experts.name not in engines.FLOAT8_ENGINES and activation is not None
    of_up = (layout.pairs(w1), None) if paired else (gate, up)
    if experts.copies(*of_up):
        yield f"w1{'' if v1 is None else ' or v1'} is copied in each call: {_why_copied(experts)}"
    if experts.copies(down):
        yield f"w2 is copied in each call: {_why_copied(experts)}"
    if activation is not None:
        reason = experts.why_composed(*of_up, activation, rows, up_biased, paired)
        if reason is not None:
            yield f"the activation is a kernel of its own: {reason}"
    # A kernel that activates has added the bias before.
    composed = activation is None or experts.why_composed(*of_up, activation, rows, up_biased, paired) is not None
    if (down_biased or (up_biased and composed)) and not experts.adds_bias_in_kernel(rows, gate):
        yield "biases are added by a product of their own, to products that are rounded"


def _why_copied(experts: Engine) -> str:
    if experts.name in engines.FLOAT8_ENGINES:
        return "float8 quantises rows or columns that begin at multiples of 16 bytes, of whole matrices or of gate and up in turns"
    if isinstance(experts, OwnKernels):
        return f"{experts.name} reads rows or columns that begin at multiples of 16 bytes, and those of w1 and v1 alike"
    return "the engine reads contiguous matrices, or such that are transposed as a whole"


def _names(experts: Engine) -> list[str]:
    return list(dict.fromkeys(each.name for each in getattr(experts, "of_products", (experts,))))


def _of_choice(experts: Engine, engine: str, device: torch.device, dtype: torch.dtype, rows: int, shape_EFH: tuple, on_host: bool,
               ) -> Iterator[str]:
    """Why "auto" took none, or not only one, of the engines with kernels of their own."""
    names = _names(experts)
    if len(names) > 1:
        yield f"products of different shapes are computed by {' and '.join(names)}"
    own = {name for name, each in engines.ENGINES.items() if isinstance(each, OwnKernels)}
    if engine != "auto" or set(names) <= own:
        return
    if device.type != "cuda":
        yield f"no engine with kernels of its own runs on {device.type}"
        return
    for name, reason in engines.refusals(device, dtype, rows, shape_EFH, on_host).items():
        if name in own:
            yield f"not engine {name!r}, which {reason}"
