import torch


def _initialize_affine_weight_cpu(weight, output_size, input_size, per_partition_size, partition_dim, init_method, stride=1,
                                  return_master_weight=False, *, params_dtype=torch.float32, rank=None, world_size=None):
    whole = torch.empty(output_size, input_size)
    init_method(whole)
    parts = torch.split(whole.to(params_dtype), per_partition_size // stride, dim=partition_dim)
    weight.data.copy_(torch.cat(parts[rank::world_size], dim=partition_dim))
