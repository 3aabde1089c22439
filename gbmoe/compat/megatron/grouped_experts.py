"""GroupedExperts: Megatron-Core's TEGroupedMLP computed by gbmoe.grouped_mlp, without TransformerEngine.

Shape suffixes: R rows of the experts on this rank, E these experts, H hidden (the latent size where there is one), F ffn hidden.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from megatron.core.transformer.moe.experts import TEGroupedMLP

from gbmoe._checks import nearest, require
from gbmoe.compat.megatron.experts_configuration import ADAPTER, configuration
from gbmoe.compat.megatron.grouped_weights import GroupedWeights
from gbmoe.float8 import Float8BlockScaling
from gbmoe.ops import grouped_mlp
from gbmoe.ops.gradient_sink import WeightGradientSink
from gbmoe.separate_weights import StackOrList


class GroupedExperts(TEGroupedMLP):
    """TEGroupedMLP by its parameters, state dict, checkpoints and gradients; the products are gbmoe's.

    linear_fc1.weight0 to weight{E-1} are [2F,H] with the gate first, or [F,H], linear_fc2's [H,F]; with `single_grouped_weight` there is
    one weight [E,2F,H] each. They are read, and main_grads written, wherever DDP puts them: gbmoe.expert_mlp says which engines can
    do so.

    It builds itself from what an ExpertsBuilder is given; functools.partial adds the keywords.

    Args:
        num_local_experts, config, pg_collection, name: as Megatron's builders get them.
        submodules: those of the experts in whose place it is. They stay in specifications for others to read, and are not made.
        engine: of the products, see gbmoe.engines.
        single_grouped_weight: None: as config.moe_single_grouped_weight says, which needs TransformerEngine.
        fp8_recipe: None: as config.fp8 says.

    Raises:
        ValueError: for a configuration that gbmoe's experts do not compute, with the field, what it may be and why.
    """

    def __init__(self, num_local_experts: int, config: Any, submodules: Any = None, pg_collection: Any = None, name: str | None = None, *,
                 engine: str = "auto", single_grouped_weight: bool | None = None, fp8_recipe: Float8BlockScaling | None = None):
        super(TEGroupedMLP, self).__init__(config=config)  # TEGroupedMLP's own builds TransformerEngine's modules
        require(pg_collection is not None, ADAPTER, "pg_collection", "the process groups", None)
        self.num_local_experts, self.engine = num_local_experts, engine
        self.ep_group, self.tp_group = pg_collection.ep, pg_collection.expt_tp
        found = configuration(config, self.tp_group.size())
        self.layout, self.activation = found.layout, found.activation
        self.fp8_recipe = found.fp8_recipe if fp8_recipe is None else fp8_recipe
        self._deferred = bool(config.delay_wgrad_compute or config.overlap_dispatch_backward_with_experts_wgrad)
        self._sinks: list[tuple[WeightGradientSink, list[list[int]]]] = []
        single = config.moe_single_grouped_weight if single_grouped_weight is None else single_grouped_weight
        hidden, ffn = config.moe_latent_size or config.hidden_size, config.moe_ffn_hidden_size
        self.input_size = config.hidden_size
        options: dict[str, Any] = {"config": config, "pg_collection": pg_collection, "single": single, "deferred": self._deferred}
        self.linear_fc1 = GroupedWeights(num_local_experts, ffn * (1 + config.gated_linear_unit), hidden, partition_dim=0,
                                         init_method=config.init_method, **options)
        self.linear_fc2 = GroupedWeights(num_local_experts, hidden, ffn, partition_dim=1, init_method=config.output_layer_init_method,
                                         **options)

    def forward(self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor,
                output_buffer: torch.Tensor | None = None, grad_input_buffer: torch.Tensor | None = None,
                ) -> tuple[torch.Tensor, None]:
        """(probs[r] * mlp_e(rows[r]) with e the expert of row r, None).

        Megatron multiplies the activation by the probabilities, gbmoe the result, in float32: equal except for the rounding.

        Args:
            permuted_local_hidden_states: [R,H] in expert order. Rows after the sum of the counts come out as zeros.
            tokens_per_expert: [E], int32 or int64, on the device of the rows, where nobody waits for it, or on the CPU.
            permuted_probs: [R], any floating dtype.
            output_buffer, grad_input_buffer: None.
        """
        for argument, value in (("output_buffer", output_buffer), ("grad_input_buffer", grad_input_buffer)):
            require(value is None, ADAPTER, argument, "None (NCCL-EP without copies needs TransformerEngine's fused experts)", value)
        x_RH = permuted_local_hidden_states
        probs_R: torch.Tensor | None = permuted_probs.reshape(-1)
        if self.config.moe_apply_probs_on_input:
            x_RH, probs_R = (x_RH * permuted_probs.reshape(-1, 1)).to(x_RH.dtype), None
        w1, w2, options = self.of_this_call()
        return grouped_mlp(x_RH, tokens_per_expert, w1, w2, weights_R=probs_R, **options), None

    def of_this_call(self) -> tuple[StackOrList, StackOrList, dict[str, Any]]:
        """(w1, w2, the keywords) with which grouped_mlp or expert_mlp is called once. It calls the modules that hold the parameters."""
        (w1, w1_bias), (w2, w2_bias) = self.linear_fc1(), self.linear_fc2()
        sink = self._sink()
        if sink is not None:
            w1, w2 = self.linear_fc1.marked(w1), self.linear_fc2.marked(w2)
        return w1, w2, {"activation": self.activation, "engine": self.engine, "fp8_recipe": self.fp8_recipe, "layout": self.layout,
                        "w1_bias": w1_bias, "w2_bias": w2_bias, "gradient_sink": sink}

    def _sink(self) -> WeightGradientSink | None:
        """Where this call's gradients of weights are added; None leaves them to autograd."""
        linears = (self.linear_fc1, self.linear_fc2)
        if not torch.is_grad_enabled() or not any(each.needs_gradient for each in linears):
            return None
        if not self._deferred:
            mains = [each.main_grads() for each in linears]
            whole = all(main is not None or not each.needs_gradient for each, main in zip(linears, mains))
            return WeightGradientSink(*mains, hand_back=any(each.hands_back for each in linears)) if whole else None
        places = [each.later() if each.needs_gradient else None for each in linears]
        # A sink with the same places is used again: backward_dw may come between a call and its backward.
        for sink, of in self._sinks:
            if [_place(each) for each in places] == of:
                return sink
        sink = WeightGradientSink(*places, deferred=True, hand_back=any(each.hands_back for each in linears))
        self._sinks.append((sink, [_place(each) for each in places]))
        return sink

    def backward_dw(self) -> None:
        """Compute the deferred gradients of weights, of all calls whose backward has run since the last time."""
        if not self._deferred:
            return
        for sink, _ in self._sinks:
            sink.compute()
        self.linear_fc2.backward_dw()
        self.linear_fc1.backward_dw()


def _place(tensors: StackOrList | None) -> list[int]:
    return [each.data_ptr() for each in ((tensors,) if isinstance(tensors, torch.Tensor) else tensors or ())]


_OPTIONS = tuple(name for name, parameter in inspect.signature(GroupedExperts.__init__).parameters.items()
                 if parameter.kind is parameter.KEYWORD_ONLY)


def require_options(function: str, options: dict[str, Any]) -> None:
    """Raise TypeError for a keyword that GroupedExperts does not take, where it is given and not where layers are built."""
    for name in options:
        hint = "; with_gbmoe_experts takes it" if name == "whole_layer" else nearest(name, _OPTIONS)
        require(name in _OPTIONS, function, "options", f"keywords of GroupedExperts, {', '.join(_OPTIONS)}", f"{name!r}{hint}", TypeError)
