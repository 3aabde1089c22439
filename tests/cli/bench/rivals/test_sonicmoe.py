"""SonicMoE's adapter next to a module of its names: the weights' layouts, the router that is watched, and the gradients."""

import enum
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from gbmoe.cli.bench import rivals
from gbmoe.cli.bench.measurements.layer import LayerMeasurement
from gbmoe.cli.bench.running.burst_timer import QUICK
from gbmoe.cli.bench.running.verify_and_time import Conditions, measure
from gbmoe.testing.moe_shapes import MoeCase

CPU = torch.device("cpu")
CASE = MoeCase("case", 48, 32, 40, 8, 3, "glu")


class ActivationType(enum.Enum):
    SWIGLU = "swiglu"


class TC_Softmax_Topk_Router_Function(torch.autograd.Function):
    """Of logits the softmax of the best K, in float32, and these as int32."""

    @staticmethod
    def forward(ctx, router_logits, E, K, is_softmax_over_topk, norm_topk_probs):
        assert is_softmax_over_topk and not norm_topk_probs and E == router_logits.size(1)
        best, experts = router_logits.float().topk(K)
        scores, experts = best.softmax(-1), experts.int()
        ctx.save_for_backward(scores, experts)
        ctx.like = router_logits
        ctx.mark_non_differentiable(experts)
        return scores, experts

    @staticmethod
    def backward(ctx, grad, _):
        scores, experts = ctx.saved_tensors
        inner = scores * (grad - (grad * scores).sum(-1, keepdim=True))
        return torch.zeros_like(ctx.like).scatter(1, experts.long(), inner.to(ctx.like.dtype)), None, None, None, None


def layer(x, router_w, w1, b1, w2, b2, K, stream_id, activation_type=ActivationType.SWIGLU, is_inference_mode_enabled=False,
          is_softmax_over_topk=True, norm_topk_probs=False, concat_layout=False):
    """What 0.1.2.post1 computes of such arguments; it calls its router by the name in its module."""
    functional = sys.modules["sonicmoe.functional"]
    assert b1 is None and b2 is None and not concat_layout and activation_type is ActivationType.SWIGLU and stream_id == 7
    assert is_inference_mode_enabled != torch.is_grad_enabled()
    first_EFTH, second_EHF = w1.permute(2, 0, 1), w2.permute(2, 0, 1)
    assert first_EFTH.is_contiguous() and second_EHF.is_contiguous() and w1.shape[2] == router_w.size(0)
    logits = F.linear(x, router_w)
    scores, experts = functional.TC_Softmax_Topk_Router_Function.apply(logits, router_w.size(0), K, is_softmax_over_topk, norm_topk_probs)
    out = 0
    for slot in range(K):
        e = experts[:, slot].long()
        h = torch.einsum("th,tfh->tf", x, first_EFTH[e])
        y = torch.einsum("tf,thf->th", F.silu(h[:, ::2]) * h[:, 1::2], second_EHF[e])
        out = out + scores[:, slot, None] * y.float()
    return out.to(x.dtype), logits, None


@pytest.fixture
def sonicmoe(monkeypatch):
    package, functional, enums = (types.ModuleType(name) for name in ("sonicmoe", "sonicmoe.functional", "sonicmoe.enums"))
    functional.TC_Softmax_Topk_Router_Function, functional.moe_TC_softmax_topk_layer = TC_Softmax_Topk_Router_Function, layer
    enums.ActivationType = ActivationType
    package.functional, package.enums = functional, enums
    for module in (package, functional, enums):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr("gbmoe.cli.bench.rivals.sonicmoe.needs_cuda", lambda device: None)
    return functional


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
@pytest.mark.parametrize("computation", ["forward", "forward+backward"])
@pytest.mark.parametrize("experts", [8, 6])
def test_it_gets_gbmoes_weights_and_gives_their_gradients(sonicmoe, routing, computation, experts):
    case = MoeCase("case", 48, 32, 40, experts, 3, "glu")
    row = measure(LayerMeasurement(case, "sonicmoe", None, routing, computation), Conditions(CPU, torch.bfloat16, QUICK))
    assert row["verified"], row["problem"]
    assert sonicmoe.TC_Softmax_Topk_Router_Function is TC_Softmax_Topk_Router_Function, "its router is put back"


def test_halves_that_are_taken_for_each_other_are_found(sonicmoe, monkeypatch):
    monkeypatch.setattr(sonicmoe, "moe_TC_softmax_topk_layer",
                        lambda w1, **others: layer(w1=w1.view(-1, 2, *w1.shape[1:]).flip(1).reshape(w1.shape).permute(2, 0, 1)
                                                   .contiguous().permute(1, 2, 0), **others))
    row = measure(LayerMeasurement(CASE, "sonicmoe", None, "uniform", "forward"), Conditions(CPU, torch.bfloat16, QUICK))
    assert row["outcome"] == "wrong"


def test_its_first_release_is_left_out_by_name(sonicmoe, monkeypatch):
    rival = rivals.load("sonicmoe")
    assert rival.unavailable(CPU) is None
    monkeypatch.setattr(sonicmoe, "moe_TC_softmax_topk_layer", lambda x, router_w, w1, b1, w2, b2, K, stream_id: None)
    assert rival.unavailable(CPU) == ("expected sonic-moe 0.1.2 or newer, whose layer takes concat_layout and is_softmax_over_topk")


@pytest.mark.parametrize("change, words", [(dict(mlp_type="mlp"), "has no plain MLP"), (dict(ffn=44), "multiples of 8, not 32 and 44")])
def test_what_it_is_not_made_for(change, words):
    case = MoeCase(**{**CASE.__dict__, **change})
    assert words in rivals.load("sonicmoe").refuses(case, torch.bfloat16)
