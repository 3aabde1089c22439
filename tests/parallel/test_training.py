"""Training and checkpoints where ranks have experts of their own: four processes (gloo; NCCL on four GPUs) do what one does.

One start serves all tests: it takes longer than they do. Pairs of ranks train side by side where two are asked for.
"""

import copy
import dataclasses
import functools
import pickle
import warnings
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.utils.prune as prune
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations

import gbmoe
from gbmoe import WeightLayout
from gbmoe.layers import Arguments
from gbmoe.parallel import training
from tests import rank_groups

pytestmark = pytest.mark.xdist_group("parallel_training")  # one start serves all tests

WORLD, STEPS, TOKENS, HIDDEN = 4, 2, 10, 16
MAX_NORM = 1e-3  # far below the gradients' norm


@dataclass(frozen=True)
class Case:
    """`wrapped` is "ddp", "fsdp" or nothing. The experts are spread over groups of `ranks` ranks, which all hold the same. `put` is done to
    the experts first, see PUTS. `layout` is that of the parameters."""
    wrapped: str
    experts: int = 8
    ranks: int = WORLD
    norm_type: float = 2.0
    put: str = ""
    layout: WeightLayout | None = None


class Adapter(torch.nn.Module):
    """Stands in the place of the experts and holds factors for them, as adapters of low rank do."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.down, self.up = torch.nn.Linear(HIDDEN, 2, bias=False), torch.nn.Linear(2, HIDDEN, bias=False)

    def forward(self, x_TH, *args):
        return self.base_layer(x_TH, *args)


def load_swapping(moe):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        moe.load_state_dict({name: tensor.clone() for name, tensor in moe.state_dict().items()})
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def write_parameters(moe):
    for name, parameter in moe.experts.mlp._parameters.items():
        moe.experts.mlp._parameters[name] = torch.nn.Parameter(parameter.detach().clone())


def put_into_experts(moe, what):
    """Let torch, or an adapter, put something in the place of the experts' parameters."""
    mlp = moe.experts.mlp
    if what == "swapped":
        load_swapping(moe)
    elif what == "written to _parameters":
        write_parameters(moe)
    elif what == "weight norm":
        parametrizations.weight_norm(mlp, "w1")
    elif what == "weight norm, old":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            torch.nn.utils.weight_norm(mlp, "w2")
    elif what == "spectral norm":  # which has buffers
        parametrizations.spectral_norm(mlp, "v1")
    elif what == "pruned":  # with a mask, which is a buffer
        prune.random_unstructured(mlp, "w1", 0.3)
    elif what == "adapter":
        moe.experts.mlp = Adapter(Adapter(mlp)).to(mlp.w1.device)  # nested, as adapters of two parameters are
    elif what == "frozen":
        mlp.w1.requires_grad_(False)
    return moe


# What is put there, and the names of all expert parameters and buffers afterwards.
PUTS = {
    "": "w1 w2 v1",
    "swapped": "w1 w2 v1",
    "written to _parameters": "w1 w2 v1",
    "weight norm": "w2 v1 parametrizations.w1.original0 parametrizations.w1.original1",
    "weight norm, old": "w1 v1 w2_g w2_v",
    "spectral norm": "w1 w2 parametrizations.v1.original parametrizations.v1.0._u parametrizations.v1.0._v",
    "pruned": "w2 v1 w1_orig w1_mask",
    "adapter": "down.weight up.weight base_layer.down.weight base_layer.up.weight"
               " base_layer.base_layer.w1 base_layer.base_layer.w2 base_layer.base_layer.v1",
    "frozen": "w1 w2 v1",
}

