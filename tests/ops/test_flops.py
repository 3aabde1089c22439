"""torch.utils.flop_counter sees every product of the experts, and counts as it counts torch's own."""

import subprocess

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import gbmoe
from gbmoe import RoutingPlan
from gbmoe.layers import Arguments
from gbmoe.testing import exact_inputs
from tests.forked_python import python

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 10, 32, 48, 4, 2
PRODUCT = 2 * TOKENS * TOP_K * HIDDEN * FFN  # between all slots and a weight


def counted(function):
    with FlopCounterMode(display=False) as mode:
        function()
    return mode.get_total_flops()


@pytest.mark.parametrize("mlp_type", ["mlp", "glu"])
@pytest.mark.parametrize("activation", [F.silu, torch.tanh], ids=["fused", "composed"])
def test_a_layer_costs_what_a_loop_over_the_experts_does(device, mlp_type, activation):
    totals = []
    for impl in ("gbmoe", "reference"):
        layer = gbmoe.dMoE(Arguments(
            hidden_size=HIDDEN, ffn_hidden_size=FFN, moe_num_experts=EXPERTS, moe_top_k=TOP_K, fp16=False, device=device,
            mlp_type=mlp_type, activation_fn=activation, mlp_impl=impl, bias=False))
        x = torch.randn(TOKENS, 1, HIDDEN, device=device, requires_grad=True)
        totals.append((counted(lambda: layer(x)), counted(lambda: layer(x).sum().backward())))
    products = 2 if mlp_type == "mlp" else 3
    router = 2 * TOKENS * HIDDEN * EXPERTS
    assert totals[0] == totals[1] == (products * PRODUCT + router, 3 * (products * PRODUCT + router))


@pytest.mark.parametrize("frozen, products", [((), 6), (("x",), 4), (("w1",), 5), (("w2",), 5), (("v1",), 5),
                                              (("w1", "w2", "v1"), 3)])
def test_gradients_that_nobody_wants_cost_nothing(device, frozen, products):
    shapes = dict(x=(TOKENS, HIDDEN), w1=(EXPERTS, FFN, HIDDEN), w2=(EXPERTS, FFN, HIDDEN), v1=(EXPERTS, FFN, HIDDEN))
    tensors = {name: torch.randn(*shape, device=device, requires_grad=name not in frozen) for name, shape in shapes.items()}
    # Nor does padding cost anything.
    plan = RoutingPlan.from_experts(exact_inputs.expert_ids(TOKENS, EXPERTS, TOP_K, device=device, seed=0), EXPERTS, align=16)
    out = gbmoe.expert_mlp(tensors["x"], plan, tensors["w1"], tensors["w2"], tensors["v1"])
    assert counted(lambda: out.sum().backward()) == products * PRODUCT


def test_rows_in_expert_order(device):
    x, w1, w2, v1 = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((20, HIDDEN), *[(EXPERTS, FFN, HIDDEN)] * 3))
    counts = torch.tensor([3, 0, 10, 7], device=device)
    assert counted(lambda: gbmoe.grouped_mlp(x, counts, w1, w2, v1).sum().backward()) == 9 * PRODUCT


@pytest.mark.parametrize("trans_a, trans_b", [(False, False), (False, True), (True, False)])
def test_gmm(device, trans_a, trans_b):
    rows, inner, columns = 12, 8, 24
    a = torch.randn(rows, inner, device=device, requires_grad=True)
    b_shape = (rows, columns) if trans_a else (2, columns, inner) if trans_b else (2, inner, columns)
    b = torch.randn(*b_shape, device=device, requires_grad=True)
    sizes = torch.tensor([5, 7], device=device)
    forward = 2 * rows * inner * columns
    assert counted(lambda: gbmoe.gmm(a, b, sizes, trans_a, trans_b)) == forward
    assert counted(lambda: gbmoe.gmm(a, b, sizes, trans_a, trans_b).sum().backward()) == 3 * forward


def test_gmm_of_float8():
    a, b = gbmoe.float8.quantize_rows(torch.randn(6, HIDDEN)), gbmoe.float8.quantize_weights(torch.randn(2, FFN, HIDDEN))
    sizes = torch.tensor([4, 2])
    product = counted(lambda: gbmoe.gmm(a.values_PK, b.values_ENK, sizes, trans_b=True, scale_a=a.scales_PC, scale_b=b.scales))
    assert product == 2 * 6 * HIDDEN * FFN


COUNTING = """
import torch
{imports}
x, w = torch.randn(6, 8), torch.randn(2, 8, 4)
{before}
with FlopCounterMode(display=False) as counter:
    {inside}
    gbmoe.gmm(x, w, torch.tensor([2, 4]))
print(counter.get_total_flops() == 2 * 6 * 8 * 4)
"""
COUNTER = "from torch.utils.flop_counter import FlopCounterMode"


def printed(program):
    done = subprocess.run([python("torch"), "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("imports, before, inside", [
    (f"import gbmoe; {COUNTER}", "", ""), (f"{COUNTER}; import gbmoe", "", ""), (COUNTER, "", "import gbmoe"),
    pytest.param(f"import gbmoe; gbmoe.gmm(torch.ones(2, 2), torch.ones(1, 2, 2), torch.tensor([2])); {COUNTER}", "", "",
                 marks=pytest.mark.slow),
    pytest.param(f"import gbmoe; {COUNTER}", "gbmoe.ops.flops.register(); gbmoe.ops.flops.register()", "", marks=pytest.mark.slow),
], ids=["gbmoe first", "the counter first", "while counting", "the counter after a call", "registered twice"])
def test_whoever_is_imported_first(imports, before, inside):
    assert printed(COUNTING.format(imports=imports, before=before, inside=inside)) == ["True"]


def test_the_import_registers_nothing_and_register_all():
    assert printed("""
import torch
from torch.utils.flop_counter import flop_registry
import gbmoe

operators = ("gmm", "gmm_by_host", "scaled_gmm", "router_logits", "expert_mlp", "expert_mlp_backward", "expert_mlp_backward_by_host")
for _ in range(2):
    print([getattr(torch.ops.gbmoe, name) in flop_registry for name in operators].count(True))
    gbmoe.ops.flops.register()
""") == ["0", "7"]


def test_a_formula_of_the_callers_own_stays():
    x, w, sizes = torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 4])
    with FlopCounterMode(display=False, custom_mapping={torch.ops.gbmoe.gmm: lambda *_, **__: 7}) as mode:
        gbmoe.gmm(x, w, sizes)
    assert mode.get_total_flops() == 7


def test_what_a_compiler_estimates_has_the_formulas():
    # The memory budget's partitioner and inductor read torch's registry, and call operators without gbmoe's functions.
    assert printed("""
import torch
import gbmoe

seen = []

def backend(graph, inputs):
    from torch.utils.flop_counter import FlopCounterMode
    with FlopCounterMode(display=False) as counter:
        graph(*inputs)
    seen.append(counter.get_total_flops())
    return graph

call = torch.compile(lambda x, w, sizes: gbmoe.gmm(x, w, sizes), backend=backend, fullgraph=True)
call(torch.randn(6, 8), torch.randn(2, 8, 4), torch.tensor([2, 4]))
print(seen == [2 * 6 * 8 * 4])
""") == ["True"]
