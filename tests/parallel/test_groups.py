"""What must be known of a group: whether its ranks agree, which nodes they form, and who is a member."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist

import gbmoe
from gbmoe.layers import Arguments
from gbmoe.parallel import failures, groups, training
from tests.parallel.processes import run

pytestmark = pytest.mark.xdist_group("groups")  # one start serves all tests

WORLD = 6


def make(**changes):
    fields = dict(hidden_size=16, ffn_hidden_size=32, moe_num_experts=WORLD, moe_top_k=2, mlp_type="glu", bias=False, fp16=False,
                  device="cpu", moe_expert_model_parallelism=True)
    torch.manual_seed(0)
    return gbmoe.dMoE(Arguments(**{**fields, **changes}))


def forward(layer, rank):
    x = torch.randn(5, 1, 16, generator=torch.Generator().manual_seed(rank))
    out = layer(x).detach()
    gbmoe.clear_load_balancing_loss()
    return out


def refused(function):
    try:
        return function()
    except (ValueError, TypeError) as error:
        return f"{type(error).__name__}: {error}"


def gathers(function):
    """How many objects each rank told all others while `function` ran, and what it returned."""
    told, original = [], dist.all_gather_object

    def counted(*args, **kwargs):
        told.append(args)
        return original(*args, **kwargs)

    dist.all_gather_object = counted
    try:
        return function(), len(told)
    finally:
        dist.all_gather_object = original


def worker(rank):
    found = {}
    whole, others = dist.new_group(range(WORLD)), dist.new_group(range(WORLD - 1))
    os.environ["LOCAL_WORLD_SIZE"] = "4" if rank < 4 else "2"  # nodes of four ranks and of two
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found["uneven nodes"] = forward(make(expert_parallel_group=whole), rank)
    found["warned"] = [str(warning.message) for warning in warned if warning.category is RuntimeWarning]
    del os.environ["LOCAL_WORLD_SIZE"]
    found["one trip"] = forward(make(), rank)
    found["told"] = gathers(lambda: make() is None)[1]
    found["differing"], found["told of a difference"] = gathers(lambda: refused(lambda: make(ffn_hidden_size=32 + rank // 4 * 32)))
    own = torch.nn.Parameter(torch.ones(2))
    own.expert_model_parallel, own.grad = True, torch.full((2,), 3.0)
    found["layer"] = refused(lambda: forward(make(expert_parallel_group=others, moe_num_experts=5), rank))
    found["nodes"] = refused(lambda: groups.nodes_of(others))
    found["average"] = refused(lambda: training.average_expert_gradients([own], others))
    found["clip"] = refused(lambda: training.clip_grad_norm_([own], 1e9, group=others))
    found["gradient"] = own.grad.tolist()
    dist.barrier()
    return found


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return run(worker, WORLD, tmp_path_factory.mktemp("groups"))


def test_nodes_of_four_ranks_and_of_two_ended_in_a_type_error(ran):
    """LOCAL_WORLD_SIZE differs between their ranks, of which some saw nodes of equally many ranks and some did not."""
    for found in ran:
        assert torch.equal(found["uneven nodes"], found["one trip"])
        assert found["warned"] == [
            "expert parallelism: rows will cross to another node once for each rank there: expected nodes of as many ranks each, by"
            " LOCAL_WORLD_SIZE, got {0: '4', 1: '4', 2: '4', 3: '4', 4: '2', 5: '2'}"]


def test_comparing_arguments_told_every_rank_those_of_all_others(ran):
    """Which took 119 ms of Python for each layer with 4,096 ranks. Only ranks that differ say what they have."""
    for found in ran:
        assert found["told"] == 0 and found["told of a difference"] == 1
        assert found["differing"].endswith("expected the same arguments on all its ranks, got ffn_hidden_size is 32 on ranks 0, 1, 2, 3,"
                                           " 64 on ranks 4, 5")


def test_the_group_of_a_non_member_was_a_type_error_about_weak_references(ran):
    *_, other = ran
    for what, operator, argument in (("layer", "Arguments", "expert_parallel_group"), ("nodes", "Arguments", "expert_parallel_group"),
                                     ("average", "average_expert_gradients", "replicas"), ("clip", "clip_grad_norm_", "group")):
        assert other[what] == (f"ValueError: {operator}: {argument}: expected a group of which this rank is a member, got a group of"
                               " other ranks")


def test_gradients_on_a_rank_outside_of_the_group_were_divided_by_minus_one(ran):
    assert [found["gradient"] for found in ran] == [[3.0, 3.0]] * WORLD


def test_memory_that_runs_out_in_a_collective_was_taken_for_missing_ranks():
    def fails():
        raise torch.OutOfMemoryError("too little")

    with pytest.raises(torch.OutOfMemoryError, match="too little"):
        failures.guarded(fails, None)


def test_a_large_group_is_named_by_its_size(monkeypatch):
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    for world, words in ((3, "ranks 0, 1, 2 of"), (4096, "the 4096 ranks of")):
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group, world=world: list(range(world)))
        assert f"exchange with {words} the group (this is rank 3; which of them are left cannot be told" in str(
            failures.failure(None, "no"))
