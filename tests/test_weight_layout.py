import itertools
import weakref
from functools import partial

import pytest
import torch

import gbmoe
from gbmoe import WeightLayout, engines
from gbmoe.problem import Problem
from gbmoe.testing import exact_inputs
from gbmoe.weight_layout import MEGABLOCKS, WeightGradients

E, F, H = 3, 24, 16
LAYOUTS = [WeightLayout(*fields) for fields in itertools.product(
    ("separate", "gate_first", "up_first", "interleaved"), (False, True), (False, True))]
ids = [layout.code.replace(" ", "-") for layout in LAYOUTS]


def laid_out(layout, w1_EFH, w2_EFH, v1_EFH):
    """(w1, w2, v1) in this layout, of matrices [E,F,H]; made without the class under test."""
    if layout.gate_up == "gate_first":
        w1, v1 = torch.cat([w1_EFH, v1_EFH], 1), None
    elif layout.gate_up == "up_first":
        w1, v1 = torch.cat([v1_EFH, w1_EFH], 1), None
    elif layout.gate_up == "interleaved":
        w1, v1 = torch.stack([w1_EFH, v1_EFH], 2).flatten(1, 2), None
    else:
        w1, v1 = w1_EFH, v1_EFH
    if layout.up_transposed:
        w1, v1 = w1.transpose(1, 2), None if v1 is None else v1.transpose(1, 2)
    w2 = w2_EFH.transpose(1, 2) if layout.down_transposed else w2_EFH
    return tuple(None if w is None else w.clone(memory_format=torch.contiguous_format) for w in (w1, w2, v1))


@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_matrices_are_views(layout):
    matrices = [torch.randn(E, F, H) for _ in range(3)]
    parameters = laid_out(layout, *matrices)
    views = layout.matrices(*parameters)
    for view, matrix in zip(views, matrices):
        assert torch.equal(view, matrix)
    memories = {p.untyped_storage().data_ptr() for p in parameters if p is not None}
    assert {view.untyped_storage().data_ptr() for view in views} == memories


@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_its_code_is_the_layout(layout):
    assert WeightLayout.of_code(layout.code) == layout


@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
def test_gradients_have_the_layout_of_the_parameters(layout):
    matrices = dict(zip(("w1", "w2", "v1"), (torch.randn(E, F, H) for _ in range(3))))
    parameters = laid_out(layout, *matrices.values())
    gradients = WeightGradients(layout, *parameters)
    for name, matrix in matrices.items():
        gradients[name].copy_(matrix)
    for gradient, parameter in zip(gradients.tensors(0.5), parameters):
        assert (gradient is None) == (parameter is None)
        if parameter is not None:
            assert gradient.is_contiguous() and torch.equal(gradient, parameter * 0.5)


def test_a_gradient_that_nobody_asks_for_is_not_allocated():
    gradients = WeightGradients(MEGABLOCKS, *[torch.empty(E, F, H)] * 3)
    gradients["w2"].zero_()
    assert [gradient is None for gradient in gradients.tensors()] == [True, False, True]


@pytest.mark.parametrize("make, words", [
    (lambda: WeightLayout("halves"), "WeightLayout: gate_up: expected one of separate, gate_first, up_first, interleaved, got 'halves'"),
    (lambda: run(WeightLayout("gate_first"), v1=torch.zeros(E, F, H)), "v1: expected None, because in layout 'gate_first' it is a part"),
    (lambda: run(WeightLayout("gate_first"), w1=torch.zeros(E, 2 * F + 1, H)), "w1: expected an even number of rows, gate and up, got 49"),
    (lambda: run(WeightLayout("interleaved", True), w1=torch.zeros(E, H, 5)), "w1: expected an even number of columns"),
    (lambda: run(WeightLayout("gate_first", down_transposed=True)), r"w2: expected shape \[E,F,H\] == \[3, 24, 16\], got \[3, 16, 24\]"),
    (lambda: run("gate_first"), "layout: expected a gbmoe.WeightLayout, got 'gate_first'"),
])
def test_bad_layouts(make, words):
    with pytest.raises((TypeError, ValueError), match=words):
        make()


def run(layout, w1=None, w2=None, v1=None):
    plan = gbmoe.RoutingPlan.from_experts(torch.zeros(4, 1, dtype=torch.int64), E)
    w1 = torch.zeros(E, 2 * F, H) if w1 is None else w1
    return gbmoe.expert_mlp(torch.zeros(4, H), plan, w1, torch.zeros(E, F, H) if w2 is None else w2, v1, layout=layout)


def clamped(h, g):
    """gpt-oss' gate as its model writes it."""
    h, g = h.clamp(max=7), g.clamp(-7, 7)
    return (g + 1) * (h * torch.sigmoid(1.702 * h))


GATES = {"silu": ("silu", lambda h, g: torch.nn.functional.silu(h) * g),
         "mish": (torch.nn.functional.mish, lambda h, g: torch.nn.functional.mish(h) * g),
         "clamped": (gbmoe.ClampedSilu(1.702, 7, 7, 1), clamped)}
DTYPES = {"float32": (torch.float32, 2e-5), "bfloat16": (torch.bfloat16, 4e-2)}


def experts_in_float64(gate, ids_TK, x, weights, w1, w2, v1):
    x, weights, w1, w2, v1 = leaves = [t.double().detach().requires_grad_() for t in (x, weights, w1, w2, v1)]
    out = torch.zeros_like(x)
    for e in range(w1.size(0)):
        token, slot = (ids_TK == e).nonzero(as_tuple=True)
        y = gate(x[token] @ w1[e].t(), x[token] @ v1[e].t()) @ w2[e]
        out = out.index_add(0, token, y * weights[token, slot, None])
    return out, leaves


