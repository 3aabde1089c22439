"""mlp_impl='gbmoe' in MegaBlocks itself: against a dense float64 layer, and next to MegaBlocks' own 'grouped'.

Both sides are dMoE layers of the installed package. 'grouped' runs on gbmoe.compat.grouped_gemm, and where there is no
Triton on gbmoe's stand-ins for MegaBlocks' kernels.

Shape suffixes: T tokens, K slots a token, E experts, F ffn hidden, H hidden.
"""

import functools
import importlib.util
import pickle
import sys
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import gbmoe
from gbmoe import Float8BlockScaling
from gbmoe.compat import grouped_gemm
from gbmoe.compat.megablocks import register
from gbmoe.parallel import failures, host_copy
from gbmoe.plan import RoutingPlan
from gbmoe.testing import accuracy, exact_inputs
from tests import rank_groups
from tests.compat import MEGABLOCKS_NEEDS_A_GPU, in_a_fresh_process, skip_where_megablocks_needs_a_gpu
from tests.conftest import assert_as_accurate_as, dtype_id
from tests.test_weight_layout import LAYOUTS, ids

if importlib.util.find_spec("megablocks") is None or importlib.util.find_spec("stk") is None:
    pytest.skip("MegaBlocks is not installed: python -m gbmoe install-megablocks", allow_module_level=True)
register()

from megablocks import grouped_gemm_util  # noqa: E402
from megablocks.layers import dmlp_registry, dmoe, glu, mlp, moe, router  # noqa: E402
from megablocks.layers.arguments import Arguments  # noqa: E402

SIZES = dict(hidden_size=32, ffn_hidden_size=64, moe_num_experts=4, moe_top_k=2)


@pytest.fixture(autouse=True)
def grouped_gemm_in_any_dtype(monkeypatch):
    """Let MegaBlocks use gbmoe's grouped_gemm, because the real one, where it is installed, takes bfloat16 only."""
    monkeypatch.setattr(grouped_gemm_util, "ops", grouped_gemm.ops)
    monkeypatch.setattr(grouped_gemm_util, "backend", grouped_gemm.backend)


@pytest.fixture(autouse=True)
def fresh_losses():
    moe.clear_load_balancing_loss()
    router.clear_router_zloss()
    yield
    moe.clear_load_balancing_loss()
    router.clear_router_zloss()


def make(impl, device="cpu", dtype=torch.float32, seed=0, **fields):
    """(layer, args) of exact random weights. A 'sparse' layer is only built, where MegaBlocks would refuse to."""
    fields = {**SIZES, "fp16": dtype == torch.float16, "bf16": dtype == torch.bfloat16, "device": device,
              "mlp_impl": "grouped" if impl == "sparse" else impl, "fc_kwargs": {"dtype": dtype}, **fields}
    before = torch.get_default_dtype()
    # What MegaBlocks takes where neither flag is set.
    torch.set_default_dtype(dtype if dtype == torch.float64 else before)
    try:
        args = Arguments(**fields)
        args.mlp_impl = impl
        layer = dmoe.dMoE(args)
    finally:
        torch.set_default_dtype(before)
    with torch.no_grad():
        for place, (_, parameter) in enumerate(sorted(layer.named_parameters())):
            parameter.copy_(exact_inputs.exact_values(*parameter.shape, dtype=dtype, device=device, seed=seed + place,
                                                      scale=0.25))
    return layer, args


