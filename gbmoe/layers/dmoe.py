"""dMoE: the dropless Mixture-of-Experts layer, with MegaBlocks' interface.

Shape suffixes: T tokens, K slots a token (top-k), E experts, H hidden.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from gbmoe._checks import FLOATING, PLAIN, autocast_enabled, require, require_tensor
from gbmoe._define_operator import is_watched, may_be_one_node
from gbmoe._torch_names import calls_modules_alone, is_any_autocast_enabled
from gbmoe.layers import token_counts
from gbmoe.layers.arguments import Arguments, require_arguments
from gbmoe.layers.expert_parallelism import Prepared, parallel_experts, prepare
from gbmoe.layers.expert_weights import ExpertWeights, GroupedExperts, make_experts
from gbmoe.layers.kept import Source
from gbmoe.layers.losses import save_load_balancing_loss
from gbmoe.layers.router import LearnedRouter
from gbmoe.layers.shared_expert import make_shared_expert
from gbmoe.ops.routed_experts import routed_experts
from gbmoe.parallel.expert_modules import ExpertModule
from gbmoe.plan import RoutingPlan


class ParallelDroplessMLP(ExpertModule):
    """The experts with their plan, the all-to-all where they are spread over ranks, the output bias and the load-balancing loss.

    forward(x [..., H], scores [T,E], expert_weights [T,K], top_experts [T,K]) follows MegaBlocks' return convention: out;
    (out, bias) with bias and return_bias; out + bias with bias alone. The bias is one vector [H] a layer.

    With moe_router_enable_expert_bias `tokens_per_expert`, int64 [E], has how many tokens each expert got in training since the last
    update_expert_bias. It is no buffer, and is not saved.

    With experts spread over a group, construction and forward are collective: every rank of the group must call them, in the
    same order, with any number of tokens.
    """

    _source: Source | None = None  # in modules that were pickled before 0.3
    _prepared = Prepared()  # likewise
    tokens_per_expert: torch.Tensor | None = None

    def __init__(self, args: Arguments):
        super().__init__()
        require_arguments(args, "ParallelDroplessMLP")
        self.args, self._source = args, Source()
        self.num_experts, self.top_k = args.moe_num_experts, args.moe_top_k
        self._prepared = prepare(args)
        self.mlp = make_experts(args)
        if args.bias:
            self.bias = torch.nn.Parameter(torch.zeros(args.hidden_size, device=args.device, dtype=args.dtype))
        else:
            self.register_parameter("bias", None)
        if args.moe_router_enable_expert_bias:
            # No buffer: DistributedDataParallel gives all ranks the buffers of the first.
            self.tokens_per_expert = torch.zeros(args.moe_num_experts, dtype=torch.int64, device=args.device)

    def _apply(self, fn, recurse=True):
        """What to(), cuda() and their like call: the counts move with the parameters."""
        super()._apply(fn, recurse)
        counts_E = self.tokens_per_expert
        if counts_E is not None:
            device = fn(counts_E.new_empty(0)).device
            if device != counts_E.device:
                moved = counts_E.is_meta or device.type == "meta"  # no values to take along
                self.tokens_per_expert = torch.zeros_like(counts_E, device=device) if moved else counts_E.to(device)
        return self

    def expert_root(self):
        """The experts, or what was put round them, such as an adapter; the bias is the same on all ranks."""
        return self._modules.get("mlp")

    def forward(self, x, scores, expert_weights, top_experts, *, meanwhile=None, padding_mask=None, cu_seqlens=None):
        """Shapes and results are those of the class. padding_mask [...] and cu_seqlens [S+1] are for the load-balancing loss.

        With expert parallelism `meanwhile` is called once. Work that it starts on the device runs while the host waits for the numbers of
        rows. Without expert parallelism it is not called.
        """
        x_TH = x.reshape(-1, x.size(-1))
        if self.args.moe_expert_model_parallelism:
            counts = self.training and (self.tokens_per_expert is not None or self.args.has_load_balancing_loss)
            out_TH, counts_E = parallel_experts(self.mlp, x_TH, top_experts, expert_weights, self.args, meanwhile, self._prepared, counts)
        else:
            # The router's ids are in range by construction.
            plan = RoutingPlan.from_experts(top_experts, self.num_experts, check="none")
            out_TH, counts_E = self.mlp(x_TH, plan, expert_weights), plan.counts_E
        # To autograd this is not a view. fully_shard gathers the weights for backward in a hook on the result of its unit, and the
        # hook of a view is lost where the caller adds to it in place.
        # torch.jit.trace records the sizes of a view, but would make those of this operator constants.
        out = out_TH.view(x.shape) if torch.jit.is_tracing() else torch.ops.aten._unsafe_view.default(out_TH, x.shape)
        return self.finish(x, out, scores, top_experts, counts_E, padding_mask=padding_mask, cu_seqlens=cu_seqlens)

    def finish(self, x, out, scores, top_experts, counts_E, *, padding_mask=None, cu_seqlens=None):
        """What forward returns, made of the experts' sums in the shape of x and of how many tokens each expert got, which it reads in
        training alone."""
        training, args = self.training, self.args
        try:
            bias = self._parameters["bias"]  # found in less time than as an attribute
        except KeyError:  # a parametrization or pruning has taken it out
            bias = self.bias
        if training and self.tokens_per_expert is not None:
            token_counts.add(counts_E, self.tokens_per_expert)
        if training and args.has_load_balancing_loss:
            by_sequence = args.moe_router_load_balancing_type == "seq_aux_loss"
            experts = top_experts.view(*x.shape[:-1], top_experts.size(-1)) if by_sequence else None
            save_load_balancing_loss((counts_E, scores), self._source, experts=experts, padding_mask=padding_mask,
                                     cu_seqlens=cu_seqlens if by_sequence else None)
        if bias is None:
            return out
        if not args.return_bias:
            return out + bias.to(out.dtype)  # under autocast out has autocast's dtype, as a Linear with a bias does
        # A clone under fully_shard, which frees the memory of a unit's parameters when the unit returns.
        return out, bias.clone() if "_is_fsdp_managed_module" in self.__dict__ else bias


class dMoE(torch.nn.Module):
    """Dropless Mixture of Experts: router -> experts -> optional shared expert. Mirrors megablocks.layers.dmoe.dMoE.

    Parameters, all under MegaBlocks' names and shapes, so that its checkpoints load with strict=True: router.layer.weight
    [E,H]; experts.mlp.w1, w2 and (glu) v1 [E*F,H]; experts.bias [H]; shared_expert.{up,down,gate}_proj. Options that MegaBlocks lacks add
    names of their own, and with one_matrix_per_expert or weight_layout the names and shapes are those of state dicts alone.

    The layer's dtype is that of its experts. The router may have another one, such as float32 in a bfloat16 layer (`layer.router.float()`).
    `router.layer` may be any module that maps [T,H] to logits [T,E], such as an adapter round the linear layer or a quantised one.

    `router` itself may be any module that maps x [..., H], in the layer's dtype or autocast's, to a tuple (scores, weights, ids):

    - scores [T,E], floating, which the load-balancing loss reads in training; None where there is none
    - weights [T,K], floating, of any dtype, by which the experts' outputs are multiplied; gradients flow back through them
    - ids [T,K], int32 or int64, in [0,E); a slot with the id -1 is left out

    where T is the number of tokens, E == moe_num_experts and K == moe_top_k. All are on the device of x. What the router's arguments ask
    for (jitter, z-loss, normalised weights, uniform assignment) is left to such a module. It is not given them.

    Args:
        args: see Arguments. gbmoe.layers.from_megatron makes them of MegaBlocks' Arguments, and of Megatron's.

    Raises:
        TypeError: for arguments of another library.

    Example:
        >>> layer = dMoE(Arguments(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4,
        ...                        moe_top_k=2, bias=False, fp16=False, device="cpu"))
        >>> layer(torch.randn(7, 3, 32)).shape
        torch.Size([7, 3, 32])
        >>> class SigmoidRouter(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.gate = torch.nn.Linear(32, 4, bias=False)
        ...
        ...     def forward(self, x):
        ...         scores_TE = self.gate(x.flatten(0, -2)).sigmoid()
        ...         weights_TK, ids_TK = scores_TE.topk(2)
        ...         return scores_TE, weights_TK / weights_TK.sum(-1, keepdim=True), ids_TK
        >>> layer.router = SigmoidRouter()
        >>> layer(torch.randn(7, 3, 32)).shape
        torch.Size([7, 3, 32])
    """

    _tape: Any = None  # of record_experts or replay_experts

    def __init__(self, args: Arguments):
        super().__init__()
        require_arguments(args, "dMoE")
        self.args = args
        self.router: torch.nn.Module = LearnedRouter(args)
        self.experts: Any = self._init_experts_mlp(args)
        self.shared_expert = make_shared_expert(args) if args.shared_expert else None

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        if "args" not in self.__dict__:  # modules that were pickled before the router could be any module
            self.args = self.experts.args

    def _init_experts_mlp(self, args: Arguments) -> torch.nn.Module:
        return ParallelDroplessMLP(args)

    def forward(self, x: torch.Tensor, *, padding_mask: torch.Tensor | None = None, given_experts: torch.Tensor | None = None,
                cu_seqlens: torch.Tensor | None = None):
        """x [sl, bs, H] (any leading dimensions) -> the same shape, or (that, bias [H]); see ParallelDroplessMLP.

        `padding_mask`, bool [sl, bs], is True for tokens that no expert computes and no loss counts. `given_experts`, ids [sl, bs, K], are
        taken instead of the router's choice, with weights that the router computes for them. A router of your own gets those of the two
        that are given, as keyword arguments.

        `cu_seqlens`, int32 or int64 [S+1] on the device of x, tells packed sequences apart for the loss of each sequence
        (moe_router_load_balancing_type "seq_aux_loss"): sequence s has the tokens from cu_seqlens[s] to cu_seqlens[s+1], in the order
        in which they lie in x, and the first begins at 0. Without it x is [sl, bs, H], or [bs, sl, H] with Arguments.batch_first. Other
        losses do not look at it.

        Under autocast x may have any floating dtype; a float64 layer takes float64 and computes in it, as torch's own do.

        Raises:
            TypeError, ValueError: naming what x, or what the router returned, should be and what it is.
        """
        modules = self._modules  # where they are found in a tenth of the time that an attribute takes
        router: Any = modules.get("router")
        experts: Any = modules.get("experts")
        shared_expert, tape = self.shared_expert, self._tape
        x = self._checked(x, experts)
        if cu_seqlens is not None:
            require_tensor(cu_seqlens, "dMoE", "cu_seqlens", rank=1, dtypes=(torch.int32, torch.int64), device=x.device)
        routed = self._route_and_compute(x, padding_mask, router, experts) if tape is None and given_experts is None else None
        if routed is not None and shared_expert is None:
            return experts.finish(x, *routed, padding_mask=padding_mask, cu_seqlens=cu_seqlens)
        further: dict[str, Any] = {} if padding_mask is None else {"padding_mask": padding_mask}
        if cu_seqlens is not None:
            further["cu_seqlens"] = cu_seqlens
        if routed is not None:
            return self._with_shared_expert(functools.partial(experts.finish, x, *routed), x, further)
        if tape is not None:  # a mask that it makes hides no token
            padding_mask, given_experts = tape.before(x, padding_mask, given_experts)
        given = {} if padding_mask is None else {"padding_mask": padding_mask}
        if given_experts is not None:
            given["given_experts"] = given_experts
        scores, expert_weights, top_experts = self._route(x, **given)
        if tape is not None:
            tape.after(top_experts)
        compute: Callable[..., Any] = functools.partial(experts, x, scores, expert_weights, top_experts)
        return compute(**further) if shared_expert is None else self._with_shared_expert(compute, x, further)

    def _with_shared_expert(self, compute: Callable[..., Any], x: torch.Tensor, further: dict[str, Any]):
        """What forward returns: that of compute(**further), and the shared expert's output for x."""
        shared_expert: Any = self.shared_expert
        shared: list[torch.Tensor] = []
        if self.args.moe_expert_model_parallelism:  # the shared expert hides the host's wait
            out = compute(meanwhile=lambda: shared.append(shared_expert(x)), **further)
        else:
            out = compute(**further)
            shared.append(shared_expert(x))
        out, *bias = out if isinstance(out, tuple) else (out,)
        out = shared_expert.add_experts_sharedexpert(shared[0], out)
        return (out, *bias) if bias else out

    def _route_and_compute(self, x: torch.Tensor, padding_mask: torch.Tensor | None, router: Any, experts: Any,
                           ) -> tuple[torch.Tensor, ...] | None:
        """Router and experts in one call: what experts.finish takes after x. None where they are to be called one after the other, because
        something watches or replaces one of them, or they do more than routed_experts."""
        if torch.compiler.is_compiling() or self.args.moe_expert_model_parallelism or type(self)._route is not _ROUTE \
                or "_route" in self.__dict__ \
                or not _is_called_as_is(router, LearnedRouter) or not _is_called_as_is(experts, ParallelDroplessMLP):
            return None
        mlp = experts._modules.get("mlp")
        if not _is_called_as_is(mlp, GroupedExperts) or not calls_modules_alone():
            return None
        padding_mask_T = None if padding_mask is None else padding_mask.reshape(-1)
        before, after = router.call_before_experts(padding_mask_T), mlp.call_after_router()
        if before is None or after is None or not may_be_one_node(x, *before.tensors, *after.tensors):
            return None
        routed = routed_experts(x, before, after)
        router.save_logsumexp(routed.logsumexp_T, x.dtype, padding_mask_T)
        return routed.out, routed.scores_TE, routed.experts_TK, routed.counts_E

    def _checked(self, x: torch.Tensor, experts: Any) -> torch.Tensor:
        """x, cast to autocast's dtype where that is on. Raises unless the experts can take it."""
        weight, hidden = _weight_in_use(experts), self.args.hidden_size
        if weight is not None and type(x) in PLAIN and x.dtype is weight.dtype and x.dtype in FLOATING and x.device == weight.device \
                and x.dim() and x.size(-1) == hidden and not is_any_autocast_enabled():
            return x  # the usual case, in less time than the questions below take
        require_tensor(x, "dMoE", "x", dtypes=FLOATING, device=None if weight is None else weight.device)
        if x.dim() < 1 or x.size(-1) != hidden:
            require(False, "dMoE", "x", lambda: f"last dimension hidden_size == {hidden}", list(x.shape))
        dtype, device_type = x.dtype if weight is None else weight.dtype, x.device.type
        if autocast_enabled(device_type) and dtype != torch.float64:
            # Cast before the tokens are permuted, so that half as many bytes are moved.
            return x.to(torch.get_autocast_dtype(device_type))
        if x.dtype != dtype:
            require(False, "dMoE", "x", f"the layer's dtype {dtype}{'' if dtype == torch.float64 else ', or autocast'}", x.dtype, TypeError)
        return x

    def _route(self, x: torch.Tensor, **given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the router returns for x. Raises where it is not what the class says."""
        router = self.router
        routing = router(x, **given)
        if type(router) is not LearnedRouter or "forward" in router.__dict__:
            needs_scores = self.training and self.args.has_load_balancing_loss
            _check_routing(routing, x, self.args.moe_num_experts, self.args.moe_top_k, needs_scores)
        return routing


_ROUTE = dMoE._route
# What a call of each of these modules runs, which somebody may replace, in the class or for one module.
_METHODS: dict[type, tuple[str, ...]] = {
    LearnedRouter: ("forward", "_route"), ParallelDroplessMLP: ("forward",),
    GroupedExperts: ("forward", "compute", "weights_as_stored", "_weights_as_stored")}
_NOW = {kind: operator.attrgetter("__call__", *methods) for kind, methods in _METHODS.items()}
_ORIGINALS = {kind: (torch.nn.Module.__call__, *(getattr(kind, name) for name in methods)) for kind, methods in _METHODS.items()}


def _is_called_as_is(module: torch.nn.Module | None, kind: type[torch.nn.Module]) -> bool:
    """Whether the module is of exactly this class, and a call of it runs the class's own methods and nothing else."""
    if type(module) is not kind:
        return False
    of = module.__dict__
    return (of.keys().isdisjoint(_METHODS[kind]) and _NOW[kind](kind) == _ORIGINALS[kind]
            and not (of["_forward_hooks"] or of["_forward_pre_hooks"] or of["_backward_hooks"] or of["_backward_pre_hooks"])
            and of.get("_compiled_call_impl") is None)


def _weight_in_use(experts: Any) -> torch.Tensor | None:
    """A parameter of the experts that has the dtype and the device on which they compute. None where it cannot be told."""
    mlp = experts._modules.get("mlp", experts)
    if not isinstance(mlp, ExpertWeights):  # something may wrap them, such as an adapter
        mlp = next((module for module in mlp.modules() if isinstance(module, ExpertWeights)), None)
        if mlp is None:
            return None
    weight = mlp.stored_weight()
    # Weights of a unit of fully_shard are there only while that unit is called. If it is the experts themselves, the unit's policy may
    # still cast them, and x with them, and they may come from another device.
    if type(weight) is not torch.nn.Parameter and hasattr(weight, "to_local") and "_is_fsdp_managed_module" in mlp.__dict__:
        return None
    return weight


def _check_routing(routing: Any, x: torch.Tensor, experts: int, top_k: int, needs_scores: bool) -> None:
    """Raise unless a router of the user's returned what dMoE says. Values are looked at on the CPU alone, where nothing waits for them."""
    parts = len(routing) if isinstance(routing, (tuple, list)) else 1
    require(parts == 3, "dMoE", "router", "to return a tuple (scores, weights, ids)", type(routing) if parts == 1 else f"{parts} values",
            TypeError)
    scores_TE, weights_TK, ids_TK = routing
    if scores_TE is not None or needs_scores:
        _check_part("scores", scores_TE, x, "E", experts, FLOATING)
    _check_part("weights", weights_TK, x, "K", top_k, FLOATING)
    _check_part("ids", ids_TK, x, "K", top_k, (torch.int32, torch.int64))
    if ids_TK.device.type == "cpu" and ids_TK.numel() and not is_watched(ids_TK):
        low, high = (int(bound) for bound in ids_TK.aminmax())
        require(low >= -1 and high < experts, "dMoE", "ids of router", f"ids in [0, {experts}), or -1 to leave a slot out",
                f"ids from {low} to {high}")


def _check_part(name: str, tensor: Any, x: torch.Tensor, letter: str, width: int, dtypes: tuple[torch.dtype, ...]) -> None:
    require_tensor(tensor, "dMoE", f"{name} of router", rank=2, dtypes=dtypes, device=x.device)
    tokens = x.numel() // x.size(-1)
    require(tensor.size(0) == tokens and tensor.size(1) == width, "dMoE", f"{name} of router",
            lambda: f"shape [T,{letter}] == [{tokens}, {width}]", list(tensor.shape))
