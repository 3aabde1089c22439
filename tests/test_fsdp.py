"""fully_shard (FSDP2) over models with dMoE layers: two processes train as one does, whatever is a unit of it."""

import functools
from dataclasses import dataclass, field

import pytest
import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import gbmoe
from gbmoe import WeightLayout
from gbmoe.layers import Arguments
from tests import rank_groups

pytestmark = pytest.mark.xdist_group("fsdp")  # one pair of processes serves all tests

WORLD, STEPS, TOKENS, HIDDEN, EXPERTS = 2, 2, 10, 16, 3


@dataclass(frozen=True)
class Case:
    """What is sharded, and how. `unit` names the module that fully_shard is given besides the whole model."""
    unit: str
    fields: dict = field(default_factory=dict)
    reshard_after_forward: bool = True
    mixed: bool = False
    compiled: bool = False


CASES = {
    "block": Case("block", dict(mlp_type="glu", shared_expert=True)),
    "layer": Case("layer", dict(mlp_type="glu")),  # the bias that it returns outlives it
    "layer, added to in place": Case("layer", dict(bias=False)),
    "experts": Case("experts", dict(ffn_hidden_size=35, bias=False)),  # 105 rows on two ranks
    "kept gathered": Case("layer", dict(activation_fn=torch.tanh, memory_optimized_mlp=True), reshard_after_forward=False),
    "model": Case("model", dict(mlp_impl="bmm", return_bias=False)),
    "mixed precision": Case("layer", dict(mlp_type="glu", bias=False), mixed=True),
    "mixed precision of experts": Case("experts", dict(bias=False), mixed=True),
    "float32 router": Case("router", dict(mlp_type="glu", bias=False), mixed=True),
    "compiled": Case("block", dict(mlp_type="glu"), compiled=True),
    "another layout": Case("block", dict(mlp_type="glu", weight_layout=WeightLayout("gate_first", down_transposed=True))),
    "another layout, of experts": Case("experts", dict(mlp_type="glu", bias=False, moe_expert_linear_bias=True,
                                                       weight_layout=WeightLayout("interleaved", True))),
    "another layout, whole experts": Case("block", dict(mlp_type="glu", moe_num_experts=4, weight_layout=WeightLayout("up_first", True))),
    "one matrix an expert": Case("block", dict(mlp_type="glu", one_matrix_per_expert=True)),
    "expert parallel": Case("block", dict(moe_num_experts=4, moe_expert_model_parallelism=True, bias=False)),
}


class Block(torch.nn.Module):
    def __init__(self, args):
        super().__init__()
        self.norm = torch.nn.LayerNorm(args.hidden_size, device=args.device)
        self.moe = gbmoe.dMoE(args)

    def forward(self, x):
        out = self.moe(self.norm(x))
        out, bias = out if isinstance(out, tuple) else (out, None)
        out += x  # in place: what the layer returns must bear it
        return out if bias is None else out + bias


def make(case, device, **changes):
    sizes = dict(hidden_size=HIDDEN, ffn_hidden_size=32, moe_num_experts=EXPERTS, moe_top_k=2, num_layers=2)
    args = Arguments(**{**sizes, "fp16": False, "device": device,
                        "init_method": functools.partial(torch.nn.init.normal_, std=0.3), **case.fields, **changes})
    torch.manual_seed(0)
    return torch.nn.Sequential(*(Block(args) for _ in range(args.num_layers))), args


def shard(model, case, mesh, args):
    options = dict(mesh=mesh, reshard_after_forward=case.reshard_after_forward)
    if case.mixed:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if args.moe_expert_model_parallelism:  # every rank has experts of its own
        options["ignored_params"] = {p for n, p in model.named_parameters() if ".mlp." in n}
    for index, block in enumerate(model):
        if case.compiled:
            model[index] = block = torch.compile(block, backend="aot_eager", fullgraph=True)
        moe = block.moe
        for unit in {"block": [block], "layer": [moe], "experts": [moe.experts.mlp, moe], "router": [moe.router, moe],
                     "model": []}[case.unit]:
            wide = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.float32)} if unit is moe.router else {}
            fully_shard(unit, **{**options, **wide})
    fully_shard(model, **options)


