"""grouped_gemm's names on gbmoe: products, gradients, results in given memory, permutation, and who finds the package.

Shape suffixes: M rows, E groups, K inner, N columns; for the permutation T tokens, K slots a token, H hidden, P rows.
"""

import inspect
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from gbmoe.compat import grouped_gemm
from gbmoe.compat.grouped_gemm import backend, ops
from gbmoe.testing import accuracy, exact_inputs, moe_shapes
from tests.compat import in_a_fresh_process
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id

INNER, COLUMNS = 24, 40


def by_hand(a, b, sizes, trans_a=False, trans_b=False):
    """One product a group."""
    rows = a.split(sizes)
    if trans_a:
        return torch.stack([left.t() @ right for left, right in zip(rows, b.split(sizes))])
    return torch.cat([left @ (right.t() if trans_b else right) for left, right in zip(rows, b)])


def operands(sizes, trans_a, trans_b, dtype, device):
    rows, groups = sum(sizes), len(sizes)
    shape = (rows, COLUMNS) if trans_a else (groups, COLUMNS, INNER) if trans_b else (groups, INNER, COLUMNS)
    return (exact_inputs.exact_values(rows, INNER, dtype=dtype, device=device, seed=1),
            exact_inputs.exact_values(*shape, dtype=dtype, device=device, seed=2))


def on(place, sizes, device):
    return torch.tensor(sizes, device="cpu" if place == "host" else device)


@pytest.mark.parametrize("sizes", moe_shapes.GROUP_SIZES.values(), ids=moe_shapes.GROUP_SIZES)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("place", ["host", "device"])
def test_gmm_and_its_gradients(device, sizes, trans_b, dtype, place):
    a, b = (t.requires_grad_() for t in operands(sizes, False, trans_b, dtype, device))
    grad = exact_inputs.exact_values(sum(sizes), COLUMNS, dtype=dtype, device=device, seed=3)
    exact_inputs.poison(device)
    out = ops.gmm(a, b, on(place, sizes, device), trans_b)
    results = (out.detach(), *torch.autograd.grad(out, (a, b), grad))

    def reference(dtype):
        a_, b_ = (t.detach().to(dtype).requires_grad_() for t in (a, b))
        out = by_hand(a_, b_, list(sizes), trans_b=trans_b)
        return (out.detach(), *torch.autograd.grad(out, (a_, b_), grad.to(dtype)))

    names = ("out", "grad a", "grad b")
    for what, result, baseline, exact in zip(names, results, reference(dtype), reference(torch.float64)):
        assert_as_accurate_as(result, baseline, exact, what)