GATE_FIRST, INTERLEAVED = WeightLayout("gate_first", down_transposed=True), WeightLayout("interleaved", True)
TRAININGS = {
    "ddp, swapped": Case("ddp", put="swapped"),
    "ddp, another layout": Case("ddp", layout=GATE_FIRST),
    "fsdp, another layout": Case("fsdp", experts=2, layout=INTERLEAVED),
    "ddp over two groups, weight norm": Case("ddp", ranks=2, put="weight norm"),
    "ddp, old weight norm": Case("ddp", put="weight norm, old"),
    "fsdp, written to _parameters": Case("fsdp", put="written to _parameters"),
    "ddp over two groups, frozen": Case("ddp", ranks=2, put="frozen"),
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
    "swapped": Case("ddp", experts=4, put="swapped"),
    "another layout": Case("ddp", experts=4, ranks=2, layout=GATE_FIRST),
    "another layout, shards of experts": Case("fsdp", experts=2, layout=INTERLEAVED),
    "one matrix an expert": Case("ddp", experts=4, layout=WeightLayout()),
    "weight norm": Case("ddp", experts=4, ranks=2, put="weight norm"),
    "pruned shards of experts": Case("ddp", experts=2, put="pruned"),
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
                     fp16=False, device=device, init_method=functools.partial(torch.nn.init.normal_, std=0.3),
                     weight_layout=case.layout, **parallel)
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(HIDDEN, HIDDEN, device=device), Block(args))
    put_into_experts(model[1].moe, case.put)
    return model


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
    resumed = [(ranks, wrapped, case.layout) for ranks, wrapped in ((2, ""), (WORLD, "fsdp"), (WORLD, "ddp"))]
    for ranks, wrapped, layout in [*resumed, (WORLD, "ddp", None)] if case.layout else resumed:
        model, optimizer = spread(dataclasses.replace(case, wrapped=wrapped, ranks=ranks, layout=layout), device, groups, seed=1)
        state = training.sharded_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder / "0", process_group=groups.get(ranks))
        training.load_sharded_state_dict(state, model, optimizer)
        found[ranks, wrapped, layout] = whole(model, optimizer)
    return found


def saved_where_experts_are_frozen(device, groups, folder):
    """Save after a step in which rank 1's experts are frozen; load with rank 2's frozen, and with none. Returns what was saved, what was
    loaded, and for which expert parameters the optimizers then keep something."""
    def spread_frozen(rank, seed):
        model = make(TRAININGS["ddp"], device, seed, moe_expert_model_parallelism=True)
        if dist.get_rank() == rank:
            model[1].moe.experts.requires_grad_(False)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, foreach=False)

    model, optimizer = spread_frozen(1, seed=0)
    loss_of(model, inputs(0, dist.get_rank(), device))
    optimizer.step()
    found = {"saved": whole(model, optimizer)}
    dcp.save(training.sharded_state_dict(model, optimizer), checkpoint_id=folder)
    for rank in (2, None):
        model, optimizer = spread_frozen(rank, seed=1)
        state = training.sharded_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder)
        training.load_sharded_state_dict(state, model, optimizer)
        found[rank] = whole(model, optimizer), [p in optimizer.state for p in training.expert_parameters(model).values()]
    return found


def averaged(groups):
    """Gradients of experts, of which one was frozen after backward on this rank and on its replica, after average_expert_gradients."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for parameter in parameters:
        parameter.expert_model_parallel, parameter.grad = True, torch.full((2,), float(dist.get_rank()))
    parameters[1].requires_grad_(False)
    parameters[1].grad = torch.full((2,), 7.0) if dist.get_rank() == 0 else None
    training.average_expert_gradients(parameters, groups["replicas"])
    return [p.grad if p.grad is None else p.grad.tolist() for p in parameters]


def marks(device):
    """The names of a layer's expert parameters after torch functions that replace parameters."""
    layer = make(TRAININGS["ddp"], device, moe_expert_model_parallelism=True)
    assigned, empty = (make(TRAININGS["ddp"], d, moe_expert_model_parallelism=True) for d in (device, "meta"))
    assigned.load_state_dict(layer.state_dict(), assign=True)
    empty.to_empty(device=device)
    return [[name for name, parameter in model.named_parameters() if getattr(parameter, "expert_model_parallel", False)]
            for model in (layer, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), assigned, empty)]


