"""Adapters (LoRA) of a layer's experts: several by name, of which some are active, merged or not.

They are parameters of the module of the experts' weights, `experts.mlp.adapters.NAME.w1_a` and so on, with the factors of
gbmoe.LoraFactors, so that optimizers, fully_shard and checkpoints of the model take them as they take others.

Shape suffixes: E experts on this rank, H hidden, F ffn hidden, R rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from gbmoe._checks import require
from gbmoe.layers import mpu
from gbmoe.layers.expert_weights import ExpertWeights, local_weight
from gbmoe.lora_factors import ExpertLora, LoraFactors
from gbmoe.weight_layout import WeightLayout

__all__ = ["adapter_state_dict", "add_adapter", "load_adapter_state_dict", "merge_adapters", "remove_adapter", "set_adapters",
           "unmerge_adapters"]


class Adapter(torch.nn.Module):
    """One adapter of one layer: w1_a [E,R,H] and w1_b [E,F,R], v1_a and v1_b as these, w2_a [E,R,F] and w2_b [E,H,R], those that it has."""

    def __init__(self, experts: ExpertWeights, targets: Sequence[str], rank: int, scale: float, dtype: torch.dtype | None):
        super().__init__()
        self.rank, self.scale, self.targets = rank, scale, tuple(targets)
        weight = experts.stored_weight()
        hidden, ffn = experts.args.hidden_size, experts.rows // experts.num_local_experts
        for name in self.targets:
            inner, columns = (ffn, hidden) if name == "w2" else (hidden, ffn)
            options = {"dtype": dtype or weight.dtype, "device": weight.device}
            a_ERK = torch.empty(experts.num_local_experts, rank, inner, **options)
            for a_RK in a_ERK:  # as torch.nn.Linear draws its weight
                torch.nn.init.kaiming_uniform_(a_RK, a=math.sqrt(5))
            self.register_parameter(f"{name}_a", torch.nn.Parameter(a_ERK))
            self.register_parameter(f"{name}_b", torch.nn.Parameter(torch.zeros(experts.num_local_experts, columns, rank, **options)))

    def factors(self, name: str) -> LoraFactors:
        """Those of w1, w2 or v1, local."""
        return LoraFactors(local_weight(getattr(self, f"{name}_a")), local_weight(getattr(self, f"{name}_b")), self.scale)

    def extra_repr(self) -> str:
        return f"{', '.join(self.targets)}, rank={self.rank}, scale={self.scale:g}"


class Adapters(torch.nn.ModuleDict):
    """The adapters of one layer by name.

    Attributes:
        active: names of those that forward computes with.
        merged: names of those that are in the weights.
    """

    def __init__(self) -> None:
        super().__init__()
        self.active: tuple[str, ...] = ()
        self.merged: tuple[str, ...] = ()
        self.merged_factors: dict[str, dict[int, int]] = {}  # of each merged adapter, how often its factors had been written, by their id

    def adapter(self, name: str) -> Adapter:
        """The one of this name, which is there."""
        found = self[name]
        assert isinstance(found, Adapter)
        return found

    def lora(self, layout: WeightLayout) -> ExpertLora | None:
        """What expert_mlp is to compute with; None where no adapter is active, or all that are active are merged."""
        used = [self.adapter(name) for name in self.active if name not in self.merged]
        if not used:
            return None
        of = {name: tuple(each.factors(name) for each in used if name in each.targets) for name in ("w1", "w2", "v1")}
        if not layout.is_combined:
            return ExpertLora(**of)
        # The factors of gate and up remain parameters of their own. In the one tensor each changes its own rows.
        of_gate = [LoraFactors(each.a, layout.joined(each.b, torch.zeros_like(each.b)), each.scale) for each in of["w1"]]
        of_up = [LoraFactors(each.a, layout.joined(torch.zeros_like(each.b), each.b), each.scale) for each in of["v1"]]
        return ExpertLora(w1=(*of_gate, *of_up), w2=of["w2"])

    def extra_repr(self) -> str:
        return f"active={list(self.active)}, merged={list(self.merged)}"


def _layers(model: torch.nn.Module, function: str) -> list[tuple[str, ExpertWeights]]:
    """The modules of experts' weights in a model. Raises ValueError where there is none."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, ExpertWeights)]
    require(len(found) > 0, function, "model", "a module with at least one gbmoe.dMoE", f"a {type(model).__name__} without")
    return found


def _adapters(model: torch.nn.Module, function: str, names: Sequence[str] = ()) -> Iterator[tuple[str, ExpertWeights, Adapters]]:
    """Layers that have adapters. Raises ValueError where no layer has one of these names."""
    found = [(path, experts, experts.adapters) for path, experts in _layers(model, function) if isinstance(experts.adapters, Adapters)]
    known = {name for _, _, adapters in found for name in adapters}
    for name in names:
        require(name in known, function, "name", f"one of {', '.join(sorted(known)) or 'none, as the model has no adapters'}", repr(name))
    return iter(found)


