"""Fixtures and the one measure of accuracy that every test uses."""

import os

import pytest
import torch

import gbmoe
from gbmoe import cases, engines

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def dtype_id(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def pytest_configure(config):
    # What a GPU machine promises must not turn into a green run on a CPU.
    if os.environ.get("GBMOE_TEST_REQUIRE_CUDA") == "1" and not torch.cuda.is_available():
        raise pytest.UsageError("GBMOE_TEST_REQUIRE_CUDA=1, but torch sees no CUDA device")


def pytest_collection_modifyitems(config, items):
    """Deselect, visibly counted, what needs a GPU where there is none, and `large` tests unless -m asks for them."""
    unwanted = set()
    if not torch.cuda.is_available():
        unwanted.add("gpu")
    if "large" not in (config.option.markexpr or ""):
        unwanted.add("large")
    gone = [item for item in items if any(item.get_closest_marker(name) for name in unwanted)]
    if gone:
        config.hook.pytest_deselected(items=gone)
        items[:] = [item for item in items if item not in set(gone)]


@pytest.fixture(autouse=True)
def fresh_losses():
    """No test finds what the layers of another have kept."""
    gbmoe.clear_load_balancing_loss()
    gbmoe.clear_router_zloss()
    yield
    gbmoe.clear_load_balancing_loss()
    gbmoe.clear_router_zloss()


@pytest.fixture(autouse=True)
def fresh_choices():
    """No test gets an engine that was chosen under another's patches."""
    engines.forget()
    yield
    engines.forget()


@pytest.fixture(params=DEVICES)
def device(request):
    """Each device here, its free memory full of NaN."""
    cases.poison(request.param)
    return torch.device(request.param)


@pytest.fixture(params=[("cpu", "reference"), *(pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in engines.ENGINES)],
                ids="-".join)
def engine_on(request):
    """(engine name, device) for every engine on every device it is made for, free memory full of NaN."""
    place, name = request.param
    cases.poison(place)
    reason = engines.ENGINES[name].unavailable(torch.device(place))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return name, torch.device(place)


def assert_as_accurate_as(result, baseline, reference, what="result", factor=2.0):
    """The error of `result` against the float64 `reference` is at most `factor` times the baseline's in the same dtype.

    The error is ||result - reference|| / ||reference||; the worst element, a noisier measure, may be twice as far again.
    Where the baseline is exact the last bit may differ; so may it in float32, where sums of a few terms leave errors below it
    to luck; and in float64, where the reference is no better than the result, a few last bits may.
    """
    assert result.dtype == baseline.dtype, f"{what}: dtype {result.dtype}, expected {baseline.dtype}"
    assert result.shape == reference.shape, f"{what}: shape {list(result.shape)}, expected {list(reference.shape)}"
    assert torch.isfinite(result).all() or not torch.isfinite(baseline).all(), f"{what}: holds NaN or Inf"
    last_bits = (32 if result.dtype == torch.float64 else 1) * torch.finfo(result.dtype).eps
    error, allowed = cases.relative_error(result, reference), factor * cases.relative_error(baseline, reference)
    if not allowed or result.dtype in (torch.float32, torch.float64):
        allowed = max(allowed, last_bits)
    assert error <= allowed, f"{what}: relative error {error:.3e}, allowed {allowed:.3e}"
    if result.numel():
        worst, allowed = (float((t.double() - reference.double()).abs().max()) for t in (result, baseline))
        allowed *= 2 * factor
        if not allowed or result.dtype in (torch.float32, torch.float64):
            allowed = max(allowed, last_bits * float(reference.abs().max()))
        assert worst <= allowed, f"{what}: largest error {worst:.3e}, allowed {allowed:.3e}"
