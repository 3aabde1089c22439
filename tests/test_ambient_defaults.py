"""torch's default dtype and default device, which a program may set for its own tensors, change nothing in gbmoe."""

import ast
import contextlib
import copy
import functools
import itertools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import gbmoe
from gbmoe import Arguments, Float8BlockScaling, RoutingPlan, dMoE, float8
from gbmoe.compat import transformer_engine
from gbmoe.compat.grouped_gemm import backend, ops as grouped_gemm
from gbmoe.compat.megablocks import ops as megablocks
from gbmoe.ops.route_operator import route
from gbmoe.parallel import training
from gbmoe.parallel.shadowing import fewest_bytes
from gbmoe.testing import exact_inputs

# ------------------------------------------------------------------------------------------------------------------ cases
#
# Each function prepares inputs and returns a function of no arguments, whose results must not depend on the defaults.

values = functools.partial(exact_inputs.exact_values, device="cpu")
TOKENS, HIDDEN, EXPERTS, TOP_K = 24, 32, 4, 2
IDS_TK = exact_inputs.expert_ids(TOKENS, EXPERTS, TOP_K, device="cpu", seed=1)
RECIPES = [None, *(Float8BlockScaling(*flags) for flags in itertools.product((False, True), repeat=3))]


def backward(out, *leaves):
    """`out` and the gradients of the leaves."""
    grad = torch.linspace(-1, 1, out.numel(), dtype=torch.float32, device="cpu").view(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, leaves, grad, allow_unused=True)]


def layer(dtype=torch.bfloat16, **changes):
    arguments = dict(hidden_size=HIDDEN, ffn_hidden_size=48, moe_num_experts=EXPERTS, moe_top_k=TOP_K, mlp_type="glu", activation_fn=F.silu,
                     fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, bias=False, num_layers=1, moe_loss_weight=0.1,
                     moe_zloss_weight=0.01, device="cpu") | changes
    torch.manual_seed(0)
    args = Arguments(**arguments)
    made = dMoE(args)
    x = values(TOKENS, 1, HIDDEN, dtype=dtype, seed=3)

    def run():
        layer, leaf = copy.deepcopy(made), x.clone().requires_grad_()
        torch.manual_seed(1)
        out = layer(leaf)
        losses = gbmoe.batched_load_balancing_loss(args) + gbmoe.batched_router_zloss(args).sum()
        gbmoe.clear_load_balancing_loss()
        gbmoe.clear_router_zloss()
        (out.float().square().sum() + losses).backward()
        norm = training.clip_grad_norm_(layer.router.parameters(), 1.0)
        return [out, losses, leaf.grad, norm, *(p.grad for p in layer.parameters())]

    return run


def operators():
    x, y = (values(rows, HIDDEN, dtype=torch.bfloat16, seed=rows) for rows in (TOKENS, 64))
    weights = torch.rand(TOKENS, TOP_K, generator=exact_inputs.generator("cpu", 2), dtype=torch.float32, device="cpu")
    logits = values(TOKENS, EXPERTS, dtype=torch.bfloat16, seed=5)

    def run():
        plan = RoutingPlan.from_experts(IDS_TK, EXPERTS, align=4)
        yield from (plan.row_of_slot_TK, plan.slot_of_row_P, plan.offsets_E1, plan.host_sizes(), plan.expert_of_tile)
        yield from backward(gbmoe.padded_gather(x.requires_grad_(), plan), x)
        rows = y[: plan.num_rows].detach().requires_grad_()
        yield from backward(gbmoe.padded_scatter(rows, plan, weights.requires_grad_()), rows, weights)
        for p in (None, 0.5, 1, 2, 3, float("inf")):
            routing = route(logits.requires_grad_(), TOP_K, normalize=p)
            yield routing.experts_TK
            yield from backward(routing.weights_TK, logits)
        counts = torch.tensor([5, 0, 12, 3], dtype=torch.int64, device="cpu")
        w1, w2, v1 = (values(EXPERTS, 16, HIDDEN, dtype=torch.bfloat16, seed=seed).requires_grad_() for seed in range(3))
        for activation in ("gelu", F.mish):
            yield from backward(gbmoe.grouped_mlp(x, counts, w1, w2, v1, activation=activation), x, w1, w2, v1)
        a, b = (values(EXPERTS, *shape, dtype=torch.float32, seed=1).requires_grad_() for shape in ((3, HIDDEN), (16, 3)))
        lora = gbmoe.ExpertLora(w1=gbmoe.LoraFactors(a, b, scale=0.3), v1=gbmoe.LoraFactors(a, b))
        yield from backward(gbmoe.grouped_mlp(x, counts, w1, w2, v1, lora=lora), x, a, b)
        for fp8 in RECIPES[1:]:
            yield from backward(gbmoe.grouped_mlp(x, counts, w1, w2, fp8_recipe=fp8), x, w1, w2)

    return run


