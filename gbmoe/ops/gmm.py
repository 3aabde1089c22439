"""gmm: the grouped matrix product, with grouped_gemm's shapes and meaning.

Shape suffixes: M rows of all groups, E groups (experts), K inner, N columns.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from gbmoe import engines
from gbmoe._checks import FLOATING, autocast_enabled, require, require_tensor
from gbmoe._define_operator import define, is_batched, is_watched, may_be_transformed, without_autocast
from gbmoe.engines.base import Engine
from gbmoe.ops import flops
from gbmoe.ops.batch_sizes import check_sizes
from gbmoe.ops.scaled_gmm import scaled_gmm
from gbmoe.problem import result_shape
from gbmoe.separate_weights import StackOrList, like_a_stack, lists_of, why_stacked
from gbmoe.stacked_weights import stack_or_separate, stacked


def gmm(a: torch.Tensor, b: StackOrList, batch_sizes: torch.Tensor, trans_a: bool = False, trans_b: bool = False,
        *, engine: str = "auto", batch_invariant: bool = False, scale_a: torch.Tensor | None = None,
        scale_b: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """One matrix product a group: rows batch_sizes[0] of a with b[0], the next batch_sizes[1] with b[1], and so on.

    Mirrors grouped_gemm.ops.gmm (and its backend's trans_a), with more dtypes and with checks. Differentiable in a and b;
    the gradient of a group without rows is exactly 0.

    Args:
        a: [M,K]. bfloat16, float16, float32 (follows torch.backends.cuda.matmul.allow_tf32) or float64; any device, any
            strides. Sums are kept in float32 (float64 for float64).
        b: [E,K,N], or [E,N,K] with trans_b; with trans_a [M,N]. Dtype and device of a. Without trans_a and scales it may be a list of E
            matrices, each of which gets its gradient; they are read where they lie, or copied, as expert_mlp's.
        batch_sizes: rows of each group, int32 or int64 [E], sum M; on the host or on the device of a. Zeros are allowed.
            If they are on the device, engines that need them on the host wait for it. The others check them by an assertion on the
            device. Sizes on the host may be rewritten once gmm has returned, sizes on the device only after backward.
        trans_a: k-grouped, out[e] = a[rows of e].T @ b[rows of e]. Not together with trans_b.
        engine: "auto", or one of gbmoe.engines.ENGINES; or one of FLOAT8_ENGINES, which quantises both operands (docs/float8.md).
        batch_invariant: a row of the result has the same bits whatever other rows there are, however many, and in whichever groups.
            The engine `hopper` does this, on other GPUs `tensor_core`; where they cannot, ValueError says why. Not for trans_a, which sums
            over rows.
        scale_a, scale_b: for operands in float8_e4m3fn, with trans_b, on compute capability 9.0 or the CPU: the decoding scales, float32
            [M, ceil(K / 128)] and [E, ceil(N / 128), ceil(K / 128)], as gbmoe.float8.quantize_rows and quantize_weights give them and
            as torch.nn.functional.scaled_mm names them BlockWise1x128 and BlockWise128x128. K and N are multiples of 16. Not
            differentiable.
        out_dtype: with scales, the dtype of the result, bfloat16 (None) or float16. Without them that of the operands, or None.

    Returns:
        [M,N], or [E,K,N] with trans_a. The same operands give the same bits on the same device. With the engine `hopper` a group's
        bits may depend on the other groups' sizes, which decide where long sums are split (split-K). With `hopper` and `tensor_core` a
        row's bits may depend on how many rows there are.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> a, b = torch.randn(5, 8), torch.randn(2, 8, 4)
        >>> gmm(a, b, torch.tensor([3, 2])).shape
        torch.Size([5, 4])
    """
    if scale_a is not None or scale_b is not None:
        return _gmm_of_scaled(a, b, batch_sizes, trans_a, trans_b, engine, batch_invariant, scale_a, scale_b, out_dtype or torch.bfloat16)
    stack, matrices = _tensor_and_list(b, trans_a)
    check_arguments(a, stack, batch_sizes, trans_a, trans_b)
    require(out_dtype is None or out_dtype == computed_dtype(a), "gmm", "out_dtype",
            lambda: f"None or {computed_dtype(a)}, as the operands have no scales", out_dtype)
    require(isinstance(engine, str), "gmm", "engine", "a name", repr(engine), TypeError)
    if batch_invariant:
        require(not trans_a, "gmm", "batch_invariant", "False with trans_a, which sums over rows", batch_invariant)
        engine = engines.batch_invariant(engine, a.device)
    if matrices:
        of = None if a.is_meta else engines.of_operands(engine, a, stack, batch_sizes, False, trans_b, computed_dtype(a))
        if _takes_list(of, a, matrices):
            check_operands(a, stack, False, trans_b)
            return _OfList.apply(a, batch_sizes, trans_b, engine, *matrices)
        stack = stacked(matrices)
    if batch_sizes.device.type not in ("cpu", "meta") and engines.of_operands(
            engine, a, stack, batch_sizes, trans_a, trans_b, computed_dtype(a)).needs_host_sizes:
        batch_sizes = batch_sizes.to("cpu", torch.int64)
    return _gmm(a, stack, batch_sizes, trans_a, trans_b, engine, True)


def _gmm_of_scaled(a, b, batch_sizes, trans_a, trans_b, engine, batch_invariant, scale_a, scale_b, out_dtype):
    for argument, scales in (("scale_a", scale_a), ("scale_b", scale_b)):
        require(scales is not None, "gmm", argument, "a tensor, as the other operand has scales", None, TypeError)
    require(trans_b and not trans_a, "gmm", "trans_b", "True with scales, and not trans_a", f"trans_b {trans_b}, trans_a {trans_a}")
    require(engine == "auto", "gmm", "engine", "'auto' with scales", repr(engine))
    require(not batch_invariant, "gmm", "batch_invariant", "False with scales", batch_invariant)
    check_arguments(a, b, batch_sizes, trans_a, trans_b, dtypes=(torch.float8_e4m3fn,))
    return scaled_gmm(a, b, batch_sizes, scale_a, scale_b, out_dtype)


def check_arguments(a: torch.Tensor, b: torch.Tensor, batch_sizes: torch.Tensor, trans_a: bool, trans_b: bool,
                    dtypes: tuple[torch.dtype, ...] = FLOATING) -> None:
    """Raise unless gmm takes these tensors. Whether dtypes and inner dimensions match is checked later, by the operator."""
    require_tensor(a, "gmm", "a", rank=2, dtypes=dtypes)
    require(not (trans_a and trans_b), "gmm", "trans_a, trans_b", "at most one of them", "both")
    require_tensor(b, "gmm", "b" if not trans_a else "b, with trans_a", rank=2 if trans_a else 3, dtypes=dtypes, device=a.device)
    require_tensor(batch_sizes, "gmm", "batch_sizes", rank=1, dtypes=(torch.int32, torch.int64))
    require(batch_sizes.device.type == "cpu" or batch_sizes.device == a.device, "gmm", "batch_sizes",
            lambda: f"device cpu or {a.device}", batch_sizes.device)
    if not trans_a:
        require(b.size(0) == batch_sizes.numel(), "gmm", "batch_sizes",
                lambda: f"b.size(0) == {b.size(0)} entries", batch_sizes.numel())


def computed_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype in which products of `tensor` are computed: its own or, under autocast, autocast's (float64 stays)."""
    if autocast_enabled(tensor.device.type) and tensor.dtype != torch.float64:
        return torch.get_autocast_dtype(tensor.device.type)
    return tensor.dtype


def check_operands(a: torch.Tensor, b: torch.Tensor, trans_a: bool, trans_b: bool) -> None:
    """Raise TypeError or ValueError unless a and b have one dtype and their inner dimensions match."""
    # Called inside the operator, after autocast's rule has cast the operands: only here the dtypes are those that are multiplied.
    require(a.dtype == b.dtype, "gmm", "b", lambda: f"the dtype of a, {a.dtype}", b.dtype, TypeError)
    if trans_a:
        require(a.size(0) == b.size(0), "gmm", "b", lambda: f"b.size(0) == a.size(0) == {a.size(0)}", b.size(0))
    else:
        inner = 2 if trans_b else 1
        require(b.size(inner) == a.size(1), "gmm", "b",
                lambda: f"b.size({inner}) == a.size(1) == {a.size(1)}", b.size(inner))


def _gmm_kernel(a, b, batch_sizes, trans_a, trans_b, engine, fills):
    check_operands(a, b, trans_a, trans_b)
    if fills:  # checked inside the operator, which has the values, so that a compiled graph checks them too
        check_sizes(batch_sizes, a.size(0))
    out = engines.product(a, b, batch_sizes, trans_a, trans_b, engine=engine)
    if not fills and not trans_a and torch.is_anomaly_enabled():
        # Rows that nobody reads are not written. Anomaly detection reads them, and takes what their memory held for a gradient.
        rows = torch.arange(out.size(0), dtype=torch.int64, device=out.device)
        out.masked_fill_((rows >= batch_sizes.sum().to(out.device)).unsqueeze(1), 0)
    return out


def _gmm_fake(a, b, batch_sizes, trans_a, trans_b, engine, fills):
    check_operands(a, b, trans_a, trans_b)
    return a.new_empty(result_shape(a, b, batch_sizes.size(0), trans_a, trans_b))


def _gmm_setup_context(ctx, inputs, output):
    a, b, batch_sizes, ctx.trans_a, ctx.trans_b, ctx.engine, fills = inputs
    need_a, need_b = ctx.needs_input_grad[:2]
    # Sizes that are not a plan's belong to the caller, who may rewrite them behind autograd's back, as a collective does.
    sizes = batch_sizes.clone() if fills else batch_sizes
    ctx.save_for_backward(a if need_b else None, b if need_a else None, sizes)


def _gmm_backward(ctx, grad):
    a, b, sizes = ctx.saved_tensors
    need_a, need_b = ctx.needs_input_grad[:2]
    grad_a = grad_b = None
    if ctx.trans_a:  # out[e] = a_e.T @ b_e
        if need_a:
            grad_a = _gmm(b, grad, sizes, False, True, ctx.engine, False)
        if need_b:
            grad_b = _gmm(a, grad, sizes, False, False, ctx.engine, False)
    else:            # out_e = a_e @ b[e]
        if need_a:
            grad_a = _gmm(grad, b, sizes, False, not ctx.trans_b, ctx.engine, False)
        if need_b:
            left, right = (grad, a) if ctx.trans_b else (a, grad)
            grad_b = _gmm(left, right, sizes, True, False, ctx.engine, False)
    return {"a": grad_a, "b": grad_b}


_gmm = define(
    "gmm(Tensor a, Tensor b, Tensor batch_sizes, bool trans_a, bool trans_b, str engine, bool fills) -> Tensor",
    reference=_gmm_kernel, fake=_gmm_fake, backward=_gmm_backward, setup_context=_gmm_setup_context, autocast=("a", "b"),
    waits=lambda a, b, batch_sizes, *_: batch_sizes.device.type == "cpu", flops=flops.gmm,
)


def _tensor_and_list(b: Any, trans_a: bool) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """(b, ()); of a list (a tensor like its stack, the matrices)."""
    if isinstance(b, torch.Tensor):
        return b, ()
    require(not trans_a, "gmm", "b", "a tensor with trans_a", type(b).__name__, TypeError)
    matrices = lists_of("gmm", b=b).get("b", ())
    return (like_a_stack(matrices) if matrices else b), matrices


def _takes_list(engine: Engine | None, a: torch.Tensor, matrices: tuple[torch.Tensor, ...]) -> bool:
    # Of the kind of call alone, as a checkpoint that repeats it asks again.
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or may_be_transformed()  # type: ignore[attr-defined]
    return (not traced and a.dtype == computed_dtype(a) and why_stacked(engine, a.dtype, {"b": matrices}) is None
            and engine is not None and not engine.needs_host_sizes)


class _OfList(torch.autograd.Function):
    """The product with matrices that an engine reads where they lie; differentiable as often as that with their stack."""

    @staticmethod
    @without_autocast
    def forward(ctx, a, sizes, trans_b, engine, *matrices):
        need_a, need_b = ctx.needs_input_grad[0], any(ctx.needs_input_grad[4:])
        ctx.trans_b, ctx.engine, ctx.count = trans_b, engine, len(matrices)
        ctx.save_for_backward(a if need_b else None, sizes.clone(), *(matrices if need_a else ()))  # a clone, as in _gmm_setup_context
        b = stack_or_separate(matrices, as_stack=is_watched(a))
        if isinstance(b, torch.Tensor):
            return _gmm(a, b, sizes, False, trans_b, engine, True)
        check_sizes(sizes, a.size(0))
        return engines.product(a, b, sizes, False, trans_b, engine=engine)

    @staticmethod
    @without_autocast
    def backward(ctx, grad):
        a, sizes, *matrices = ctx.saved_tensors
        by_operator = is_batched(grad) or torch.is_grad_enabled() or is_watched(grad)
        product = partial(_gmm, engine=ctx.engine, fills=False) if by_operator else partial(engines.product, engine=ctx.engine)
        grad_a, of_each = None, (None,) * ctx.count
        if ctx.needs_input_grad[0]:
            grad_a = product(grad, stack_or_separate(tuple(matrices), as_stack=by_operator), sizes, False, not ctx.trans_b)
        if any(ctx.needs_input_grad[4:]):
            left, right = (grad, a) if ctx.trans_b else (a, grad)
            of_each = product(left, right, sizes, True, False).unbind(0)
        return grad_a, None, None, None, *of_each


def grouped(a: torch.Tensor, b: torch.Tensor, sizes: torch.Tensor, trans_a: bool = False, trans_b: bool = False,
            *, engine: str) -> torch.Tensor:
    """gmm for a plan's sizes, which are known to be right and may sum to less than the rows: differentiable, without checks.

    Rows after the last group are neither read nor written, except that anomaly detection reads them: there they are zeros. `sizes`
    are on the host or the device as the engine needs them (gbmoe.ops.plan_sizes).
    """
    return _gmm(a, b, sizes, trans_a, trans_b, engine, False)