def dense(x, parameters, args, ids_TK):
    """(out, losses) by MegaBlocks' definitions: every expert over every token, and of these the slots that ids name."""
    x_TH, act = x.flatten(0, -2), args.activation_fn
    logits_TE = x_TH @ parameters["router.layer.weight"].t()
    scores_TE = logits_TE.softmax(-1)
    weights_TK = scores_TE.gather(1, ids_TK)
    if args.moe_normalize_expert_weights:
        weights_TK = weights_TK / weights_TK.norm(p=args.moe_normalize_expert_weights, dim=-1, keepdim=True)

    def stacked(name):
        return parameters[f"experts.mlp.{name}"].view(args.moe_num_experts, -1, args.hidden_size)

    h_ETF = act(x_TH @ stacked("w1").transpose(1, 2))
    if args.mlp_type == "glu":
        h_ETF = h_ETF * (x_TH @ stacked("v1").transpose(1, 2))
    y_TEH = (h_ETF @ stacked("w2")).transpose(0, 1)
    out = (y_TEH.gather(1, ids_TK.unsqueeze(-1).expand(-1, -1, args.hidden_size)) * weights_TK.unsqueeze(-1)).sum(1)
    if "experts.bias" in parameters:
        out = out + parameters["experts.bias"]
    if args.shared_expert:
        def linear(name, t):
            return F.linear(t, parameters[f"shared_expert.{name}.weight"], parameters[f"shared_expert.{name}.bias"])
        up_TF = linear("up_proj", x_TH)
        shared = linear("down_proj", act(linear("gate_proj", x_TH)) * up_TF if args.mlp_type == "glu" else act(up_TF))
        k = args.moe_top_k
        out = shared / (k + 1) + out * k / (k + 1) if args.shared_expert_weighted_sum else shared + out
    counts_E = torch.bincount(ids_TK.flatten(), minlength=args.moe_num_experts).to(x.dtype)
    scale = args.moe_num_experts * args.moe_loss_weight / (x_TH.size(0) * args.moe_top_k)
    losses = scale * counts_E @ scores_TE.mean(0) + args.moe_zloss_weight * logits_TE.logsumexp(1).square().mean()
    return out.view(x.shape), losses


def run_layer(layer, args, x, grad):
    """{"out", "losses", "x", *parameters}: results and gradients of one training step of the layer."""
    moe.clear_load_balancing_loss()
    router.clear_router_zloss()
    x = x.clone().requires_grad_()
    out = layer(x)
    losses = moe.batched_load_balancing_loss(args)
    if args.moe_zloss_weight:
        losses = losses + router.batched_router_zloss(args).sum()
    exact_inputs.poison(x.device)
    torch.autograd.backward([out, losses], [grad, torch.ones_like(losses)])
    gradients = {n: p.grad for n, p in layer.named_parameters()}
    return {"out": out.detach(), "losses": losses.detach(), "x": x.grad, **gradients}


