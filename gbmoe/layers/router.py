"""LearnedRouter: scores, weights and ids of each token's experts; mirrors megablocks.layers.router.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import torch

from gbmoe import _torch_names, engines
from gbmoe._checks import PLAIN, autocast_enabled, require
from gbmoe.launch.router import kernels_take
from gbmoe.layers.arguments import Arguments, require_arguments
from gbmoe.layers.kept import Source
from gbmoe.layers.losses import save_router_logsumexp
from gbmoe.ops.route_operator import Routing, route
from gbmoe.ops.route_tokens import route_tokens
from gbmoe.ops.routed_experts import RouterCall
from gbmoe.router_function import RouterFunction

_LINEAR_FORWARD = torch.nn.Linear.forward


class LearnedRouter(torch.nn.Module):
    """A linear layer, scores of all experts, the K best experts, and their weights: those of args.router_function, which is MegaBlocks'
    softmax and top-k unless the arguments say otherwise.

    forward(x [..., H]) returns scores [T,E], expert_weights [T,K] and expert_indices [T,K] (int64). In training the input is
    jittered (moe_jitter_eps), and the logits' logsumexp is kept for the z-loss where that has a weight. MegaBlocks keeps logits in
    evaluation too, where they pile up because nothing clears them.

    forward takes `padding_mask`, bool [...], and `given_experts`, ids [..., K], as gbmoe.ops.route does: tokens of padding have the ids -1,
    scores and weights of 0, and given experts are taken instead of a choice.

    With moe_router_enable_expert_bias the buffer `expert_bias` [E] is added to what experts are ranked by. It is float32 whatever dtype the
    module is cast to, because steps of 1e-3 are lost in 16 bits.

    Experts are ranked by their logits, which stay in float32 from the product on (float64 in a float64 layer); scores and weights are
    rounded to the layer's dtype afterwards, or not at all with moe_router_dtype "fp32". MegaBlocks has logits in the layer's
    dtype, and ranks scores that are rounded once more. A `layer` that is more than a torch.nn.Linear without bias (a subclass,
    one with hooks or a forward of its own, a parametrized or quantised one) is called, and its logits are taken as they come. So
    is any while hooks are registered for all modules.
    """

    # Of modules that were pickled by older versions.
    _source: Source | None = None
    _function: RouterFunction | None = None  # None: MegaBlocks'
    _tape: Any = None  # of record_experts or replay_experts, where this is a layer by itself

    def __init__(self, args: Arguments):
        super().__init__()
        require_arguments(args, "LearnedRouter")
        experts, top_k, p = args.moe_num_experts, args.moe_top_k, args.moe_normalize_expert_weights or None
        function = args.router_function
        plain = function.is_softmax_topk and not args.moe_router_enable_expert_bias
        require(not args.batch_invariant or kernels_take(experts, top_k, function, plain), "dMoE", "batch_invariant",
                "False where no router kernel takes moe_num_experts, moe_top_k and moe_normalize_expert_weights",
                f"{experts}, {top_k} and {p}")
        if top_k == 1 and experts > 1 and (p is not None or not function.pre_softmax):
            _warn_of_constant_weights("moe_router_pre_softmax" if not function.pre_softmax else "moe_normalize_expert_weights")
        self.args, self._source = args, Source()
        self._function = None if function == RouterFunction(normalize=p) else function
        self.layer = torch.nn.Linear(args.hidden_size, experts, bias=args.moe_router_linear_bias, dtype=args.dtype, device=args.device)
        args.init_method(self.layer.weight)
        if args.moe_router_linear_bias:
            torch.nn.init.zeros_(self.layer.bias)
        biased = args.moe_router_enable_expert_bias
        self.register_buffer("expert_bias", torch.zeros(experts, dtype=torch.float32, device=args.device) if biased else None)

    def _apply(self, fn, recurse=True):
        """What to(), half() and their like call: the bias moves to another device as all do, and stays what it is in float32."""
        before = self._buffers.get("expert_bias")
        super()._apply(fn, recurse)
        after = self._buffers.get("expert_bias")
        if before is not None and after is not None and after.dtype != before.dtype:
            self._buffers["expert_bias"] = torch.empty_like(after, dtype=before.dtype) if before.is_meta else before.to(after.device)
        return self

    def jitter(self, x: torch.Tensor) -> torch.Tensor:
        """Random factors, uniform in [1 - eps, 1 + eps), with the shape and dtype of x."""
        eps = self.args.moe_jitter_eps or 0.0
        low, high = 1.0 - eps, 1.0 + eps
        return low + torch.rand_like(x) * (high - low)

    def _route(self, x_TH: torch.Tensor, **given: Any) -> tuple[Routing, torch.dtype]:
        """What the router decides, and the dtype in which MegaBlocks has the logits."""
        args, layer, engine = self.args, self.layer, None
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        top_k, plain = args.moe_top_k, self._is_plain(weight, bias)
        if args.batch_invariant:
            self._require_batch_invariance(plain, bool(given))
            engine = engines.batch_invariant(args.engine, x_TH.device)
        expert_bias = self._buffers.get("expert_bias")
        if self._function is not None or expert_bias is not None or given:
            given |= {"function": self._function or args.router_function, "expert_bias": expert_bias}
        else:
            given["normalize"] = args.moe_normalize_expert_weights or None
        if engine is None and (not plain or args.moe_router_dtype == "bf16" or _torch_names.has_global_hooks()):
            logits_TE = self._logits(x_TH, plain)
            self._require_experts(logits_TE.shape)
            return route(logits_TE, top_k, **given), logits_TE.dtype
        assert weight is not None  # of a plain layer
        if weight.size(0) != args.moe_num_experts:
            self._require_experts((x_TH.size(0), weight.size(0)))
        scores_dtype = torch.float32 if args.moe_router_dtype == "fp32" else None
        return route_tokens(x_TH, weight, top_k, engine=engine, bias=bias, scores_dtype=scores_dtype, **given), x_TH.dtype

    def call_before_experts(self, padding_mask_T: torch.Tensor | None) -> RouterCall | None:
        """What forward calls, for routed_experts; None where forward does more or something else."""
        args, layer = self.args, self._modules.get("layer")
        if type(layer) is not torch.nn.Linear:
            return None
        weight, bias = layer._parameters.get("weight"), layer._parameters.get("bias")
        if args.uniform_expert_assignment or args.moe_router_dtype == "bf16" or self._tape is not None \
                or (self.training and args.moe_jitter_eps is not None) \
                or not _is_plain_linear(layer, weight, bias, args.moe_router_linear_bias):
            return None
        assert weight is not None  # of a plain layer
        if weight.size(0) != args.moe_num_experts:
            return None
        engine = None
        if args.batch_invariant:
            self._require_batch_invariance(True, padding_mask_T is not None)
            engine = engines.batch_invariant(args.engine, weight.device)
        function, expert_bias = self._function, self._buffers.get("expert_bias")
        if function is None and (expert_bias is not None or padding_mask_T is not None):
            function = args.router_function
        normalize = None if function is not None else args.moe_normalize_expert_weights or None
        scores_dtype = torch.float32 if args.moe_router_dtype == "fp32" else None
        tensors = weight, bias, expert_bias, padding_mask_T
        return RouterCall(tensors, args.moe_top_k, normalize, function, engine, scores_dtype)

    def _is_plain(self, weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
        return _is_plain_linear(self.layer, weight, bias, self.args.moe_router_linear_bias)

    def _require_batch_invariance(self, plain: bool, given: bool) -> None:
        """Raise where the layer, which is `plain` or not, or the router's kernel might depend on other tokens. `given`: with padding or
        given experts, for which there are not kernels of every norm."""
        args = self.args
        bias = "with a" if args.moe_router_linear_bias else "without"
        require(plain, "dMoE", "router.layer", f"a torch.nn.Linear {bias} bias for batch_invariant, and without"
                " hooks or a forward of its own", type(self.layer).__name__, TypeError)
        require(not given or kernels_take(args.moe_num_experts, args.moe_top_k, args.router_function, False), "dMoE",
                "moe_normalize_expert_weights", "None or 1 with batch_invariant and padding_mask or given_experts",
                repr(args.moe_normalize_expert_weights))

    def _logits(self, x_TH: torch.Tensor, plain: bool) -> torch.Tensor:
        """What the layer returns, or a product in the dtype that moe_router_dtype names."""
        layer = self.layer
        if plain and self.args.moe_router_dtype == "bf16" and x_TH.dtype != torch.float64:
            operands = (None if t is None else t.bfloat16() for t in (x_TH, layer.weight, layer.bias))
            with torch.autocast(x_TH.device.type, enabled=False) if autocast_enabled(x_TH.device.type) else contextlib.nullcontext():
                return torch.nn.functional.linear(*operands)
        logits_TE = layer(_as_weight(layer, x_TH))
        return logits_TE.float() if self.args.moe_router_dtype == "fp32" and logits_TE.dtype != torch.float64 else logits_TE

    def _require_experts(self, logits_shape) -> None:
        require(logits_shape[-1] == self.args.moe_num_experts, "dMoE", "router.layer",
                f"a module that maps [T,H] to [T,E] with E == {self.args.moe_num_experts}", list(logits_shape))

    def forward(self, x: torch.Tensor, *, padding_mask: torch.Tensor | None = None, given_experts: torch.Tensor | None = None,
                ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tape = self._tape
        if tape is not None:
            padding_mask, given_experts = tape.before(x, padding_mask, given_experts)
        if self.training and self.args.moe_jitter_eps is not None:
            x = x * self.jitter(x)
        given: dict[str, Any] = {}
        if padding_mask is not None or given_experts is not None:
            given = {"padding_mask": None if padding_mask is None else padding_mask.reshape(-1),
                     "given_experts": None if given_experts is None else given_experts.reshape(-1, given_experts.size(-1))}
        (scores_TE, weights_TK, experts_TK, logsumexp_T), dtype = self._route(x.reshape(-1, x.size(-1)), **given)
        self.save_logsumexp(logsumexp_T, dtype, given.get("padding_mask"))
        if self.args.uniform_expert_assignment:
            slots = torch.arange(experts_TK.numel(), dtype=torch.int64, device=experts_TK.device)
            uniform_TK = torch.remainder(slots, self.args.moe_num_experts).view_as(experts_TK)
            experts_TK = uniform_TK if padding_mask is None else torch.where(experts_TK < 0, experts_TK, uniform_TK)
        if tape is not None:
            tape.after(experts_TK)
        return scores_TE, weights_TK, experts_TK

    def save_logsumexp(self, logsumexp_T: torch.Tensor, dtype: torch.dtype, padding_mask_T: torch.Tensor | None) -> None:
        """Keep it for the z-loss in training, where that has a weight; `dtype` is that of MegaBlocks' logits."""
        if self.training and self.args.moe_zloss_weight != 0:
            # MegaBlocks keeps logits, whose logsumexp has their dtype, or is computed in float32 if that is asked for.
            save_router_logsumexp(logsumexp_T if self.args.moe_zloss_in_fp32 else logsumexp_T.to(dtype), self._source, padding_mask_T)


