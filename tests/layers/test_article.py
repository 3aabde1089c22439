"""The article's cases: every engine's forward and gradients against float64, measured by torch.bmm's own error.

Scaled down on a CPU, in full on a GPU; the two that need tens of GiB are marked `large`. All values are exact in every dtype,
so one float64 result, computed one expert at a time, serves all of them.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from gbmoe import RoutingPlan, engines
from gbmoe.layers import Arguments
from gbmoe.layers.expert_weights import make_experts
from gbmoe.problem import Problem
from gbmoe.testing import exact_inputs, moe_shapes
from tests.conftest import assert_as_accurate_as, dtype_id

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGE = 4000  # hidden sizes from here on


class Inputs:
    """x, router weights, ids, the incoming gradient and the weights of one case, in float32."""

    def __init__(self, case, device):
        def values(*shape, seed, scale=1.0):
            return exact_inputs.exact_values(*shape, dtype=torch.float32, device=device, seed=seed, scale=scale)
        rows, scale = case.experts * case.ffn, exact_inputs.fan_in_scale(case.hidden)
        self.case, self.device = case, device
        self.ids_TK = exact_inputs.expert_ids(case.tokens, case.experts, case.top_k, device=device, seed=1, skew=0.5)
        self.tensors = {
            "x": values(case.tokens, case.hidden, seed=2), "weights": values(case.tokens, case.top_k, seed=3).abs(),
            "w1": values(rows, case.hidden, seed=4, scale=scale), "w2": values(rows, case.hidden, seed=5, scale=scale),
        }
        self.grad_TH = values(case.tokens, case.hidden, seed=6)


def forward_and_gradients(function, inputs, dtype):
    leaves = {name: t.detach().to(dtype).requires_grad_() for name, t in inputs.tensors.items()}
    out = function(**leaves)
    exact_inputs.poison(inputs.device)
    grads = torch.autograd.grad(out, list(leaves.values()), inputs.grad_TH.to(dtype))
    return {"out": out.detach(), **{f"grad_{name}": grad for name, grad in zip(leaves, grads)}}


def one_expert_at_a_time(inputs, multiply):
    """The layer as a sum over experts, each recomputed in backward, so that one expert's activations are all it holds."""
    case = inputs.case
    routed = [(inputs.ids_TK == e).nonzero(as_tuple=True) for e in range(case.experts)]

    def expert(x, weights, w1_FH, w2_FH, token, slot):
        a = F.gelu(multiply(x[token], w1_FH.t()), approximate="tanh")
        return weights[token, slot, None] * multiply(a, w2_FH)

    def layer(x, weights, w1, w2):
        out = torch.zeros_like(x)
        for (token, slot), w1_FH, w2_FH in zip(routed, w1.split(case.ffn), w2.split(case.ffn)):
            out = out.index_add(0, token, checkpoint(expert, x, weights, w1_FH, w2_FH, token, slot, use_reentrant=False))
        return out
    return layer


def experts_layer(inputs, impl, engine, dtype):
    case = inputs.case
    args = Arguments(hidden_size=case.hidden, ffn_hidden_size=case.ffn, moe_num_experts=case.experts, moe_top_k=case.top_k,
                     mlp_impl=impl, engine=engine, fp16=dtype == torch.float16, bf16=dtype == torch.bfloat16, device="meta")
    module = make_experts(args)
    plan = RoutingPlan.from_experts(inputs.ids_TK, case.experts)

    def layer(x, weights, w1, w2):
        return torch.func.functional_call(module, {"w1": w1, "w2": w2}, (x, plan, weights))
    return layer


def check(case, device, dtypes, bmm_fits=True):
    inputs = Inputs(case, device)
    exact = forward_and_gradients(one_expert_at_a_time(inputs, torch.matmul), inputs, torch.float64)
    keep = "cpu" if case.hidden >= LARGE else device  # where results wait, so that the next layer has the memory
    exact = {name: t.to(keep) for name, t in exact.items()}
    for dtype in dtypes:
        # torch.bmm on all experts at once, or, where that does not fit in memory, on one after the other.
        baseline_layer = experts_layer(inputs, "bmm", "auto", dtype) if bmm_fits else one_expert_at_a_time(
            inputs, lambda a, b: torch.bmm(a[None], b[None])[0])
        baseline = {name: t.to(keep) for name, t in forward_and_gradients(baseline_layer, inputs, dtype).items()}
        for name, engine in engines.ENGINES.items():
            problem = Problem(torch.device(device), dtype, case.slots, case.experts, case.hidden, case.ffn, False)
            if engine.unavailable(problem.device) or engine.refuses(problem):
                continue  # test_engines.py pins which and why
            results = forward_and_gradients(experts_layer(inputs, "gbmoe", name, dtype), inputs, dtype)
            for what in list(results):
                assert_as_accurate_as(results.pop(what), baseline[what].to(device), exact[what].to(device),
                                      f"{case.name} {dtype_id(dtype)} {name} {what}")


@pytest.mark.pairs
@pytest.mark.parametrize("case", moe_shapes.NYU_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_id)
def test_scaled_down(device, case, dtype):
    check(moe_shapes.scaled_down(case), device, [dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("case", [c for c in moe_shapes.NYU_CASES if c.hidden < LARGE], ids=lambda case: case.name)
def test_in_full(case):
    check(case, "cuda", DTYPES)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("case", [c for c in moe_shapes.NYU_CASES if c.hidden >= LARGE], ids=lambda case: case.name)
def test_in_full_large(case):
    torch.cuda.empty_cache()
    check(case, "cuda", DTYPES, bmm_fits=False)
