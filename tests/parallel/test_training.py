"""Training and checkpoints where ranks have experts of their own: four processes (gloo; NCCL on four GPUs) do what one does.

One start serves all tests: it takes longer than they do. Pairs of ranks train side by side where two are asked for.
"""

import copy
import functools
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gbmoe
from gbmoe.layers import Arguments
from gbmoe.parallel import training

pytestmark = pytest.mark.xdist_group("parallel_training")  # one start serves all tests

WORLD, STEPS, TOKENS, HIDDEN = 4, 2, 10, 16
MAX_NORM = 1e-3  # far below the gradients' norm


@dataclass(frozen=True)
class Case:
    """`wrapped` is "ddp", "fsdp" or nothing. The experts are spread over groups of `ranks` ranks, which all hold the same."""
    wrapped: str
    experts: int = 8
    ranks: int = WORLD
    norm_type: float = 2.0


TRAININGS = {
    "ddp": Case("ddp"),
    "fsdp": Case("fsdp"),
    "ddp, shards of experts": Case("ddp", experts=2, norm_type=float("inf")),
    "ddp over two groups": Case("ddp", ranks=2),
    "fsdp over two groups": Case("fsdp", ranks=2, norm_type=3.0),
}
SAVES = {
    "two ranks": Case("ddp", experts=4, ranks=2),
    "four ranks": Case("fsdp", experts=4),
    "shards of experts": Case("ddp", experts=2),
}


class Block(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.norm = torch.nn.LayerNorm(args.hidden_size, device=args.device)
        self.moe = gbmoe.dMoE(args)

    def forward(self, x):
        return x + self.moe(self.norm(x))


def make(case, device, seed=0, **parallel):
    """A model on one process, or with expert parallelism."""
    args = Arguments(hidden_size=HIDDEN, ffn_hidden_size=32, moe_num_experts=case.experts, moe_top_k=2, mlp_type="glu", bias=False,
                     fp16=False, device=device, init_method=functools.partial(torch.nn.init.normal_, std=0.3), **parallel)
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN, device=device), Block(args))


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, foreach=False)


def spread(case, device, groups, seed=0):
    """The model of this rank, wrapped, and its optimizer."""
    group = groups.get(case.ranks)
    model = make(case, device, seed, moe_expert_model_parallelism=True, expert_parallel_group=group)
    if case.wrapped == "ddp":
        model = training.data_parallel(model)
    elif case.wrapped == "fsdp":
        options = dict(mesh=groups["mesh"], ignored_params=set(training.expert_parameters(model).values()))
        fully_shard(model[1], **options)
        fully_shard(model, **options)
    return model, optimizer_of(model)


def inputs(step, rank, device):
    return torch.randn(TOKENS, 1, HIDDEN, generator=torch.Generator().manual_seed(STEPS * rank + step)).to(device)


def loss_of(model, x):
    loss = model(x).square().mean()
    loss.backward()
    gbmoe.clear_load_balancing_loss()
    return float(loss.detach())


def whole(model, optimizer):
    """Every weight, with all experts, and what the optimizer keeps for it, on the CPU."""
    rows = training.expert_rows(model)
    state = training.sharded_state_dict(model, optimizer)

    def one(name, value):
        if hasattr(value, "full_tensor"):
            value = rows[name].gather(value.to_local()) if name in rows else value.full_tensor()
        return value.detach().cpu().clone()

    found = {name: one(name, value) for name, value in state["model"].items()}
    for name, kept in state["optimizer"]["state"].items():
        found |= {f"{name} {key}": one(name, value) for key, value in kept.items()}
    return found


def train(case, device, groups):
    model, optimizer = spread(case, device, groups)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append(loss_of(model, inputs(step, dist.get_rank(), device)))
        if case.ranks < WORLD:
            training.average_expert_gradients(model.parameters(), groups["replicas"])
        norms.append(float(training.clip_grad_norm_(model.parameters(), MAX_NORM, case.norm_type, group=groups.get(case.ranks))))
        optimizer.step()
    return {"losses": losses, "norms": norms, "whole": whole(model, optimizer)}


def save_and_load(case, device, groups, folder):
    """Save after a step; load into other models and optimizers on two and on four ranks. Returns what each of them then has."""
    model, optimizer = spread(case, device, groups)
    loss_of(model, inputs(0, dist.get_rank(groups.get(case.ranks)), device))
    if case.ranks < WORLD:  # each pair is to be a job by itself: they train alike
        training.average_expert_gradients(model.parameters(), groups["replicas"])
    optimizer.step()
    found = {"saved": whole(model, optimizer)}
    mine = folder / f"{dist.get_rank() // case.ranks}"
    dcp.save(training.sharded_state_dict(model, optimizer), checkpoint_id=mine, process_group=groups.get(case.ranks))
    dist.barrier()
    for ranks, wrapped in ((2, ""), (WORLD, "fsdp"), (WORLD, "ddp")):
        model, optimizer = spread(Case(wrapped, case.experts, ranks), device, groups, seed=1)
        state = training.sharded_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder / "0", process_group=groups.get(ranks))
        training.load_sharded_state_dict(state, model, optimizer)
        found[ranks, wrapped] = whole(model, optimizer)
    return found


