"""The parameters of linear_fc1 and linear_fc2, named, marked and saved as those of TEGroupedLinear, and where their gradients are added.

Shape suffixes: E experts on this rank, O output rows, I input columns of a matrix.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.extensions.transformer_engine import _set_expert_parameter_attributes
from megatron.core.tensor_parallel.layers import _initialize_affine_weight_cpu
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from gbmoe._checks import require
from gbmoe.compat.megatron.experts_configuration import ADAPTER
from gbmoe.separate_weights import StackOrList
from gbmoe.stacked_weights import stacked


class GroupedWeights(torch.nn.Module):
    """weight0 [O,I], weight1, ..., or with `single` one weight [E,O,I]; biases likewise. Calling it returns them.

    It computes nothing. It is called all the same, because Megatron waits for gathered parameters in hooks that run before a module does.
    """

    def __init__(self, experts: int, rows: int, columns: int, *, config: Any, init_method: Callable, partition_dim: int, pg_collection: Any,
                 single: bool, deferred: bool):
        super().__init__()
        # The names are those that Megatron's optimizers and its resharding ask TEGroupedLinear for.
        self.num_gemms, self.in_features, self.out_features = experts, columns, rows
        self.use_bias, self.single_grouped_weight = config.add_bias_linear, single
        self.single_grouped_bias = single and config.add_bias_linear
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = config.gradient_accumulation_fusion, deferred
        # Megatron-Bridge asks any module whose class it does not know for these, to load and export its weights (AutoMapping).
        self.config, self.tensor_model_parallel, self.partition_dim = config, True, partition_dim
        self._groups = pg_collection
        self._hooks_of_gradients: list[Callable] = []
        self._later: torch.Tensor | None = None
        self._make_parameters(config, init_method)
        self.register_load_state_dict_pre_hook(_in_this_form)

    def _make_parameters(self, config: Any, init_method: Callable) -> None:
        parallel, experts = self._groups.expt_tp.size(), self.num_gemms
        shape = [self.out_features, self.in_features]
        whole = list(shape)
        shape[self.partition_dim] = whole[self.partition_dim] // parallel
        require(shape[self.partition_dim] * parallel == whole[self.partition_dim], ADAPTER, "expert_tensor_parallel_size",
                f"a divisor of {whole[self.partition_dim]}", parallel)
        device = _device(config)
        for name, each in (("weight", shape), ("bias", [shape[0]])):
            if name == "bias" and not self.use_bias:
                continue
            one = torch.zeros([experts, *each], dtype=config.params_dtype, device=device)
            if self.single_grouped_weight:
                self.register_parameter(name, torch.nn.Parameter(one))
            else:
                for e in range(experts):
                    self.register_parameter(f"{name}{e}", torch.nn.Parameter(one[e]))
        if config.perform_initialization and device.type != "meta":
            for matrix_OI in self._parts("weight"):
                self._initialize(matrix_OI.detach(), whole, config, init_method)
        of_experts = config.expert_model_parallel_size > 1 or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        _set_expert_parameter_attributes(self, ("column", "row")[self.partition_dim], of_experts)
        for parameter in self.parameters():
            parameter.skip_backward_post_hook = self.delay_wgrad_compute  # type: ignore[attr-defined]

    def _initialize(self, matrix_OI: torch.Tensor, whole: list[int], config: Any, init_method: Callable) -> None:
        group = self._groups.expt_tp
        if config.use_cpu_initialization:
            # A gated unit's rank has its part of the gate and its part of up, which lie apart in the whole matrix.
            stride = 2 if self.partition_dim == 0 and config.gated_linear_unit else 1
            _initialize_affine_weight_cpu(matrix_OI, *whole, matrix_OI.size(self.partition_dim), self.partition_dim, init_method,
                                          stride=stride, params_dtype=config.params_dtype, rank=group.rank(), world_size=group.size())
            return
        # As TEGroupedLinear: without model_parallel_cuda_manual_seed the tracker has no states, and the device's own is used.
        tracker = get_cuda_rng_tracker()
        with tracker.fork(get_expert_parallel_rng_tracker_name()) if tracker.is_initialized() else contextlib.nullcontext():
            init_method(matrix_OI)

    def _named(self, name: str) -> list[Any]:
        """The parameters of this name: one for each expert, or one for all."""
        names = [name] if self.single_grouped_weight else [f"{name}{e}" for e in range(self.num_gemms)]
        return [getattr(self, each) for each in names]

    def _parts(self, name: str) -> list[torch.Tensor]:
        """One tensor for each expert: a parameter, or a view of the one that they share."""
        parameters = self._named(name)
        return list(parameters[0].unbind(0)) if self.single_grouped_weight else parameters

    def _apply(self, fn: Callable, recurse: bool = True) -> Any:
        # What moves a module to a device or casts it moves each parameter by itself; afterwards they lie in one buffer again.
        super()._apply(fn, recurse)
        if not self.single_grouped_weight:
            for name in ("weight", "bias")[: 1 + self.use_bias]:
                parameters = self._named(name)
                if parameters[0].device.type != "meta" and not _in_one_buffer(parameters):
                    for parameter, part in zip(parameters, torch.stack([each.detach() for each in parameters])):
                        parameter.data = part
        return self

    def forward(self) -> tuple[StackOrList, torch.Tensor | None]:
        """(weights [E,O,I], or a list of E [O,I]; biases [E,O] or None), differentiable in the parameters."""
        biases = self._named("bias") if self.use_bias else []
        if self.single_grouped_weight:
            return self._named("weight")[0], biases[0] if biases else None
        return self._named("weight"), stacked(biases) if biases else None

    # ------------------------------------------------------------------------------------------------------- gradients of weights

    @property
    def needs_gradient(self) -> bool:
        return any(parameter.requires_grad for parameter in self._named("weight"))

    def main_grads(self) -> StackOrList | None:
        """The float32 main_grads of the weights, in the form of `forward`; None where there are none."""
        parameters = self._named("weight")
        if not self.fuse_wgrad_accumulation or any(hasattr(each, "get_main_grad") for each in parameters):  # FSDP overwrites them
            return None
        main = [getattr(each, "main_grad", None) for each in parameters]
        if any(each is None or each.dtype != torch.float32 for each in main):
            return None
        return main[0] if self.single_grouped_weight else main  # type: ignore[return-value]

    def later(self) -> StackOrList:
        """Where deferred gradients are added: main_grads, or a tensor of this module, from which `backward_dw` takes them."""
        main = self.main_grads()
        if main is not None:
            return main
        if self._later is None:
            weight = self._parts("weight")[0]
            self._later = torch.zeros([self.num_gemms, *weight.shape], dtype=torch.float32, device=weight.device)
        return self._later

    def marked(self, weights: StackOrList) -> StackOrList:
        """What `forward` returned, with gradients that are added elsewhere: backward sets grad_added_to_main_grad of the parameters."""
        if isinstance(weights, torch.Tensor):
            return _Marked.apply(weights, weights)
        return [_Marked.apply(weight, weight) for weight in weights]

    @property
    def hands_back(self) -> bool:
        """Whether backward gives parameters a gradient that means nothing, so that DDP's hooks run."""
        return self.fuse_wgrad_accumulation and any(hasattr(each, "grad_added_to_main_grad") for each in self._named("weight"))

    @torch.no_grad()
    def backward_dw(self) -> None:
        """Hand deferred gradients, which have been computed, to their parameters, and call DDP's hooks."""
        if self._later is not None:
            for parameter, gradient in zip(self._named("weight"), (self._later,) if self.single_grouped_weight else self._later):
                if self.fuse_wgrad_accumulation and getattr(parameter, "main_grad", None) is not None:
                    parameter.main_grad.add_(gradient)
                elif parameter.requires_grad:
                    new = gradient.to(parameter.dtype, copy=True)
                    parameter.grad = new if parameter.grad is None else parameter.grad.add_(new)
            self._later.zero_()
        for hook in self._hooks_of_gradients:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable) -> None:
        """As TEGroupedLinear's, for DDP with delay_wgrad_compute."""
        self._hooks_of_gradients.append(hook)

    # ----------------------------------------------------------------------------------------------------------------- checkpoints

    def get_extra_state(self) -> None:
        """TransformerEngine's modules keep the state of float8 there; there is none, and its key remains."""

    def set_extra_state(self, state: object) -> None:
        """TransformerEngine's is not needed."""

    def _split_grouped_checkpoint_tensor(self, tensor: torch.Tensor, checkpoint_key: str) -> list[torch.Tensor]:
        """Megatron's optimizers ask for it, under this name."""
        split = getattr(tensor, "split_into_quantized_tensors", None)
        parts = list(split()) if split else list(tensor.unflatten(0, (self.num_gemms, -1)) if tensor.size(0) != self.num_gemms else tensor)
        require(len(parts) == self.num_gemms, ADAPTER, checkpoint_key, f"{self.num_gemms} experts", len(parts))
        return parts

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """TEGroupedLinear's: a tensor and a state for each expert, numbered over all ranks."""
        metadata = metadata or {}
        alone, groups = metadata.get("singleton_local_shards", False), self._groups
        first, everywhere = groups.ep.rank() * self.num_gemms, groups.ep.size() * self.num_gemms
        weights, biases = self._state_parts("weight"), self._state_parts("bias") if self.use_bias else None
        sharded: dict[str, Any] = {}
        for e in range(self.num_gemms):
            entries: dict[str, Any] = {f"{e}.weight": weights[e], f"{e}._extra_state": None}
            axes = {f"{e}.weight": self.partition_dim}
            if biases is not None:
                entries[f"{e}.bias"] = biases[e]
                if self.partition_dim == 0:
                    axes[f"{e}.bias"] = 0
            offsets = sharded_offsets if alone else (*sharded_offsets, (len(sharded_offsets), first + e, everywhere))
            of_expert = make_sharded_tensors_for_checkpoint(entries, "", axes, offsets, tp_group=groups.expt_tp,
                                                            dp_cp_group=metadata["dp_cp_group"])
            replace_prefix_for_sharding(of_expert, f"{e}.", f"{first + e}.{prefix}" if alone else prefix)
            for key, each in of_expert.items():
                each.replica_id = (*each.replica_id[:2], groups.expt_dp.rank())
                name = key.partition(".")[2]
                sharded[f"{prefix}{name}{'' if name == '_extra_state' and e == 0 else e}"] = each
        return sharded

    def _state_parts(self, name: str) -> list[torch.Tensor]:
        # Not views of a parameter where there are parameters: Megatron's optimizers look for these.
        return [part.detach() for part in self._parts(name)] if self.single_grouped_weight else self._parts(name)


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, parameter, weight):
        ctx.parameter = parameter
        ctx.set_materialize_grads(False)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, grad):
        if hasattr(ctx.parameter, "grad_added_to_main_grad"):
            ctx.parameter.grad_added_to_main_grad = True
        return None, grad


def _device(config: Any) -> torch.device:
    if getattr(config, "init_model_with_meta_device", False):
        return torch.device("meta")
    return torch.device("cpu") if config.use_cpu_initialization else torch.device(torch.cuda.current_device())


def _in_one_buffer(tensors: list[Any]) -> bool:
    with torch.no_grad():
        return stacked(tensors).data_ptr() == tensors[0].data_ptr()


def _in_this_form(module: GroupedWeights, state_dict: dict, prefix: str, *_: Any) -> None:
    """Before a state dict is loaded: the form with a tensor for each expert and that with one for all are converted into each other."""
    for name in ("weight", "bias")[: 1 + module.use_bias]:
        one, each = f"{prefix}{name}", [f"{prefix}{name}{e}" for e in range(module.num_gemms)]
        if module.single_grouped_weight and one not in state_dict and all(key in state_dict for key in each):
            state_dict[one] = torch.stack([state_dict.pop(key) for key in each])
        elif not module.single_grouped_weight and one in state_dict and each[0] not in state_dict:
            state_dict.update(zip(each, module._split_grouped_checkpoint_tensor(state_dict.pop(one), one)))
    for e in range(1, module.num_gemms):
        state_dict.pop(f"{prefix}_extra_state{e}", None)