def _is_plain_linear(layer: torch.nn.Module, weight: torch.Tensor | None, bias: torch.Tensor | None, with_bias: bool) -> bool:
    """Whether calling the layer, which has these parameters, computes x @ weight.T, plus a bias where the arguments ask for one, and does
    nothing else, so that route_tokens may take its place."""
    return (type(layer) is torch.nn.Linear and torch.nn.Linear.forward is _LINEAR_FORWARD and "forward" not in layer.__dict__
            and weight is not None and (bias is not None) == with_bias
            and type(weight) in _PLAIN_PARAMETERS and type(bias) in _PLAIN_PARAMETERS
            and not (layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks))


# Weights of other types (DTensor, quantised ones) have products of their own.
_PLAIN_PARAMETERS = {*PLAIN, *_torch_names.FAKES, type(None)}


# Where torch.compile's and torch's checkpoint_wrapper's modules have the one that they call.
_WRAPPED = ("_orig_mod", "_checkpoint_wrapped_module")


def _as_weight(layer: torch.nn.Module, x_TH: torch.Tensor) -> torch.Tensor:
    """x in the dtype of a linear layer's weight: a router may be of another dtype than the layer, and torch's product takes only one.
    Autocast casts both. A module with a forward of its own gets x as it is."""
    while (inner := next((layer._modules[name] for name in _WRAPPED if name in layer._modules), None)) is not None:
        layer = inner
    if type(layer).forward is not torch.nn.Linear.forward or "forward" in layer.__dict__:
        return x_TH
    weight: torch.Tensor | None = layer._parameters.get("weight")
    if weight is None:  # parametrized: reading layer.weight would compute it
        weight = next(layer.parameters(), x_TH)
    if weight.dtype == x_TH.dtype or (autocast_enabled(x_TH.device.type) and torch.float64 not in (weight.dtype, x_TH.dtype)):
        return x_TH
    return x_TH.to(weight.dtype)


# What makes all weights the same with moe_top_k=1, and what to use instead.
_CONSTANT_WEIGHTS = {
    "moe_normalize_expert_weights": ("divides the one weight of a token by itself", "None"),
    "moe_router_pre_softmax": ("False takes the softmax of one logit", "True"),
}


@functools.cache
def _warn_of_constant_weights(field: str) -> None:
    why, instead = _CONSTANT_WEIGHTS[field]
    warnings.warn(f"Arguments: {field} {why} with moe_top_k=1: all weights are the same, and the router gets no gradient from the layer's"
                  f" output. Use {instead} with moe_top_k=1.", stacklevel=4)
