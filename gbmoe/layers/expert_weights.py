"""The experts' weights, and the three implementations that compute with them.

Shape suffixes: T tokens, K slots a token, E experts on this rank, H hidden, F ffn hidden on this rank, C capacity, P padded rows,
R = T * K slots.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.utils import parametrize

from gbmoe._checks import require
from gbmoe._define_operator import refuse_jit_tracing
from gbmoe.float8 import keeps_weights
from gbmoe.layers import mpu
from gbmoe.layers.arguments import Arguments
from gbmoe.layers.megablocks_state import BIASES, WEIGHTS, load_as_megablocks, save_as_megablocks, saved_tensors, stored_tensor
from gbmoe.lora_factors import ExpertLora, LoraFactors
from gbmoe.lora_of_peft import is_of_peft, low_rank_changes, may_have_changes
from gbmoe.ops import expert_mlp, padded_gather, padded_scatter
from gbmoe.ops.activations import activation_name, gated
from gbmoe.ops.gradient_scale import scales_exactly, with_scaled_gradients
from gbmoe.ops.routed_experts import ExpertsCall
from gbmoe.ops.rows_before_weights import rows_before_weights
from gbmoe.parallel.expert_modules import ExpertModule
from gbmoe.parallel.scaled_exchange import ScaledExchange
from gbmoe.plan import RoutingPlan
from gbmoe.weight_layout import MEGABLOCKS, WeightLayout


def local_weight(weight: torch.Tensor) -> torch.Tensor:
    """The tensor to compute with: the local shard of a DTensor, or the tensor itself. Any shape and dtype, without a copy.

    Differentiable: the gradient of a shard becomes a DTensor with the same placements.
    """
    if type(weight) is torch.nn.Parameter:
        return weight
    return weight.to_local() if hasattr(weight, "to_local") else weight


class ExpertWeights(ExpertModule):
    """w1, w2 and, for a GLU, v1: each [E*F,H], row-major, expert-major, with MegaBlocks' names, shapes and checkpoints; or with
    one_matrix_per_expert [E,F,H], or in another weight_layout, and the same checkpoints. With moe_expert_linear_bias also w1_bias and
    v1_bias [E,F], and w2_bias [E,H]; a layout with gate and up in one tensor has w1_bias [E,2F].

    forward(x_TH, plan, weights_TK or None) -> out_TH is the weighted sum of each token's experts. Subclasses compute it for given
    weights: compute(x_TH, plan, weights_TK or None, w1, w2, v1 or None), one matrix an expert, in `layout`. They scale the gradients of
    these weights by gradient_scale (gbmoe.ops.gradient_scale).
    """

    compute: Callable[..., torch.Tensor]
    # Where an expert's matrices lie in the parameters. It is the module's own: arguments may change after it was made.
    layout: WeightLayout = MEGABLOCKS
    # Whether `compute` takes lora=, a gbmoe.ExpertLora, for these arguments.
    takes_adapters = False

    def __init__(self, args: Arguments):
        super().__init__()
        self.args = args
        parallel = args.moe_expert_model_parallelism
        # With expert parallelism a rank's experts see the tokens of all ranks. Their gradients are scaled to the mean over ranks, which
        # data parallelism would give.
        self.gradient_scale = 1 / mpu.expert_parallel_world_size(args) if parallel else 1
        # The order in which MegaBlocks draws them, after those of an MLP that it makes first and drops.
        methods = {"w1": args.init_method, "w2": args.output_layer_init_method}
        if args.mlp_type == "glu":
            methods["v1"] = args.init_method
        self.num_local_experts = mpu.experts_per_rank(args)
        features = mpu.features_per_rank(args)
        self.rows = self.num_local_experts * features
        if args.weight_layout is not None:
            self.layout = WeightLayout.of_code(args.weight_layout.code)
        layout, hidden = self.layout, args.hidden_size
        stacked = args.one_matrix_per_expert or args.weight_layout is not None
        if stacked:
            self.register_state_dict_post_hook(save_as_megablocks)
            self.register_load_state_dict_pre_hook(load_as_megablocks)
        columns = {"w1": 2 * features if layout.is_combined else features, "w2": features, "v1": features}
        names = [name for name in methods if name in self.stored_names()]
        for name in names:
            shape = (columns[name], hidden)
            if layout.down_transposed if name == "w2" else layout.up_transposed:
                shape = (hidden, columns[name])
            shape = (self.num_local_experts, *shape) if stacked else (self.rows, hidden)  # type: ignore[assignment]
            self.register_parameter(name, torch.nn.Parameter(torch.empty(shape, device=args.device, dtype=args.dtype)))
        absent = [name for name in methods if name not in names]
        for name in absent:  # as attributes they are there for those who walk along the names of state dicts, as torch does
            self.register_parameter(name, None)
        with torch.no_grad():
            for name, init_method in methods.items():
                self._draw(name, init_method)
        if args.moe_expert_linear_bias:
            columns["w2"] = hidden
            for name in names:
                bias = torch.zeros(self.num_local_experts, columns[name], device=args.device, dtype=args.dtype)
                self.register_parameter(f"{name}_bias", torch.nn.Parameter(bias))
            for name in absent:
                self.register_parameter(f"{name}_bias", None)

    def _draw(self, name: str, init_method: Callable[[torch.Tensor], Any]) -> None:
        """Draw the matrices w1, w2 or v1 of all experts, with the values that they have in MegaBlocks' layout."""
        stored = self._parameters[name if name in self.stored_names() else "w1"]
        assert stored is not None
        place = self.layout.matrix(name, stored)
        if place.is_contiguous():
            _initialise(place, self.args, init_method)
            return
        drawn = torch.empty(self.rows, self.args.hidden_size, device=place.device, dtype=place.dtype)
        _initialise(drawn, self.args, init_method)
        place.copy_(drawn.view(place.shape))

    def stored_names(self) -> tuple[str, ...]:
        """Which of w1, w2 and v1 are parameters."""
        return ("w1", "w2", "v1") if self.args.mlp_type == "glu" and not self.layout.is_combined else ("w1", "w2")

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """As in Module. Every parameter is marked as expert-parallel or not, also one that load_state_dict(assign=True) puts here."""
        super().register_parameter(name, param)
        self.mark()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self.gradient_scale = self.gradient_scale or 1  # None in modules that were pickled before 0.2

    def weights_EFH(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(w1, w2, v1 or None) as [E,F,H], local; of another layout they are views. Gradients are not scaled. Raises as weights_as_stored
        does."""
        return self.layout.matrices(*self.weights_as_stored())

    def weights_as_stored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(w1, w2, v1 or None), local, one matrix an expert, in `layout`. `compute` scales their gradients by gradient_scale. Raises
        ValueError where there are adapters, of which a caller that computes with weights alone would not know."""
        require(self.active_lora() is None, "dMoE", "adapters", "none that is active, or merged ones, with experts in mapped memory, in"
                " chunks, with shadows or expert_parallel_exact (expert_parallel_transport='exchange', expert_parallel_chunks=1)",
                "active adapters")
        return self._weights_as_stored()

    def as_saved(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        return saved_tensors(self.layout, name, tensor)

    def as_stored(self, name: str, saved: dict[str, torch.Tensor]) -> torch.Tensor:
        stored = self._parameters.get(name)
        if name in BIASES or (name in WEIGHTS and stored is not None and stored.dim() == 3):
            return stored_tensor(self.layout, name, saved, self.num_local_experts)
        return saved[name]

    def own_weights(self) -> list[torch.nn.Parameter]:
        """The parameters of the experts without their adapters."""
        return [parameter for name, parameter in self.named_parameters() if not name.startswith("adapters.")]

    @property
    def adapters(self) -> Any:
        """gbmoe.layers.lora_adapters.Adapters, or None where there are none."""
        return self._modules.get("adapters")

    def active_lora(self) -> ExpertLora | None:
        """The active adapters of these experts, gbmoe's own and PEFT's, that are not merged."""
        adapters: Any = self._modules.get("adapters")
        own = None if adapters is None else adapters.lora(self.layout)
        return own if not may_have_changes(self) else _with_changes_of_peft(self, own)

    def _weights_as_stored(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        experts, hidden = self.num_local_experts, self.args.hidden_size
        w1, w2, v1 = [w if w is None or w.dim() == 3 else w.view(experts, -1, hidden) for w in self._weights()]
        return w1, w2, v1  # type: ignore[return-value]

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """w1, w2 and v1 in the shape in which they are parameters, local."""
        return self._weight("w1"), self._weight("w2"), self._weight("v1") if len(self.stored_names()) == 3 else None

    def _weight(self, name: str) -> torch.Tensor:
        weight: Any = self._parameters.get(name)
        if type(weight) is not torch.nn.Parameter:  # a parametrization, pruning or fully_shard has put something in its place
            weight = local_weight(_without_changes(self, name))
        stacked = weight.dim() == 3
        # Without this check a shard that fully_shard made could be viewed as a wrong number of experts, without an error.
        expected = self.num_local_experts if stacked else self.rows
        if weight.size(0) != expected:
            require(False, "dMoE", name,
                    lambda: f"{expected} {'matrices' if stacked else 'rows'} on this rank (fully_shard gathers them only when the"
                    " module that it was given is called, not for a submodule)", weight.size(0))
        return weight

    def biases(self) -> dict[str, Any]:
        """w1_bias, w2_bias and (glu) v1_bias, those that there are, local, as `layout` has them."""
        if not self.args.moe_expert_linear_bias:
            return {}
        return {name: local_weight(bias) for name in BIASES if (bias := getattr(self, name, None)) is not None}

    def forward(self, x_TH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None) -> torch.Tensor:
        lora = self.active_lora()
        if lora is None:
            return self.compute(x_TH, plan, weights_TK, *self._weights_as_stored())
        return self.compute(x_TH, plan, weights_TK, *self._weights_as_stored(), lora=lora)

    def stored_weight(self) -> Any:
        """A tensor from which the weights are computed, for its dtype and device: w1 or, where a parametrization or pruning has taken
        its place, another parameter. No parametrization is computed. It may have any shape."""
        weight = self._parameters.get("w1")
        if weight is None:
            weight = next(self.parameters(), None)
        return self.w1 if weight is None else weight

    def hooks_set_weights(self) -> bool:
        """Whether hooks compute weights when the module is called, as pruning and the older weight_norm have them do. Only in a call
        are such weights those of the step."""
        set_here = self.__dict__
        return "w1" in set_here or "w2" in set_here or "v1" in set_here

    def _require_no_hooks(self, option: str) -> None:
        require(not self.hooks_set_weights(), "dMoE", "experts.mlp",
                f"parameters or parametrizations with {option}, which uses the weights without calling the module",
                "weights that hooks compute")

    def in_chunks(self, bounds: list[tuple[int, int]], shadows_of: Callable[..., tuple] | None = None,
                  ) -> list[Callable[..., torch.Tensor]]:
        """A function like forward for each chunk of experts. `bounds` are each chunk's first expert and the one after its last;
        together the chunks are all experts. With `shadows_of`, one more for the experts whose weights shadows_of(w1, w2, v1 or None) gives,
        in the layout of those that it takes.

        Hooks of this module do not run in these functions, so fully_shard has to be given a module around it.
        """
        self._require_no_hooks("expert_parallel_chunks and expert_parallel_shadows")
        sizes = [end - first for first, end in bounds]
        # split, because its gradient is one concatenation; that of a slice would be a whole matrix for every chunk.
        weights = self.weights_as_stored()
        parts = list(zip(*(w.split(sizes) if w is not None else [None] * len(sizes) for w in weights)))
        if shadows_of is not None:
            parts.append(shadows_of(*weights))
        return [lambda x_TH, plan, weights_TK, part=part: self.compute(x_TH, plan, weights_TK, *part) for part in parts]

    def rows_before_weights(self) -> Callable[..., torch.Tensor] | None:
        """A function like forward for one slot a token, which returns rows before they are weighed and uses the weights in the
        gradients only (gbmoe.ops.rows_before_weights).

        None for implementations where weighing forward's rows afterwards gives the same bits in every gradient.
        """
        return None

    def extra_repr(self) -> str:
        a = self.args
        experts, ffn = mpu.experts_per_rank(a), mpu.features_per_rank(a)
        layout = "" if self.layout == MEGABLOCKS else f", layout='{self.layout.code}'"
        return (f"{a.mlp_type}, experts={experts}, hidden={a.hidden_size}, ffn={ffn},"
                f" engine={a.experts_engine}{layout}")


def _without_changes(module: ExpertWeights, name: str) -> torch.Tensor:
    """The weight without low-rank changes by PEFT, which active_lora has. Raises TypeError where PEFT has made one A and one B for the
    rows of all experts."""
    changed = low_rank_changes(module, name)
    if changed is not None and changed.original.dim() == 3 and module.takes_adapters:
        return changed.original
    parts: Any = module.parametrizations[name] if parametrize.is_parametrized(module, name) else ()  # type: ignore[index]
    if any(is_of_peft(part) for part in parts) and parts.original.dim() == 2:
        require(False, "dMoE", name, "adapters of each expert: gbmoe.add_adapter, or with Arguments(one_matrix_per_expert=True) or a"
                " weight_layout PEFT's target_parameters",
                f"PEFT's factors of one matrix {list(parts.original.shape)}, the rows of all experts", TypeError)
    return getattr(module, name)


def _with_changes_of_peft(module: ExpertWeights, own: ExpertLora | None) -> ExpertLora | None:
    """`own`, and the changes that PEFT makes of the parameters w1, w2 and v1."""
    if not module.takes_adapters:
        return own
    found = {name: () if own is None else own.of(name) for name in WEIGHTS}
    for name in WEIGHTS:
        changed = low_rank_changes(module, name)
        if changed is not None and changed.original.dim() == 3:
            # A parameter [E,out,in] has factors [E,out,r] and [E,r,in], and one [E,in,out] the transposes of these.
            transposed = not module.layout.down_transposed if name == "w2" else module.layout.up_transposed
            found[name] += tuple(
                LoraFactors(lhs.transpose(1, 2), rhs.transpose(1, 2), scale) if transposed else LoraFactors(rhs, lhs, scale)
                for lhs, rhs, scale in changed.changes)
    return ExpertLora(**found) if any(found.values()) else None


def _initialise(weight: torch.Tensor, args: Arguments, init_method: Callable[[torch.Tensor], Any]) -> None:
    """Draw the weights of all experts and keep this rank's part, so that a seed gives the same model on any number of ranks."""
    shape = (args.moe_num_experts, args.ffn_hidden_size, args.hidden_size)
    if not args.moe_expert_model_parallelism:
        init_method(weight.view(shape))
        return
    first_expert, first_feature = mpu.first_expert(args), mpu.first_feature(args)
    last_expert = first_expert + mpu.experts_per_rank(args)
    features = slice(first_feature, first_feature + mpu.features_per_rank(args))
    if not _draws_one_by_one(init_method, weight, elements=args.ffn_hidden_size * args.hidden_size):
        every_EFH = torch.empty(shape, device=args.device, dtype=args.dtype)
        init_method(every_EFH)
        weight.copy_(every_EFH[first_expert:last_expert, features].reshape(weight.shape))
        return
    mine_EFH = weight.view(last_expert - first_expert, -1, args.hidden_size)
    one_FH = torch.empty(shape[1:], device=args.device, dtype=args.dtype)
    for expert in range(args.moe_num_experts):  # those of other ranks too: every rank's random numbers are those of one process
        init_method(one_FH)
        if first_expert <= expert < last_expert:
            mine_EFH[expert - first_expert].copy_(one_FH[features])


def _draws_one_by_one(init_method: Callable[[torch.Tensor], Any], weight: torch.Tensor, elements: int) -> bool:
    """Whether experts of so many elements get the same values if they are drawn one after the other as if they are drawn together.

    So do constants. On CPUs so do torch's uniform numbers, one random number for each element in their order, and its normal ones, which
    are made in blocks of 16. On GPUs the place of an element decides which random number it gets. Every other function may depend on the
    shape, as xavier_ and orthogonal_ do, or draw again, as trunc_normal_ does.
    """
    while isinstance(init_method, functools.partial) and not init_method.args:
        init_method = init_method.func
    init = torch.nn.init
    if init_method in (init.constant_, init.zeros_, init.ones_):
        return True
    return weight.device.type == "cpu" and (init_method is init.uniform_ or (init_method is init.normal_ and elements % 16 == 0))


class GroupedExperts(ExpertWeights):
    """mlp_impl='gbmoe': gather, grouped GEMMs, weighted scatter; see gbmoe.ops.expert_mlp."""

    @property
    def takes_adapters(self) -> bool:  # type: ignore[override]
        return activation_name(self.args.activation_fn) is not None and self.args.fp8_recipe is None

    def compute(self, x_TH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None, w1: torch.Tensor,
                w2: torch.Tensor, v1: torch.Tensor | None, lora: ExpertLora | None = None) -> torch.Tensor:
        return expert_mlp(x_TH, plan, w1, w2, v1, weights_TK=weights_TK, activation=self.args.activation_fn, layout=self.layout,
                          engine=self.args.engine, recompute_activation=self.args.memory_optimized_mlp,
                          batch_invariant=self.args.batch_invariant, fp8_recipe=self.args.fp8_recipe,
                          keep_gathered_rows=self.args.keep_gathered_rows, weight_gradient_scale=self.gradient_scale,
                          weights_on="input" if self.args.moe_apply_probs_on_input else "output", lora=lora, **self.biases())

    def forward(self, x_TH: torch.Tensor, plan: RoutingPlan | None, weights_TK: torch.Tensor | None,
                over: ScaledExchange | None = None) -> torch.Tensor:
        """As in ExpertWeights; with `over`, and without a plan, over rows that ranks exchange in e4m3."""
        if over is None or weights_TK is None:
            assert plan is not None
            return super().forward(x_TH, plan, weights_TK)
        weights, scale, keep_weights = self.weights_of_pass(x_TH.dtype)
        return over.experts(x_TH, weights_TK, *weights, str(activation_name(self.args.activation_fn)), scale, keep_weights, self.layout)

    def weights_of_pass(self, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], float, bool]:
        """(w1, w2 and v1 as stored, in the dtype of the tokens, the scale that is left for their gradients, whether forward keeps them in
        float8), for a pass that computes with them over a transport."""
        weights: Any = self.weights_as_stored()
        scale = self.gradient_scale
        if not scales_exactly(scale, dtype):
            weights, scale = with_scaled_gradients(scale, *weights), 1.0
        # Autocast may have lowered x's dtype, to which weights are cast. Such copies are not in the weights' memory.
        keep_weights = keeps_weights(self.args.fp8_recipe, (w for w in weights if w is not None and w.dtype == dtype))
        cast: Any = tuple(w if w is None else w.to(dtype) for w in weights)
        return cast, scale, keep_weights

    def call_after_router(self) -> ExpertsCall | None:
        """What `compute` calls, for routed_experts; None where that does not compute it."""
        args, activation = self.args, activation_name(self.args.activation_fn)
        if activation is None or args.fp8_recipe is not None or args.moe_apply_probs_on_input or self.gradient_scale != 1 \
                or self.active_lora() is not None:
            return None
        biases = self.biases()
        tensors = *self._weights(), biases.get("w1_bias"), biases.get("w2_bias"), biases.get("v1_bias")
        return ExpertsCall(tensors, activation, args.engine, args.batch_invariant, args.keep_gathered_rows, self.layout.code)

    def rows_before_weights(self):
        if activation_name(self.args.activation_fn) is None:
            return None
        self._require_no_hooks("expert_parallel_exact")
        return lambda x_TH, plan, weights_T1: rows_before_weights(
            x_TH, plan, weights_T1, *self.weights_as_stored(), self.args.activation_fn, self.args.experts_engine, self.gradient_scale,
            self.layout)


class BmmExperts(ExpertWeights):
    """mlp_impl='bmm': every expert padded to the largest and multiplied by torch.bmm, for comparison.

    It drops no token: the capacity C is the count of the largest expert, which is read back from the device. With unbalanced routing
    it uses more memory, and multiplies zeros.
    """

    def compute(self, x_TH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None, w1: torch.Tensor,
                w2: torch.Tensor, v1: torch.Tensor | None) -> torch.Tensor:
        refuse_jit_tracing("mlp_impl 'bmm'")
        w1_EFH, w2_EFH, v1_EFH = self.layout.matrices(*with_scaled_gradients(self.gradient_scale, w1, w2, v1))  # type: ignore[arg-type]
        experts, hidden = w1_EFH.size(0), x_TH.size(1)
        capacity = int(plan.padded_counts_E.max()) if plan.num_rows else 0
        # A slot of expert e is at index `row - first row of e` of the expert's C rows; one spare row is for dropped slots.
        row_R = plan.row_of_slot_TK.reshape(-1).long()
        expert_R = torch.searchsorted(plan.offsets_E1[1:].long(), row_R.clamp(min=0), right=True).clamp(max=experts - 1)
        place_R = expert_R * capacity + row_R - plan.offsets_E1.long()[expert_R]
        place_R = torch.where(row_R >= 0, place_R, experts * capacity)
        x_RH = x_TH.repeat_interleave(plan.top_k, dim=0)
        x_ECH = x_TH.new_zeros(experts * capacity + 1, hidden).index_copy(0, place_R, x_RH)[:-1].view(experts, capacity, hidden)
        h_ECF = torch.bmm(x_ECH, w1_EFH.transpose(1, 2))
        a_ECF = self.args.activation_fn(h_ECF) if v1_EFH is None else \
            gated(self.args.activation_fn, h_ECF, torch.bmm(x_ECH, v1_EFH.transpose(1, 2)))
        y_ECH = torch.bmm(a_ECF, w2_EFH)
        y_RH = torch.cat([y_ECH.flatten(0, 1), y_ECH.new_zeros(1, hidden)])[place_R]
        y_TKH = y_RH.view(plan.num_tokens, plan.top_k, hidden)
        if weights_TK is not None:
            y_TKH = y_TKH * weights_TK.unsqueeze(-1).to(y_TKH.dtype)
        return y_TKH.sum(dim=1)


class ReferenceExperts(ExpertWeights):
    """mlp_impl='reference': a loop over the experts in plain PyTorch, with PyTorch's own gradients."""

    def compute(self, x_TH: torch.Tensor, plan: RoutingPlan, weights_TK: torch.Tensor | None, w1: torch.Tensor,
                w2: torch.Tensor, v1: torch.Tensor | None) -> torch.Tensor:
        refuse_jit_tracing("mlp_impl 'reference'")
        w1_EFH, w2_EFH, v1_EFH = self.layout.matrices(*with_scaled_gradients(self.gradient_scale, w1, w2, v1))  # type: ignore[arg-type]
        xp_PH = padded_gather(x_TH, plan)
        sizes = plan.host_sizes().tolist()
        y_PH = []
        for e, rows in enumerate(xp_PH[: sum(sizes)].split(sizes)):  # type: ignore[union-attr]
            h = rows @ w1_EFH[e].t()
            a = self.args.activation_fn(h) if v1_EFH is None else gated(self.args.activation_fn, h, rows @ v1_EFH[e].t())
            y_PH.append(a @ w2_EFH[e])
        y_PH.append(y_PH[0].new_zeros(plan.num_rows - sum(sizes), x_TH.size(1)))
        return padded_scatter(torch.cat(y_PH), plan, weights_TK)


_IMPLEMENTATIONS = {"gbmoe": GroupedExperts, "bmm": BmmExperts, "reference": ReferenceExperts}


def make_experts(args: Arguments) -> ExpertWeights:
    """The experts that args.mlp_impl names."""
    return _IMPLEMENTATIONS[args.mlp_impl](args)
