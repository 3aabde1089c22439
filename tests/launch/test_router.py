"""Which calls of the router its kernels take."""

import math
from types import SimpleNamespace

import torch

from gbmoe import RouterFunction, extension
from gbmoe.launch import router

DEEPSEEK = RouterFunction("sigmoid", num_groups=8, group_topk=4, normalize=1, epsilon=1e-20, scale=2.5)


def test_which_calls_have_kernels():
    assert router.kernels_take(1024, 32, DEEPSEEK, False) and router.kernels_take(256, 8, RouterFunction("sqrtsoftplus"), False)
    assert not router.kernels_take(1025, 8, DEEPSEEK, False) and not router.kernels_take(256, 33, DEEPSEEK, False)
    assert not router.kernels_take(256, 8, RouterFunction("sigmoid", normalize=2), False)
    assert not router.kernels_take(256, 8, RouterFunction(num_groups=8, group_topk=2, group_best=3), False)
    assert not router.kernels_take(1024, 8, RouterFunction(num_groups=128, group_topk=2), False)
    assert router.kernels_take(1024, 8, RouterFunction(num_groups=64, group_topk=2), False)


def test_which_calls_are_a_softmax_alone():
    some = torch.zeros(1)
    assert router.is_softmax_topk(RouterFunction(normalize=2.0), None, None, None)
    assert router.is_softmax_topk(RouterFunction(pre_softmax=False), None)
    assert not router.is_softmax_topk(RouterFunction(), None, some, None) and not router.is_softmax_topk(RouterFunction("sigmoid"))
    assert not router.is_softmax_topk(RouterFunction(scale=2)) and not router.is_softmax_topk(RouterFunction(num_groups=2))
    assert router.is_softmax_topk(RouterFunction(num_groups=2, group_topk=2))


def test_what_no_kernel_serves_is_computed_in_plain_pytorch(monkeypatch):
    monkeypatch.setattr(extension, "loaded", lambda: True)

    def serves(experts, top_k, p=None, **changes):
        logits = SimpleNamespace(**{"device": torch.device("cuda", 0), "dtype": torch.float32, **changes}, size=lambda _: experts)
        return router._kernels_serve(logits, top_k, RouterFunction(normalize=p), True, torch.float32)

    assert serves(1024, 32) and serves(1, 1, p=2.0)
    assert not serves(1025, 5) and not serves(48, 33) and not serves(48, 5, p=math.inf)
    assert not router._kernels_serve(SimpleNamespace(device=torch.device("cuda", 0), dtype=torch.float32), 5, RouterFunction(), True,
                                     torch.float64)
    assert not serves(48, 5, dtype=torch.float64) and not serves(48, 5, device=torch.device("cpu"))
    monkeypatch.setattr(extension, "loaded", lambda: False)
    assert not serves(48, 5)
