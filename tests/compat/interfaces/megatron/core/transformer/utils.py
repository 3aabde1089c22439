"""Checkpoints are tested in Megatron-Core itself; here is where each entry says it belongs."""

from types import SimpleNamespace


def make_sharded_tensors_for_checkpoint(state_dict, prefix, tensor_parallel_layers_axis_map=None, sharded_offsets=(),
                                        extra_state_suffix="_extra_state", tp_group=None, dp_cp_group=None):
    return {prefix + name: SimpleNamespace(key=prefix + name, data=data, offsets=sharded_offsets,
                                           axis=(tensor_parallel_layers_axis_map or {}).get(name), replica_id=(0, tp_group.rank(), 0))
            for name, data in state_dict.items()}
