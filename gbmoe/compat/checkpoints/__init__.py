"""MoE layers in checkpoints, converted from one layout to another bit for bit, by way of MegaBlocks', which gbmoe.dMoE has.

A layer's names begin with any prefix (model.layers.0.mlp., transformer.blocks.0.ffn., none), which stays as it is:

    MegaBlocks, gbmoe.dMoE           transformers
    router.layer.weight [E,H]        gate.weight [E,H], or as the model type has it
    router.expert_bias [E]           gate.e_score_correction_bias [E], or as the model type
                                     has it
    experts.mlp.w1 [E*F,H]           experts.gate_up_proj [E,2F,H], gate above up; without a
                                     gate experts.up_proj [E,F,H]
    experts.mlp.v1 [E*F,H]           its up half; there is no v1 without a gate
    experts.mlp.w2 [E*F,H]           experts.down_proj [E,H,F]
    experts.mlp.w1_bias, v1_bias     experts.gate_up_proj_bias [E,2F] of gpt_oss
    experts.mlp.w2_bias [E,H]        experts.down_proj_bias [E,H]
    shared_expert.*_proj.weight      shared_experts.*_proj.weight, shared_expert. or
                                     shared_mlp.
    shared_expert.expert_gate.weight shared_expert_gate.weight [1,H]

This is the layout that transformers 5 has in memory, here called "fused". gpt_oss and llama4 have experts.gate_up_proj [E,H,2F] and
experts.down_proj [E,F,H] under these names, the former with gate and up in turns; shapes and biases tell. On disk most of its models still
have a tensor for each expert: save_pretrained writes these by default, and published checkpoints hold them. These are the other layouts:

    "gate_proj"     experts.0.gate_proj.weight [F,H], experts.0.up_proj.weight [F,H],
                    experts.0.down_proj.weight [H,F]
    "w1"            experts.0.w1.weight, experts.0.w3.weight, experts.0.w2.weight: the same
                    tensors under Mixtral's names
    "input_linear"  input_linear.weight [E,2F,H], output_linear.weight [E,H,F]: the fused
                    ones under Granite's names

All can be read and written. A model type loads "fused" and at most one of the others; from_pretrained gives experts under other names
random values. models.py has the list, and convert_checkpoint refuses to write what the model type in
config.json does not load.

Layouts of training frameworks, with the whole tensors of all ranks:

    "megatron_grouped"     Megatron-Core's TEGroupedMLP: experts.linear_fc1.weight0 [2F,H],
                           gate above up, experts.linear_fc2.weight0 [H,F]
    "megatron_sequential"  its SequentialMLP: the same as
                           experts.local_experts.0.linear_fc1.weight
    "torchtitan"           experts.w1, w3 [E,F,H], w2 [E,H,F], router.gate.weight, expert_bias;
                           with score_before_experts the router's weight multiplies what an
                           expert gets: Arguments.moe_apply_probs_on_input
    "torchtitan_0.3"       what torchtitan 0.3 has: the same as
                           routed_experts.inner_experts.w1_EFD, expert_bias_E
    "olmo_core"            OLMo-core's MoE: experts.mlp.w1, w2, w3 [E*F,H], router.weight [E*H]

All tensors outside of the layers stay as they are. A layer that holds anything else (an output bias, or biases of the experts where a
layout has no names for them) has no counterpart; it is refused with the names that do not fit. Checkpoints must be whole:
one rank's part of an expert-parallel model looks like a smaller layer.

Names and shapes do not tell what a layer computes. That is in config.json: convert_checkpoint derives from it the gbmoe.Arguments
with which a dMoE computes the layers, and refuses what no dMoE computes. The functions for state dicts see no config.json and
check none of this.

    layouts.py              names, shapes and places of matrices in each layout
    model_types.py          how a model type is described
    models.py               what transformers' model types compute, by their config.json, and
                            which layouts they load; data only
    refused.py              model types that are refused, and what each needs
    recognise.py            the layout and the sizes of a layer, and what of it does not fit
    tensor_conversion.py    what becomes of each tensor
    convert_state_dicts.py  to_megablocks, to_transformers, to_framework
    arguments_of_config.py  config.json to Arguments, and the file that keeps them
    convert_files.py        convert_checkpoint
    files.py                safetensors files and their index, one tensor at a time
"""

from gbmoe.compat.checkpoints.arguments_of_config import read_arguments
from gbmoe.compat.checkpoints.convert_files import convert_checkpoint
from gbmoe.compat.checkpoints.convert_state_dicts import to_framework, to_megablocks, to_transformers
from gbmoe.compat.checkpoints.recognise import BrokenCheckpoint
from gbmoe.compat.checkpoints.tensor_conversion import EXPERT_LAYOUTS, LAYOUTS

__all__ = [
    "EXPERT_LAYOUTS", "LAYOUTS", "BrokenCheckpoint", "convert_checkpoint", "read_arguments", "to_framework",
    "to_megablocks", "to_transformers",
]