def knows(device, put):
    """Of experts of which this rank alone has values: the expert parameters' names, whether clipping and the mark know them too, of a deep
    copy as well; what DDP overwrites; the error of a checkpoint."""
    args = dict(moe_expert_model_parallelism=True, expert_parallel_group=None)
    model = make(Case("ddp", put=put), device, dist.get_rank(), **args)
    found = {}
    models = {"model": model, "compiled": torch.compile(model, backend="eager")}
    if not model[1].moe.experts.mlp.__dict__.keys() & {"w1", "w2"}:  # torch copies no results of hooks
        models["copy"] = copy.deepcopy(model)
    for name, one in models.items():
        by_parameter = [n for n, p in one.named_parameters() if training.is_expert_parameter(p)]
        found[name] = list(training.expert_parameters(one))
        assert by_parameter == found[name] and not found[name] & training.other_parameters(one).keys()
        assert all(p.expert_model_parallel for p in training.expert_parameters(one).values())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found["checkpoint"] = refused(training.sharded_state_dict, model)
    training.data_parallel(model)
    found["kept"] = [name for name, tensor in model.state_dict().items() if torch.equal(tensor, before[name])]
    return found


class Own(torch.nn.Module):
    """A user's module: each rank has a weight of its own, which another module shares, and all have the same bias."""

    def __init__(self, device):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((2,), 1.0 + dist.get_rank(), device=device))
        self.bias = torch.nn.Parameter(torch.full((2,), 1.0 + dist.get_rank(), device=device))
        self.weight.expert_model_parallel = True
        self.part = torch.nn.Module()
        self.part.shared = self.weight

    def forward(self, x):
        return (self.weight + self.part.shared) * x + self.bias