def run_dense(layer, args, x, grad, ids_TK):
    """The same results of the dense layer, in float64."""
    x = x.detach().double().clone().requires_grad_()
    parameters = {n: p.detach().double().clone().requires_grad_() for n, p in layer.named_parameters()}
    out, losses = dense(x, parameters, args, ids_TK)
    torch.autograd.backward([out, losses], [grad.double(), torch.ones_like(losses)])
    return {"out": out.detach(), "losses": losses.detach(), "x": x.grad, **{n: p.grad for n, p in parameters.items()}}


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
@pytest.mark.parametrize("activation", [F.silu, F.mish], ids=["silu", "mish"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=dtype_id)
@pytest.mark.parametrize("memory_optimized", [False, True])
def test_results_and_gradients_are_those_of_a_dense_layer(device, mlp_type, activation, dtype, memory_optimized):
    """silu is fused; mish is a callable that only Python knows."""
    skip_where_megablocks_needs_a_gpu(device)
    fields = dict(device=device, dtype=dtype, mlp_type=mlp_type, activation_fn=activation,
                  memory_optimized_mlp=memory_optimized, moe_normalize_expert_weights=1, moe_zloss_weight=1e-2,
                  shared_expert=True, shared_expert_weighted_sum=True, return_bias=False)
    x = exact_inputs.exact_values(12, 2, 32, dtype=dtype, device=device, seed=1)
    grad = exact_inputs.exact_values(12, 2, 32, dtype=dtype, device=device, seed=2)
    results = {}
    for impl in ("gbmoe", "grouped"):
        layer, args = make(impl, **fields)
        results[impl] = run_layer(layer, args, x, grad)
    exact = run_dense(layer, args, x, grad, layer.router(x)[2])
    for what, result in results["gbmoe"].items():
        assert_as_accurate_as(result, results["grouped"][what], exact[what], what)


@pytest.mark.parametrize("experts, top_k", [(1, 1), (2, 1), (8, 8), (16, 3)])
def test_experts_and_top_k(device, experts, top_k):
    layer, args = make("gbmoe", device, torch.float64, moe_num_experts=experts, moe_top_k=top_k, bias=False,
                       ffn_hidden_size=128)
    x = exact_inputs.exact_values(7, 3, 32, dtype=torch.float64, device=device, seed=1)
    grad = exact_inputs.exact_values(7, 3, 32, dtype=torch.float64, device=device, seed=2)
    exact = run_dense(layer, args, x, grad, layer.router(x)[2])
    for what, result in run_layer(layer, args, x, grad).items():
        torch.testing.assert_close(result, exact[what], msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
@pytest.mark.parametrize("other", ["grouped", "sparse"])
@pytest.mark.parametrize("shared_expert", [False, True])
def test_state_dicts_go_both_ways(mlp_type, other, shared_expert):
    fields = dict(mlp_type=mlp_type, shared_expert=shared_expert)
    for source, target in ((other, "gbmoe"), ("gbmoe", other)):
        state = make(source, seed=1, **fields)[0].state_dict()
        layer, _ = make(target, seed=100, **fields)
        layer.load_state_dict(state, strict=True)
        assert all(torch.equal(tensor, state[name]) for name, tensor in layer.state_dict().items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_state_dicts_of_a_layer_that_stores_another_layout_go_both_ways(mlp_type, layout):
    """gbmoe's own layer, and MegaBlocks'."""
    if layout.is_combined and mlp_type == "mlp":
        return  # refused
    theirs, _ = make("grouped", seed=1, mlp_type=mlp_type)
    own = gbmoe.dMoE(gbmoe.Arguments(**SIZES, mlp_type=mlp_type, fp16=False, device="cpu", weight_layout=layout))
    own.load_state_dict(theirs.state_dict(), strict=True)
    back, _ = make("grouped", seed=100, mlp_type=mlp_type)
    back.load_state_dict(own.state_dict(), strict=True)
    assert all(torch.equal(tensor, theirs.state_dict()[name]) for name, tensor in back.state_dict().items())


def test_a_seed_gives_the_parameters_of_grouped():
    states = []
    for impl in ("gbmoe", "grouped"):
        torch.manual_seed(3)
        layer = dmoe.dMoE(Arguments(**SIZES, mlp_impl=impl, mlp_type="glu", fp16=False, device="cpu"))
        states.append((layer.state_dict(), torch.get_rng_state()))
    assert all(torch.equal(tensor, states[1][0][name]) for name, tensor in states[0][0].items())
    assert torch.equal(states[0][1], states[1][1])
    assert layer.experts.mlp.w1.expert_model_parallel is False


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("return_bias", [False, True])
def test_return_convention(device, bias, return_bias):
    skip_where_megablocks_needs_a_gpu(device)
    outs = []
    for impl in ("gbmoe", "grouped"):
        layer, _ = make(impl, device, bias=bias, return_bias=return_bias)
        out = layer(torch.ones(5, 3, 32, device=device))
        if bias and return_bias:
            out, vector = out
            assert vector is layer.experts.bias
        outs.append(out)
    torch.testing.assert_close(*outs)


def test_losses_are_kept_in_training_only():
    layer, args = make("gbmoe", num_layers=2)
    layer(torch.ones(5, 3, 32))
    (counts, scores), = moe.get_load_balancing_loss()
    assert counts.dtype == torch.int32 and int(counts.sum()) == 30 and scores.shape == (15, 4)
    with pytest.raises(ValueError, match="Expected 2 token_per_experts"):
        moe.batched_load_balancing_loss(args)
    layer.eval()(torch.ones(5, 3, 32))
    make("gbmoe", moe_loss_weight=0)[0](torch.ones(5, 3, 32))
    assert len(moe.get_load_balancing_loss()) == 1


def test_uniform_expert_assignment(device):
    layer, _ = make("gbmoe", device, uniform_expert_assignment=True, moe_top_k=3)
    out = layer(torch.randn(8, 1, 32, device=device))[0]
    out.sum().backward()
    assert moe.get_load_balancing_loss()[-1][0].tolist() == [6, 6, 6, 6]


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
def test_autocast_from_float32_parameters(device, mlp_type):
    skip_where_megablocks_needs_a_gpu(device)
    x = exact_inputs.exact_values(9, 2, 32, dtype=torch.float32, device=device, seed=1)
    results = {}
    for impl in ("gbmoe", "grouped"):
        layer, args = make(impl, device, mlp_type=mlp_type)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            out = layer(x)[0]
        assert out.dtype == torch.bfloat16
        out.backward(torch.ones_like(out))
        results[impl] = {"out": out.detach(), **{n: p.grad for n, p in layer.named_parameters() if p.grad is not None}}
        assert all(p.grad.dtype == torch.float32 for n, p in layer.named_parameters() if n != "experts.bias")
    for what, result in results["gbmoe"].items():
        assert accuracy.relative_error(result, results["grouped"][what]) < 2e-2, what


@pytest.mark.parametrize("activation", [F.silu, F.mish], ids=["silu", "mish"])
@pytest.mark.parametrize("frozen", ["x", "experts.mlp.w1", "experts.mlp.w2", "experts.mlp.v1", "router.layer.weight"])
def test_memory_optimised_with_frozen_weights_or_input(device, activation, frozen):
    """MegaBlocks' own memory-optimised layers raise here, and write over the gradient that comes in."""
    fields = dict(device=device, mlp_type="glu", memory_optimized_mlp=True, activation_fn=activation, bias=False)
    layer, args = make("gbmoe", **fields)
    x = exact_inputs.exact_values(9, 2, 32, dtype=torch.float32, device=device, seed=1)
    grad = exact_inputs.exact_values(9, 2, 32, dtype=torch.float32, device=device, seed=2)
    expected = run_layer(layer, args, x, grad.clone())
    moe.clear_load_balancing_loss()
    layer, args = make("gbmoe", **fields)
    x.requires_grad_(frozen != "x")
    if frozen != "x":
        layer.get_parameter(frozen).requires_grad_(False)
    out = layer(x)
    before = grad.clone()
    torch.autograd.backward([out, moe.batched_load_balancing_loss(args)], [grad, torch.ones((), device=device)])
    assert torch.equal(grad, before)
    for name, tensor in (("x", x), *layer.named_parameters()):
        assert (tensor.grad is None) == (name == frozen)
        if name != frozen:
            torch.testing.assert_close(tensor.grad, expected[name])


def test_megablocks_own_permutation_and_products_are_not_called(device, monkeypatch):
    class Refused:
        def __getattr__(self, name):
            raise AssertionError(f"called MegaBlocks' {name}")

    for module, name in ((dmoe, "ops"), (moe, "ops"), (mlp, "gg"), (glu, "gg"), (dmoe, "stk")):
        monkeypatch.setattr(module, name, Refused())
    for mlp_type in ("mlp", "glu"):
        for memory_optimized in (False, True):
            layer, _ = make("gbmoe", device, mlp_type=mlp_type, memory_optimized_mlp=memory_optimized,
                            shared_expert=True, return_bias=False)
            layer(torch.randn(5, 3, 32, device=device)).sum().backward()
    with pytest.raises(AssertionError, match="called MegaBlocks' sort"):
        make("grouped", device)[0](torch.randn(5, 3, 32, device=device))


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
@pytest.mark.parametrize("counts_on", ["host", "device"])
def test_the_registrys_class_takes_sorted_rows(device, mlp_type, counts_on):
    """Like every class of the registry it has forward(x, tokens_per_expert), which MegaBlocks' permute_and_compute calls too."""
    skip_where_megablocks_needs_a_gpu(device)
    rows = torch.randn(10, 32, device=device)
    counts = torch.tensor([3, 0, 6, 1], device="cpu" if counts_on == "host" else device)
    fused, grouped = (make(impl, device, mlp_type=mlp_type)[0].experts for impl in ("gbmoe", "grouped"))
    assert isinstance(fused.mlp, mlp.SparseMLP) and type(fused.mlp) is dmlp_registry._REGISTRY[mlp_type]["gbmoe"]
    torch.testing.assert_close(fused.mlp(rows, counts), grouped.mlp(rows, counts))
    indices = torch.tensor([4, 0, 7, 9, 1, 2, 3, 5, 6, 8], dtype=torch.int32, device=device)
    bin_ids = torch.tensor([0, 0, 0, 2, 2, 2, 2, 2, 2, 3], dtype=torch.int32, device=device)
    bins = counts.to(device).cumsum(0).int()
    outs = (experts.permute_and_compute(rows, counts.int(), indices, bin_ids, None, bins, -1, top_k=1)
            for experts in (fused, grouped))
    torch.testing.assert_close(*outs)


def test_tokens_per_expert_on_the_host_that_would_lose_rows(device):
    experts = make("gbmoe", device)[0].experts.mlp
    for counts in ([3, 0, 6, 0], [3, 0, 6, 2], [-1, 4, 6, 1]):
        with pytest.raises(ValueError, match=r"tokens_per_expert: expected no negative entry and a sum of x.size\(0\) == 10, got \["):
            experts(torch.randn(10, 32, device=device), torch.tensor(counts))


def test_zero_tokens(device):
    layer, args = make("gbmoe", device, bias=False)
    x = torch.randn(0, 3, 32, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape and bool((layer.experts.mlp.w1.grad == 0).all())


def test_layers_can_be_pickled():
    layer, _ = make("gbmoe", mlp_type="glu")
    x = torch.randn(5, 3, 32)
    assert torch.equal(pickle.loads(pickle.dumps(layer))(x)[0], layer(x)[0])


@pytest.mark.parametrize("mlp_type", [pytest.param("mlp", marks=pytest.mark.slow), "glu"])
def test_compiles_without_a_graph_break(mlp_type):
    layer, _ = make("gbmoe", mlp_type=mlp_type, shared_expert=True, return_bias=False)
    x = torch.randn(5, 3, 32, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out, again = compiled(x), layer(x)
    torch.testing.assert_close(out, again)
    torch.testing.assert_close(*(torch.autograd.grad(o.sum(), layer.experts.mlp.w1)[0] for o in (out, again)))
    torch.compiler.reset()


# --------------------------------------------------------------------------------------------------- expert parallelism


def run_rank(rank, store, world, results):
    """Every case on one rank."""
    register()
    rank_groups.join(rank, world, store)

    host_sizes = RoutingPlan.host_sizes

    def known_sizes(plan):
        assert plan.has_host_sizes, "read the plan's sizes from the device"
        return host_sizes(plan)

    for mlp_type, experts in CASES:
        x = parallel_inputs(world)[rank]
        grad = torch.ones_like(x)
        for impl in IMPLS:
            layer, args = make_parallel(impl, True, mlp_type, experts)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(RoutingPlan, "host_sizes", known_sizes)
                result = run_layer(layer, args, x, grad)
            result["weights"] = {n: p.detach() for n, p in layer.experts.mlp.named_parameters()}
            result["counts"] = moe.get_load_balancing_loss()[-1][0]
            results[rank, impl, mlp_type, experts] = result
    dist.destroy_process_group()


IMPLS = ["gbmoe"] if MEGABLOCKS_NEEDS_A_GPU else ["gbmoe", "grouped"]
# With one expert on two ranks its ffn rows are sharded.
CASES = [("mlp", 4), ("glu", 4), ("glu", 1)]


def make_parallel(impl, parallel, mlp_type, experts):
    torch.manual_seed(0)
    args = Arguments(hidden_size=16, ffn_hidden_size=256, moe_num_experts=experts, moe_top_k=min(2, experts),
                     mlp_type=mlp_type, mlp_impl=impl, moe_expert_model_parallelism=parallel, fp16=False, device="cpu",
                     bias=False, init_method=functools.partial(torch.nn.init.normal_, std=0.3))
    return dmoe.dMoE(args), args


def parallel_inputs(world):
    return torch.randn(world, 6, 2, 16, generator=exact_inputs.generator("cpu", 7))


def test_expert_parallelism_is_that_of_grouped_and_of_one_process(tmp_path):
    """Two gloo processes. The one host wait is for the counts to send and receive: a plan's sizes are not read back."""
    world = 2
    results = rank_groups.shared_by_ranks(run_rank, world, tmp_path, world)
    for mlp_type, experts in CASES:
        whole, args = make_parallel("gbmoe", False, mlp_type, experts)
        x = parallel_inputs(world).requires_grad_()
        outs = [whole(x[rank]) for rank in range(world)]
        losses = [moe.get_load_balancing_loss()[rank - world] for rank in range(world)]
        sum(out.sum() for out in outs).backward()
        for rank in range(world):
            fused, *grouped = (results[rank, impl, mlp_type, experts] for impl in IMPLS)
            torch.testing.assert_close([fused] * len(grouped), grouped)
            torch.testing.assert_close(fused["out"], outs[rank].detach())
            assert torch.equal(fused["counts"], losses[rank][0])
            for name, parameter in whole.experts.mlp.named_parameters():
                mine = parameter.detach().view(world, -1, 16)[rank]
                assert torch.equal(fused["weights"][name], mine)
                grad = parameter.grad.view(world, -1, 16)[rank] / world  # MegaBlocks scales gradients of experts
                torch.testing.assert_close(fused[f"experts.mlp.{name}"], grad)


@pytest.mark.gpu
def test_expert_parallelism_waits_no_more_often_than_grouped(tmp_path, monkeypatch):
    """The size is one at which "auto" takes cuBLAS, which needs the sizes on the host. Torch warns of waits, but not of questions whether
    an event has happened, by which gbmoe's host waits."""
    asked, wait_for_ranks = [], failures.wait_for_ranks
    monkeypatch.setattr(host_copy, "wait_for_ranks", lambda *arguments: asked.append(1) or wait_for_ranks(*arguments))
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        waits = {}
        for impl in ("gbmoe", "grouped"):
            layer, _ = make(impl, "cuda", torch.bfloat16, moe_expert_model_parallelism=True, bias=False,
                            hidden_size=1024, ffn_hidden_size=1024)
            x = torch.randn(128, 128, 1024, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            layer(x).sum().backward()  # Triton compiles, NCCL connects
            torch.cuda.synchronize()
            asked.clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                layer(x).sum().backward()
                torch.cuda.set_sync_debug_mode("default")
            waits[impl] = len(asked) + sum("synchronizing CUDA operation" in str(w.message) for w in caught)
        assert 1 <= waits["gbmoe"] <= waits["grouped"]
    finally:
        torch.cuda.set_sync_debug_mode("default")
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------------------------- register


def test_register_is_idempotent_and_leaves_the_other_implementations():
    names = ("forward_once", "parallel_forward_once", "__init__", "permute_and_compute")
    methods = [getattr(dmoe.ParallelDroplessMLP, name) for name in names] + [Arguments.__init__]
    registry = {mlp_type: dict(classes) for mlp_type, classes in dmlp_registry._REGISTRY.items()}
    register()
    assert methods == [getattr(dmoe.ParallelDroplessMLP, name) for name in names] + [Arguments.__init__]
    assert registry == dmlp_registry._REGISTRY
    assert registry["mlp"]["grouped"] is mlp.GroupedMLP and registry["glu"]["sparse"] is glu.SparseGLU
    with pytest.raises(ValueError, match="mlp does not support other backend"):
        make("other")


@pytest.mark.parametrize("module, package", [("megablocks", "megablocks"), ("stk", "stanford-stk"),
                                             ("packaging", "packaging")])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, module, package):
    monkeypatch.setitem(sys.modules, module, None)
    words = f"expected the package {package}, found no module '{module}'; `python -m gbmoe install-megablocks`"
    with pytest.raises(ModuleNotFoundError, match=words) as raised:
        register()
    assert raised.value.name == module


HIDDEN = ("triton", "megablocks_ops", "grouped_gemm")


def test_a_fresh_process_without_triton_extension_and_grouped_gemm():
    assert in_a_fresh_process("""
        import torch
        import gbmoe.compat.megablocks
        names = ("megablocks", "stk", "megablocks_ops", "grouped_gemm")
        seen["imported early"] = [name for name in names if sys.modules.get(name)]
        gbmoe.compat.megablocks.register()
        import grouped_gemm, megablocks, megablocks_ops, stk
        from megablocks.layers.dmoe import dMoE
        seen["cuda"] = torch.cuda.is_initialized()
        seen["triton"] = sys.modules["triton"]
        seen["grouped_gemm"] = grouped_gemm.__name__
        torch.cuda.is_available = lambda: False
        args = megablocks.Arguments(mlp_impl="gbmoe", hidden_size=16, ffn_hidden_size=64, moe_num_experts=4, fp16=False)
        seen["device"] = args.device
        seen["out"] = list(dMoE(args)(torch.randn(3, 2, 16))[0].shape)
        seen["refused"] = []
        for attempt in (lambda: stk.backend.sputnik.backend.sdd(), lambda: megablocks.Arguments(mlp_impl="sparse")):
            try:
                attempt()
            except ImportError as error:
                seen["refused"].append(str(error))
    """, HIDDEN) == {
        "imported early": [], "cuda": False, "triton": None, "grouped_gemm": "gbmoe.compat.grouped_gemm",
        "device": "cpu", "out": [3, 2, 16],
        "refused": ["stk's block-sparse products, and so MegaBlocks' mlp_impl='sparse', are written in Triton, which is"
                    " not installed; mlp_impl='gbmoe' does without",
                    "Triton is required for sparse MLP implementation"]}


def test_register_mends_an_import_that_failed_before_it():
    assert in_a_fresh_process("""
        try:
            import megablocks
        except ModuleNotFoundError as error:
            seen["missing"] = error.name
        import gbmoe.compat.megablocks
        gbmoe.compat.megablocks.register()
        import megablocks
        import megablocks.grouped_gemm_util as gg
        seen["impls"] = [megablocks.Arguments(mlp_impl=impl, device="cpu").mlp_impl for impl in ("gbmoe", "grouped")]
        seen["gmm"] = gg.ops.gmm.__module__
    """, HIDDEN) == {"missing": "triton", "impls": ["gbmoe", "grouped"], "gmm": "gbmoe.compat.grouped_gemm.ops"}


def test_an_extension_of_megablocks_that_does_not_import_is_named(tmp_path):
    (tmp_path / "megablocks_ops.py").write_text("raise ImportError('undefined symbol: _ZN3c10')\n")
    assert in_a_fresh_process(f"""
        import warnings
        sys.path.insert(0, {str(tmp_path)!r})
        import gbmoe.compat.megablocks
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", RuntimeWarning)
            for _ in range(2):
                gbmoe.compat.megablocks.register()
        seen["said"] = [str(w.message) for w in caught if "megablocks_ops" in str(w.message)]
        seen["taken"] = sys.modules["megablocks_ops"].__name__
    """, ("triton", "grouped_gemm")) == {
        "said": ["megablocks_ops is installed and cannot be imported; gbmoe's stand-in takes its place:"
                 " undefined symbol: _ZN3c10"],
        "taken": "gbmoe.compat.megablocks.megablocks_ops"}


@pytest.mark.parametrize("spec", ["types.SimpleNamespace(name=name)", "None"], ids=["installed", "stubs without a spec"])
def test_what_is_installed_stays(spec):
    assert in_a_fresh_process(f"""
        import types
        for name in ("megablocks_ops", "grouped_gemm"):
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__spec__ = {spec}
        sys.modules["grouped_gemm"].ops = sys.modules["grouped_gemm"].backend = None
        import gbmoe.compat.megablocks
        gbmoe.compat.megablocks.register()
        seen.update({{name: sys.modules[name].__name__ for name in ("megablocks_ops", "grouped_gemm")}})
    """, HIDDEN) == {"megablocks_ops": "megablocks_ops", "grouped_gemm": "grouped_gemm"}


def test_float8_experts():
    layer, args = make("gbmoe", dtype=torch.bfloat16, mlp_type="glu")
    x = exact_inputs.exact_values(5, 3, SIZES["hidden_size"], dtype=torch.bfloat16, device="cpu", seed=9)
    expected, _ = layer(x)
    args.fp8_recipe = Float8BlockScaling()
    result, _ = layer(x)
    assert 0.001 < accuracy.relative_error(result, expected.double()) < 0.12