def add_adapter(model: torch.nn.Module, name: str, *, rank: int, alpha: float | None = None, targets: Sequence[str] = ("w1", "v1", "w2"),
                rank_stabilised: bool = False, dtype: torch.dtype | None = None, freeze: bool = True) -> list[torch.nn.Parameter]:
    """Give the experts of every dMoE in `model` low-rank adapters (LoRA), which change nothing until they are trained.

    The first adapter of a layer is active at once, further ones when `set_adapters` says so. Make the optimizer, and call fully_shard,
    afterwards.

    Args:
        model: a dMoE, or a module that contains some. Their mlp_impl is "gbmoe", the activation has a kernel, and there is no fp8_recipe.
        name: without dots, and not taken.
        rank: at least 1; a multiple of 8 needs no padding.
        alpha: the change is multiplied by alpha / rank; None for 1.
        targets: those of w1 (gate), v1 (up) and w2 (down) that get factors; v1 is skipped in layers without a gate.
        rank_stabilised: alpha / sqrt(rank) instead.
        dtype: of the factors, None for that of the weights. They are multiplied in the dtype of the rows.
        freeze: set requires_grad of the experts' own weights and biases to False, so that they get no gradients.

    Returns:
        The new parameters: a [E,R,in], drawn as torch.nn.Linear draws its weight, and b [E,out,R], zeros. Gate and up have factors of
        their own also where a weight_layout has them in one tensor.

    Raises:
        ValueError: where the model has no dMoE, the name is taken, or a layer cannot have adapters.

    Example:
        >>> layer = dMoE(Arguments(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4,
        ...                        mlp_type="glu", bias=False, fp16=False, device="cpu"))
        >>> parameters = gbmoe.add_adapter(layer, "task", rank=8, alpha=16)
        >>> layer(torch.randn(7, 3, 32)).sum().backward()
        >>> experts = layer.experts.mlp
        >>> experts.w1.grad is None, experts.adapters["task"].w1_b.grad.shape
        (True, torch.Size([4, 64, 8]))
    """
    layers = _layers(model, "add_adapter")
    require(isinstance(name, str) and name != "" and "." not in name and not hasattr(Adapters(), name), "add_adapter", "name",
            "a name without dots that torch.nn.ModuleDict takes", repr(name))
    require(rank >= 1, "add_adapter", "rank", "at least 1", rank)
    require(len(targets) > 0 and set(targets) <= {"w1", "v1", "w2"}, "add_adapter", "targets", "some of w1, v1 and w2", list(targets))
    for path, experts in layers:
        _require_possible(path, experts, name)
    require(set(targets) != {"v1"} or any(experts.args.mlp_type == "glu" for _, experts in layers), "add_adapter", "targets",
            "a matrix that some layer has", "v1 alone, and no layer has a gate")
    parameters = []
    scale = 1.0 if alpha is None else alpha / (math.sqrt(rank) if rank_stabilised else rank)
    for _, experts in layers:
        own = [target for target in targets if target != "v1" or experts.args.mlp_type == "glu"]
        if freeze:
            for weight in experts.own_weights():
                weight.requires_grad_(False)
        if not own:
            continue
        if experts.adapters is None:
            experts._modules["adapters"] = Adapters()
        adapter = Adapter(experts, own, rank, scale, dtype)
        experts.adapters[name] = adapter
        experts.mark()
        if len(experts.adapters) == 1:
            experts.adapters.active = (name,)
        parameters += list(adapter.parameters())
    return parameters


def _require_possible(path: str, experts: ExpertWeights, name: str) -> None:
    where = f"'{path}' of model" if path else "model"
    require(experts.takes_adapters, "add_adapter", where, "mlp_impl 'gbmoe', an activation with a kernel, and no fp8_recipe",
            repr(experts))
    require(experts.adapters is None or name not in experts.adapters, "add_adapter", "name", f"none that {where} has", repr(name))
    require(mpu.features_per_rank(experts.args) == experts.args.ffn_hidden_size, "add_adapter", where,
            "whole experts on each rank", "experts whose features are spread over ranks")


