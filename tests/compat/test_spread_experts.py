"""gbmoe.compat._spread_experts on ranks that differ: all of them say in what. Two processes (gloo) run all cases, over both transports."""

import gc

import pytest
import torch
import torch.distributed as dist

from gbmoe import Float8BlockScaling
from gbmoe.compat._spread_experts import SpreadExperts
from gbmoe.parallel import peer_memory
from tests import rank_groups

WORLD, EXPERTS, HIDDEN, FFN, TOKENS = 2, 4, 32, 48, 20
RECIPES = (Float8BlockScaling(), Float8BlockScaling(float8_dispatch=True), Float8BlockScaling(power_2_scale=True))


def call(spread, rank, dtype=torch.bfloat16, **options):
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    ids, weights = torch.rand(TOKENS, EXPERTS, generator=generator).topk(2).indices, torch.rand(TOKENS, 2, generator=generator)
    shapes = ((FFN, HIDDEN), (HIDDEN, FFN), (FFN, HIDDEN))
    parameters = [torch.randn(EXPERTS // WORLD, *shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    spread(x, ids, weights, *parameters, **options).sum().backward()
    return x.grad


def recipes_of_other_kinds(spread, rank):
    """Rows quantised by one recipe were computed with as those of another."""
    for mine, other in ((RECIPES[0], None), (RECIPES[1], RECIPES[0]), (RECIPES[2], RECIPES[0])):
        with pytest.raises(ValueError, match=r"path is .* on rank 0, .* quantised by \w+ .* on rank 1"):
            call(spread, rank, fp8_recipe=mine if rank else other)


def autocast(spread, rank):
    with torch.autocast("cpu", torch.float16, enabled=rank == 0), pytest.raises(ValueError, match="float16.* on rank 0, .* on rank 1"):
        call(spread, rank)


def no_grad(spread, rank):
    with torch.set_grad_enabled(rank == 0), pytest.raises(ValueError, match=r"is_grad_enabled\(\) is True on rank 0, False on rank 1"):
        call(spread, rank)


def tokens_of_float64(spread, rank):
    with pytest.raises((ValueError, RuntimeError), match="float64" if rank == 0 or spread.maps else "path is .*float64"):
        call(spread, rank, torch.float64 if rank == 0 else torch.bfloat16)


def other_arguments(spread, rank):
    """A rank that exchanges rows waited for one that pulls them, and so did ranks with other numbers of experts."""
    for arguments, words in (((EXPERTS * (1 + rank), "cpu", "exchange"), "experts is 4 on rank 0, 8 on rank 1"),
                             ((EXPERTS, "cpu", ("exchange", "auto")[rank]), "transport is 'exchange' on rank 0, 'auto' on rank 1")):
        with pytest.raises(ValueError, match=f"SpreadExperts: group: expected the same arguments on all its ranks, got {words}"):
            SpreadExperts(dist.group.WORLD, *arguments)


CASES = (recipes_of_other_kinds, autocast, no_grad, tokens_of_float64, other_arguments)


def worker(rank, store, folder):
    rank_groups.join_and_map_memory(rank, WORLD, store, "cpu")
    for transport in ("exchange", "peer_memory"):
        spread = SpreadExperts(dist.group.WORLD, EXPERTS, "cpu", transport)
        assert spread.maps == (transport == "peer_memory")
        wanted = call(spread, rank)
        for case in CASES:
            case(spread, rank)
            gc.collect()
            assert torch.equal(call(spread, rank), wanted), case  # the ranks go on together
    peer_memory.release()
    torch.save(True, folder / f"{rank}.pt")
    rank_groups.leave()


@pytest.mark.slow
@pytest.mark.xdist_group("mapped-files")
def test_all_ranks_say_in_what_they_differ(tmp_path):
    assert rank_groups.files_of_ranks(worker, WORLD, tmp_path) == [True, True]
