"""The order in which "auto" tries engines, by problem and device."""

import pytest
import torch
from hypothesis import given, strategies as st

from gbmoe.problem import Problem
from gbmoe.tuning import groups_of_few_rows
from gbmoe.tuning.engine_order import engine_order
from tests.tuning.cards import A100, B200, CARDS, H20, H100, H100_PCIE, H200, L40S, V100, card_id, devices

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
BEFORE_AND_AFTER_HOPPER = [A100, L40S, L40S._replace(capability=(12, 0))]


def problem_of(dtype, rows=131072, **fields):
    return Problem(torch.device("cuda", 0), dtype, rows, 128, 2048, 768, False, **fields)


def test_of_other_devices_is_empty():
    assert engine_order(Problem(torch.device("cpu"), torch.bfloat16, 64, 2, 8, 8, False), None) == ()


@pytest.mark.parametrize("device", BEFORE_AND_AFTER_HOPPER, ids=["8.0", "8.9", "12.0"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [128, 131072, 1 << 22])
def test_where_hopper_does_not_serve_begins_with_tensor_core(device, dtype, rows):
    assert engine_order(problem_of(dtype, rows), device)[:2] == ("hopper", "tensor_core")


@pytest.mark.parametrize("device", [H100, H200, H100_PCIE, H20, B200, B200._replace(capability=(10, 3))],
                         ids=lambda device: f"{device.multiprocessors}, {device.capability}")
@pytest.mark.parametrize("rows", [1024, 131072])
def test_has_torch_before_tensor_core_where_its_kernels_are_for_newer_tensor_cores(device, rows):
    assert engine_order(problem_of(torch.bfloat16, rows), device)[:3] == ("hopper", "torch", "tensor_core")
    assert engine_order(problem_of(torch.float16, rows), device)[:2] == ("hopper", "tensor_core")


@pytest.mark.parametrize("k_grouped", [False, True])  # one engine for all of a layer's products
@pytest.mark.parametrize("rows, order", [(16, ("hopper", "tensor_core", "torch")), (17, ("hopper", "torch", "tensor_core"))])
def test_on_data_centre_blackwell_keeps_the_kernels_for_few_rows(rows, order, k_grouped):
    problem = Problem(torch.device("cuda", 0), torch.bfloat16, rows, 8, 4096, 4096, k_grouped)
    assert engine_order(problem, B200)[:3] == order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_hopper_compared_the_number_of_rows_for_nothing(monkeypatch, dtype):
    """torch.compile then makes a graph for each answer."""
    monkeypatch.setattr(groups_of_few_rows, "few_rows", lambda rows, groups: pytest.fail("asked"))
    for rows in (1, 1 << 20):
        assert engine_order(problem_of(dtype, rows), H200)[0] == "hopper"


def test_on_data_centre_blackwell_takes_the_loop_where_it_does_not_wait():
    for rows, order in ((1 << 19, ("hopper", "cublas_loop", "tensor_core")), (128, ("hopper", "tensor_core", "cublas_grouped"))):
        assert engine_order(problem_of(torch.float16, rows, sizes_on_host=True), B200) == order


def test_in_float32_begins_with_the_loop_where_it_does_not_wait():
    assert engine_order(problem_of(torch.float32, sizes_on_host=True), H200) == ("cublas_loop", "tensor_core")


@pytest.mark.parametrize("device", [None, *CARDS], ids=card_id)
def test_of_large_groups_on_the_host_begins_with_the_loop(device):
    assert engine_order(problem_of(torch.bfloat16, 1 << 26, sizes_on_host=True), device)[0] == "cublas_loop"


@pytest.mark.parametrize("device", [None, H100, H200], ids=card_id)
@pytest.mark.parametrize("flops, k_grouped, first", [
    (4e11, False, "cublas_loop"), (3.9e11, False, "hopper"), (7e11, True, "cublas_loop"), (6.9e11, True, "hopper")])
def test_how_large_a_group_is_for_the_loop_where_that_was_measured(device, flops, k_grouped, first):
    problem = Problem(torch.device("cuda", 0), torch.bfloat16, round(flops / (2 * 1000 * 1000)), 1, 1000, 1000, k_grouped, True)
    assert engine_order(problem, device)[0] == first


@pytest.mark.parametrize("device", [None, *CARDS], ids=card_id)
def test_a_group_is_large_where_its_product_takes_as_long(device):
    """What takes it as many cycles as 2.5e9 FLOP take an H200."""
    scale = 1.0 if device is None else device.flops(1.0)
    for share, order in ((1.02, ("cublas_loop", "tensor_core")), (0.98, ("tensor_core", "cublas_grouped"))):
        rows = round(2.5e9 * scale * share / (2 * 1000 * 1000))
        problem = Problem(torch.device("cuda", 0), torch.float32, rows, 1, 1000, 1000, False, True)
        assert [name for name in engine_order(problem, device) if name != "hopper"] == list(order)


@given(device=st.one_of(st.none(), devices), dtype=st.sampled_from(DTYPES), rows=st.integers(0, 1 << 24),
       groups=st.integers(0, 2048), inner=st.integers(1, 1 << 15), columns=st.integers(1, 1 << 15), k_grouped=st.booleans(),
       on_host=st.booleans())
def test_there_is_an_engine_for_every_problem(device, dtype, rows, groups, inner, columns, k_grouped, on_host):
    order = engine_order(Problem(torch.device("cuda", 0), dtype, rows, groups, inner, columns, k_grouped, on_host), device)
    assert order and len(set(order)) == len(order)
    assert set(order) <= {"hopper", "tensor_core", "torch", "cublas_loop", "cublas_grouped"}
    assert "cublas_loop" in order or "cublas_grouped" in order


def test_a_graph_without_a_gpu_has_the_order_of_no_generation():
    as_fast_as_fitted = V100._replace(multiprocessors=528)
    assert engine_order(problem_of(torch.bfloat16), None) == engine_order(problem_of(torch.bfloat16), as_fast_as_fitted)