def set_adapters(model: torch.nn.Module, names: str | Sequence[str]) -> None:
    """Make these adapters the active ones: their changes are added. With () none is active. Adapters that are not active keep their
    parameters.

    Raises:
        ValueError: for a name that no layer has, and while adapters are merged.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    for path, _, adapters in _adapters(model, "set_adapters", names):
        require(not adapters.merged, "set_adapters", f"'{path}'", "adapters that are not merged (unmerge_adapters)", list(adapters.merged))
        adapters.active = tuple(name for name in names if name in adapters)


def remove_adapter(model: torch.nn.Module, name: str) -> None:
    """Forget an adapter with its parameters. The changes of one that is merged stay in the weights.

    Raises:
        ValueError: for a name that no layer has.
    """
    for _, experts, adapters in _adapters(model, "remove_adapter", (name,)):
        if name in adapters:
            del adapters[name]
        adapters.active = tuple(other for other in adapters.active if other != name)
        adapters.merged = tuple(other for other in adapters.merged if other != name)
        adapters.merged_factors.pop(name, None)
        if not len(adapters):
            del experts._modules["adapters"]


@torch.no_grad()
def merge_adapters(model: torch.nn.Module) -> None:
    """Add the changes of the active adapters to the weights, in place, with one rounding for each adapter. Forward then costs as much as
    without adapters.

    `unmerge_adapters` subtracts them, which in 16 bits need not give the same bits again. The merged state is not part of a checkpoint:
    save a merged model after remove_adapter, or unmerge it first.

    Raises:
        ValueError: where weights are sharded (DTensor), or computed by a parametrization.
    """
    for path, experts, adapters in _adapters(model, "merge_adapters"):
        for name in adapters.active:
            if name not in adapters.merged:
                _add(path, experts, adapters.adapter(name), 1.0)
                adapters.merged += (name,)
                adapters.merged_factors[name] = _versions(adapters.adapter(name))


@torch.no_grad()
def unmerge_adapters(model: torch.nn.Module) -> None:
    """Subtract the changes of merged adapters from the weights, in place. Errors are those of merge_adapters, and ValueError where an
    adapter's factors have been written since it was merged: what they are now is not what was added."""
    layers = list(_adapters(model, "unmerge_adapters"))
    for path, _, adapters in layers:
        for name in adapters.merged:
            merged = adapters.merged_factors[name]
            # Of a copy of the model nothing is known: its factors are other tensors.
            same = all(merged.get(factor, version) == version for factor, version in _versions(adapters.adapter(name)).items())
            require(same, "unmerge_adapters", f"'{path}.{name}'", "factors that have not been written since they were merged", "others")
    for path, experts, adapters in layers:
        for name in adapters.merged:
            _add(path, experts, adapters.adapter(name), -1.0)
        adapters.merged = ()


def _versions(adapter: Adapter) -> dict[int, int]:
    return {id(parameter): parameter._version for parameter in adapter.parameters()}


def _add(path: str, experts: ExpertWeights, adapter: Adapter, sign: float) -> None:
    for name in adapter.targets:
        stored = name if name in experts.stored_names() else "w1"
        weight = experts._parameters.get(stored)
        plain = type(weight) is torch.nn.Parameter
        require(plain, "merge_adapters", f"'{path}.{stored}'", "a plain parameter", type(weight).__name__)
        assert weight is not None
        factors = adapter.factors(name)
        b_ENR, a_ERK = factors.b.to(weight.dtype), factors.a.to(weight.dtype)
        w_EFH = experts.layout.matrix(name, weight if weight.dim() == 3 else weight.unflatten(0, (experts.num_local_experts, -1)))
        left, right = (a_ERK.transpose(1, 2), b_ENR.transpose(1, 2)) if name == "w2" else (b_ENR, a_ERK)
        w_EFH.baddbmm_(left, right, alpha=sign * factors.scale)


def adapter_state_dict(model: torch.nn.Module, name: str) -> dict[str, torch.Tensor]:
    """The parameters of one adapter by names "PATH.w1_a" and so on. PATH leads to the module of the experts' weights in the model.

    Raises:
        ValueError: for a name that no layer has.
    """
    found = {}
    for path, _, adapters in _adapters(model, "adapter_state_dict", (name,)):
        if name in adapters:
            found.update({f"{path}.{key}" if path else key: value for key, value in adapters[name].state_dict().items()})
    return found


def load_adapter_state_dict(model: torch.nn.Module, name: str, state: dict[str, torch.Tensor]) -> None:
    """Load what adapter_state_dict gave, into an adapter with the same ranks and targets; its name may be another one.

    Raises:
        ValueError: for a name that no layer has, where keys differ, and while the adapter is merged.
        RuntimeError: where shapes differ.
    """
    for path, _, adapters in _adapters(model, "load_adapter_state_dict", (name,)):
        require(name not in adapters.merged, "load_adapter_state_dict", f"'{path}.{name}'",
                "an adapter that is not merged (unmerge_adapters)", "one whose change is in the weights")
    expected = adapter_state_dict(model, name)
    differing = sorted(expected.keys() ^ state.keys())
    require(not differing, "load_adapter_state_dict", "state", "the keys of adapter_state_dict", f"a difference in {differing[:3]}")
    for path, _, adapters in _adapters(model, "load_adapter_state_dict", (name,)):
        if name in adapters:
            prefix = f"{path}." if path else ""
            adapters[name].load_state_dict({key: state[prefix + key] for key in adapters[name].state_dict()})
