"""How a rank's experts get their first values: those that one process with all experts gives them, without room for all experts."""

import copy
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gbmoe.layers import Arguments, dMoE, expert_weights

init = torch.nn.init
EXPERTS, FFN = 6, 8
FILLING = {"normal": partial(init.normal_, std=0.3), "nested": partial(partial(init.normal_, mean=1.0), std=2.0),
           "uniform": partial(init.uniform_, a=-1.0, b=2.0), "constant": partial(init.constant_, val=0.5), "zeros": init.zeros_,
           "ones": init.ones_, "normal, without arguments": init.normal_}
OTHERS = {"xavier": init.xavier_normal_, "xavier, uniform": partial(init.xavier_uniform_, gain=2.0), "orthogonal": init.orthogonal_,
          "truncated": partial(init.trunc_normal_, std=0.02), "kaiming": init.kaiming_uniform_,
          "a function": lambda w: w.copy_(torch.arange(w.numel(), dtype=torch.float64, device="cpu").view(w.shape))}


def drawn(monkeypatch, method, dtype, hidden, rank, world):
    """What a rank's weights become, the random number after them, and the most elements that were made room for at once."""
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: world)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: rank)
    args = Arguments(hidden_size=hidden, ffn_hidden_size=FFN, moe_num_experts=EXPERTS, fp16=False, device="cpu",
                     moe_expert_model_parallelism=world > 1)
    monkeypatch.setattr(Arguments, "dtype", dtype)
    shards = max(world // EXPERTS, 1)
    weight = torch.full((EXPERTS * FFN // min(world, EXPERTS) // shards, hidden), torch.nan, dtype=dtype, device="cpu")
    torch.manual_seed(5)
    room, empty = [0], torch.empty

    def counted(shape, **options):
        room.append(torch.Size(shape).numel())
        return empty(shape, **options)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", counted)
        expert_weights._initialise(weight, args, method)
    return weight, torch.rand(3, dtype=torch.float64, device="cpu"), max(room)


def assert_the_same(monkeypatch, method, dtype, hidden, world):
    """Compare all ranks with one process; the elements that ranks made room for."""
    rows = EXPERTS * FFN
    whole, after, _ = drawn(monkeypatch, method, dtype, hidden, 0, 1)
    degree = min(world, EXPERTS)
    by_rank = whole.view(degree, EXPERTS // degree, world // degree, -1, hidden).transpose(1, 2)
    rooms = set()
    for rank in range(world):
        mine, next_numbers, room = drawn(monkeypatch, method, dtype, hidden, rank, world)
        assert torch.equal(mine, by_rank[rank % degree, rank // degree].reshape(rows // world, hidden))
        assert torch.equal(next_numbers, after)
        rooms.add(room)
    return rooms


@pytest.mark.parametrize("world", [2, 6, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FILLING)
def test_each_rank_drew_all_experts_to_keep_its_own(monkeypatch, name, dtype, world):
    assert assert_the_same(monkeypatch, FILLING[name], dtype, 6, world) == {FFN * 6}


@pytest.mark.parametrize("name", OTHERS)
def test_what_depends_on_the_shape_of_all_experts_draws_them_together(monkeypatch, name):
    assert assert_the_same(monkeypatch, OTHERS[name], torch.float32, 6, 3) == {EXPERTS * FFN * 6}


def test_normal_numbers_are_drawn_together_where_experts_are_no_multiple_of_sixteen(monkeypatch):
    """torch makes them in blocks of 16, the last of which overlaps the one before it."""
    assert assert_the_same(monkeypatch, init.normal_, torch.float32, 5, 3) == {EXPERTS * FFN * 5}
    assert assert_the_same(monkeypatch, init.uniform_, torch.float32, 5, 3) == {FFN * 5}


def layer(**fields):
    torch.manual_seed(3)
    return dMoE(Arguments(hidden_size=16, ffn_hidden_size=FFN, moe_num_experts=EXPERTS, moe_top_k=2, moe_loss_weight=0, fp16=False,
                          bias=False, mlp_type="glu", device="cpu", **fields))


def test_muon_took_all_experts_for_one_matrix():
    """Parameters of [E,F,H] have the values, outputs and gradients of MegaBlocks' [E*F,H], and its state dicts."""
    flat, stacked = layer(), layer(one_matrix_per_expert=True)
    x = torch.randn(10, 1, 16)
    outs = [each(x) for each in (flat, stacked)]
    assert torch.equal(*outs)
    for out in outs:
        out.square().sum().backward()
    for (name, one), (_, other) in zip(flat.named_parameters(), stacked.named_parameters(), strict=True):
        if ".mlp." in name:
            assert other.shape == (EXPERTS, FFN, 16)
        assert torch.equal(one.view_as(other), other) and torch.equal(one.grad.view_as(other), other.grad), name


def test_state_dicts_of_one_matrix_per_expert_are_megablocks(tmp_path):
    flat, stacked = layer(), layer(one_matrix_per_expert=True)
    saved = stacked.state_dict()
    assert {name: tensor.shape for name, tensor in saved.items()} == {name: tensor.shape for name, tensor in flat.state_dict().items()}
    torch.save(saved, tmp_path / "saved.pt")
    for parameter in (*flat.parameters(), *stacked.parameters()):
        torch.nn.init.zeros_(parameter)
    loaded = torch.load(tmp_path / "saved.pt")
    for assign in (False, True):
        for each in (flat, stacked):
            each.load_state_dict(loaded, assign=assign)
            assert all(torch.equal(tensor, loaded[name]) for name, tensor in each.state_dict().items())
        assert stacked.experts.mlp.w1.shape == (EXPERTS, FFN, 16) and stacked.experts.mlp.w1.expert_model_parallel is False
    stacked.state_dict()["experts.mlp.w2"].fill_(2.0)  # as torch.distributed.checkpoint loads
    assert bool((stacked.experts.mlp.w2 == 2).all())
    in_three = {name: tensor.unflatten(0, (EXPERTS, FFN)) if ".mlp." in name else tensor for name, tensor in loaded.items()}
    stacked.load_state_dict(in_three)
    with pytest.raises(RuntimeError, match="size mismatch for experts.mlp.w1"):
        stacked.load_state_dict({**loaded, "experts.mlp.w1": loaded["experts.mlp.w1"][:-1]})


def test_the_state_of_an_optimizer_of_all_experts_failed_in_the_next_step_of_one_matrix_per_expert():
    """With the lines of docs/recipes.md the steps of AdamW have the bits that they have without a change of shapes."""
    page = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    names: dict = {"torch": torch}
    exec(re.search(r"def view_state_as_parameters.*?\n\n", page, re.DOTALL).group(), names)

    def optimizer_of(module):
        return torch.optim.AdamW(module.parameters(), lr=1e-2, amsgrad=True)

    def step(module, optimizer):
        optimizer.zero_grad()
        module(x).square().mean().backward()
        optimizer.step()

    x = torch.randn(10, 1, 16)
    for before, after in ((False, True), (True, False)):
        old, resumed = layer(one_matrix_per_expert=before), layer(one_matrix_per_expert=after)
        optimizer = optimizer_of(old)
        step(old, optimizer)
        step(old, optimizer)
        resumed.load_state_dict(old.state_dict())
        loaded = optimizer_of(resumed)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        with pytest.raises(RuntimeError):
            step(resumed, loaded)
        resumed.load_state_dict(old.state_dict())
        loaded = optimizer_of(resumed)
        loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        names["view_state_as_parameters"](loaded)
        for _ in range(2):
            step(old, optimizer)
            step(resumed, loaded)
        assert loaded.state[resumed.experts.mlp.w1]["exp_avg_sq"].shape == resumed.experts.mlp.w1.shape
        assert all(torch.equal(one.view_as(other), other) for one, other in zip(old.parameters(), resumed.parameters(), strict=True))
