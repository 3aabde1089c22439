"""What an engine's name stands for is found once for a kind of call, and asked from then on."""

import threading
from types import SimpleNamespace

import pytest
import torch

import gbmoe
from gbmoe import _define_operator, engines
from gbmoe.engines import choice
from gbmoe.engines.base import Engine
from gbmoe.engines.reference import Reference
from gbmoe.engines.resolved import ByKind, Resolved
from gbmoe.layers import Arguments
from gbmoe.ops.plan_sizes import sizes_and_engine
from gbmoe.ops.rows_before_weights import rows_before_weights

CPU = torch.device("cpu")


def layer(device="cpu", **more):
    args = Arguments(hidden_size=8, ffn_hidden_size=16, moe_num_experts=4, moe_top_k=2, mlp_type="glu", bias=False, fp16=False,
                     device=device, **more)
    return gbmoe.dMoE(args)


def counted(monkeypatch, module, name):
    """The calls of a module's function from now on, by their arguments. Callers look up `resolve` in gbmoe.engines, and `_choose` in
    gbmoe.engines.choice."""
    calls, function = [], getattr(module, name)
    monkeypatch.setattr(module, name, lambda *args, **more: calls.append(args) or function(*args, **more))
    return calls


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_layers_step_asked_for_its_engine_in_each_of_its_parts(monkeypatch, device):
    """Forward asked twice, and backward once more. What calls kernels without the dispatcher takes forward's answer along."""
    if device == "cpu":
        monkeypatch.setattr(_define_operator, "_is_unseen", lambda inputs: True)  # as of CUDA tensors that nothing watches
    asked = counted(monkeypatch, engines, "resolve")
    moe, x = layer(device, bf16=True), torch.randn(6, 1, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
    out = moe(x)
    moved = [args[5] for args in asked] == [False, True]  # by an engine that wants its sizes on the host
    assert len(asked) == (2 if moved else 1)
    out.sum().backward()
    assert len(asked) == (2 if moved else 1) and x.grad is not None


def test_through_the_dispatcher_goes_the_name_and_each_kind_is_chosen_once(monkeypatch):
    chosen = counted(monkeypatch, choice, "_choose")
    moe = layer(memory_optimized_mlp=True)
    for _ in range(3):
        moe(torch.randn(6, 1, 8, requires_grad=True)).sum().backward()
    assert len(chosen) == len(set(chosen)) == 4  # the products of hidden by ffn and back, m-grouped and k-grouped


def test_rows_that_are_not_weighed_take_what_was_resolved(monkeypatch):
    monkeypatch.setattr(_define_operator, "_is_unseen", lambda inputs: True)
    asked = counted(monkeypatch, engines, "resolve")
    x, w = torch.randn(5, 8, requires_grad=True), torch.randn(2, 16, 8, requires_grad=True)
    plan = gbmoe.RoutingPlan.from_experts(torch.tensor([[0], [1], [1], [0], [1]]), 2)
    rows_before_weights(x, plan, torch.ones(5, 1), w, w, None, "silu", "auto").sum().backward()
    assert len(asked) == 1 and w.grad is not None


def test_a_watched_call_sees_a_name(monkeypatch):
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.name().startswith("gbmoe::expert_mlp"):
                seen.extend(type(value) for value in args if not isinstance(value, (torch.Tensor, int, float, type(None))))
            return function(*args, **(kwargs or {}))

    moe, x = layer(), torch.randn(6, 1, 8, requires_grad=True)
    with Watch():
        moe(x).sum().backward()
    assert set(seen) == {str}


class Recording(Engine):
    """Computes as the reference does, and writes down for which products."""

    def __init__(self, name, needs_host_sizes=False):
        self.name, self.needs_host_sizes, self.products = name, needs_host_sizes, []

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        self.products.append((trans_a, a.size(1)))
        return engines.ENGINES["reference"].gmm(a, b, sizes, trans_a, trans_b, out, accumulate)


@pytest.mark.parametrize("hidden, ffn", [(8, 16), (16, 8), (8, 8)])
def test_a_layer_whose_products_have_two_engines_asks_for_none_again(monkeypatch, hidden, ffn):
    ours = {False: Recording("rows"), True: Recording("weights", needs_host_sizes=True)}
    monkeypatch.setattr(choice, "_choose", lambda *kind: ours[kind[7]])
    x, w = torch.randn(5, hidden, requires_grad=True), torch.randn(2, ffn, hidden, requires_grad=True)
    plan = gbmoe.RoutingPlan.from_experts(torch.tensor([[0], [1], [1], [0], [1]]), 2)
    resolved = engines.resolve("auto", CPU, torch.float32, plan.num_rows, w.shape, True)
    assert resolved.engine.name == "auto" and resolved.needs_host_sizes and resolved.gathers_before_up(ffn, "silu", 1)
    gbmoe.expert_mlp(x, plan, w, w).sum().backward()
    assert ours[False].products == [(False, hidden), (False, ffn), (False, hidden), (False, ffn)]
    assert ours[True].products == [(True, ffn), (True, ffn)]


def test_each_product_of_a_layer_has_the_engine_that_was_chosen_for_its_shape(monkeypatch):
    """In the order k-grouped or not, then by the length of a's rows."""
    ours = {}
    monkeypatch.setattr(choice, "_choose", lambda *kind: ours.setdefault((kind[7], kind[5]), Recording(str(kind[5]))))
    w = torch.randn(2, 16, 8)
    chosen = engines.resolve("auto", CPU, torch.float32, 4, w.shape, True).engine
    sizes, a = torch.tensor([2, 2]), {8: torch.randn(4, 8), 16: torch.randn(4, 16)}
    for k_grouped, inner in ours:
        chosen.product(a[inner], a[24 - inner] if k_grouped else w if inner == 16 else w.transpose(1, 2), sizes, k_grouped)
    assert {key: engine.products for key, engine in ours.items()} == {key: [key] for key in ours} and len(ours) == 4


def test_on_the_meta_device_no_engine_is_asked(monkeypatch):
    monkeypatch.setattr(engines, "resolve", None)
    plan = gbmoe.RoutingPlan.from_experts(torch.zeros(5, 1, dtype=torch.int64, device="meta"), 2, check="none")
    w = torch.empty(2, 16, 8, device="meta")
    assert gbmoe.expert_mlp(torch.empty(5, 8, device="meta"), plan, w, w, keep_gathered_rows=True).shape == (5, 8)
    assert not Resolved("auto", None).needs_host_sizes and not Resolved("auto", None).gathers_before_up(8, "silu", 1)


@pytest.mark.parametrize("waits, places", [(True, [False, True]), (False, [False])])
def test_sizes_that_move_to_the_host_may_change_the_engine(monkeypatch, waits, places):
    """As in float32: which engine that waits is the best depends on whether the sizes are there. Other engines are asked for once."""
    on_host, elsewhere = Recording("on host", waits), Recording("elsewhere", waits)
    monkeypatch.setattr(choice, "_choose", lambda *kind: on_host if kind[8] else elsewhere)
    asked, device = counted(monkeypatch, engines, "resolve"), torch.device("cuda", 0)
    x_TH = SimpleNamespace(device=device, dtype=torch.float32, is_meta=False)
    there, here = SimpleNamespace(device=device), torch.tensor([2, 2])
    plan = SimpleNamespace(num_rows=4, has_host_sizes=False, padded_counts_E=there, host_sizes=lambda: here)
    sizes_E, resolved = sizes_and_engine(plan, x_TH, (2, 16, 8), "auto")
    assert sizes_E is (here if waits else there) and resolved.engine is (on_host if waits else elsewhere)
    assert [args[5] for args in asked] == places


# ------------------------------------------------------------------------------------------------------------------- table


def test_a_table_keeps_the_kinds_that_came_last():
    table, made = ByKind(most=3), []
    for number in (0, 1, 2, 0, 3, 1, 0):
        assert table.of((number,), lambda n: made.append(n) or f"{n}") == f"{number}"
    assert made == [0, 1, 2, 3, 0] and len(table) == 3
    table.forget()
    assert len(table) == 0 and table.of((3,), lambda n: "again") == "again"


def test_what_was_resolved_while_the_table_was_emptied_is_not_kept():
    table = ByKind()

    def resolve(number):
        table.forget()
        return "of before"

    assert table.of((1,), resolve) == "of before"
    assert table.of((1,), lambda n: "of after") == "of after"


def test_a_failure_is_not_kept_and_hides_nothing():
    def refuse(number):
        raise ValueError("not this")

    table = ByKind()
    with pytest.raises(ValueError, match="not this") as raised:
        table.of((1,), refuse)
    assert raised.value.__context__ is None and len(table) == 0


def test_sizes_of_traces_and_compilers_are_not_kept():
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    table, symbolic = ByKind(), ShapeEnv().create_unbacked_symint()
    assert table.of((torch.tensor(3),), int) == 3 and table.of((symbolic,), lambda size: "traced") == "traced"
    assert len(table) == 0


def test_threads_share_a_table():
    table, wrong = ByKind(most=7), []

    def ask(offset):
        for number in range(2000):
            key = (number * offset) % 11
            if table.of((key,), lambda k: k + 100) != key + 100:
                wrong.append(key)

    threads = [threading.Thread(target=ask, args=(offset,)) for offset in (1, 3, 5, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(table) <= 7


class Wrong(Reference):
    name = "of_a_program"

    def gmm(self, a, b, sizes, trans_a, trans_b, out=None, accumulate=False):
        return super().gmm(a, b, sizes, trans_a, trans_b, out, accumulate) + 1


class Mended(Reference):
    name = "of_a_program"


def test_an_engine_that_was_replaced_under_its_name_went_on_computing(monkeypatch):
    a, b, sizes = torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 4])
    right = gbmoe.gmm(a, b, sizes)
    monkeypatch.setitem(engines.ENGINES, "of_a_program", Wrong())
    assert not torch.equal(gbmoe.gmm(a, b, sizes, engine="of_a_program"), right)
    engines.ENGINES.update(of_a_program=Mended())
    assert torch.equal(gbmoe.gmm(a, b, sizes, engine="of_a_program"), right)
    table = engines.ENGINES
    table |= {"of_a_program": Wrong()}
    assert table is engines.ENGINES and not torch.equal(gbmoe.gmm(a, b, sizes, engine="of_a_program"), right)
    del engines.ENGINES["of_a_program"]
    with pytest.raises(ValueError, match="of_a_program"):
        gbmoe.gmm(a, b, sizes, engine="of_a_program")


@pytest.mark.parametrize("engine, problem", [(Mended(), "an engine whose name is 'other', got 'of_a_program'"), ("reference", "Engine")])
def test_engines_without_the_name_that_they_are_put_in_under_were_taken(engine, problem):
    with pytest.raises((TypeError, ValueError), match=problem):
        engines.ENGINES["other"] = engine
    assert "other" not in engines.ENGINES