def inputs(step, rank, device):
    generator = torch.Generator().manual_seed(STEPS * rank + step)
    return torch.randn(TOKENS, 1, HIDDEN, generator=generator).to(device)


def loss_and_gradients(model, args, x):
    gbmoe.clear_load_balancing_loss()
    loss = model(x).float().square().mean()
    loss = loss + gbmoe.batched_load_balancing_loss(args).float()
    loss.backward()
    gbmoe.clear_load_balancing_loss()
    return loss.detach()


def whole(tensor):
    """All of a sharded tensor, on the host; a plain tensor as it is."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu()


def name_of(parameter):
    return parameter.replace("_orig_mod.", "")


def optimizer_of(model):
    # foreach, its default on a GPU, does not take the sharded and the plain parameters of expert parallelism together.
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2, foreach=False)


def train(case, rank, mesh, device):
    model, args = make(case, device)
    shard(model, case, mesh, args)
    optimizer = optimizer_of(model)
    result = {"losses": [], "gradients": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        result["losses"].append(float(loss_and_gradients(model, args, inputs(step, rank, device))))
        result["gradients"].append({name_of(n): whole(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
    model.load_state_dict(model.state_dict(), strict=True)
    if "weight_layout" in case.fields:
        load_whole(model, make(case, device)[0])
    # Every rank takes part in gathering, and the first one keeps it.
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    result["state"] = {name_of(n): t for n, t in state.items()}
    result["sharded"] = {name_of(n) for n, p in model.named_parameters() if hasattr(p, "to_local")}
    return result


def load_whole(model, alone):
    """Put a whole checkpoint into a sharded model by the names and shapes of its parameters, as docs/experts.md says."""
    alone.load_state_dict(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    for broadcast in (False, True):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, {name: p.detach().clone() for name, p in alone.named_parameters()}, options=options)


def part_alone(mesh, device):
    """The error that calling a sharded layer's experts without the layer raises."""
    layer = make(CASES["layer"], device)[0][0].moe
    fully_shard(layer, mesh=mesh)
    try:
        layer.experts.mlp.weights_EFH()
    except ValueError as error:
        return str(error)


# Units of a bfloat16 layer whose router has float32 weights, which fully_shard does not take together.
UNITS = (["router", ""], ["router", "experts.mlp", ""], ["router.layer", "experts", ""])


def float32_router(units, mesh, device):
    """The output and the router's gradient of such a layer: whole, and sharded by these units."""
    case = Case("", dict(bf16=True, bias=False, num_layers=1))
    found = []
    for sharded in (False, True):
        layer = make(case, device)[0][0].moe
        layer.router.float()
        for unit in units if sharded else ():
            fully_shard(layer.get_submodule(unit), mesh=mesh)
        x = inputs(0, 0, device).bfloat16()  # the same on both ranks
        out = layer(x)
        out.float().square().mean().backward()
        gbmoe.clear_load_balancing_loss()
        found.append([whole(out), whole(layer.router.layer.weight.grad)])
    return found


def worker(rank, store, device_type, results):
    device = rank_groups.join(rank, WORLD, store, device_type)
    mesh = rank_groups.mesh_of_all(device_type)
    for name, case in CASES.items():
        results[name, rank] = train(case, rank, mesh, device)
    for units in UNITS:
        results["float32 router", " ".join(units), rank] = float32_router(units, mesh, device)
    results["part alone", rank] = part_alone(mesh, device)
    rank_groups.leave()


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def sharded(request, tmp_path_factory):
    """(device type, what the processes found). One start for all cases: a start takes longer than the training."""
    folder = tmp_path_factory.mktemp("fsdp")
    return request.param, rank_groups.shared_by_ranks(worker, WORLD, folder, request.param, device_type=request.param)