@pytest.mark.parametrize("trans_a, trans_b", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (24, 0, 0, 9), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_backend_writes_to_c(device, trans_a, trans_b, sizes, dtype):
    a, b = operands(sizes, trans_a, trans_b, dtype, device)
    expected = by_hand(a.double(), b.double(), list(sizes), trans_a, trans_b)
    baseline = by_hand(a, b, list(sizes), trans_a, trans_b)
    places = [torch.full_like(baseline, float("nan"))]
    # A view between two 16-byte boundaries.
    places.append(torch.full((baseline.numel() + 1,), float("nan"), dtype=dtype, device=device)[1:].view_as(baseline))
    for c in (None, *places):
        out = backend.gmm(a, b, on("host", sizes, device), trans_a, trans_b, c)
        assert c is None or out is c
        assert_as_accurate_as(out, baseline, expected)


def test_backend_is_neither_differentiable_nor_cast(device):
    sizes = (16, 16)
    a, b = (t.requires_grad_() for t in operands(sizes, False, False, torch.float32, device))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        c = torch.empty(32, COLUMNS, device=device, requires_grad=True)
        out = backend.gmm(a, b, on("host", sizes, device), c=c)
        assert ops.gmm(a, b, on("host", sizes, device)).dtype == torch.bfloat16
        assert backend.gmm(a, b, on("host", sizes, device)).dtype == torch.float32
    torch.testing.assert_close(out.detach(), by_hand(a, b, [16, 16]).detach())


@pytest.mark.parametrize("c, words", [
    (torch.empty(32, COLUMNS - 1), r"c: expected shape \[32, 40\], got \[32, 39\]"),
    (torch.empty(COLUMNS, 32).t(), r"c: expected a contiguous tensor, got strides \(1, 32\)"),
    (torch.empty(32, COLUMNS).half(), "c: expected dtype float32, got torch.float16"),
    (torch.empty(32, COLUMNS, device="meta"), "c: expected device cpu, got meta"),
])
def test_backend_refuses_another_c(c, words):
    with pytest.raises((TypeError, ValueError), match="gmm: " + words):
        backend.gmm(*operands((16, 16), False, False, torch.float32, "cpu"), torch.tensor([16, 16]), c=c)


def test_backend_checks_what_grouped_gemm_does_not():
    a, b = operands((16, 16), False, False, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"batch_sizes: expected sum\(batch_sizes\) == a.size\(0\) == 32, got 31"):
        backend.gmm(a, b, torch.tensor([16, 15]), c=torch.empty(32, COLUMNS))
    with pytest.raises(ValueError, match=r"b: expected b.size\(2\) == a.size\(1\) == 24, got 40"):
        backend.gmm(a, b, torch.tensor([16, 16]), trans_b=True)
    with pytest.raises(ValueError, match="trans_a, trans_b: expected at most one of them, got both"):
        backend.gmm(a, a, torch.tensor([16, 16]), trans_a=True, trans_b=True)


# ---------------------------------------------------------------------------------------------------------------- names

# Every public name of grouped_gemm 0.3.0: the parameters of functions with their defaults, None for modules and classes.
NAMES = {
    "ops": None, "ops.backend": None, "ops.torch": None, "ops.gmm": "(a, b, batch_sizes, trans_b=False)",
    "ops.GroupedGemm": None, "ops.GroupedGemm.forward": "(ctx, a, b, batch_sizes, trans_b)",
    "ops.GroupedGemm.backward": "(ctx, grad)",
    "backend": None, "backend.torch": None, "backend.gmm": "(a, b, batch_sizes, trans_a=False, trans_b=False, c=None)",
    "backend.backend": None, "backend.backend.gmm": "(a, b, c, batch_sizes, trans_a, trans_b, /)",  # grouped_gemm_backend
}


@pytest.mark.parametrize("name", NAMES)
def test_every_name_of_grouped_gemm_is_here_with_its_signature(name):
    found = grouped_gemm
    for part in name.split("."):
        found = getattr(found, part)
    if NAMES[name] is None:
        assert isinstance(found, ModuleType) or issubclass(found, torch.autograd.Function)
    else:
        plain = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(found).parameters.values()]
        assert str(inspect.Signature(plain)) == NAMES[name]


def test_the_modules_are_reached_on_every_way():
    assert ops.backend is backend is grouped_gemm.backend


@pytest.mark.parametrize("sizes", [(16, 16, 16, 16), (24, 0, 0, 9)], ids=str)
@pytest.mark.parametrize("trans_b", [False, True])
@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("place", ["host", "device"])
def test_the_autograd_function_is_gmm(device, sizes, trans_b, dtype, place):
    a, b = (t.requires_grad_() for t in operands(sizes, False, trans_b, dtype, device))
    grad = exact_inputs.exact_values(sum(sizes), COLUMNS, dtype=dtype, device=device, seed=3)
    found, expected = (function(a, b, on(place, sizes, device), trans_b) for function in (ops.GroupedGemm.apply, ops.gmm))
    assert torch.equal(found, expected)
    for result, wanted in zip(*(torch.autograd.grad(out, (a, b), grad) for out in (found, expected))):
        assert torch.equal(result, wanted)


