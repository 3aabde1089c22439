"""Arguments of a kind that was right are not looked at again, and those of another kind are."""

import pytest
import torch

from gbmoe import RoutingPlan, WeightLayout, expert_mlp
from gbmoe.ops import expert_arguments


def arguments(tokens=6, hidden=16, ffn=32, experts=4, dtype=torch.float32):
    ids = torch.arange(tokens)[:, None] % experts
    return {"x_TH": torch.randn(tokens, hidden, dtype=dtype), "plan": RoutingPlan.from_experts(ids, experts),
            "w1_EFH": torch.randn(experts, ffn, hidden, dtype=dtype), "w2_EFH": torch.randn(experts, ffn, hidden, dtype=dtype),
            "v1_EFH": torch.randn(experts, ffn, hidden, dtype=dtype), "weights_TK": torch.rand(tokens, 1)}


@pytest.fixture
def asked(monkeypatch):
    """How often arguments are looked at."""
    monkeypatch.setattr(expert_arguments, "_SHAPE_OF_KIND", {})
    calls, check = [], expert_arguments.check_arguments
    monkeypatch.setattr(expert_arguments, "check_arguments", lambda *given: calls.append(given) or check(*given))
    return calls


def test_a_kind_is_looked_at_once(asked):
    for _ in range(3):
        expert_mlp(**arguments())
    assert len(asked) == 1
    expert_mlp(**arguments(tokens=7))
    expert_mlp(**arguments(dtype=torch.bfloat16))
    expert_mlp(**arguments() | {"v1_EFH": None})
    expert_mlp(**arguments() | {"weights_TK": None})
    layout = WeightLayout(up_transposed=True, down_transposed=True)
    square = arguments(hidden=32)
    expert_mlp(**square)
    expert_mlp(**square, layout=layout)  # of the same shapes
    assert len(asked) == 7


@pytest.mark.parametrize("wrong, message", [
    ({"w2_EFH": torch.randn(4, 16, 32)}, r"w2: expected shape \[E,F,H\] == \[4, 32, 16\], got \[4, 16, 32\]"),
    ({"w1_EFH": torch.randn(4, 32, 16, dtype=torch.float64)}, "w1: expected the dtype of x, torch.float32, got torch.float64"),
    ({"x_TH": torch.randn(5, 16)}, "x: expected 6 rows, as in the plan, got 5"),
    ({"weights_TK": torch.rand(6, 2)}, r"weights: expected shape \[6, 1\], one a slot, got \[6, 2\]"),
    ({"layout": "gate_first"}, "layout: expected a gbmoe.WeightLayout, got 'gate_first'"),
    ({"plan": torch.zeros(6, 1)}, "plan: expected a RoutingPlan"),
    ({"x_TH": None}, "x: expected a torch.Tensor, got NoneType")])
def test_another_kind_is_refused_after_a_right_one(asked, wrong, message):
    right = arguments()
    expert_mlp(**right)
    for _ in range(2):  # what was refused once is refused again
        with pytest.raises((TypeError, ValueError), match=message):
            expert_mlp(**right | wrong)
    expert_mlp(**right)
    assert len(expert_arguments._SHAPE_OF_KIND) == 1


def test_autocast_is_of_the_kind(asked):
    mixed = arguments() | {"w1_EFH": torch.randn(4, 32, 16, dtype=torch.bfloat16)}
    with torch.autocast("cpu"):
        expert_mlp(**mixed)
    with pytest.raises(TypeError, match="w1: expected the dtype of x"):
        expert_mlp(**mixed)


def test_many_kinds_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(expert_arguments, "_SHAPE_OF_KIND", {})
    monkeypatch.setattr(expert_arguments, "_MOST_KINDS", 4)
    for tokens in range(1, 12):
        expert_mlp(**arguments(tokens=tokens))
        assert len(expert_arguments._SHAPE_OF_KIND) <= 4