def train_alone(case, device):
    """The same steps in one process, which averages the gradients over the batches of the ranks."""
    model, args = make(case, device, moe_expert_model_parallelism=False)
    optimizer = optimizer_of(model)
    result = {"losses": [], "gradients": []}
    for step in range(STEPS):
        working, losses = model, []
        optimizer.zero_grad()
        if case.mixed:  # a half-precision copy computes each rank's gradients; they meet in float32
            mean = {n: torch.zeros_like(p) for n, p in model.named_parameters()}
        for rank in range(WORLD):
            if case.mixed:
                working, _ = make(case, device, bf16=True)
                working.bfloat16()
                if case.unit == "router":
                    for block in working:
                        block.moe.router.float()
                working.load_state_dict(model.state_dict())
            x = inputs(step, rank, device)
            losses.append(float(loss_and_gradients(working, args, x.bfloat16() if case.mixed else x)))
            if case.mixed:
                for n, p in working.named_parameters():
                    mean[n] += p.grad.float()
        for n, p in model.named_parameters():
            p.grad = (mean[n] if case.mixed else p.grad) / WORLD
        result["losses"].append(losses)
        result["gradients"].append({n: p.grad.cpu() for n, p in model.named_parameters()})
        optimizer.step()
    result["state"] = {n: t.cpu() for n, t in model.state_dict().items()}
    return result


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(sharded, name):
    device_type, results = sharded
    case = CASES[name]
    alone = train_alone(case, device_type)
    tolerance = dict(rtol=1e-2, atol=1e-3) if case.mixed else dict(rtol=1e-4, atol=1e-5)
    close = functools.partial(torch.testing.assert_close, **tolerance)
    for rank in range(WORLD):
        got = results[name, rank]
        close(got["losses"], [losses[rank] for losses in alone["losses"]])
        for gradients, expected in zip(got["gradients"], alone["gradients"]):
            assert gradients.keys() == expected.keys()
            for parameter, gradient in gradients.items():
                close(gradient, mine(expected[parameter], gradient, rank), msg=lambda text: f"{parameter}: {text}")
    state = results[name, 0]["state"]
    for parameter, expected in alone["state"].items():
        close(state[parameter], mine(expected, state[parameter], 0), msg=lambda text: f"{parameter}: {text}")
    if "expert parallel" not in name:
        model, _ = make(case, "cpu")
        assert results[name, 0]["sharded"] == {parameter for parameter, _ in model.named_parameters()}
        model.load_state_dict(state, strict=True)


@pytest.mark.parametrize("units", UNITS, ids=" ".join)
def test_a_float32_router_in_a_sharded_bfloat16_layer_was_refused(sharded, units):
    for rank in range(WORLD):
        (out, gradient), (sharded_out, sharded_gradient) = sharded[1]["float32 router", " ".join(units), rank]
        assert out.dtype == torch.bfloat16 and gradient.dtype == torch.float32
        # A router.layer that is a unit of its own is called, and its logits keep their dtype.
        torch.testing.assert_close(sharded_out, out, rtol=2**-7, atol=1e-3)
        torch.testing.assert_close(sharded_gradient, gradient, rtol=1e-2, atol=1e-4)


def mine(expected, got, rank):
    """The rows of this rank's experts, where experts are spread."""
    return expected if expected.shape == got.shape else expected.chunk(WORLD)[rank]


def test_a_part_called_alone_says_what_is_missing(sharded):
    _, results = sharded
    words = "dMoE: w1: expected 96 rows on this rank (fully_shard gathers them only when the module that it was given is"
    assert results["part alone", 0].startswith(words)


def test_operators_refuse_dtensors():
    class DTensor(torch.Tensor):  # all that is looked at
        def to_local(self):
            return self

    b = torch.zeros(2, 8, 4).as_subclass(DTensor)
    with pytest.raises(TypeError, match="gmm: b: expected a plain tensor, such as .*full_tensor\\(\\), got DTensor"):
        gbmoe.gmm(torch.zeros(5, 8), b, torch.tensor([3, 2]))
