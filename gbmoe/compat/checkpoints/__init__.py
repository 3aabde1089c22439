"""MoE layers in checkpoints: MegaBlocks' layout to Hugging Face transformers' and back, bit for bit.

The two layouts of a layer, whose names begin with any prefix (model.layers.0.mlp., transformer.blocks.0.ffn., none):

    MegaBlocks (and gbmoe.dMoE)    transformers
    router.layer.weight [E,H]      gate.weight [E,H]; in Jamba router.weight
    experts.mlp.w1 [E*F,H]         experts.gate_up_proj [E,2F,H], gate above up; without a gate experts.up_proj [E,F,H]
    experts.mlp.v1 [E*F,H]         its up half; there is no v1 without a gate
    experts.mlp.w2 [E*F,H]         experts.down_proj [E,H,F]
    shared_expert.*_proj.weight    shared_experts.*_proj.weight

This is the layout that transformers 5 has in memory, here called "fused". On disk most of its models still have a tensor for each
expert: save_pretrained writes these by default, and published checkpoints hold them. There are two layouts of that kind:

    "gate_proj"    experts.0.gate_proj.weight [F,H], experts.0.up_proj.weight [F,H], experts.0.down_proj.weight [H,F]
    "w1"           experts.0.w1.weight, experts.0.w3.weight, experts.0.w2.weight: the same tensors under Mixtral's names

All three can be read and written, but from_pretrained does not load all three. A model type loads "fused" and at most one of the
others, and gives experts under other names random values. model_types.py has the list, and convert_checkpoint refuses to write
what the model type in config.json does not load.

Prefixes and all other tensors stay as they are. A layer that holds anything else (an output bias, biases of the experts or the
router, DeepSeek-V3's correction bias, the gate of Qwen2-MoE's shared expert) has no counterpart in the other layout; it is refused
with the names that do not fit. Checkpoints must be whole: one rank's part of an expert-parallel model looks like a smaller layer.

Names and shapes do not tell what a layer computes. That is in config.json: convert_checkpoint derives from it the gbmoe.Arguments
with which a dMoE computes the layers, and refuses what no dMoE computes. to_megablocks and to_transformers see no config.json and
ask nothing.

    layouts.py         names and shapes: what becomes of each tensor
    model_types.py     what transformers' model types compute, by their config.json, and which layouts they load; data only
    arguments.py       config.json to Arguments, and the file that keeps them
    conversion.py      convert_checkpoint
    files.py           safetensors files and their index, read and written one tensor at a time
"""

from gbmoe.compat.checkpoints.arguments import read_arguments
from gbmoe.compat.checkpoints.conversion import convert_checkpoint
from gbmoe.compat.checkpoints.layouts import EXPERT_LAYOUTS, LAYOUTS, BrokenCheckpoint, to_megablocks, to_transformers

__all__ = [
    "EXPERT_LAYOUTS", "LAYOUTS", "BrokenCheckpoint", "convert_checkpoint", "read_arguments", "to_megablocks", "to_transformers",
]