def products():
    sizes = torch.tensor([5, 0, 16, 3], dtype=torch.int64, device="cpu")

    def run():
        for dtype, engine in itertools.product((torch.bfloat16, torch.float16, torch.float32, torch.float64), ("reference", *RECIPES[1:5])):
            engine = engine if isinstance(engine, str) else engine.engine
            if engine != "reference" and dtype.itemsize > 2:
                continue
            a, b, c = (values(*shape, dtype=dtype, seed=2) for shape in ((TOKENS, HIDDEN), (EXPERTS, HIDDEN, 48), (TOKENS, 16)))
            yield gbmoe.gmm(a, b, sizes, engine=engine)
            yield gbmoe.gmm(a, b.transpose(1, 2).contiguous(), sizes, trans_b=True, engine=engine)
            yield gbmoe.gmm(a, c, sizes, trans_a=True, engine=engine)
        rows, weights = float8.quantize_rows(a), float8.quantize_weights(b, transpose=True)
        yield gbmoe.gmm(rows.values_PK, weights.values_ENK, sizes, trans_b=True, scale_a=rows.scales_PC, scale_b=weights.scales,
                        out_dtype=torch.bfloat16)
        a, b = (t.bfloat16().requires_grad_() for t in (a, b))
        yield from backward(grouped_gemm.gmm(a, b, sizes), a, b)
        yield backend.gmm(a, b, sizes)

    return run


def transformer_engines_permutation():
    x = values(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=1)
    mask = torch.zeros(TOKENS, EXPERTS, dtype=torch.int32, device="cpu").scatter_(1, IDS_TK, 1)
    probs = torch.rand(TOKENS, EXPERTS, generator=exact_inputs.generator("cpu", 2), dtype=torch.float32, device="cpu")

    def run():
        leaf, leaf_probs = x.clone().requires_grad_(), probs.clone().requires_grad_()
        for kind, routing in (("mask", mask), ("index", IDS_TK.int())):
            rows, row_id_map = transformer_engine.moe_permute(leaf, routing, -1, map_type=kind)
            yield from (row_id_map, *backward(rows, leaf))
            merging = leaf_probs if kind == "mask" else leaf_probs[:, :TOP_K]
            yield from backward(transformer_engine.moe_unpermute(rows.detach(), row_id_map, merging, map_type=kind), leaf_probs)
        rows, probs_P, row_id_map, pads, counts = transformer_engine.moe_permute_and_pad_with_probs(
            leaf, leaf_probs, mask, mask.sum(0), 16)
        yield from (row_id_map, pads, counts, *backward(probs_P, leaf_probs))
        yield transformer_engine.moe_unpermute(rows, row_id_map, leaf_probs, pad_offsets=pads)
        splits, order = (torch.tensor(numbers, dtype=torch.int32, device="cpu") for numbers in ([3, 0, 12, 4], [2, 0, 3, 1]))
        yield from backward(transformer_engine.moe_sort_chunks_by_index(leaf, splits, order), leaf)
        rows, row_id_map = grouped_gemm.permute(leaf, IDS_TK.int())
        yield from backward(grouped_gemm.unpermute(rows, row_id_map, leaf_probs[:, :TOP_K]), leaf, leaf_probs)

    return run


def transformer_engines_router():
    logits = values(TOKENS, EXPERTS, dtype=torch.bfloat16, seed=5)

    def run():
        leaf = logits.clone().requires_grad_()
        probs, routing_map = transformer_engine.fused_topk_with_score_function(leaf, TOP_K, False, None, None, 2.5, "sigmoid", None)
        yield from (routing_map, *backward(probs, leaf))
        routing_map, scores = transformer_engine.fused_compute_score_for_moe_aux_loss(leaf, TOP_K, "sigmoid")
        counts = routing_map.sum(0)
        yield from (routing_map, *backward(scores, leaf))
        leaf = scores.detach().requires_grad_()
        yield from backward(transformer_engine.fused_moe_aux_loss(leaf, counts, TOKENS, EXPERTS, TOP_K, 0.1), leaf)

    return run


