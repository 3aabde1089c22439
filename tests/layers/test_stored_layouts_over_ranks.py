"""Layers that store another WeightLayout with experts spread over ranks: what one process with MegaBlocks' layout computes.

One start of two processes serves all cases.
"""

import contextlib
import functools
import traceback

import pytest
import torch
import torch.nn.functional as F

import gbmoe
from gbmoe import Float8BlockScaling, WeightLayout
from gbmoe.layers import Arguments, expert_parallelism
from gbmoe.parallel import shadowing
from gbmoe.testing import accuracy, exact_inputs
from tests import rank_groups
from tests.test_weight_layout import laid_out

pytestmark = pytest.mark.xdist_group("stored layouts over ranks")

WORLD, E, H, K, TOKENS = 2, 4, 32, 2, (40, 31)
NAMES = ("w1", "w2", "v1")
LAYOUTS = [WeightLayout("gate_first", down_transposed=True), WeightLayout("interleaved", True), WeightLayout("up_first"),
           WeightLayout("separate", True, True)]
EXCHANGE, MAPPED = dict(expert_parallel_transport="exchange"), dict(expert_parallel_transport="peer_memory")
RECIPE = dict(bf16=True, fp8_recipe=Float8BlockScaling(float8_dispatch=True))
CASES = {
    "exchange": EXCHANGE,
    "mapped memory": MAPPED,
    "mapped memory, kept rows": dict(MAPPED, keep_gathered_rows=True),
    "chunks": dict(EXCHANGE, expert_parallel_chunks=2),
    "nodes": dict(EXCHANGE, expert_parallel_ranks_per_node=1),
    "shadows": dict(EXCHANGE, expert_parallel_shadows=3, ffn_hidden_size=2),
    "exact, exchange": dict(EXCHANGE, expert_parallel_exact=True),
    "exact, mapped memory": dict(MAPPED, expert_parallel_exact=True),
    "exact, no kernel": dict(EXCHANGE, expert_parallel_exact=True, activation_fn=torch.tanh),
    "shards, exchange": dict(EXCHANGE, moe_num_experts=1, moe_top_k=1),
    "shards, mapped memory": dict(MAPPED, moe_num_experts=1, moe_top_k=1),
    "no kernel": dict(activation_fn=torch.tanh),
    "bmm": dict(mlp_impl="bmm"),
    "reference": dict(mlp_impl="reference"),
    "bfloat16, mapped memory": dict(MAPPED, bf16=True),
    "float8, exchange": dict(EXCHANGE, **RECIPE),
    "float8, mapped memory": dict(MAPPED, **RECIPE),
}


def make(layout, spread, **fields):
    torch.manual_seed(0)
    return gbmoe.dMoE(Arguments(**dict(hidden_size=H, ffn_hidden_size=48, moe_num_experts=E, moe_top_k=K, mlp_type="glu", bias=False,
                                       fp16=False, device="cpu", activation_fn=F.silu, moe_loss_weight=0, weight_layout=layout,
                                       moe_expert_model_parallelism=spread,
                                       init_method=functools.partial(torch.nn.init.normal_, std=0.3)) | fields))


def tokens(dtype):
    generator = torch.Generator().manual_seed(7)
    return [[torch.randn(each, H, generator=generator).to(dtype) for each in TOKENS] for _ in range(2)]


def mine(stack, rank):
    """This rank's part of [E,F,H]: experts or, of one expert, rows."""
    return stack.chunk(WORLD, dim=0 if stack.size(0) > 1 else 1)[rank]


def one_process(rank, fields):
    """What this rank is to find: output, gradient of its tokens, the router's on all ranks, and stacks of the experts' gradients."""
    alone = {name: value for name, value in fields.items() if not name.startswith("expert_parallel")}
    layer, (xs, grads) = make(None, False, **alone), tokens(torch.bfloat16 if "bf16" in fields else torch.float32)
    x = torch.cat(xs).requires_grad_()
    out = layer(x)
    out.backward(torch.cat(grads))
    mlp = layer.experts.mlp
    stacks = [getattr(mlp, name).grad.unflatten(0, (-1, layer.args.ffn_hidden_size)) for name in NAMES]
    cut = [t.split(list(TOKENS))[rank] for t in (out.detach(), x.grad)]
    return *cut, [mine(stack, rank) / WORLD for stack in stacks]