def test_the_autograd_function_gives_only_the_gradients_asked_for(device):
    for wanted in (0, 1):
        tensors = operands((16, 16), False, False, torch.float32, device)
        tensors[wanted].requires_grad_()
        ops.GroupedGemm.apply(*tensors, on("host", (16, 16), device), False).sum().backward()
        assert tensors[wanted].grad is not None and tensors[1 - wanted].grad is None


@pytest.mark.parametrize("trans_b", [False, True])
def test_the_autograd_function_is_differentiable_twice(device, trans_b):
    a, b = (t.requires_grad_() for t in operands((3, 0, 2), False, trans_b, torch.float64, device))
    sizes = on("host", (3, 0, 2), device)
    assert torch.autograd.gradgradcheck(lambda a, b: ops.GroupedGemm.apply(a, b, sizes, trans_b), (a, b), fast_mode=True)


def test_the_autograd_function_is_not_cast(device):
    """Neither forward nor a backward that runs under autocast casts: saved operands and gradient have the same dtype."""
    a, b = (t.requires_grad_() for t in operands((16, 16), False, False, torch.float32, device))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = ops.GroupedGemm.apply(a, b, on("host", (16, 16), device), False)
        assert out.dtype == torch.float32
        out.sum().backward()
    torch.testing.assert_close(a.grad, by_hand(torch.ones_like(out), b.detach(), [16, 16], trans_b=True))


def test_a_subclass_of_the_autograd_function_keeps_its_own_backward(device):
    class Scaled(ops.GroupedGemm):
        @staticmethod
        def backward(ctx, grad):
            return ops.GroupedGemm.backward(ctx, 2 * grad)
    a, b = (t.requires_grad_() for t in operands((16, 16), False, False, torch.float32, device))
    sizes = on("host", (16, 16), device)
    scaled, plain = (torch.autograd.grad(cls.apply(a, b, sizes, False).sum(), (a, b)) for cls in (Scaled, ops.GroupedGemm))
    assert all(torch.equal(left, 2 * right) for left, right in zip(scaled, plain))


@pytest.mark.parametrize("place", ["host", "device"])
def test_ops_backend_as_grouped_gemms_own_test_calls_it(device, place):
    """Groups without rows are zeros in the memory of the caller's."""
    a = torch.ones(192, 128, dtype=torch.bfloat16, device=device)
    c = torch.ones(4, 128, 128, dtype=torch.bfloat16, device=device)
    ops.backend.gmm(a, a.clone(), on(place, (0, 128, 0, 64), device), trans_a=True, c=c)
    assert [group.unique().tolist() for group in c] == [[0], [128], [0], [64]]


def test_the_extension_of_grouped_gemm_writes_to_its_third_argument(device):
    a, b = operands((16, 16), False, False, torch.float32, device)
    c = torch.full((32, COLUMNS), float("nan"), device=device)
    assert backend.backend.gmm(a, b, c, on("host", (16, 16), device), False, False) is None
    torch.testing.assert_close(c, by_hand(a, b, [16, 16]))


# ---------------------------------------------------------------------------------------------------------- permutation


