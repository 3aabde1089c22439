"""Arguments of the layers: MegaBlocks' fields, names and defaults."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from gbmoe import engines
from gbmoe._checks import as_device, names_the_nearest_field, require, require_choice
from gbmoe.float8 import Float8BlockScaling
from gbmoe.layers.expert_parallel_options import FLAT_NAMES, ExpertParallelOptions, with_flat_names
from gbmoe.router_function import SCORES, RouterFunction
from gbmoe.weight_layout import MEGABLOCKS, WeightLayout

DEFAULT_ACTIVATION_FN = functools.partial(F.gelu, approximate="tanh")
LOAD_BALANCING_TYPES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "none")
MLP_TYPES = ("mlp", "glu")
MLP_IMPLS = ("gbmoe", "bmm", "reference")
MLP_IMPLS_OF_MEGABLOCKS = ("grouped", "sparse")


def default_device() -> torch.device:
    """The current CUDA device where there is one, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


@functools.partial(names_the_nearest_field, further=FLAT_NAMES)
@with_flat_names
@dataclasses.dataclass
class Arguments:
    """The arguments of a layer; mirrors megablocks.layers.arguments.Arguments field by field.

    Differences: `device` falls back to the CPU, and may be "meta" (with mlp_impl "gbmoe" forward and backward give shapes there);
    `mlp_impl` is "gbmoe" (the grouped GEMMs), "bmm" (every expert padded to the largest, torch.bmm) or "reference" (a plain
    loop over the experts); `engine` names the engine of the grouped GEMMs (gbmoe.engines). fp16 wins over bf16; with both
    False parameters have torch's default dtype.

    `activation_fn` may be any callable. A torch.nn.Module is called, and gradients flow to its parameters. But it belongs to the
    arguments, which layers share, and not to a layer. So, as in MegaBlocks, no layer's parameters(), state_dict() or to() includes it;
    only a shared expert registers it, as `shared_expert.act`. Where it has parameters, register it once on your model, move it to the
    layers' device and dtype, and give the optimizer the model's parameters.

    What the router computes is MegaBlocks' (a softmax over all experts, the moe_top_k highest, their norm) unless fields with
    Megatron-Core's names say otherwise; `router_function` is the result of them all, see gbmoe.RouterFunction:

    - `moe_router_score_function` is "softmax", "sigmoid" or "sqrtsoftplus". Where weights are normalised, 1e-20 is added to the norm of
      the latter two, as in DeepSeek-V3 and Megatron-Core.
    - `moe_router_pre_softmax` False takes the softmax over the chosen logits. It does not concern other scores.
    - `moe_router_num_groups` and `moe_router_group_topk` choose experts from the best groups only. Groups are ranked by the sum of their
      `moe_router_group_best` best scores; None takes Megatron-Core's value, moe_top_k // moe_router_group_topk.
    - `moe_router_topk_scaling_factor` multiplies the weights.
    - `moe_router_enable_expert_bias` gives the router `expert_bias`, a float32 buffer [E] that is added to what experts are
      ranked by. It is saved with the layer and has no gradient. gbmoe.update_expert_bias moves it by steps of
      moe_router_bias_update_rate.
    - `moe_router_linear_bias` gives the router's linear layer a bias, a parameter.
    - `moe_router_dtype`: with None logits are in float32, and scores and weights are rounded to the layer's dtype. With "fp32" these stay
      in float32, too. With "bf16" the logits are rounded to bfloat16, as a linear layer of torch does.
    - `moe_router_load_balancing_type` is the loss that gbmoe.batched_load_balancing_loss computes, with the weight moe_loss_weight:
      "aux_loss" of a layer's tokens, "seq_aux_loss" of each sequence, "global_aux_loss" of the global batch, or "none".

    `moe_expert_linear_bias` gives each expert biases of its products, as gpt-oss has them: the parameters `w1_bias` and (glu) `v1_bias`
    [E,F], and `w2_bias` [E,H], of experts.mlp, zeros at first. `moe_apply_probs_on_input` multiplies an expert's input by the router's
    weight, as Llama-4 does, instead of its output. Both need mlp_impl "gbmoe" and experts that are not spread over ranks. Biases also
    need an activation that has a kernel.

    `batch_first` says that x is [batch, sequence, H], for the loss of each sequence; nothing else depends on it.

    `moe_shared_expert_gate` multiplies a shared expert's output by the sigmoid of a linear layer of one output.

    moe_capacity_factor exists for compatibility and has no effect: the layers here drop no token.

    `expert_parallel` says how rows travel between experts that are spread over ranks, see gbmoe.ExpertParallelOptions. Its options are
    arguments as well: `expert_parallel_exact`, `expert_parallel_ranks_per_node`, `expert_parallel_chunks`, `expert_parallel_transport`,
    `expert_parallel_rows`, `expert_parallel_shadows` and `expert_parallel_loans`. These win over `expert_parallel`, and can be read and
    set as attributes. Constructing such a layer is collective over the group: it compares the ranks' arguments.

    `batch_invariant` asks that the output for a token, the router's choice included, has the same bits whatever other tokens are in the
    batch, and however many. It concerns forward only. It needs the engine `hopper` or `tensor_core` and a router that is a plain linear
    layer, and excludes a shared expert and experts spread over ranks.

    With `fp8_recipe` the experts' products of rows are computed in float8, see gbmoe.Float8BlockScaling. It needs mlp_impl "gbmoe" and
    the engine "auto", and excludes batch_invariant. Parameters, gradients and checkpoints are the same with it and without.

    `keep_gathered_rows` trades memory for time: the rows of x that forward gathers are kept until backward, which would otherwise gather
    them again. That is one copy of x for each of a token's slots, in every layer. Where `hopper` would gather inside forward's first
    product there is little to gain: forward then gathers before that product, and backward does not gather. Over mapped memory the rows
    that forward pulls are kept. The option has no effect where gbmoe.expert_mlp's argument has none, nor with expert_parallel_exact over
    the exchange, or with another mlp_impl than "gbmoe".

    `one_matrix_per_expert` makes the experts' parameters [E,F,H] instead of MegaBlocks' [E*F,H], for optimizers that see a matrix in each
    parameter, such as Muon, which would orthogonalise all experts as one. State dicts are MegaBlocks' with it and without. Those of an
    optimizer are not: docs/recipes.md says how to resume from [E*F,H].

    `weight_layout` says where an expert's gate, up and down lie in the parameters, see gbmoe.WeightLayout, which then have one matrix an
    expert: `w1` [E,F,H] or [E,H,F], and `v1` alike; with gate and up in one tensor `w1` [E,2F,H] or [E,H,2F], `w1_bias` [E,2F], and no
    `v1` or `v1_bias`; `w2` [E,F,H] or [E,H,F]. Values at first, results and state dicts are those of MegaBlocks' layout, so that
    checkpoints move between layouts. What state_dict() returns is in the memory of the parameters only where these are [E,F,H]: of others
    it is a copy, which has to be loaded by load_state_dict. Optimizers' state is that of the parameters' own shapes. Gate and up in one
    tensor need mlp_type "glu". Layouts other than MegaBlocks' exclude expert_parallel_rows and expert_parallel_loans.

    Raises:
        TypeError: for a keyword that is no field, naming the nearest one.
        ValueError: naming the field, what was expected and what came.

    Example:
        >>> Arguments(hidden_size=64, ffn_hidden_size=128, fp16=False).mlp_impl
        'gbmoe'
    """

    # Model.
    hidden_size: int = 1024
    ffn_hidden_size: int = 4096
    num_layers: int = 1
    bias: bool = True
    return_bias: bool = True
    activation_fn: Callable[..., torch.Tensor] = DEFAULT_ACTIVATION_FN

    # Mixture of experts.
    moe_num_experts: int = 1
    moe_top_k: int = 1
    moe_capacity_factor: int = 1
    moe_normalize_expert_weights: int | float | None = None
    moe_loss_weight: float = 0.1
    moe_jitter_eps: float | None = None
    moe_lbl_in_fp32: bool = False

    # Router, with Megatron-Core's names where it has one.
    moe_router_score_function: str = "softmax"
    moe_router_pre_softmax: bool = True
    moe_router_num_groups: int | None = None
    moe_router_group_topk: int | None = None
    moe_router_group_best: int | None = None
    moe_router_topk_scaling_factor: float | None = None
    moe_router_enable_expert_bias: bool = False
    moe_router_bias_update_rate: float = 1e-3
    moe_router_linear_bias: bool = False
    moe_router_dtype: str | None = None
    moe_router_load_balancing_type: str = "aux_loss"

    # Whether x is [batch, sequence, H] instead of [sequence, batch, H].
    batch_first: bool = False

    # Parallelism.
    moe_expert_model_parallelism: bool = False
    expert_parallel_group: dist.ProcessGroup | None = None
    pipeline_model_parallel_size: int = 1
    num_layers_per_virtual_pipeline_stage: int | None = None

    # Computation.
    memory_optimized_mlp: bool = False
    mlp_type: str = "mlp"
    mlp_impl: str = "gbmoe"

    # Initialisation.
    fp16: bool = True
    bf16: bool = False
    device: int | str | torch.device = dataclasses.field(default_factory=default_device)
    init_method: Callable[[torch.Tensor], Any] = functools.partial(torch.nn.init.normal_, mean=0.0, std=0.02)
    output_layer_init_method: Callable[[torch.Tensor], Any] = init_method

    # Benchmarking: route slot i to expert i % experts, whatever the router says.
    uniform_expert_assignment: bool = False

    # Shared expert.
    shared_expert: bool = False
    fc_cls: Any = torch.nn.Linear
    fc_kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    remat_act_fn: bool = True
    shared_expert_hidden_size: int | None = None
    shared_expert_weighted_sum: bool = False
    moe_shared_expert_gate: bool = False

    # Router z-loss.
    moe_zloss_weight: float = 0
    moe_zloss_in_fp32: bool = False

    # Not in MegaBlocks.
    engine: str = "auto"
    batch_invariant: bool = False
    fp8_recipe: Float8BlockScaling | None = None
    keep_gathered_rows: bool = False
    expert_parallel: ExpertParallelOptions = ExpertParallelOptions()
    one_matrix_per_expert: bool = False
    moe_expert_linear_bias: bool = False
    moe_apply_probs_on_input: bool = False
    weight_layout: WeightLayout | None = None

    def __post_init__(self):
        for name in ("hidden_size", "ffn_hidden_size", "moe_num_experts", "moe_top_k", "num_layers", "pipeline_model_parallel_size"):
            value = getattr(self, name)
            require(isinstance(value, int) and value >= 1, "Arguments", name, "an int of at least 1", repr(value))
        require(self.moe_top_k <= self.moe_num_experts, "Arguments", "moe_top_k",
                f"at most moe_num_experts == {self.moe_num_experts}", self.moe_top_k)
        hint = " (one of MegaBlocks'; use 'gbmoe' instead)" if self.mlp_impl in MLP_IMPLS_OF_MEGABLOCKS else ""
        require_choice("Arguments", "mlp_type", self.mlp_type, MLP_TYPES)
        require_choice("Arguments", "mlp_impl", self.mlp_impl, MLP_IMPLS, hint)
        require_choice("Arguments", "engine", self.engine, tuple(engines.names()))
        if self.batch_invariant:
            self._check_batch_invariant()
        if self.fp8_recipe is not None:
            engines.float8(self.fp8_recipe, self.engine)
            for name, expected in (("mlp_impl", "gbmoe"), ("batch_invariant", False), ("expert_parallel_loans", 0)):
                require(getattr(self, name) == expected, "Arguments", name, f"{expected!r} with fp8_recipe", repr(getattr(self, name)))
        for name in ("moe_loss_weight", "moe_zloss_weight", "moe_jitter_eps"):
            value = getattr(self, name)
            unset = value is None and name == "moe_jitter_eps"
            require(unset or (isinstance(value, (int, float)) and value >= 0), "Arguments", name, "a number of at least 0", repr(value))
        stages = self.num_layers_per_virtual_pipeline_stage
        require(stages is None or (isinstance(stages, int) and stages >= 1), "Arguments", "num_layers_per_virtual_pipeline_stage",
                "None or an int of at least 1", repr(stages))
        require(callable(self.activation_fn), "Arguments", "activation_fn", "a callable, such as torch.nn.functional.silu",
                repr(self.activation_fn))
        p = self.moe_normalize_expert_weights
        require(p is None or (isinstance(p, (int, float)) and p >= 0), "Arguments", "moe_normalize_expert_weights",
                "None or 0 for none, or a positive p of the norm", repr(p))
        self.moe_normalize_expert_weights = p or None
        for option in ("moe_expert_linear_bias", "moe_apply_probs_on_input"):
            for name, expected in (("mlp_impl", "gbmoe"), ("moe_expert_model_parallelism", False)) if getattr(self, option) else ():
                require(getattr(self, name) == expected, "Arguments", name, f"{expected!r} with {option}", repr(getattr(self, name)))
        if self.weight_layout is not None:
            self._check_weight_layout(self.weight_layout)
        self._check_router()
        as_device(self.device, "Arguments")
        if self.shared_expert_hidden_size is None:
            self.shared_expert_hidden_size = self.ffn_hidden_size

    def _check_weight_layout(self, layout: WeightLayout):
        require(isinstance(layout, WeightLayout), "Arguments", "weight_layout", "None or a gbmoe.WeightLayout", repr(layout))
        require(self.mlp_type == "glu" or not layout.is_combined, "Arguments", "weight_layout",
                "gate_up 'separate' with mlp_type 'mlp', which has no gate", f"'{layout.code}'")
        if layout != MEGABLOCKS:
            for name, none, why in (("expert_parallel_rows", None, "further rows are computed one part after the other"),
                                    ("expert_parallel_loans", 0, "experts are lent as [F,H]")):
                value = getattr(self, name)
                require(value == none, "Arguments", name,
                        f"{none} with weight_layout '{layout.code}', as {why} in MegaBlocks' layout alone", repr(value))

    def _check_router(self):
        require_choice("Arguments", "moe_router_score_function", self.moe_router_score_function, SCORES)
        require_choice("Arguments", "moe_router_load_balancing_type", self.moe_router_load_balancing_type, LOAD_BALANCING_TYPES)
        require(self.moe_router_dtype in (None, "fp32", "bf16"), "Arguments", "moe_router_dtype", "None, 'fp32' or 'bf16'",
                repr(self.moe_router_dtype))
        for name in ("moe_router_num_groups", "moe_router_group_topk", "moe_router_group_best"):
            value = getattr(self, name)
            require(value is None or (isinstance(value, int) and value >= 1), "Arguments", name, "None or an int of at least 1",
                    repr(value))
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        require(chosen is None or groups is not None, "Arguments", "moe_router_num_groups",
                "the number of groups with moe_router_group_topk", groups)
        if groups is not None:
            require(self.moe_num_experts % groups == 0, "Arguments", "moe_router_num_groups",
                    f"a divisor of moe_num_experts == {self.moe_num_experts}", groups)
            require(chosen is None or chosen <= groups, "Arguments", "moe_router_group_topk", f"at most moe_router_num_groups == {groups}",
                    chosen)
        if self._has_groups:
            size = self.moe_num_experts // groups
            require(self.moe_top_k <= size * chosen, "Arguments", "moe_router_group_topk",
                    f"groups of {size} experts with at least moe_top_k == {self.moe_top_k} of them together", chosen)
            require(self._group_best <= size, "Arguments", "moe_router_group_best", f"at most {size}, the experts of a group",
                    self._group_best)
        scale = self.moe_router_topk_scaling_factor
        require(scale is None or (isinstance(scale, (int, float)) and math.isfinite(scale)), "Arguments", "moe_router_topk_scaling_factor",
                "None or a number", repr(scale))
        rate = self.moe_router_bias_update_rate
        require(isinstance(rate, (int, float)) and rate >= 0, "Arguments", "moe_router_bias_update_rate", "a number of at least 0",
                repr(rate))
        p = self.moe_normalize_expert_weights
        after = self.moe_router_score_function == "softmax" and not self.moe_router_pre_softmax
        require(not after or p in (None, 1), "Arguments", "moe_normalize_expert_weights",
                "None or 1 without moe_router_pre_softmax, as the softmax over the chosen logits sums to one", repr(p))

    @property
    def _has_groups(self) -> bool:
        """Whether groups limit the choice."""
        groups, chosen = self.moe_router_num_groups, self.moe_router_group_topk
        return groups is not None and chosen is not None and chosen < groups

    @property
    def _group_best(self) -> int:
        return self.moe_router_group_best or max(1, self.moe_top_k // (self.moe_router_group_topk or 1))

    @property
    def router_function(self) -> RouterFunction:
        """What the router makes of its logits."""
        softmax, p = self.moe_router_score_function == "softmax", self.moe_normalize_expert_weights or None
        scale = self.moe_router_topk_scaling_factor
        groups: dict[str, Any] = {}
        if self._has_groups:
            groups = {"num_groups": self.moe_router_num_groups, "group_topk": self.moe_router_group_topk, "group_best": self._group_best}
        return RouterFunction(
            self.moe_router_score_function, self.moe_router_pre_softmax or not softmax, normalize=p,
            epsilon=1e-20 if p is not None and not softmax else 0.0, scale=1.0 if scale is None else float(scale), **groups)

    def _check_batch_invariant(self):
        engines.batch_invariant(self.engine)
        for name, expected in (("mlp_impl", "gbmoe"), ("shared_expert", False), ("moe_expert_model_parallelism", False)):
            require(getattr(self, name) == expected, "Arguments", name, f"{expected!r} with batch_invariant", repr(getattr(self, name)))
        require(self.moe_router_dtype != "bf16", "Arguments", "moe_router_dtype", "None or 'fp32' with batch_invariant, whose logits are"
                " float32", repr(self.moe_router_dtype))

    @property
    def has_load_balancing_loss(self) -> bool:
        """Whether layers keep what a load-balancing loss needs."""
        return self.moe_loss_weight > 0 and self.moe_router_load_balancing_type != "none"

    @property
    def experts_engine(self) -> str:
        """The name of the engine of the experts' grouped GEMMs, which is the recipe's where there is one."""
        return self.engine if self.fp8_recipe is None else self.fp8_recipe.engine

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters."""
        if self.fp16:
            return torch.float16
        return torch.bfloat16 if self.bf16 else torch.get_default_dtype()


def require_arguments(args: Any, caller: str) -> None:
    """Raise a TypeError that names what makes Arguments of another library's, unless `args` are Arguments."""
    require(isinstance(args, Arguments), caller, "args", "gbmoe.Arguments (gbmoe.layers.from_megatron(args) makes them of MegaBlocks'"
            " Arguments, and of Megatron's)", f"{type(args).__module__}.{type(args).__qualname__}", TypeError)


def from_megatron(megatron_args: Any) -> Arguments:
    """Arguments from Megatron-LM's parsed arguments, Megatron-Core's TransformerConfig, or any object with attributes of their names, of
    MegaBlocks' names (those of the fields of Arguments), or of both. A field of which the object says nothing keeps its default.

    Mirrors megablocks.layers.arguments.from_megatron, which takes only the fields' own names. An mlp_impl of MegaBlocks' ('grouped',
    'sparse') becomes 'gbmoe', and an fp8_recipe that is no Float8BlockScaling, such as Megatron-LM's 'delayed', is ignored. Where
    num_experts is there but not set, Megatron's own options of experts mean nothing and are ignored.

    The layer is then Megatron's: without moe_router_pre_softmax a token's weights are normalised (the softmax of the chosen logits);
    num_layers counts layers with experts (moe_layer_freq), and moe_loss_weight is moe_aux_loss_coeff times num_layers, because
    batched_load_balancing_loss is a mean over layers. In training the losses have to be added by batched_load_balancing_loss and
    batched_router_zloss; Megatron adds them by itself. moe_input_jitter_eps acts in training alone.

    With expert_model_parallel_size above 1, set expert_parallel_group to
    megatron.core.parallel_state.get_expert_model_parallel_group(), unless these are all ranks.

    Raises:
        TypeError: for None, and for a dictionary whose entries are no attributes.
        ValueError: naming every option that is set to what the layer cannot do, every pair that contradicts itself, and every option
            that begins with "moe", is set and is not known.

    Example:
        >>> import types
        >>> config = types.SimpleNamespace(num_experts=8, moe_router_topk=2,
        ...                                moe_router_pre_softmax=True)
        >>> from_megatron(config).moe_top_k
        2
    """
    from gbmoe.layers.megatron_arguments import translate  # which needs this module
    values = translate(megatron_args)
    if values.get("mlp_impl") in MLP_IMPLS_OF_MEGABLOCKS:
        values["mlp_impl"] = "gbmoe"
    return Arguments(**values)