def run(rank, layout, fields):
    layer, (xs, grads) = make(layout, True, **fields), tokens(torch.bfloat16 if "bf16" in fields else torch.float32)
    plain = make(None, True, **fields)
    for name, tensor in plain.state_dict().items():  # of a rank's own experts
        assert torch.equal(layer.state_dict()[name], tensor), name
    expected_out, expected_dx, stacks = one_process(rank, fields)
    allowed = 3e-2 if "bf16" in fields else 1e-5
    exact_inputs.poison(torch.device("cpu"))
    for _ in range(2):  # the second pass finds memory that the first one mapped
        layer.zero_grad()
        x = xs[rank].clone().requires_grad_()
        out = layer(x)
        out.backward(grads[rank])
        for found, expected in ((out, expected_out), (x.grad, expected_dx)):
            assert accuracy.relative_error(found, expected) < allowed, accuracy.relative_error(found, expected)
        gradients = {name: parameter.grad for name, parameter in layer.experts.mlp.named_parameters()}
        wanted = {name: w for name, w in zip(NAMES, laid_out(layout, *stacks)) if w is not None}
        assert gradients.keys() == wanted.keys()
        for name, gradient in gradients.items():
            assert accuracy.relative_error(gradient, wanted[name]) < allowed, (name, accuracy.relative_error(gradient, wanted[name]))
    layer.load_state_dict(plain.state_dict())
    torch.testing.assert_close(layer(xs[rank]), out, rtol=0, atol=0)


@contextlib.contextmanager
def counted(module, name):
    """A list of what a function returns meanwhile."""
    found, original = [], getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *args, **kwargs: found.append(original(*args, **kwargs)) or found[-1])
        yield found


def differ(rank):
    make(LAYOUTS[rank], True)


def adapters(rank, layout):
    """Of a rank's own experts, over the exchange; where weights alone are read they are refused."""
    layers = [make(each, True, **EXCHANGE, expert_parallel_chunks=1) for each in (None, layout)]
    (xs, grads), found = tokens(torch.float32), []
    for layer in layers:
        for number, parameter in enumerate(gbmoe.add_adapter(layer, "task", rank=4, alpha=8)):
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(number))
        out = layer(xs[rank])
        out.backward(grads[rank])
        found.append([out.detach(), *(p.grad for p in layer.experts.mlp.adapters["task"].parameters())])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
    mapped = make(layout, True, **MAPPED)
    gbmoe.add_adapter(mapped, "task", rank=4)
    with pytest.raises(ValueError, match="adapters: expected none that is active"):
        mapped(xs[rank])


def worker(rank, store, results):
    rank_groups.join_and_map_memory(rank, WORLD, store, "cpu")

    def report(key, function, *arguments):
        try:
            results[key, rank] = function(*arguments) or "done"
        except Exception:
            results[key, rank] = traceback.format_exc()

    for name, fields in CASES.items():
        for layout in LAYOUTS:
            with counted(shadowing, "choose") as chosen, counted(expert_parallelism, "peer_experts") as passes, \
                    counted(expert_parallelism, "_over_scaled_rows") as scaled:
                report((name, layout.code), run, rank, layout, fields)
            results[name, layout.code, "shadows", rank] = [len(experts) for experts, _ in chosen]
            results[name, layout.code, "mapped", rank] = len(passes)
            results[name, layout.code, "scaled", rank] = [experts is not None for experts in scaled]
    report("differ", differ, rank)
    for layout in LAYOUTS:
        report(("adapters", layout.code), adapters, rank, layout)
    rank_groups.leave()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return rank_groups.shared_by_ranks(worker, WORLD, tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.code.replace(" ", "-"))
@pytest.mark.parametrize("name", CASES)
def test_ranks_compute_what_one_process_does(results, name, layout):
    for rank in range(WORLD):
        assert results[(name, layout.code), rank] == "done", results[(name, layout.code), rank]
        assert bool(results[name, layout.code, "mapped", rank]) == ("mapped memory" in name)
        assert any(results[name, layout.code, "shadows", rank]) == (name == "shadows")
        assert any(results[name, layout.code, "scaled", rank]) == (name == "float8, exchange")


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.code.replace(" ", "-"))
def test_adapters(results, layout):
    for rank in range(WORLD):
        assert results[("adapters", layout.code), rank] == "done", results[("adapters", layout.code), rank]


def test_ranks_of_different_layouts_are_told(results):
    """Experts that travel as shadows, and checkpoints by rank, would be read in a layout that they do not have."""
    for rank in range(WORLD):
        assert "weight_layout" in results["differ", rank] and "ValueError" in results["differ", rank]
