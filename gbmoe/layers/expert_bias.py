"""Balance without a loss: the experts' biases follow how many tokens each expert got (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

Shape suffixes: L layers, E experts.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from gbmoe._checks import require
from gbmoe.layers.dmoe import ParallelDroplessMLP, dMoE
from gbmoe.parallel import agreement, failures, groups


class _Layer(NamedTuple):
    bias_E: torch.Tensor
    counts_E: torch.Tensor
    rate: float  # 0 for a frozen layer


# Models whose layers are known to be alike on all ranks, and the names of the groups of these ranks.
_ALIKE: weakref.WeakKeyDictionary[torch.nn.Module, set[str]] = weakref.WeakKeyDictionary()


def update_expert_bias(model: torch.nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Move the experts' biases of all layers by one step, up for experts that got fewer tokens than the mean and down for those that got
    more; then begin to count anew. Call it once a step, after the optimizer's step.

    A layer with moe_router_enable_expert_bias counts the tokens of each expert, without padding, in every forward in training with
    gradients. All micro-batches since the last call count, and a forward that torch.utils.checkpoint repeats counts once. The counts are
    summed over the ranks of `group` and

        bias += moe_router_bias_update_rate * sign(mean of the counts - counts)

    as in DeepSeek-V3 and Megatron-Core. A layer that got no tokens stays as it is, and so does one whose router has no parameter that
    requires a gradient. The rate is read from the layer's `args` at each call, and may be changed between calls. The biases are saved in
    checkpoints, the counts are not.

    The host does not wait for the device, except in the first call for a model, in which the ranks compare their layers. A CUDA graph may
    record later calls.

    Args:
        model: a dMoE, or a module that contains some; those without biases are left alone.
        group: the data-parallel ranks, which have other tokens for the same layers. Expert-parallel ranks are among them, stages of a
            pipeline are not. None is the default group, or this process alone where torch.distributed is not initialised. Collective: all
            of its ranks must call it.

    Raises:
        ValueError: where no layer of the model has biases; on a rank that is no member of the group; on all ranks where their layers
            differ.
        RuntimeError: where the collective fails; it names the ranks that are missing.

    Example:
        >>> layer = dMoE(Arguments(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4,
        ...                        bias=False, fp16=False, device="cpu", moe_loss_weight=0,
        ...                        moe_router_enable_expert_bias=True,
        ...                        moe_router_bias_update_rate=0.25))
        >>> layer(torch.ones(3, 1, 32)).sum().backward()  # all three tokens to one expert
        >>> gbmoe.update_expert_bias(layer)
        >>> layer.router.expert_bias.sort().values
        tensor([-0.2500,  0.2500,  0.2500,  0.2500])
    """
    layers = _layers_with_bias(model)
    with torch.no_grad():
        for same, counts_LE in _counts_of_all_ranks(layers, model, group):
            # Exact, as these are integers.
            signs_LE = (counts_LE.sum(1, keepdim=True) - counts_LE.size(1) * counts_LE).sign().to(torch.float32)
            for rate in {layer.rate for layer in same} - {0.0}:
                moved = [(layer.bias_E, sign_E.to(layer.bias_E)) for layer, sign_E in zip(same, signs_LE) if layer.rate == rate]
                biases, signs = zip(*moved)
                torch._foreach_add_(biases, signs, alpha=rate)
        torch._foreach_zero_([layer.counts_E for layer in layers])


def update_expert_bias_after(optimizer: torch.optim.Optimizer, model: torch.nn.Module, group: dist.ProcessGroup | None = None,
                             ) -> torch.utils.hooks.RemovableHandle:
    """Call update_expert_bias(model, group) after every step of the optimizer, with its register_step_post_hook.

    Where a model has several optimizers, give the one whose step comes last. A step that torch.amp.GradScaler skips moves no bias; its
    tokens are counted with those of the next.

    Returns:
        A handle; its remove() ends this.

    Raises:
        TypeError: where the optimizer has no register_step_post_hook.
        ValueError: where no layer of the model has biases.

    Example:
        >>> layer = dMoE(Arguments(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4,
        ...                        bias=False, fp16=False, device="cpu", moe_loss_weight=0,
        ...                        moe_router_enable_expert_bias=True))
        >>> optimizer = torch.optim.AdamW(layer.parameters())
        >>> handle = gbmoe.update_expert_bias_after(optimizer, layer)
        >>> layer(torch.ones(3, 1, 32)).sum().backward()
        >>> optimizer.step()
        >>> bool(layer.router.expert_bias.any())
        True
    """
    require(hasattr(optimizer, "register_step_post_hook"), "update_expert_bias_after", "optimizer",
            "a torch.optim.Optimizer, or what has its register_step_post_hook", type(optimizer).__name__, TypeError)
    _layers_with_bias(model)
    return optimizer.register_step_post_hook(lambda *_: update_expert_bias(model, group))


def _layers_with_bias(model: torch.nn.Module) -> list[_Layer]:
    """The layers with biases, in the order of model.modules(). Raises where there is none."""
    layers = []
    for layer in model.modules():
        if not isinstance(layer, dMoE):
            continue
        bias_E = getattr(layer.router, "expert_bias", None)
        experts = next((module for module in layer.experts.modules() if isinstance(module, ParallelDroplessMLP)), None)
        counts_E = None if experts is None else experts.tokens_per_expert
        if bias_E is not None and counts_E is not None:
            trained = any(parameter.requires_grad for parameter in layer.router.parameters())
            layers.append(_Layer(bias_E, counts_E, layer.args.moe_router_bias_update_rate if trained else 0.0))
    require(len(layers) > 0, "update_expert_bias", "model", "a module with at least one gbmoe.dMoE with moe_router_enable_expert_bias",
            f"a {type(model).__name__} without")
    return layers


def _counts_of_all_ranks(layers: list[_Layer], model: torch.nn.Module, group: dist.ProcessGroup | None,
                         ) -> list[tuple[list[_Layer], torch.Tensor]]:
    """Layers with the same number of experts, and their counts [L,E], for each such number; summed over the ranks in one reduction."""
    by_size: dict[int, list[_Layer]] = {}
    for layer in layers:
        by_size.setdefault(layer.counts_E.size(0), []).append(layer)
    device = layers[0].counts_E.device  # stages of a pipeline in one process may be on several
    total = torch.cat([layer.counts_E.to(device) for same in by_size.values() for layer in same])
    if dist.is_available() and dist.is_initialized() and groups.world_of(group, "update_expert_bias", "group") > 1:
        _require_like_layers(layers, model, group)
        failures.guarded(lambda: dist.all_reduce(total, group=group), group, "summing the tokens of experts", "update_expert_bias")
    parts = total.split([len(same) * experts for experts, same in by_size.items()])
    return [(same, part.view(len(same), experts)) for (experts, same), part in zip(by_size.items(), parts)]


def _require_like_layers(layers: list[_Layer], model: torch.nn.Module, group: dist.ProcessGroup | None) -> None:
    """Raise ValueError on all ranks, in a model's first call in a group, where ranks have other layers. Collective in this call alone."""
    whole: Any = dist.group.WORLD if group is None else group
    compared = _ALIKE.setdefault(model, set())
    if whole.group_name in compared:
        return
    experts = [layer.counts_E.size(0) for layer in layers]
    each = agreement.of_all_ranks_unless_alike(experts, group, "comparing the layers with biases")
    if each is not None:
        differences = agreement.differences([{"number of experts of each": repr(theirs)} for theirs in each], group)
        require(False, "update_expert_bias", "model", "the same layers with biases on all ranks of the group", "; ".join(differences))
    compared.add(whole.group_name)