@pytest.mark.parametrize("tokens, experts, top_k", [(64, 8, 2), (33, 5, 3), (16, 4, 1), (0, 8, 2)])
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64], ids=dtype_id)
def test_permute_and_unpermute(device, tokens, experts, top_k, ids_dtype):
    x = exact_inputs.exact_values(tokens, 16, dtype=torch.float32, device=device, seed=1).requires_grad_()
    ids = exact_inputs.expert_ids(tokens, experts, top_k, device=device, seed=2)
    probs = exact_inputs.exact_values(tokens, top_k, dtype=torch.float32, device=device, seed=3).requires_grad_()
    order = ids.flatten().argsort(stable=True)
    rows, row_id_map = ops.permute(x, ids.to(ids_dtype))
    assert torch.equal(rows, x[order // top_k])
    assert row_id_map.dtype == torch.int32
    assert torch.equal(row_id_map.view(top_k, tokens).t().reshape(-1).long(), order.argsort())
    grad = exact_inputs.exact_values(*rows.shape, dtype=torch.float32, device=device, seed=4)
    grad_x, = torch.autograd.grad(rows, x, grad)
    torch.testing.assert_close(grad_x, torch.zeros_like(x).index_add(0, order // top_k, grad))

    y = exact_inputs.exact_values(tokens * top_k, 16, dtype=torch.float32, device=device, seed=5).requires_grad_()
    out = ops.unpermute(y, row_id_map, probs)
    expected = (y[order.argsort()].view(tokens, top_k, 16) * probs.unsqueeze(-1)).sum(1)
    torch.testing.assert_close(out, expected)
    grad = torch.ones_like(out)
    torch.testing.assert_close(*(torch.autograd.grad(result, (y, probs), grad) for result in (out, expected)))


def test_permute_one_slot_a_token():
    x, ids = torch.randn(6, 8), torch.tensor([2, 0, 1, 0, 2, 1])
    rows, row_id_map = ops.permute(x, ids)
    assert torch.equal(rows, x[[1, 3, 2, 5, 0, 4]])
    assert torch.equal(ops.unpermute(rows, row_id_map), x)


def test_permute_drops_what_does_not_fit():
    x, ids = torch.randn(3, 8), torch.tensor([[0, 2], [1, 0], [2, 1]])
    rows, row_id_map = ops.permute(x, ids, num_out_tokens=4, max_token_num=100)
    assert torch.equal(rows, x[[0, 1, 1, 2]])
    assert row_id_map.tolist() == [0, 2, -1, -1, 1, 3]
    probs = torch.tensor([[0.5, 7.0], [1.0, 2.0], [7.0, 4.0]])
    torch.testing.assert_close(ops.unpermute(rows, row_id_map, probs), x * torch.tensor([[0.5], [3.0], [4.0]]))


# -------------------------------------------------------------------------------------------------- how callers call it


@pytest.mark.parametrize("place", ["host", "device"])
def test_as_olmo_core_calls_it(device, place):
    """Float32 weights [E*F,H] cast to bfloat16 a call; sizes int64, wherever they are."""
    w1, w2, w3 = (exact_inputs.exact_values(4 * 64, 32, dtype=torch.float32, device=device, seed=seed, scale=0.25)
                  .requires_grad_() for seed in (1, 2, 3))
    x = exact_inputs.exact_values(20, 32, dtype=torch.float32, device=device, seed=4)
    sizes = on(place, (7, 0, 12, 1), device)

    def gmm(x, w, trans_b=False):
        return ops.gmm(x.to(torch.bfloat16), w.view(4, 64, 32).to(torch.bfloat16), sizes, trans_b=trans_b)

    out = gmm(F.silu(gmm(x, w1, trans_b=True)) * gmm(x, w3, trans_b=True), w2)
    out.float().square().sum().backward()
    parts = zip(x.split([7, 0, 12, 1]), *(w.detach().view(4, 64, 32) for w in (w1, w2, w3)))
    expected = torch.cat([(F.silu(rows @ w1.t()) * (rows @ w3.t())) @ w2 for rows, w1, w2, w3 in parts])
    assert accuracy.relative_error(out, expected) < 2e-2
    assert all(w.grad.dtype == torch.float32 and bool(w.grad.isfinite().all()) for w in (w1, w2, w3))


def test_as_nanotron_calls_it(device):
    """permute by int32 ids, two products with sizes moved to the CPU, unpermute by float32 weights."""
    dtype = torch.bfloat16
    x = exact_inputs.exact_values(20, 32, dtype=dtype, device=device, seed=1).requires_grad_()
    gate_up = exact_inputs.exact_values(4, 32, 128, dtype=dtype, device=device, seed=2, scale=0.25).requires_grad_()
    down = exact_inputs.exact_values(4, 64, 32, dtype=dtype, device=device, seed=3, scale=0.25).requires_grad_()
    ids = exact_inputs.expert_ids(20, 4, 2, device=device, seed=4)
    weights = torch.rand(20, 2, generator=exact_inputs.generator(device, 5), device=device, requires_grad=True)
    rows, mapping = ops.permute(x, ids.int())
    sizes = torch.bincount(ids.flatten(), minlength=4).to("cpu")
    gate, up = ops.gmm(rows, gate_up, sizes, trans_b=False).split(64, dim=-1)
    out = ops.unpermute(ops.gmm(F.silu(gate) * up, down, sizes, trans_b=False), mapping, weights)
    out.float().square().sum().backward()

    def expert(e, rows):
        gate, up = (rows @ gate_up[e].double()).split(64, dim=-1)
        return (F.silu(gate) * up) @ down[e].double()

    y_TEH = torch.stack([expert(e, x.double()) for e in range(4)], 1)
    expected = (y_TEH.gather(1, ids.unsqueeze(-1).expand(-1, -1, 32)) * weights.unsqueeze(-1)).sum(1)
    assert accuracy.relative_error(out, expected) < 2e-2
    assert all(t.grad is not None and bool(t.grad.isfinite().all()) for t in (x, gate_up, down, weights))


# ------------------------------------------------------------------------------------------------------------- register


def test_register_where_there_is_none():
    assert in_a_fresh_process("""
        import importlib.util
        import gbmoe.compat.grouped_gemm
        seen["early"] = sys.modules["grouped_gemm"]
        for _ in range(2):
            gbmoe.compat.grouped_gemm.register()
        import grouped_gemm
        import grouped_gemm.ops as ops
        import grouped_gemm_backend
        from grouped_gemm import backend
        from grouped_gemm.ops import permute, unpermute
        seen["modules"] = [m.__name__ for m in (grouped_gemm, ops, backend)]
        seen["same"] = ops is grouped_gemm.ops and backend is grouped_gemm.backend is ops.backend
        seen["extension"] = grouped_gemm_backend is backend.backend
        seen["spec"] = importlib.util.find_spec("grouped_gemm") is not None
    """, hidden=["grouped_gemm", "grouped_gemm_backend"]) == {"early": None, "same": True, "spec": True, "extension": True,
             "modules": [f"gbmoe.compat.grouped_gemm{name}" for name in ("", ".ops", ".backend")]}


@pytest.mark.parametrize("stub", ["types.ModuleType('grouped_gemm')", "types.SimpleNamespace()"])
def test_a_stub_without_a_spec_counts_as_installed(stub):
    assert in_a_fresh_process(f"""
        import types
        stub = sys.modules["grouped_gemm"] = {stub}
        from gbmoe.compat.grouped_gemm import register
        register()
        import grouped_gemm
        seen["stays"] = grouped_gemm is stub
        register(force=True)
        import grouped_gemm
        seen["forced"] = grouped_gemm.__name__
    """) == {"stays": True, "forced": "gbmoe.compat.grouped_gemm"}


def test_an_installed_package_stays_unless_forced(tmp_path):
    package = tmp_path / "grouped_gemm"
    package.mkdir()
    (package / "__init__.py").write_text("from grouped_gemm import backend, ops\n")
    (package / "ops.py").write_text("")
    (package / "backend.py").write_text("")
    assert in_a_fresh_process(f"""
        sys.path.insert(0, {str(tmp_path)!r})
        from gbmoe.compat.grouped_gemm import register
        register()
        from grouped_gemm import ops
        seen["installed"] = ops.__name__
        register()
        register(force=True)
        register(force=True)
        from grouped_gemm import ops
        import grouped_gemm.backend
        seen["forced"] = [ops.__name__, grouped_gemm.backend.__name__]
    """) == {"installed": "grouped_gemm.ops",
             "forced": ["gbmoe.compat.grouped_gemm.ops", "gbmoe.compat.grouped_gemm.backend"]}