def megablocks_operators():
    x, ids_R = values(TOKENS, HIDDEN, dtype=torch.bfloat16, seed=1), IDS_TK.flatten().int()
    weights = torch.rand(TOKENS * TOP_K, generator=exact_inputs.generator("cpu", 2), dtype=torch.float32, device="cpu")

    def run():
        leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        bin_ids, indices = megablocks.sort(ids_R, 2)
        counts = megablocks.histogram(ids_R, EXPERTS)
        bins, padded = (megablocks.inclusive_cumsum(t, 0) for t in (counts, megablocks.round_up(counts, 16)))
        yield from (bin_ids, indices, counts, bins, padded, megablocks.exclusive_cumsum(counts, 0))
        yield megablocks.topology(padded, 16, int(padded[-1]) // 16, 3)
        columns = values(1, EXPERTS, dtype=torch.float32, seed=2).requires_grad_()
        yield from backward(megablocks.replicate(columns, bins, TOKENS * TOP_K), columns)
        rows = megablocks.padded_gather(leaf, indices, bin_ids, bins, padded, TOP_K)
        yield from backward(megablocks.padded_scatter(rows, indices, bin_ids, leaf_weights, bins, padded, TOP_K), leaf, leaf_weights)
        rows = megablocks.gather(leaf, indices, bin_ids, bins, TOP_K)
        yield from backward(megablocks.scatter(rows, indices, bin_ids, leaf_weights, bins, TOP_K), leaf, leaf_weights)
        rows = megablocks.binned_gather(leaf, indices, bins, 8, TOP_K)
        yield from backward(megablocks.binned_scatter(rows, indices, leaf_weights, bins, TOP_K), leaf, leaf_weights)

    return run


def decisions():
    rows = torch.randint(100, (4, 4, 3), generator=exact_inputs.generator("cpu", 1), dtype=torch.int64, device="cpu")
    frozen = torch.nn.Parameter(values(3, dtype=torch.bfloat16, seed=1))

    def run():
        yield torch.tensor(fewest_bytes(rows, [1, 3], 64, 1024), dtype=torch.int64, device="cpu")
        for parameters in ([], [frozen]):
            yield training.clip_grad_norm_(parameters, 1.0)
        yield training._norm([], 2.0, None)

    return run


def _in_words(changes: dict) -> str:
    """Without addresses, because every process of pytest-xdist must have the same names."""
    return ", ".join(f"{name} {getattr(value, '__name__', value)}" for name, value in changes.items())


CASES = {f"a layer in {dtype} with {recipe}": functools.partial(layer, dtype, fp8_recipe=recipe)
         for dtype, recipe in [(torch.float32, None), (torch.float16, RECIPES[1]), *((torch.bfloat16, recipe) for recipe in RECIPES)]}
CASES |= {f"a layer with {_in_words(changes)}": functools.partial(layer, **changes) for changes in (
    {"mlp_type": "mlp"}, {"activation_fn": F.mish}, {"moe_jitter_eps": 0.1}, {"uniform_expert_assignment": True},
    {"moe_lbl_in_fp32": True, "moe_zloss_in_fp32": True}, {"shared_expert": True, "shared_expert_hidden_size": 16},
    *({"dtype": dtype, "moe_normalize_expert_weights": p} for p in (0.5, 1, 2, 3, float("inf"))
      for dtype in (torch.bfloat16, torch.float32)))}
CASES |= {case.__name__: case for case in (operators, products, transformer_engines_permutation, transformer_engines_router,
                                           megablocks_operators, decisions)}


# ------------------------------------------------------------------------------------------------------------------ tests


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


DEFAULTS = {"float16": functools.partial(default_dtype, torch.float16), "float64": functools.partial(default_dtype, torch.float64),
            "meta": functools.partial(default_device, "meta"), "with meta": functools.partial(torch.device, "meta")}


def assert_same_bits(results, expected):
    for result, wanted in zip(results, expected, strict=True):
        assert (result is None) == (wanted is None)
        if result is not None:
            assert (result.dtype, result.device, result.shape) == (wanted.dtype, wanted.device, wanted.shape)
            assert torch.equal(*(t.detach().contiguous().view(-1).view(torch.uint8) for t in (result, wanted)))


@pytest.mark.parametrize("defaults", DEFAULTS.values(), ids=DEFAULTS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_defaults_change_no_bit(case, defaults):
    run = case()
    expected = list(run())
    with defaults():
        results = list(run())
    assert_same_bits(results, expected)


@pytest.mark.parametrize("defaults", DEFAULTS.values(), ids=DEFAULTS)
def test_a_layer_is_made_where_its_arguments_say(defaults):
    changes = {"shared_expert": True, "shared_expert_hidden_size": 16, "bias": True, "return_bias": False}
    expected = layer(**changes)()
    with defaults():
        run = layer(**changes)
    assert_same_bits(run(), expected)


# What takes its dtype or its device from torch's defaults, unless they are named.
CREATIONS = {"arange", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm",
             "scalar_tensor", "tensor", "zeros"}


def test_every_creation_names_dtype_and_device():
    """Most run where no test sets defaults: on a GPU, on several ranks, inside an operator, where the default device is not seen."""
    unnamed = []
    for path in sorted(Path(gbmoe.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CREATIONS \
                    and ast.unparse(node.func.value) == "torch":
                named = {keyword.arg for keyword in node.keywords}
                if not named >= {"dtype", "device"} and None not in named:  # None for **
                    unnamed.append(f"{path.name}:{node.lineno}: {ast.unparse(node)}")
    assert not unnamed