@pytest.mark.parametrize("layout", LAYOUTS, ids=ids)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_every_layout(layout, gate, dtype, engine_on):
    """With an expert without rows, slots without an expert, and clamps that are reached."""
    engine, device = engine_on
    activation, of_model = GATES[gate]
    dtype, tolerance = DTYPES[dtype]
    reason = engines.ENGINES[engine].refuses(Problem(device, dtype, 80, E, H, F, False))
    if reason:
        pytest.skip(reason)
    exact = partial(exact_inputs.exact_values, dtype=dtype, device=device)
    x, grad = exact(40, H, seed=1, scale=4), exact(40, H, seed=2)
    ids_TK = torch.randint(-1, E - 1, (40, 2), generator=torch.Generator().manual_seed(3)).to(device)
    weights = exact(40, 2, seed=4)
    matrices = [exact(E, F, H, seed=seed) for seed in (5, 6, 7)]
    plan = gbmoe.RoutingPlan.from_experts(ids_TK, E)

    def run_with(layout, parameters):
        leaves = [t.clone().requires_grad_() for t in (x, weights, *parameters) if t is not None]
        w1, w2, *v1 = leaves[2:]
        out = gbmoe.expert_mlp(leaves[0], plan, w1, w2, *v1, weights_TK=leaves[1], activation=activation, layout=layout, engine=engine)
        return out, *torch.autograd.grad(out, leaves, grad)

    got = run_with(layout, laid_out(layout, *matrices))
    out, leaves = experts_in_float64(of_model, ids_TK, x, weights, *matrices)
    dx, dweights, *of_matrices = torch.autograd.grad(out, leaves, grad.double())
    expected = (out, dx, dweights, *(t for t in laid_out(layout, *of_matrices) if t is not None))
    assert len(got) == len(expected)
    for name, (one, other) in enumerate(zip(got, expected)):
        assert one.shape == other.shape
        other = other.detach()
        error = float((one.detach().double() - other).norm() / other.norm())
        assert error <= tolerance, (name, error)  # of all elements, because a rounded h may cross a clamp
    if device.type == "cpu":  # on a GPU engines may sum in another order
        separate = run_with(MEGABLOCKS, matrices)
        for one, other in zip(got, (*separate[:3], *(t for t in laid_out(layout, *separate[3:]) if t is not None))):
            assert layout.is_paired or torch.equal(one, other)  # of pairs, products have twice as many columns or terms


@pytest.mark.parametrize("layout", [WeightLayout(), WeightLayout("gate_first", down_transposed=True), WeightLayout("interleaved", True)],
                         ids=lambda layout: layout.code)
@pytest.mark.parametrize("tokens, large, again", [(4, True, False), (24, True, True), (40, False, False)])
def test_one_gradient_of_gate_and_up_lay_next_to_w2s_while_both_were_made(monkeypatch, layout, tokens, large, again):
    """Where it is large next to the rows, that of w2 is made last: then dh and dg, and the rows of x, are free again. Before, its own rows
    are free where these would be in use next to most."""
    made, kept, rows_of_up, rows_of_w2 = [], [], [], []

    def down_backward(self, dz, *others):
        rows_of_w2.append(weakref.ref(dz.rows_PH()))
        return down(self, dz, *others)

    def weight_gradient(self, left_PF, rows, sizes_E, out_EFH=None, only=False):
        made.append("w2" if left_PF.size(1) == F and rows.rows_PH().equal(grad_TH[of_row]) else "up")
        if made[-1] == "up":
            rows_of_up.append(weakref.ref(left_PF))
            kept.append(rows_of_w2[-1]() is not None)
        elif large and layout.is_combined:
            assert not any(of() is not None for of in rows_of_up)
        return original(self, left_PF, rows, sizes_E, out_EFH, only)

    engine = type(engines.ENGINES["reference"])
    original, down, down_pairs = engine.weight_gradient, engine.down_backward, engine.down_backward_pairs
    monkeypatch.setattr(engine, "down_backward", down_backward)
    monkeypatch.setattr(engine, "down_backward_pairs", lambda self, dz, *others: (
        rows_of_w2.append(weakref.ref(dz.rows_PH())), down_pairs(self, dz, *others))[1])
    monkeypatch.setattr(engine, "weight_gradient", weight_gradient)
    matrices = [torch.randn(E, F, H).requires_grad_() for _ in range(3)]
    x, grad_TH = torch.randn(tokens, H).requires_grad_(), torch.randn(tokens, H)
    plan = gbmoe.RoutingPlan.from_experts(torch.arange(tokens, dtype=torch.int32).unsqueeze(1) % E, E)
    of_row = plan.slot_of_row_P.long()

    def gradients(layout, w1, w2, v1):
        weights = [None if w is None else w.detach().requires_grad_() for w in (w1, w2, v1)]
        out = gbmoe.expert_mlp(x, plan, *weights, activation="silu", engine="reference", layout=layout)
        return torch.autograd.grad(out, [x, *(w for w in weights if w is not None)], grad_TH)

    got = gradients(layout, *laid_out(layout, *matrices))
    ups = 1 if layout.is_paired else 2
    assert made == (["up"] * ups + ["w2"] if large and layout.is_combined else ["w2"] + ["up"] * ups)
    assert kept == [large and layout.is_combined and not again] * ups
    expected = gradients(WeightLayout(), *matrices)
    for one, other in zip(got, (expected[0], *laid_out(layout, *expected[1:]))):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
