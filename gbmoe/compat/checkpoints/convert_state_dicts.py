"""State dicts from one layout to another."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gbmoe.compat.checkpoints.tensor_conversion import plan


def to_megablocks(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict with its MoE layers in MegaBlocks' layout, for gbmoe.dMoE and for MegaBlocks.

    Whether a dMoE computes what the model computes is not checked here; convert_checkpoint does so.

    Args:
        state_dict: of a model or of one MoE block in any layout of gbmoe.compat.checkpoints, with whole tensors, not one rank's; any
            dtype and device. TransformerEngine's `_extra_state` is left out.

    Returns:
        A new dict. Tensors that have another shape or order are copies, all others are those of `state_dict`.

    Raises:
        ValueError: where there is no MoE layer, where all have this layout already, or with the names that do not fit.
            BrokenCheckpoint, a subclass, for a layer with a size of zero or with a dtype that packs several values into a byte.

    Example:
        >>> block = {"gate.weight": torch.zeros(4, 8),
        ...          "experts.gate_up_proj": torch.zeros(4, 2 * 16, 8),
        ...          "experts.down_proj": torch.zeros(4, 8, 16)}
        >>> list(to_megablocks(block))
        ['experts.mlp.w1', 'experts.mlp.v1', 'experts.mlp.w2', 'router.layer.weight']
    """
    return _converted(state_dict, "megablocks")


def to_transformers(state_dict: Mapping[str, torch.Tensor], experts: str = "fused", model_type: str = "deepseek_v3",
                    ) -> dict[str, torch.Tensor]:
    """The state dict with its MoE layers in transformers' layout; the inverse of to_megablocks.

    A model in memory has the experts "fused". Which layouts from_pretrained loads depends on the model type, see
    gbmoe.compat.checkpoints.

    Args:
        state_dict: as of to_megablocks.
        experts: "fused", "gate_proj", "w1" or "input_linear"; see gbmoe.compat.checkpoints.
        model_type: as in config.json; the router and the shared expert get its names.

    Returns, Raises: as to_megablocks.
    """
    return _converted(state_dict, "transformers", experts, model_type)


def to_framework(state_dict: Mapping[str, torch.Tensor], framework: str) -> dict[str, torch.Tensor]:
    """The state dict with its MoE layers in the layout of a training framework; to_megablocks is the inverse.

    Args:
        state_dict: as of to_megablocks.
        framework: "megatron_grouped", "megatron_sequential", "torchtitan", "torchtitan_0.3" or "olmo_core"; see
            gbmoe.compat.checkpoints.

    Returns, Raises: as to_megablocks.
    """
    return _converted(state_dict, framework)


def _converted(state_dict: Mapping[str, torch.Tensor], to: str, experts: str = "fused", model_type: str = "deepseek_v3",
               ) -> dict[str, torch.Tensor]:
    signatures = {name: (list(value.shape), value.dtype) for name, value in state_dict.items() if not name.endswith("_extra_state")}
    outputs, _ = plan(signatures, to, experts, model_type)
    return {output.name: output.value(state_dict) for output in outputs}
