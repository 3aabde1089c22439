"""The least time that a layer could take, by the formulas."""


from gbmoe.cli.bench import roofline
from gbmoe.testing import moe_shapes


def test_limits_are_those_of_the_formulas():
    case = moe_shapes.MoeCase("case", tokens=10, hidden=3, ffn=5, experts=4, top_k=2, mlp_type="glu")
    weights, gather, combine = 4 * 3 * 5 * 3, 3 * (10 + 20), 3 * (20 + 10)
    products = 20 * (3 + 2 * 5 + 5) + 20 * (5 + 3)
    assert roofline.layer_bytes(case, 4, 2) == 2 * (weights + gather + products + combine)
    assert roofline.layer_bytes(case, 1, 2) == 2 * (weights // 4 + gather + products + combine)
    known = roofline.Limits(flops=1000, bytes=10)
    assert known.seconds(5000, 40) == (5, "compute") and known.seconds(5000, 60) == (6, "memory")
    assert known.seconds(None, 60) == (6, "memory") and roofline.Limits().seconds(5000, 60) is None
