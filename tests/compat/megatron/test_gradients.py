"""Gradients of the weights of gbmoe.compat.megatron's experts: in main_grad, deferred, and by autograd."""

import pytest
import torch

from tests.compat import expert_rows
from tests.compat.expert_rows import HIDDEN, ROWS, values
from tests.compat.megatron.parts import EXPERTS, built, main_grads


def steps(module, count=2, then=lambda: None):
    for seed in range(count):
        x = values(ROWS, HIDDEN, dtype=torch.float32, seed=seed).requires_grad_()
        out, _ = module(x, expert_rows.counts(), values(ROWS, dtype=torch.float32, seed=8).abs())
        out.backward(values(ROWS, HIDDEN, dtype=torch.float32, seed=seed + 5))
        then()
        yield x.grad


def expected(megatron, count=2):
    """Gradients of a module without fusion, and of rows."""
    torch.manual_seed(0)
    module = built(megatron)
    rows = list(steps(module, count))
    return {name: p.grad for name, p in module.named_parameters()}, rows, module.state_dict()


def check_gradients(found, wanted, single):
    for name, gradient in found.items():
        one = torch.stack([wanted[f"{name}{e}"] for e in range(EXPERTS)]) if single else wanted[name]
        torch.testing.assert_close(gradient, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("single", [False, True], ids=["weight0", "weight"])
def test_fused_gradients_are_added_to_main_grad(megatron, single):
    wanted, rows, state = expected(megatron)
    module = built(megatron, single=single, gradient_accumulation_fusion=True)
    module.load_state_dict(state)
    main_grads(module)
    for got, row in zip(steps(module), rows):
        torch.testing.assert_close(got, row)
        for parameter in module.parameters():  # what DDP's hook asks, before it drops the gradient
            assert parameter.grad_added_to_main_grad and parameter.grad is not None
            parameter.grad = None
    check_gradients({name: p.main_grad for name, p in module.named_parameters()}, wanted, single)


def test_main_grads_in_reverse_order_got_none_or_others_gradients(megatron):
    """DDP fills its buffers from the last parameter to the first."""
    wanted, _, state = expected(megatron)
    module = built(megatron, gradient_accumulation_fusion=True)
    module.load_state_dict(state)
    main_grads(module, reversed_buffer=True)
    list(steps(module))
    assert all(p.grad_added_to_main_grad for p in module.parameters())
    check_gradients({name: p.main_grad for name, p in module.named_parameters()}, wanted, False)


def test_the_mark_was_set_by_forward_and_kept_after_it_was_reset(megatron):
    module = built(megatron, single=True, gradient_accumulation_fusion=True)
    main_grads(module)
    out, _ = module(torch.zeros(ROWS, HIDDEN), expert_rows.counts(), torch.ones(ROWS))
    assert not any(p.grad_added_to_main_grad for p in module.parameters())
    out.sum().backward()
    assert all(p.grad_added_to_main_grad for p in module.parameters())


@pytest.mark.parametrize("fusion", ["", "in place", "reversed"])
@pytest.mark.parametrize("single", [False, True], ids=["weight0", "weight"])
def test_deferred_gradients_come_with_backward_dw(megatron, single, fusion):
    wanted, rows, state = expected(megatron)
    module = built(megatron, single=single, gradient_accumulation_fusion=bool(fusion), delay_wgrad_compute=True)
    assert all(p.skip_backward_post_hook for p in module.parameters())
    module.load_state_dict(state)
    if fusion:
        main_grads(module, reversed_buffer=fusion == "reversed")
    called = []
    module.linear_fc1.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(1))

    def gradient(parameter):
        return parameter.main_grad if fusion else parameter.grad

    def nothing_yet():
        before.append([None if gradient(p) is None else gradient(p).clone() for p in module.parameters()])

    before = []
    for number, (got, row) in enumerate(zip(steps(module, then=nothing_yet), rows)):
        torch.testing.assert_close(got, row)
        module.backward_dw()
        assert len(called) == number + 1
    assert all(each is None or not bool(each.any()) for each in before[0])
    check_gradients({name: gradient(p) for name, p in module.named_parameters()}, wanted, single)
    module.backward_dw()  # there is nothing left
    check_gradients({name: gradient(p) for name, p in module.named_parameters()}, wanted, single)


def test_a_second_forward_before_backward_dw_was_forgotten(megatron):
    wanted, _, state = expected(megatron)
    module = built(megatron, delay_wgrad_compute=True)
    module.load_state_dict(state)
    calls = [module(values(ROWS, HIDDEN, dtype=torch.float32, seed=seed), expert_rows.counts(),
                    values(ROWS, dtype=torch.float32, seed=8).abs())[0] for seed in range(2)]
    for seed, out in enumerate(calls):
        out.backward(values(ROWS, HIDDEN, dtype=torch.float32, seed=seed + 5))
        module.backward_dw()
    check_gradients({name: p.grad for name, p in module.named_parameters()}, wanted, False)


def test_frozen_experts_have_no_gradients_and_rows_have(megatron):
    for fields in ({}, {"gradient_accumulation_fusion": True}, {"delay_wgrad_compute": True}):
        module = built(megatron, **fields)
        module.linear_fc1.requires_grad_(False)
        if fields.get("gradient_accumulation_fusion"):
            main_grads(module)
        (got,) = steps(module, 1)
        module.backward_dw()
        assert bool(got.any()) and all(p.grad is None for p in module.linear_fc1.parameters())
