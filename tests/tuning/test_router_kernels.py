"""The router's table: what is chosen where rows meet, and that every choice is compiled and serves its call."""

import re
from pathlib import Path

import pytest

from gbmoe.tuning import router_kernels

CALLS = [(experts, slots) for experts in range(1, 1025) for slots in range(1, min(experts, 32) + 1)]
TABLES = {"forward, bfloat16": lambda *call: router_kernels.forward(*call, True),
          "forward": lambda *call: router_kernels.forward(*call, False),
          "backward, 16 bits": lambda *call: router_kernels.backward(*call, False),
          "backward, float32": lambda *call: router_kernels.backward(*call, True),
          "any function": router_kernels.any_function}


def compiled(name):
    """The instances of one table of csrc/router/instances.cuh, as tuples of a RouterConfig."""
    text = (Path(__file__).resolve().parents[2] / "csrc" / "router" / "instances.cuh").read_text()
    table = text.split(f"struct {name} {{")[1].split("};\n};")[0]
    rows = [tuple(map(int, row.split(","))) for row in re.findall(r"\{((?:\s*\d+,){4}\s*\d+)\}", table)]
    assert rows
    return {(lanes, numbers, vector, variant) for lanes, numbers, vector, first, last in rows
            for variant in (0, 1, 2, 4, 8, 16, 32) if first <= variant <= last}


@pytest.mark.parametrize("experts, slots, bfloat16, config", [
    (8, 2, True, (2, 4, 8, 4)), (8, 2, False, (2, 4, 4, 4)), (64, 8, True, (4, 16, 8, 8)), (64, 20, True, (32, 8, 1, 0)),
    (64, 20, False, (32, 8, 1, 0)), (60, 4, True, (4, 16, 4, 4)), (61, 4, True, (8, 8, 1, 8)), (128, 8, False, (4, 32, 4, 8)),
    (128, 9, False, (8, 16, 4, 16)),
    (128, 4, True, (4, 32, 8, 4)), (128, 17, False, (32, 8, 1, 0)), (160, 8, True, (4, 40, 8, 8)), (160, 8, False, (8, 20, 4, 8)),
    (192, 8, True, (4, 48, 8, 8)), (256, 8, True, (8, 32, 8, 8)), (256, 8, False, (8, 32, 4, 8)), (256, 17, True, (32, 8, 1, 0)),
    (384, 8, True, (8, 48, 8, 8)), (384, 8, False, (16, 24, 4, 8)), (384, 9, False, (32, 12, 4, 0)), (384, 17, False, (16, 32, 4, 32)),
    (512, 10, True, (16, 32, 8, 16)), (512, 10, False, (32, 16, 4, 0)), (513, 1, True, (32, 32, 1, 0)), (1024, 32, False, (32, 32, 4, 0)),
])
def test_forward(experts, slots, bfloat16, config):
    assert router_kernels.forward(experts, slots, bfloat16) == config


@pytest.mark.parametrize("experts, slots, float32, config", [
    (8, 2, False, (8, 2, 1, 2)), (16, 16, True, (8, 2, 1, 2)), (64, 8, False, (8, 8, 4, 2)), (64, 17, False, (32, 4, 4, 1)),
    (128, 6, True, (8, 16, 4, 2)), (128, 7, True, (32, 4, 4, 1)), (256, 8, False, (8, 32, 4, 2)), (256, 8, True, (32, 8, 4, 1)),
    (1000, 9, False, (32, 32, 4, 1)), (1023, 32, True, (32, 32, 1, 1)),
])
def test_backward(experts, slots, float32, config):
    assert router_kernels.backward(experts, slots, float32) == config


@pytest.mark.parametrize("experts, slots, config", [
    (64, 8, (8, 8, 4, 8)), (61, 8, (8, 8, 1, 8)), (64, 9, (32, 8, 1, 0)), (128, 1, (8, 16, 4, 8)), (256, 8, (8, 32, 4, 8)),
    (384, 8, (16, 32, 4, 8)), (512, 8, (16, 32, 4, 8)), (512, 9, (32, 32, 4, 0)), (1024, 32, (32, 32, 4, 0)), (1001, 2, (32, 32, 1, 0)),
])
def test_any_function(experts, slots, config):
    assert router_kernels.any_function(experts, slots) == config


@pytest.mark.parametrize("experts, config", [(1, (8, 1, 1, 0)), (64, (8, 8, 4, 0)), (61, (8, 8, 1, 0)), (256, (8, 32, 4, 0)),
                                             (264, (16, 20, 4, 0)), (512, (16, 32, 4, 0)), (511, (32, 16, 1, 0)), (1024, (32, 32, 4, 0))])
def test_the_gradient_of_any_function(experts, config):
    assert router_kernels.any_function_backward(experts) == config


def test_the_gradient_of_any_function_has_room_for_all_experts():
    for experts in range(1, 1025):
        lanes, numbers, vector, _ = router_kernels.any_function_backward(experts)
        assert experts <= lanes * numbers and numbers % vector == 0 and experts % vector == 0 and numbers <= 32


def test_every_choice_is_compiled_and_every_kernel_is_chosen():
    chosen = {name: {tuple(choose(*call)) for call in CALLS} for name, choose in TABLES.items()}
    any_type, bfloat16 = (compiled(f"ForwardInstances<{name}>") for name in ("float", "__nv_bfloat16"))
    assert not any_type & bfloat16  # a launch knows by the configuration which of them it is
    assert chosen["forward"] == any_type and bfloat16 <= chosen["forward, bfloat16"] <= bfloat16 | any_type
    assert chosen["backward, 16 bits"] | chosen["backward, float32"] == compiled("BackwardInstances")
    assert chosen["any function"] == compiled("FunctionInstances")


@pytest.mark.parametrize("name", TABLES)
def test_every_choice_serves_its_call(name):
    """Lanes hold all experts, vectors divide them, and there is a place for each slot."""
    for experts, slots in CALLS:
        lanes, numbers, longest, variant = TABLES[name](experts, slots)
        vector = min(numbers, longest)
        places = variant * lanes if name.startswith("backward") else variant or 32
        assert lanes * numbers >= experts and experts % vector == 0 and slots <= places, (experts, slots)


def test_any_norm_has_kernels_with_the_code_of_powers():
    """serves_any_norm in csrc/router/rows.cuh; the launches refuse the others."""
    tables = compiled("ForwardInstances<float>") | compiled("ForwardInstances<__nv_bfloat16>") | compiled("BackwardInstances")
    for experts, slots in CALLS:
        for choose in (router_kernels.forward, router_kernels.backward):
            for of_dtype in (False, True):
                lanes, numbers, vector, variant = config = choose(experts, slots, of_dtype, True)
                assert (lanes == 32 and numbers in (8, 32)) or ((lanes, vector, variant) == (8, 4, 16) and numbers in (16, 32))
                assert experts <= lanes * numbers and experts % min(vector, numbers) == 0
                assert tuple(config) in tables


def test_calls_beyond_the_tables_are_not_served():
    assert all(router_kernels.serves(*call) for call in CALLS)
    assert not router_kernels.serves(1025, 2) and not router_kernels.serves(64, 33) and not router_kernels.serves(4, 5)
