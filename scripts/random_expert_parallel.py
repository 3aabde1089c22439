#!/usr/bin/env python
"""Random layers whose experts are spread over ranks, each compared with float64 of one process: outputs and all gradients.

    python scripts/random_expert_parallel.py --ranks 4 --cases 1000              gloo on the CPU, rows exchanged
    python scripts/random_expert_parallel.py --ranks 4 --cases 1000 --mapped     the same over memory that the ranks map (files)
    python scripts/random_expert_parallel.py --ranks 2 --cases 300 --cuda        a GPU for each rank, both transports
    python scripts/random_expert_parallel.py --ranks 4 --cases 100 --cuda --share-gpus    the same where there are fewer GPUs, which run
                                                                                 one rank after the other, over gloo

A case is drawn from its seed, which is printed where it fails: `--seed S --cases 1` draws that one again. The number of experts and of
their shards, the option, dtypes, tokens of each rank (none on some), dropped slots, skew, one micro-batch or two, and what needs gradients
on each rank differ. An error is allowed up to a tolerance of the dtype, or to four times that of one process in the same dtype. The status
is 1 if a case fails.

Shape suffixes: T tokens, K slots a token, E experts, F ffn hidden, H hidden.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import gbmoe
from gbmoe.layers import ParallelDroplessMLP
from gbmoe.parallel import loans, peer_memory
from gbmoe.testing import mapped_files

TOLERANCES = {torch.float64: 1e-11, torch.float32: 3e-4, torch.bfloat16: 4e-2}
ONLY_EXCHANGED = ("nodes", "chunks", "nodes and chunks", "shadows")


def x_sigmoid(x):
    """An activation that has no kernel."""
    return x * x.sigmoid()


class Case:
    """What all ranks draw alike from a seed."""

    def __init__(self, seed: int, world: int, device: torch.device, mapped: bool):
        draw = random.Random(seed)
        self.seed, self.world, self.device = seed, world, device
        self.shards = draw.choice([1, 1, 1, 2]) if world % 2 == 0 else 1
        self.groups = world // self.shards  # ranks with different experts
        self.experts = self.groups * (draw.choice([1, 1, 2, 3, 4]) if self.shards == 1 else 1)
        self.top_k = draw.randint(1, min(self.experts, draw.choice([1, 2, 3, 8])))
        on_gpu = device.type == "cuda"
        self.hidden = draw.choice([64, 128, 256] if on_gpu else [8, 16, 24, 64])
        # MegaBlocks' layout: where ranks share an expert, its ffn size is divided by all of them.
        self.ffn = draw.choice([64, 192] if on_gpu else [8, 16, 40, 64]) * (self.shards * world if self.shards > 1 else 1)
        self.glu = draw.random() < 0.6
        dtypes = [torch.bfloat16] * 2 + [torch.float32] if on_gpu else [torch.float32] * 2 + [torch.bfloat16]
        self.dtype = draw.choice(dtypes if mapped or on_gpu else [*dtypes, torch.float64, torch.float64, torch.float64])
        self.activation = draw.choice([F.silu, F.gelu, F.relu, torch.tanh, x_sigmoid])
        self.option = draw.choice(["none", "none", "exact", "nodes", "chunks", "nodes and chunks", "shadows", "rows", "bmm", "kept rows",
                                   "loans", "loans", "exact and loans"])
        if mapped and self.option in ONLY_EXCHANGED:
            self.option = "none"
        self.fields = self._fields(draw, mapped)
        most = draw.choice([0, 1, 5, 30, 90])
        self.tokens = [draw.choice([0, most, draw.randint(0, most)]) for _ in range(world)]
        self.frozen, self.no_dx, self.no_dweights = ([draw.random() < 0.15 for _ in range(world)] for _ in range(3))
        self.skew, self.dropped = draw.choice([0, 1, 4]), draw.choice([0, 0, 0.2])
        self.micro_batches, self.training = draw.choice([1, 1, 2]), draw.random() < 0.9

    def _fields(self, draw: random.Random, mapped: bool) -> dict:
        world, option = self.world, self.option
        fields: dict = dict(expert_parallel_transport="auto" if self.device.type == "cpu" else draw.choice(["auto", "exchange"]))
        if "exact" in option and self.shards == 1:
            fields["expert_parallel_exact"] = True
        if "nodes" in option and world % 2 == 0:
            fields["expert_parallel_ranks_per_node"] = world // 2 if world // 2 <= self.groups else 1
        if "chunks" in option:
            fields["expert_parallel_chunks"] = draw.choice([1, 2, 3, 0])
        if option == "shadows" and self.shards == 1:
            fields["expert_parallel_shadows"] = draw.randint(1, self.experts)
        if "loans" in option and self.shards == 1 and fields["expert_parallel_transport"] == "auto":
            fields["expert_parallel_loans"] = draw.choice([1, 2, self.experts])
        if option == "rows":
            fields["expert_parallel_rows"] = draw.choice([0.1, 1.5, world])
        if option == "bmm":
            fields["mlp_impl"] = "bmm"
        if option == "kept rows" or (option == "loans" and draw.random() < 0.3):
            fields["keep_gathered_rows"] = True
        return fields

    def layer(self, parallel: bool, dtype: torch.dtype) -> ParallelDroplessMLP:
        further = dict(self.fields, moe_expert_model_parallelism=True) if parallel else {}
        arguments = gbmoe.Arguments(
            hidden_size=self.hidden, ffn_hidden_size=self.ffn, moe_num_experts=self.experts, moe_top_k=self.top_k, bias=False, fp16=False,
            bf16=dtype == torch.bfloat16, mlp_type="glu" if self.glu else "mlp", activation_fn=self.activation, moe_loss_weight=0,
            device=self.device, init_method=functools.partial(torch.nn.init.normal_, std=0.2), **further)
        return ParallelDroplessMLP(arguments).to(dtype)

    def weights_EFH(self, generator: torch.Generator) -> dict[str, torch.Tensor]:
        names = ("w1", "w2", "v1") if self.glu else ("w1", "w2")
        return {name: self._rounded(0.3 * torch.randn(self.experts, self.ffn, self.hidden, generator=generator, dtype=torch.float64))
                for name in names}

    def inputs(self, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """(x [T,H], ids [T,K], weights [T,K], the output's gradient [T,H]) of all ranks' tokens."""
        T, E = sum(self.tokens), self.experts
        x_TH, grad_TH = (torch.randn(T, self.hidden, generator=generator, dtype=torch.float64) for _ in range(2))
        scores_TE = torch.rand(T, E, generator=generator) + self.skew * torch.linspace(1, 0, E) * torch.rand(T, 1, generator=generator)
        ids_TK = scores_TE.topk(self.top_k).indices
        ids_TK = torch.where(torch.rand(ids_TK.shape, generator=generator) < self.dropped, -1, ids_TK)
        weights_TK = torch.rand(T, self.top_k, generator=generator, dtype=torch.float64)
        return self._rounded(x_TH), ids_TK.to(self.device), self._rounded(weights_TK), self._rounded(grad_TH)

    def _rounded(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.dtype).double().to(self.device)

    def exact(self, x_TH, ids_TK, weights_TK, weights_EFH):
        """The output in float64, with gradients."""
        out_TH = torch.zeros_like(x_TH)
        for e in range(self.experts):
            t, k = (ids_TK == e).nonzero(as_tuple=True)
            h = self.activation(x_TH[t] @ weights_EFH["w1"][e].t())
            h = h * (x_TH[t] @ weights_EFH["v1"][e].t()) if self.glu else h
            out_TH = out_TH.index_add(0, t, weights_TK[t, k, None] * (h @ weights_EFH["w2"][e]))
        return out_TH

    def part(self, tensor_EFH: torch.Tensor, rank: int) -> torch.Tensor:
        """The part of an expert's tensor that is on a rank."""
        mine = tensor_EFH.view(self.groups, -1, self.ffn, self.hidden)[rank % self.groups]
        return mine.chunk(self.shards, 1)[rank // self.groups]


def errors_of(case: Case, rank: int) -> list[str]:
    """What is wrong on this rank."""
    generator, wrong = torch.Generator().manual_seed(case.seed), []
    layer, alone = case.layer(True, case.dtype), case.layer(False, case.dtype)
    weights_EFH = case.weights_EFH(generator)
    with torch.no_grad():
        for name, full_EFH in weights_EFH.items():
            getattr(layer.mlp, name).copy_(case.part(full_EFH, rank).reshape(getattr(layer.mlp, name).shape))
            getattr(alone.mlp, name).copy_(full_EFH.view(getattr(alone.mlp, name).shape))
    layer.requires_grad_(not case.frozen[rank])
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in weights_EFH.items()}

    def compare(name, got, exact, of_one_process):
        got, exact, own = (t.detach().double().reshape(-1) for t in (got, exact, of_one_process))
        if got.numel():
            norm = max(float(exact.norm()), 1.0 if case.dtype == torch.bfloat16 else 1e-2)
            error, allowed = float((got - exact).norm()), max(TOLERANCES[case.dtype] * norm, 4 * float((own - exact).norm()))
            if not error <= allowed:
                wrong.append(f"{name}: error {error / norm:.2e}, allowed {allowed / norm:.2e}")

    def call(layer, x, ids, weights, grad, needs_x=True, needs_weights=True):
        x, weights = (tensor.to(case.dtype, copy=True).requires_grad_(needs) for tensor, needs in ((x, needs_x), (weights, needs_weights)))
        with torch.set_grad_enabled(case.training):
            out = layer(x, x.new_zeros(x.size(0), case.experts), weights, ids)
        if out.requires_grad:
            out.backward(grad.to(case.dtype).view_as(out))
        return out, x.grad, weights.grad

    for _ in range(case.micro_batches):
        x, ids, weights, grad = everything = case.inputs(generator)
        mine = [tensor.split(case.tokens)[rank] for tensor in everything]
        out, dx, dweights = call(layer, *mine, needs_x=not case.no_dx[rank], needs_weights=not case.no_dweights[rank])
        own = call(alone, *everything)
        x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        exact_out = case.exact(x, ids, weights, leaves)
        split = functools.partial(torch.Tensor.split, split_size=case.tokens)
        compare("out", out, split(exact_out)[rank], split(own[0])[rank])
        if case.training:
            exact_out.backward(grad)
            for name, got, leaf, of_own, unwanted in (("dx", dx, x, own[1], case.no_dx),
                                                      ("dweights", dweights, weights, own[2], case.no_dweights)):
                if mine[0].numel() and (got is None) != unwanted[rank]:
                    wrong.append(f"{name} is not there" if got is None else f"{name} is there")
                elif got is not None:
                    exact, own_one = (torch.zeros_like(leaf) if grad is None else grad for grad in (leaf.grad, of_own))
                    compare(name, got, split(exact)[rank], split(own_one)[rank])
    for name, leaf in leaves.items() if case.training else ():
        got = getattr(layer.mlp, name).grad
        if (got is None) != case.frozen[rank]:
            wrong.append(f"d{name} is not there" if got is None else f"d{name} is there")
        elif got is not None:
            exact, own = (torch.zeros_like(leaf) if grad is None else grad.view_as(leaf).double() / case.world
                          for grad in (leaf.grad, getattr(alone.mlp, name).grad))
            compare("d" + name, got, case.part(exact, rank), case.part(own, rank))
    return wrong


def run(rank: int, options: argparse.Namespace, store: str) -> None:
    """A rank's part of all cases."""
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    shared = options.cuda and torch.cuda.device_count() < options.ranks
    device = torch.device("cuda", rank % torch.cuda.device_count()) if options.cuda else torch.device("cpu")
    if options.cuda:
        torch.cuda.set_device(device)
    if shared:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # torch reads it when ranks map memory
    if options.mapped:
        peer_memory.MAPPERS["cpu"] = lambda: mapped_files
    loans.price_in_rows = lambda *_: 0  # a loan costs a GPU more than the few rows of a case
    dist.init_process_group("nccl" if options.cuda and not shared else "gloo", init_method=f"file://{store}", rank=rank,
                            world_size=options.ranks, timeout=timedelta(seconds=180 if shared else 60))
    began, failed = time.time(), 0
    for seed in range(options.seed, options.seed + options.cases):
        case = Case(seed, options.ranks, device, options.mapped)
        peer_memory.BYTES_FOR_COPY_ENGINES = (0, 2**30)[seed % 2]  # cases have few tokens, which copy engines would bring in none
        try:
            wrong = errors_of(case, rank)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}"[:400]]
        each: list = [None] * options.ranks
        dist.all_gather_object(each, wrong)
        failed += any(each)
        if any(each) and rank == 0:
            print(f"seed {seed} fails: {vars(case)}\n    {each}", flush=True)
    if rank == 0:
        print(f"{options.cases} cases, {failed} failed; {options.ranks} ranks, seeds from {options.seed},"
              f" {'mapped' if options.mapped else device.type}; {time.time() - began:.0f} s", flush=True)
    dist.destroy_process_group()
    sys.exit(failed > 0)


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the next one has the next seed")
    parser.add_argument("--mapped", action="store_true", help="rows are pulled from memory that the ranks map, on the CPU")
    parser.add_argument("--cuda", action="store_true", help="each rank has a GPU")
    parser.add_argument("--share-gpus", action="store_true", help="with --cuda: or a part of a GPU's time, where there are fewer GPUs")
    options = parser.parse_args()
    for name, least in (("ranks", 1), ("cases", 1), ("seed", 0)):
        if not least <= getattr(options, name) < 2**31:
            parser.error(f"--{name}: expected a number of at least {least}, got {getattr(options, name)}")
    if options.cuda and torch.cuda.device_count() < (1 if options.share_gpus else options.ranks):
        parser.error(f"--cuda: expected a GPU for each of {options.ranks} ranks, found {torch.cuda.device_count()}")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (options, str(Path(folder, "store"))), nprocs=options.ranks)


if __name__ == "__main__":
    main()
