"""The router's table: what is chosen where rows meet, and that every choice is compiled and serves its call."""

import re
from pathlib import Path

import pytest

from gbmoe.tuning import router

CALLS = [(experts, slots) for experts in range(1, 1025) for slots in range(1, min(experts, 32) + 1)]
TABLES = {"forward, 16 bits": (router.forward, False), "forward, float32": (router.forward, True),
          "backward, 16 bits": (router.backward, False), "backward, float32": (router.backward, True)}


def compiled(name):
    """The instances of one table of csrc/router/instances.cuh, as tuples of a RouterConfig."""
    direction, dtype = name.split(", ")
    text = (Path(__file__).resolve().parents[2] / "csrc" / "router" / "instances.cuh").read_text()
    start = f"struct {direction.capitalize()}Instances" + ("<float> {" if dtype == "float32" else " {")
    table = text.split(start)[1].split("};\n};")[0]
    rows = [tuple(map(int, row.split(","))) for row in re.findall(r"\{((?:\s*\d+,){4}\s*\d+)\}", table)]
    assert rows
    return {(lanes, numbers, vector, variant) for lanes, numbers, vector, first, last in rows
            for variant in (0, 1, 2, 4, 8, 16, 32) if first <= variant <= last}


@pytest.mark.parametrize("experts, slots, float32, config", [
    (8, 2, False, (2, 4, 16, 4)), (8, 2, True, (2, 4, 16, 4)), (64, 8, False, (4, 16, 16, 8)), (64, 20, False, (8, 8, 16, 32)),
    (64, 20, True, (4, 16, 16, 32)), (60, 4, False, (4, 16, 4, 4)), (61, 4, False, (8, 8, 1, 4)), (128, 8, True, (4, 32, 16, 8)),
    (128, 17, True, (8, 16, 16, 32)), (100, 8, False, (32, 4, 16, 0)), (256, 8, False, (8, 32, 16, 8)), (256, 8, True, (8, 32, 16, 8)),
    (384, 8, True, (16, 24, 16, 8)), (384, 9, True, (32, 12, 16, 0)), (384, 17, True, (16, 24, 16, 32)), (513, 1, False, (32, 32, 1, 0)),
    (1024, 32, True, (32, 32, 16, 0)),
])
def test_forward(experts, slots, float32, config):
    assert router.forward(experts, slots, float32) == config


@pytest.mark.parametrize("experts, slots, float32, config", [
    (8, 2, False, (8, 2, 1, 1)), (16, 16, True, (8, 2, 1, 2)), (64, 8, False, (8, 8, 16, 1)), (64, 17, False, (32, 2, 1, 1)),
    (128, 6, True, (8, 16, 16, 1)), (128, 7, True, (32, 4, 16, 1)), (256, 8, False, (8, 32, 16, 1)), (256, 8, True, (32, 8, 16, 1)),
    (1000, 9, False, (32, 32, 16, 1)), (1023, 32, True, (32, 32, 1, 1)),
])
def test_backward(experts, slots, float32, config):
    assert router.backward(experts, slots, float32) == config


@pytest.mark.parametrize("name", TABLES)
def test_every_choice_is_compiled_and_every_kernel_is_chosen(name):
    choose, float32 = TABLES[name]
    assert {tuple(choose(*call, float32)) for call in CALLS} == compiled(name)


@pytest.mark.parametrize("name", TABLES)
def test_every_choice_serves_its_call(name):
    """Lanes hold all experts, vectors divide them, and there is a place for each slot."""
    choose, float32 = TABLES[name]
    for experts, slots in CALLS:
        lanes, numbers, longest, variant = choose(experts, slots, float32)
        vector = min(numbers, longest, 4 if float32 else 8)
        places = variant * lanes if choose is router.backward else variant or 32
        assert lanes * numbers >= experts and experts % vector == 0 and slots <= places, (experts, slots)


def test_calls_beyond_the_tables_are_not_served():
    assert all(router.serves(*call) for call in CALLS)
    assert not router.serves(1025, 2) and not router.serves(64, 33) and not router.serves(4, 5)
