"""The megakernel of gbmoe.compat.megatron on one rank, and on two that differ; models over several ranks are in test_models.py."""

import gc
import importlib
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from gbmoe.parallel import peer_memory
from tests import rank_groups
from tests.compat import interfaces
from tests.compat.expert_rows import HIDDEN, values
from tests.compat.megatron.conftest import ADAPTER
from tests.compat.megatron.parts import EXPERTS, Group, configured, groups, halves, main_grads, routed


def megakernel(megatron, *, shared=None, of=None, local=EXPERTS, fields=None, **config):
    of = of or groups()
    experts = megatron.adapter.GroupedExperts(local, configured(megatron, **config), pg_collection=of)
    for name, value in (fields or {}).items():
        setattr(experts.config, name, value)
    return experts, megatron.adapter.build_megakernel_backend(config=experts.config, ep_group=of.ep, routed_experts=experts,
                                                              shared_experts=shared, num_local_experts=local)


@pytest.mark.parametrize("fusion", [False, True])
def test_a_megakernel_is_the_sum_of_each_tokens_experts(megatron, fusion, device):
    experts, kernel = megakernel(megatron, gradient_accumulation_fusion=fusion, shared=lambda x: 2 * x)
    assert not list(kernel.parameters())
    experts.to(device)
    if fusion:
        main_grads(experts)
    x, probs, routing_map = (t.to(device) for t in routed(experts=EXPERTS))
    routing_map[3], routing_map[5] = False, torch.arange(EXPERTS, device=device) == 1  # tokens with fewer experts, dropped or masked
    probs = (probs + routing_map * 0.1) * routing_map
    leaves = [t.clone().requires_grad_() for t in (x, probs)]
    out = kernel(leaves[0].view(8, 5, HIDDEN), leaves[1], routing_map)
    grad = values(40, HIDDEN, dtype=torch.float32, seed=7).to(device)
    out.backward(grad.view_as(out))

    again = [t.clone().requires_grad_() for t in (x, probs)]
    w1, w2 = (torch.stack([weight.detach() for weight in each()[0]]).requires_grad_() for each in
              (experts.linear_fc1, experts.linear_fc2))
    a = [F.silu(halves(again[0] @ one.t())[0]) * halves(again[0] @ one.t())[1] @ two.t() for one, two in zip(w1, w2)]
    wanted = (torch.stack(a, 1) * (again[1] * routing_map)[..., None]).sum(1) + 2 * again[0]
    wanted.backward(grad)
    torch.testing.assert_close(out.view_as(wanted), wanted)
    torch.testing.assert_close(leaves[0].grad, again[0].grad)
    torch.testing.assert_close(leaves[1].grad, again[1].grad)
    for e in range(EXPERTS):
        parameter = getattr(experts.linear_fc1, f"weight{e}")
        torch.testing.assert_close(parameter.main_grad if fusion else parameter.grad, w1.grad[e])


def test_what_a_megakernel_refuses(megatron):
    for name in ("moe_pad_expert_input_to_capacity", "moe_router_padding_for_quantization", "overlap_moe_expert_parallel_comm"):
        with pytest.raises(ValueError, match=f"{name}: expected None or False"):
            megakernel(megatron, fields={name: True})
    with pytest.raises(ValueError, match="expert_tensor_parallel_size: expected 1 .* got 2"):
        megakernel(megatron, of=groups(tp=(0, 2)))
    with pytest.raises(ValueError, match="num_local_experts: expected 5 experts over 2 ranks, got 5"):
        megakernel(megatron, of=groups(ep=(0, 2)))
    with pytest.raises(TypeError, match="routed_experts: expected GroupedExperts .* got Linear"):
        megatron.adapter.Megakernel(config=configured(megatron), ep_group=Group(), routed_experts=torch.nn.Linear(1, 1),
                                    num_local_experts=1)
    x, probs, routing_map = routed(experts=EXPERTS)
    with pytest.raises(ValueError, match=r"routing_map: expected shape \[T,E\] == \[39, 5\], as probs, got \[40, 5\]"):
        megakernel(megatron)[1](x[1:], probs, routing_map)


def _on_a_rank(rank, store, folder):
    """Two ranks that map each other's memory, whose tokens differ: each call raises on both, and they go on together."""
    rank_groups.join_and_map_memory(rank, 2, store, "cpu")
    of = groups()
    of.ep = dist.group.WORLD
    with interfaces.installed("megatron-core", ADAPTER, folder / f"of-{rank}"):
        modules = SimpleNamespace(transformer_config=importlib.import_module("megatron.core.transformer.transformer_config"),
                                  adapter=importlib.import_module(ADAPTER))

        def kernel(transport, **config):
            config = configured(modules, num_moe_experts=4, **config)
            experts = modules.adapter.GroupedExperts(2, config, pg_collection=of)
            return modules.adapter.Megakernel(config=config, ep_group=of.ep, routed_experts=experts, num_local_experts=2,
                                              transport=transport)

        def call(layer, dtype=torch.float32):
            x, probs, routing_map = routed(experts=4)
            return layer(x.to(dtype), probs, routing_map)

        with pytest.raises(ValueError, match="ep_group: .* transport is 'exchange' on rank 0, 'auto' on rank 1"):
            kernel(("exchange", "auto")[rank])
        for transport, config in (("auto", {}), ("peer_memory", {}), ("exchange", {}), ("auto", {"add_bias_linear": True})):
            layer = kernel(transport, **config)
            wanted = call(layer)
            with pytest.raises((ValueError, RuntimeError), match="float64|rows cannot be pulled"):
                call(layer, torch.float64 if rank == 0 else torch.float32)
            gc.collect()
            assert torch.equal(call(layer), wanted)
            with torch.autocast("cpu", torch.bfloat16, enabled=rank == 0), pytest.raises(ValueError, match="path is .*bfloat16.* rank 0"):
                call(layer)
            gc.collect()
            assert torch.equal(call(layer), wanted)
    peer_memory.release()
    torch.save(True, folder / f"{rank}.pt")
    rank_groups.leave()


@pytest.mark.slow
@pytest.mark.xdist_group("mapped-files")
def test_ranks_chose_their_transports_alone(tmp_path):
    for rank in range(2):
        (tmp_path / f"of-{rank}").mkdir()
    assert rank_groups.files_of_ranks(_on_a_rank, 2, tmp_path) == [True, True]
