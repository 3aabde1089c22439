"""LigerCute's adapter next to modules of its names: the weights' layouts, the gradients' scale, and the memory that all ranks make and
give back together."""

import dataclasses
import sys
import types

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.measurements.parallel_layer import ParallelLayerMeasurement
from benchmarks.rivals import ligercute
from benchmarks.running.rank_processes import RankRunner
from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.measurements.layer import layer_inputs
from gbmoe.cli.bench.measurements.measurement import FORWARD, TRAINING, configurations
from gbmoe.cli.bench.running.repeat import Sustained
from gbmoe.cli.bench.running.verify_and_time import Conditions
from gbmoe.testing.moe_shapes import MoeCase

CPU = torch.device("cpu")
CASE = MoeCase("case", 48, 32, 40, 8, 3, "glu")
EFFORT = Sustained(seconds=0.001, rounds=2)


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    max_tokens: int
    hidden_size: int
    num_experts: int
    top_k: int
    num_hosts: int
    gpus_per_host: int


class Native:
    """The parts of LigerCute 0.8.5 that are called, on one rank; `calls` are the collective ones."""

    def __init__(self):
        self.calls, self.sizes = [], None

    def configure(self, moe):
        assert self.sizes is None, "its memory does not grow"
        self.sizes = moe
        self.calls.append(moe)

    def pool_clear_all(self):
        self.sizes = None
        self.calls.append("clear")

    def finalize(self):
        self.sizes = None
        self.calls.append("finalize")

    def moe_fused(self, x, expert_indices, expert_weights, all_B, all_C, all_A, num_experts, top_k, pg=None):
        tensors = (x, expert_weights, all_B, all_C, all_A)
        assert all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in tensors) and expert_indices.dtype == torch.int32
        assert expert_indices.shape == expert_weights.shape == (len(x), top_k) and len(all_B) == num_experts and pg is None
        assert self.sizes == MoEConfig(len(x), x.size(1), num_experts, top_k, num_hosts=1, gpus_per_host=1)
        out = 0
        for slot in range(top_k):
            e = expert_indices[:, slot].long()
            h, g = (torch.einsum("th,tfh->tf", x, w[e]) for w in (all_B, all_C))
            out = out + expert_weights[:, slot, None] * torch.einsum("tf,thf->th", F.silu(h) * g, all_A[e])
        return out.to(x.dtype)


@pytest.fixture
def native(monkeypatch):
    native = Native()
    modules = {name: types.ModuleType(name) for name in (
        "liger_cute_kernels", "liger_cute_kernels.nvshmem", "liger_kernel", "liger_kernel.ops", "liger_kernel.ops.cute",
        "liger_kernel.ops.cute.ops", "liger_kernel.ops.cute.ops.moe")}
    modules["liger_cute_kernels"].MoEConfig, modules["liger_cute_kernels"].configure = MoEConfig, native.configure
    modules["liger_cute_kernels.nvshmem"].pool_clear_all = native.pool_clear_all
    modules["liger_cute_kernels.nvshmem"].finalize = native.finalize
    modules["liger_kernel.ops.cute.ops.moe"].moe_fused = native.moe_fused
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(ligercute, "needs_cuda", lambda device: None)
    monkeypatch.setattr(ligercute, "_configured", None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield native
    dist.destroy_process_group()


def rows_of(*cases, computations=(TRAINING,)):
    measured = [ParallelLayerMeasurement(case, "ligercute", None, "skewed", computation) for case in cases for computation in computations]
    with RankRunner(Conditions(CPU, torch.bfloat16), EFFORT) as runner:
        return [row for each in configurations(measured) for row in runner.run(each)]


@pytest.mark.parametrize("computation", [FORWARD, TRAINING])
def test_it_gets_gbmoes_weights_and_gives_their_gradients(native, computation):
    row, = rows_of(CASE, computations=(computation,))
    assert row["verified"], row["problem"]


def test_gradients_are_means_over_the_ranks(native):
    weights = layer_inputs(CASE, "uniform", CPU, torch.bfloat16).weights
    layer = rivals.load("ligercute").parallel_layer(CASE, weights, dist.group.WORLD)
    layer(torch.randn(48, 32).bfloat16()).float().sum().backward()
    of_one, layer.experts.ranks = layer.weight_gradients(), 2
    for name, gradient in layer.weight_gradients().items():
        if name != "router":
            torch.testing.assert_close(gradient, of_one[name] / 2)


def test_memory_is_made_once_for_a_size_and_given_back_at_the_end(native):
    larger = dataclasses.replace(CASE, name="larger", tokens=64)
    rows = rows_of(CASE, larger, computations=(FORWARD, TRAINING))
    assert all(row["verified"] for row in rows)
    first, *others = native.calls
    assert first.max_tokens == 48 and others == ["clear", dataclasses.replace(first, max_tokens=64), "finalize"]


def test_memory_stays_if_a_rank_fails(native):
    """finalize is collective: a rank that ends with an exception does not call it."""
    with pytest.raises(KeyError), RankRunner(Conditions(CPU, torch.bfloat16), EFFORT) as runner:
        runner.rivals_about["ligercute"] = "here"
        ligercute._configure(max_tokens=1, hidden_size=1, num_experts=1, top_k=1, gpus_per_host=1)
        raise KeyError
    assert "finalize" not in native.calls


def test_what_it_is_not_made_for():
    rival = rivals.load("ligercute")
    assert rival.refuses(dataclasses.replace(CASE, mlp_type="mlp"), torch.bfloat16) == "has no plain MLP"
    assert rival.refuses(CASE, torch.float16) == "takes bfloat16 only" and rival.refuses(CASE, torch.bfloat16) is None
