"""Eight processes (gloo) train as one on the gathered batch: more ranks than experts, nodes of two and of four, uneven tokens, FSDP2; and
resume a checkpoint of two."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests import rank_groups
from tests.parallel import test_exchange, test_training
from tests.parallel.test_exchange import GLU, TOLERANCE, Case, chosen, experts_alone, inputs, make, run, shard_of, train

pytestmark = [pytest.mark.xdist_group("eight_ranks"), pytest.mark.slow]  # one start serves all tests

EIGHT, UNEVEN = (6,) * 8, (5, 0, 1, 9, 0, 3, 12, 2)
CASES = {
    "mlp": Case(EIGHT, dict(moe_num_experts=8)),
    "glu, uneven": Case(UNEVEN, dict(GLU, moe_num_experts=16, moe_top_k=4)),
    "shards of experts": Case(UNEVEN, dict(GLU, moe_num_experts=2)),
    "nodes of four": Case(UNEVEN, dict(GLU, moe_num_experts=16, moe_top_k=4, expert_parallel_ranks_per_node=4)),
    "nodes of two, chunks": Case(EIGHT, dict(GLU, moe_num_experts=16, moe_top_k=4, expert_parallel_ranks_per_node=2,
                                             expert_parallel_chunks=2)),
    "bfloat16": Case(EIGHT, dict(GLU, moe_num_experts=8), dtype=torch.bfloat16),
}
TRAINED = test_training.Case("fsdp", experts=16, ranks=8)
SAVED = test_training.Case("ddp", experts=8, ranks=2)
EXACT = Case(UNEVEN, dict(GLU, moe_num_experts=16, moe_top_k=4), dtype=torch.bfloat16)


def worker(rank, store, folder):
    test_exchange.TRANSPORT = "exchange"
    device = rank_groups.join(rank, 8, store)
    results = {name: train(case, device, None) for name, case in CASES.items()}
    parts = [part[rank] for part in chosen(EXACT, device)]
    results["exact"] = experts_alone(EXACT, device, *parts, moe_expert_model_parallelism=True, expert_parallel_exact=True)
    test_training.WORLD = 8
    pairs, replicas = ([dist.new_group(ranks) for ranks in of] for of in (
        [[first, first + 1] for first in range(0, 8, 2)], [list(range(first, 8, 2)) for first in range(2)]))
    groups = {2: pairs[rank // 2], "replicas": replicas[rank % 2], "mesh": init_device_mesh("cpu", (8,))}
    results["fsdp"] = test_training.train(TRAINED, device, groups)
    results["resumed"] = test_training.save_and_load(SAVED, device, groups, folder / "checkpoint")
    torch.save(results, folder / f"{rank}.pt")
    rank_groups.leave()


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What each process found."""
    return rank_groups.files_of_ranks(worker, 8, tmp_path_factory.mktemp("eight_ranks"))


@pytest.mark.parametrize("name", CASES)
def test_eight_ranks_train_as_one_process(ran, name):
    case = CASES[name]
    model = make(case, "cpu")
    outs, grads = run(model, case, [torch.cat(inputs(case, 0, "cpu"))])
    close = functools.partial(torch.testing.assert_close, **TOLERANCE[case.dtype])
    for rank, results in enumerate(ran):
        result = results[name]
        assert result["same"]
        for got, whole in zip(result["outs"] + result["grads"], outs + grads):
            close(got, whole.split(case.tokens)[rank])
        for parameter, got in result["gradients"].items():
            close(got, shard_of(case, dict(model.named_parameters())[parameter].grad / 8, got.shape, rank))


def test_exact_gives_the_bits_of_one_process(ran):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the processes: the order of a product's sums may depend on it
    expected = experts_alone(EXACT, "cpu", *(torch.cat(part) for part in chosen(EXACT, "cpu")))
    torch.set_num_threads(threads)
    for rank, results in enumerate(ran):
        for what, got in results["exact"].items():
            assert torch.equal(got, expected[what].split(EXACT.tokens)[rank]), what


def test_eight_ranks_of_fsdp_train_as_one_process(ran):
    test_training.assert_trained_as_one_process(TRAINED, "cpu", [results["fsdp"] for results in ran])


def test_a_checkpoint_of_two_ranks_is_resumed_on_eight(ran):
    for results in ran:
        test_training.assert_resumed(results["resumed"], ran[0]["resumed"]["saved"])
    assert {key for results in ran for key in results["resumed"]} == {"saved", (2, "", None), (8, "fsdp", None), (8, "ddp", None)}
