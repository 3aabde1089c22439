"""Experts spread over the ranks of torchrun: every rank has tokens of its own and a part of every layer's experts.

    torchrun --nproc-per-node 2 examples/expert_parallelism.py      # on GPUs over NCCL and mapped memory, elsewhere on CPUs over gloo

Parameters that all ranks have (the router) are averaged by DistributedDataParallel; experts' weights differ from rank to rank and are
left alone. gbmoe.parallel.training has what knows the difference: data_parallel, clip_grad_norm_, and checkpoints.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

import gbmoe
from gbmoe.parallel import training


def main() -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)  # the same layer on any number of ranks: each rank keeps its part of what all draw
    args = gbmoe.Arguments(hidden_size=128, ffn_hidden_size=256, moe_num_experts=8, moe_top_k=2, mlp_type="glu", activation_fn=F.silu,
                           bias=False, fp16=False, bf16=on_gpu, device=device, moe_expert_model_parallelism=True)
    model = training.data_parallel(gbmoe.dMoE(args))  # constructing such a layer is collective
    experts = training.expert_parameters(model)
    print(f"rank {rank} of {ranks}: {sum(p.numel() for p in experts.values()):,} parameters of experts are its own", flush=True)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(32, 4, args.hidden_size, device=device, dtype=args.dtype, generator=generator)
    for step in range(5):
        loss = (model(x) - x).float().square().mean() + gbmoe.batched_load_balancing_loss(args)
        loss.backward()
        gbmoe.clear_load_balancing_loss()
        training.clip_grad_norm_(model.parameters(), 1.0)  # one norm over all ranks' experts
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step}: mean loss {mean.item() / ranks:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
