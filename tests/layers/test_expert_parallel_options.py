"""ExpertParallelOptions, and the names of Arguments that stand for them."""

import copy
import dataclasses
import pickle

import pytest
import torch

from gbmoe import Arguments, ExpertParallelOptions, Float8BlockScaling
from gbmoe.layers import expert_parallel_options, expert_parallelism

FLAT_NAMES = expert_parallel_options.FLAT_NAMES


def test_options_are_one_value_and_their_flat_names():
    options = ExpertParallelOptions(transport="peer_memory", chunks=2, loans=3)
    nested = Arguments(expert_parallel=options)
    flat = Arguments(**{flat: getattr(options, name) for flat, name in FLAT_NAMES.items()})
    assert nested == flat and nested.expert_parallel == options
    assert {name: getattr(flat, name) for name in FLAT_NAMES} == {f: getattr(options, n) for f, n in FLAT_NAMES.items()}


def test_flat_names_win_and_the_other_options_stay():
    args = Arguments(expert_parallel=ExpertParallelOptions(chunks=2, ranks_per_node=4), expert_parallel_chunks=3)
    assert args.expert_parallel == ExpertParallelOptions(chunks=3, ranks_per_node=4)
    changed = dataclasses.replace(args, expert_parallel_exact=True)
    assert changed.expert_parallel == ExpertParallelOptions(True, 4, 3) and not args.expert_parallel_exact


def test_flat_names_can_be_set():
    args = Arguments()
    args.expert_parallel_rows = 1.5
    assert args.expert_parallel == ExpertParallelOptions(rows=1.5) and Arguments().expert_parallel == ExpertParallelOptions()
    args.expert_parallel_exact = True
    with pytest.raises(ValueError, match="expert_parallel_shadows: expected 0 with expert_parallel_exact"):
        args.expert_parallel_shadows = 1


def test_a_dictionary_of_all_arguments_makes_them_again():
    args = Arguments(expert_parallel_exact=True, fc_kwargs={"bias": False})
    assert Arguments(**dataclasses.asdict(args)).expert_parallel == args.expert_parallel
    for again in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert again.expert_parallel == args.expert_parallel and again.expert_parallel_exact


@pytest.mark.parametrize("values, words", [
    (dict(ranks_per_node=0), "ranks_per_node: expected None or an int of at least 1, got 0"),
    (dict(chunks=-1), "chunks: expected None or an int of at least 0, got -1"),
    (dict(transport="peer_memori"), "transport: expected one of auto, peer_memory, exchange, .*; the nearest is peer_memory"),
    (dict(rows=0.0), "rows: expected None or a positive number, how many times the mean, got 0.0"),
    (dict(shadows=None), "shadows: expected an int of at least 0, got None"),
    (dict(exact=True, shadows=1), "shadows: expected 0 with expert_parallel_exact"),
    (dict(loans=-1), "loans: expected an int of at least 0, got -1"),
    (dict(loans=1, transport="exchange"), "transport: expected 'auto' or 'peer_memory' with expert_parallel_loans"),
    (dict(loans=1, rows=2.0), "rows: expected None with expert_parallel_loans"),
    (dict(loans=1, shadows=1), "shadows: expected 0 with expert_parallel_loans"),
    (dict(shadows=1, transport="peer_memory"), "transport: expected 'auto' or 'exchange' with expert_parallel_shadows"),
])
def test_what_does_not_go_together_is_refused_by_its_argument(values, words):
    for make in (lambda: ExpertParallelOptions(**values), lambda: Arguments(expert_parallel=values),
                 lambda: Arguments(**{"expert_parallel_" + name: value for name, value in values.items()})):
        with pytest.raises(ValueError, match="^Arguments: expert_parallel_" + words):
            make()


def test_loans_of_experts_in_float8_are_refused():
    with pytest.raises(ValueError, match="Arguments: expert_parallel_loans: expected 0 with fp8_recipe, got 1"):
        Arguments(fp8_recipe=Float8BlockScaling(), expert_parallel_loans=1)


def test_loans_of_shards_are_refused(monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 4)
    args = Arguments(moe_num_experts=2, device="cpu", moe_expert_model_parallelism=True, expert_parallel_loans=1)
    with pytest.raises(ValueError, match="expert_parallel_loans: expected 0 where ranks share an expert"):
        expert_parallelism.placement(args)


def test_another_type_and_another_name_are_refused():
    with pytest.raises(TypeError, match="Arguments: expert_parallel: expected ExpertParallelOptions, or a mapping of them, got bool"):
        Arguments(expert_parallel=True)
    with pytest.raises(TypeError, match="the nearest is expert_parallel_chunks"):
        Arguments(expert_parallel_chunk=2)


def test_megablocks_own_arguments_have_the_defaults():
    assert expert_parallel_options.of(object()) == ExpertParallelOptions()