def marks(device):
    """The names of a layer's expert parameters after torch functions that replace parameters."""
    layer = make(TRAININGS["ddp"], device, moe_expert_model_parallelism=True)
    assigned, empty = (make(TRAININGS["ddp"], d, moe_expert_model_parallelism=True) for d in (device, "meta"))
    assigned.load_state_dict(layer.state_dict(), assign=True)
    empty.to_empty(device=device)
    return [list(training.expert_parameters(model)) for model in (layer, copy.deepcopy(layer), assigned, empty)]


def refused(function, *args, **kwargs):
    try:
        function(*args, **kwargs)
    except (RuntimeError, ValueError) as error:
        return str(error)


def one_rank_with_nan(device):
    parameter = torch.nn.Parameter(torch.zeros(3, device=device))
    parameter.expert_model_parallel = True
    parameter.grad = torch.full_like(parameter, float("nan") if dist.get_rank() == 1 else 1.0)
    return refused(training.clip_grad_norm_, parameter, 1.0, error_if_nonfinite=True)


def factored(device):
    """An optimizer that keeps a row for a matrix, as Adafactor does."""
    model = make(TRAININGS["ddp"], device, moe_expert_model_parallelism=True)
    optimizer = optimizer_of(model)
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.zeros(()), "column": torch.zeros(parameter.size(-1))}
    return refused(training.sharded_state_dict, model, optimizer)


def worker(rank, store, device_type, folder):
    torch.set_num_threads(1)
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    pairs, replicas = ([dist.new_group(ranks) for ranks in of] for of in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
    groups = {2: pairs[rank // 2], "replicas": replicas[rank % 2], "mesh": init_device_mesh(device_type, (WORLD,))}
    results = {("train", name): train(case, device, groups) for name, case in TRAININGS.items()}
    for name, case in SAVES.items():
        results["save", name] = save_and_load(case, device, groups, folder / name)
    results |= {"marks": marks(device), "nan": one_rank_with_nan(device), "factored": factored(device)}
    torch.save(results, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ran(request, tmp_path_factory):
    """(device type, folder of the checkpoints, what each process found)."""
    if request.param == "cuda" and torch.cuda.device_count() < WORLD:
        pytest.skip(f"needs {WORLD} GPUs, this machine has {torch.cuda.device_count()}")
    folder = tmp_path_factory.mktemp("training")
    mp.spawn(worker, (folder / "store", request.param, folder), nprocs=WORLD)
    return request.param, folder, [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(WORLD)]


@pytest.mark.parametrize("name", TRAININGS)
def test_ranks_with_their_own_experts_train_as_one_process(ran, name):
    device, _, results = ran
    assert_trained_as_one_process(TRAININGS[name], device, [result["train", name] for result in results])


def assert_trained_as_one_process(case, device, results):
    """Losses, norms before clipping, weights and what the optimizer keeps, of what `train` found on each rank."""
    world = len(results)
    model = make(case, device)
    optimizer = optimizer_of(model)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        losses.append([loss_of(model, inputs(step, rank, device)) for rank in range(world)])
        for parameter in model.parameters():
            parameter.grad /= world
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, case.norm_type)))
        optimizer.step()
    expected = whole(model, optimizer)
    for rank, got in enumerate(results):
        assert min(got["norms"]) > 10 * MAX_NORM
        torch.testing.assert_close(got["norms"], norms, rtol=1e-4, atol=0)
        assert got["norms"] == results[0]["norms"]  # to the bit, or the ranks drift apart
        torch.testing.assert_close(got["losses"], [each[rank] for each in losses], rtol=1e-4, atol=0)
        assert got["whole"].keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(got["whole"][key], value, rtol=1e-3, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


def assert_resumed(found, saved):
    """What `save_and_load` found on a rank, on every number of ranks, is what was saved."""
    for resumed in found.values():
        assert resumed.keys() == saved.keys() and all(torch.equal(resumed[key], saved[key]) for key in saved)


@pytest.mark.parametrize("name", SAVES)
def test_a_checkpoint_is_resumed_on_other_numbers_of_ranks(ran, name):
    device, folder, results = ran
    saved = results[0]["save", name]["saved"]
    moments = [key for key in saved if key.endswith(" exp_avg")]
    assert len(moments) == len([key for key in saved if " " not in key]) and all(saved[key].abs().max() > 0 for key in moments)
    for result in results:
        assert_resumed(result["save", name], saved)
    model = make(SAVES[name], device, seed=1)
    optimizer = optimizer_of(model)
    state = training.sharded_state_dict(model, optimizer)
    dcp.load(state, checkpoint_id=folder / name / "0")
    training.load_sharded_state_dict(state, model, optimizer)
    alone = whole(model, optimizer)
    assert alone.keys() == saved.keys() and all(torch.equal(alone[key], saved[key]) for key in saved)


def test_parameters_stay_marked_where_others_take_their_place(ran):
    for result in ran[2]:
        assert result["marks"] == [[f"1.moe.experts.mlp.{name}" for name in ("w1", "w2", "v1")]] * 4


def test_a_norm_that_is_not_finite_on_one_rank_is_refused_on_all(ran):
    for result in ran[2]:
        assert result["nan"].startswith("The total norm of order 2.0 for gradients from `parameters` is non-finite")


def test_what_cannot_be_told_to_be_of_all_experts_is_not_saved(ran):
    for result in ran[2]:
        assert result["factored"] == ("sharded_state_dict: optimizer: expected column of 1.moe.experts.mlp.w1 to be a scalar or of the"
                                      " parameter's shape [64, 16], got [16]")
