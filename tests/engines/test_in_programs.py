"""An engine in programs does what the engine does, and from the third call of a kind on without its Python."""

import itertools

import pytest
import torch

from gbmoe import programs
from gbmoe._define_operator import is_watched
from gbmoe.engines import in_programs as module
from gbmoe.engines.base import Engine, GatheredRows
from gbmoe.engines.in_programs import InPrograms, in_programs
from gbmoe.slot_map import SlotMap

E, ROWS, H, F = 3, 4, 8, 16


class EqualGroups(Engine):
    """Takes groups of ROWS rows each, so that it reads no sizes."""

    name, decides_by_kind = "equal_groups", True
    calls = 0

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        self.calls += 1
        a = a.view(E, ROWS, -1)
        b = b.view(E, ROWS, -1) if trans_a else b
        product = torch.bmm(a.transpose(1, 2), b) if trans_a else torch.bmm(a, b.transpose(1, 2) if trans_b else b).flatten(0, 1)
        return product if out is None else out.add_(product) if accumulate else out.copy_(product)

    def makes_two_weight_gradients(self, left_PF, rows, sizes_E):
        return True

    def two_weight_gradients(self, left_PF, left2_PF, rows, sizes_E, out_EFH, out2_EFH):
        self.write_gradient(left_PF, rows.rows_PH(), sizes_E, out_EFH)
        self.write_gradient(left2_PF, rows.rows_PH(), sizes_E, out2_EFH)


@pytest.fixture(autouse=True)
def fresh_programs():
    programs.forget_all()
    yield
    programs.forget_all()


def of_a_pass(engine, seed, glu, are_gathered=True):
    """Every result of forward and backward, as gbmoe/ops/expert_forward_backward.py asks for them."""
    draw = torch.Generator().manual_seed(seed)
    x, dz = (torch.randn(E * ROWS, H, generator=draw) for _ in range(2))
    w1, w2, v1 = (torch.randn(E, F, H, generator=draw) for _ in range(3))
    v1, weights = v1 if glu else None, torch.rand(E * ROWS, 1, generator=draw)
    numbers = torch.arange(E * ROWS, dtype=torch.int32)
    sizes, slots = torch.full((E,), ROWS), SlotMap(numbers.view(-1, 1), numbers)
    rows = (lambda t: GatheredRows(None, slots, t)) if are_gathered else (lambda t: GatheredRows(t, slots))
    a, h, g = engine.up(rows(x), w1, v1, sizes, "silu", True)
    y = engine.down(a, w2, sizes)
    wa, dh, dg, dweights, pair = engine.down_backward(rows(dz), w2, sizes, h, g, weights, "silu")
    dx = engine.up_backward(pair[0], w1, pair[1], v1, sizes)
    dw1, dw2, dv1 = (torch.full_like(w1, float("nan")) for _ in range(3))
    engine.weight_gradient(wa, rows(dz), sizes, dw2)
    if glu:
        assert engine.makes_two_weight_gradients(dh, rows(x), sizes)
        engine.two_weight_gradients(dh, dg, rows(x), sizes, dw1, dv1)
    else:
        engine.weight_gradient(dh, rows(x), sizes, dw1)
    return [t for t in (a, h, g, y, wa, dh, dg, dweights, dx, dw1, dw2, dv1 if glu else None) if t is not None]


@pytest.mark.parametrize("are_gathered", [True, False])
@pytest.mark.parametrize("glu", [True, False])
def test_every_call_has_the_results_of_the_engine(glu, are_gathered):
    engine = EqualGroups()
    calls = [0]
    for seed in range(5):
        expected = of_a_pass(EqualGroups(), seed, glu, are_gathered)
        for got, exact in itertools.zip_longest(of_a_pass(InPrograms(engine), seed, glu, are_gathered), expected):
            assert torch.equal(got, exact)
        calls.append(engine.calls)
    of_each = [after - before for before, after in itertools.pairwise(calls)]
    if are_gathered:
        assert of_each[0] > 0 and of_each[2:] == [0, 0, 0]  # the second call is recorded
    else:
        assert of_each[4] > 0  # rows that an engine may gather are not


def test_engines_that_read_numbers_or_are_watched_stay_as_they_are(monkeypatch):
    engine, x = EqualGroups(), torch.zeros(2, 2)
    assert in_programs(engine, x) is engine  # no CUDA
    monkeypatch.setattr(module, "is_unseen", lambda *tensors: True)
    assert isinstance(in_programs(engine, x), InPrograms)
    monkeypatch.setitem(vars(engine), "decides_by_kind", False)
    assert in_programs(engine, x) is engine
    assert InPrograms(engine).name == engine.name


def test_weights_that_take_launches_over_were_given_to_kernels(monkeypatch):
    """A tensor that wraps others has no memory of its own, and its kind is that of one that has."""
    class Wrapper(torch.Tensor):
        pass

    engine, x, w = EqualGroups(), torch.zeros(2, 2), torch.zeros(2, 2, 2)
    monkeypatch.setattr(module, "is_unseen", lambda *tensors: not is_watched(*tensors))  # on any device
    assert isinstance(in_programs(engine, x, w, torch.nn.Parameter(w), None), InPrograms)
    assert in_programs(engine, x, w, w.as_subclass(Wrapper), None) is engine


@pytest.mark.gpu
@pytest.mark.parametrize("glu", [True, False])
def test_hopper_has_the_same_bits(glu):
    from gbmoe import RoutingPlan
    from gbmoe.engines import ENGINES
    draw = torch.Generator("cuda").manual_seed(0)
    engine, tokens, experts, hidden, ffn = ENGINES["hopper"], 300, 4, 128, 192

    def values(*shape):
        return torch.randn(*shape, generator=draw, device="cuda", dtype=torch.bfloat16)

    for _ in range(4):
        plan = RoutingPlan.from_experts(torch.randint(0, experts, (tokens, 2), generator=draw, device="cuda"), experts)
        x, dz, w1, w2, v1 = values(plan.num_rows, hidden), values(plan.num_rows, hidden), *(values(experts, ffn, hidden) for _ in range(3))
        v1, weights, sizes = v1 if glu else None, torch.rand(tokens, 2, device="cuda", generator=draw), plan.padded_counts_E
        results = []
        for one in (engine, InPrograms(engine)):
            a, h, g = one.up(GatheredRows(None, plan.slot_map, x), w1, v1, sizes, "silu", True)
            back = one.down_backward(GatheredRows(None, plan.slot_map, dz), w2, sizes, h, g, weights, "silu")
            dw = torch.full_like(w1, float("nan"))
            one.weight_gradient(back[0], GatheredRows(None, plan.slot_map, dz), sizes, dw)
            results.append([a, h, g, one.down(a, w2, sizes), *back[:4], one.up_backward(back[4][0], w1, back[4][1], v1, sizes), dw])
        rows = int(sizes.sum())
        for one, other in zip(*results):
            assert (one is None and other is None) or torch.equal(one[:rows], other[:rows])