def gradients_under_ddp(device):
    model = training.data_parallel(Own(device))
    model(torch.full((2,), float(dist.get_rank()), device=device)).sum().backward()
    return {name: (p.tolist(), p.grad.tolist()) for name, p in model.module.named_parameters()}


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
    device = rank_groups.join(rank, WORLD, store, device_type)
    pairs, replicas = ([dist.new_group(ranks) for ranks in of] for of in (([0, 1], [2, 3]), ([0, 2], [1, 3])))
    groups = {2: pairs[rank // 2], "replicas": replicas[rank % 2], "mesh": rank_groups.mesh_of_all(device_type)}
    results = {("train", name): train(case, device, groups) for name, case in TRAININGS.items()}
    for name, case in SAVES.items():
        results["save", name] = save_and_load(case, device, groups, folder / name)
    results |= {("knows", put): knows(device, put) for put in PUTS}
    results |= {"under ddp": gradients_under_ddp(device), "marks": marks(device)}
    results |= {"nan": one_rank_with_nan(device), "factored": factored(device)}
    results["frozen"] = saved_where_experts_are_frozen(device, groups, folder / "frozen")
    if device_type == "cpu":
        results["averaged"] = averaged(groups)
    torch.save(results, folder / f"{rank}.pt")
    rank_groups.leave()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def ran(request, tmp_path_factory):
    """(device type, folder of the checkpoints, what each process found)."""
    folder = tmp_path_factory.mktemp("training")
    return request.param, folder, rank_groups.files_of_ranks(worker, WORLD, folder, request.param, device_type=request.param)


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
        for parameter in filter(lambda p: p.requires_grad, model.parameters()):
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
    parameters = [key for key in saved if " " not in key and "mask" not in key]
    assert len(moments) == len(parameters) and all(saved[key].abs().max() > 0 for key in moments)
    for result in results:
        assert_resumed(result["save", name], saved)
    for layout in {SAVES[name].layout, None} | ({INTERLEAVED} if SAVES[name].put == "" else set()):
        model = make(dataclasses.replace(SAVES[name], layout=layout), device, seed=1)
        optimizer = optimizer_of(model)
        state = training.sharded_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=folder / name / "0")
        training.load_sharded_state_dict(state, model, optimizer)
        alone = whole(model, optimizer)
        assert alone.keys() == saved.keys() and all(torch.equal(alone[key], saved[key]) for key in saved)
        loss_of(model, inputs(1, 0, device))
        optimizer.step()  # which would refuse moments of other shapes than the parameters'


def test_parameters_stay_marked_where_others_take_their_place(ran):
    for result in ran[2]:
        assert result["marks"] == [[f"1.moe.experts.mlp.{name}" for name in ("w1", "w2", "v1")]] * 5


@pytest.mark.parametrize("put", PUTS)
def test_experts_whose_parameters_were_replaced_were_taken_for_the_same_on_all_ranks(ran, put):
    """Their mark was lost, and data_parallel wrote rank 0's experts over those of the other ranks."""
    names = [f"1.moe.experts.mlp.{name}" for name in PUTS[put].split()]
    buffers = [name for name in names if name.endswith(("_u", "_v", "_mask")) and not name.endswith("w2_v")]
    parameters = [name for name in names if name not in buffers]
    for rank, result in enumerate(ran[2]):
        found = result["knows", put]
        assert sorted(found["model"]) == sorted(found.get("copy", found["model"])) == sorted(parameters)
        assert sorted(found["compiled"]) == sorted(f"_orig_mod.{name}" for name in parameters)
        same_on_all = {"1.moe.norm.weight", "1.moe.norm.bias"}
        assert rank == 0 or set(found["kept"]) - same_on_all >= set(names)


@pytest.mark.parametrize("put, name, shape", [
    ("adapter", "base_layer.down.weight", "[2, 16]"), ("spectral norm", "parametrizations.v1.0._v", "[16]")])
def test_a_checkpoint_of_what_are_no_rows_of_experts_is_refused(ran, put, name, shape):
    for result in ran[2]:
        assert result["knows", put]["checkpoint"] == (
            f"expert_rows: model: expected 1.moe.experts.mlp.{name} to have the 64 rows of this rank's experts, so that it can be told"
            f" which part of all ranks' it is, got {shape}")


def test_a_marked_parameter_of_the_model_itself_and_one_that_is_shared_were_averaged(ran):
    for rank, result in enumerate(ran[2]):
        assert result["under ddp"] == {"weight": ([1.0 + rank] * 2, [2.0 * rank] * 2), "bias": ([1.0] * 2, [1.0] * 2)}


def test_a_norm_that_is_not_finite_on_one_rank_is_refused_on_all(ran):
    for result in ran[2]:
        assert result["nan"].startswith("The total norm of order 2.0 for gradients from `parameters` is non-finite")


def test_what_cannot_be_told_to_be_of_all_experts_is_not_saved(ran):
    for result in ran[2]:
        assert result["factored"] == ("sharded_state_dict: optimizer: expected column of 1.moe.experts.mlp.w1 to be a scalar or of the"
                                      " parameter's shape [64, 16], got [16]")


def test_a_checkpoint_with_experts_frozen_on_one_rank_was_not_saved(ran):
    """Its optimizer keeps nothing for them, and torch refused moments of which rows are missing."""
    experts = [f"1.moe.experts.mlp.{name} {key}" for name in ("w1", "w2", "v1") for key in ("exp_avg", "exp_avg_sq")]
    for rank, result in enumerate(ran[2]):
        found = result["frozen"]
        saved = found["saved"]
        for key in experts:
            assert [bool(part.any()) for part in saved[key].chunk(WORLD)] == [True, False, True, True]
        for frozen in (2, None):
            loaded, kept = found[frozen]
            assert kept == [rank != frozen] * 3
            for key in [*experts, *(f"1.moe.experts.mlp.{name}" for name in ("w1", "w2", "v1"))]:
                expected = saved[key].clone()
                if key in experts and frozen is not None:
                    expected.chunk(WORLD)[frozen].zero_()
                assert torch.equal(loaded[key], expected), key


def test_gradients_of_experts_that_were_frozen_after_backward_were_averaged(ran):
    """A rank that still had one waited for a rank that had none."""
    for rank, result in enumerate(ran[2]):
        if "averaged" in result:
            mean = [(rank % 2 + rank % 2 + 2) / 2] * 2
            assert result["averaged"] == [mean, [7.0, 7.0] if rank == 0 else None, mean]
