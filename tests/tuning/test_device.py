"""What choices know of a GPU, and how what was fitted on one is scaled to another."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st

import gbmoe
from gbmoe.tuning import device as module
from gbmoe.tuning.device import FITTED_ON, Device
from tests.tuning.cards import A100, B200, CARDS, H20, H100, H100_PCIE, H200, L40S, MIB, V100, card_id, devices, multiprocessors


@pytest.fixture
def two_gpus(monkeypatch):
    """An H100 PCIe, which is the current device, and an A100; the list holds which were asked about."""
    asked = []

    def properties(device):
        asked.append(device.index)
        found = (H100_PCIE, A100)[device.index]
        return SimpleNamespace(multi_processor_count=found.multiprocessors, L2_cache_size=found.l2_bytes,
                               major=found.capability[0], minor=found.capability[1])

    module._found.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    yield asked
    module._found.cache_clear()


def test_each_gpu_is_asked_once(two_gpus):
    for _ in range(2):
        assert Device.of(torch.device("cuda", 0)) == Device.of(torch.device("cuda")) == H100_PCIE
        assert Device.of(torch.device("cuda", 1)) == A100
    assert two_gpus == [0, 1]


def test_cuda_without_an_index_is_the_current_device_of_each_call(monkeypatch, two_gpus):
    assert Device.of(torch.device("cuda")) == H100_PCIE
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert Device.of(torch.device("cuda")) == A100


@pytest.mark.parametrize("name", ["cpu", "meta"])
def test_a_device_without_kernels_counts_as_the_one_that_was_measured(name):
    assert Device.of(torch.device(name)) == FITTED_ON


@pytest.mark.gpu
def test_what_torch_says_of_a_gpu():
    found = Device.of(torch.device("cuda"))
    assert 1 <= found.multiprocessors <= 1024 and 1 * MIB <= found.l2_bytes < 1024 * MIB
    assert found.capability == torch.cuda.get_device_capability()


@pytest.mark.parametrize("device", [H100, H200], ids=card_id)
@given(number=st.integers(1, 1 << 40), panel=st.integers(1, 64))
def test_what_was_fitted_stays_what_it_is_where_it_was_fitted(device, number, panel):
    assert device.tiles(number) == number and device.flops(float(number)) == number and device.panel(panel) == panel
    assert device.l2_power_of_two == 32 * MIB


@pytest.mark.parametrize("device, tiles, flops, panel, l2", [
    (H100_PCIE, 221.1, 0.864, 15, 32), (H20, 151.3, 0.591, 12, 32), (A100, 209.5, 0.409, 14, 32), (L40S, 275.4, 0.269, 17, 64),
    (V100, 155.2, 0.152, 12, 4), (B200, 287.0, 2.242, 17, 64)], ids=card_id)
def test_other_cards(device, tiles, flops, panel, l2):
    """256 tiles, a FLOP, panels of 16, and MiB."""
    assert device.tiles(256) == pytest.approx(tiles, abs=0.1) and device.flops(1) == pytest.approx(flops, abs=1e-3)
    assert device.panel(16) == panel and device.l2_power_of_two == l2 * MIB


@given(device=devices, more=multiprocessors, number=st.integers(1, 1 << 20))
def test_what_scales_never_falls_as_multiprocessors_are_added(device, more, number):
    larger = device._replace(multiprocessors=max(device.multiprocessors, more))
    assert larger.tiles(number) >= device.tiles(number) and larger.flops(number) >= device.flops(number)
    assert larger.panel(number) >= device.panel(number) >= 1
    assert device._replace(l2_bytes=2 * device.l2_bytes).l2_power_of_two == 2 * device.l2_power_of_two <= 2 * device.l2_bytes


@pytest.mark.parametrize("found, like", [((8, 8), (8, 7)), ((10, 3), (10, 0)), ((12, 1), (12, 0)), ((13, 0), (12, 0)),
                                         ((6, 1), (7, 0))])
def test_an_unknown_compute_capability_counts_as_the_last_one_before_it(found, like):
    assert Device(100, 40 * MIB, found).flops(1.0) == Device(100, 40 * MIB, like).flops(1.0)


def test_no_rule_names_a_number_of_multiprocessors_or_the_l2_of_one_card():
    """They did: an H200's 132 stood in rules that every GPU was given. Constants of waves go through Device, which has the one
    card that they were fitted on."""
    of_cards = {number for card in CARDS for number in (card.multiprocessors, card.l2_bytes)} - {160}  # also a number of experts
    package = Path(gbmoe.__file__).parent
    rooms = [package / room for room in ("tuning", "engines", "kernels", "ops")]
    found = {}
    for path in (package / "plan.py", *(path for room in rooms for path in room.rglob("*.py"))):
        numbers = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        found[str(path.relative_to(package))] = of_cards.intersection(number for number in numbers if isinstance(number, int))
    assert found.pop("tuning/device.py") == {FITTED_ON.multiprocessors}
    assert not any(found.values()), found
