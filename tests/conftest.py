"""Fixtures, and the one measure of accuracy that all tests use."""

import collections
import gc
import itertools
import os

import pytest
import torch
import torch.distributed as dist

import gbmoe
from gbmoe import engines
from gbmoe.launch import alignment, quantize
from gbmoe.testing import accuracy, exact_inputs
from tests import forked_python

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
GPU_BYTES_KEPT = 4 << 30  # of a process between tests, which scripts/test_processes.py counts on


def dtype_id(value):
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else None


def copied_weights(monkeypatch):
    """A list to which the shapes of all weights go that an engine copies from now on."""
    copied = []

    def aligned(tensor):
        if tensor.dim() == 3 and not (tensor.is_contiguous() and tensor.data_ptr() % 16 == 0):
            copied.append(tuple(tensor.shape))
        return original(tensor)

    original = alignment.aligned
    for module in (alignment, engines.base, engines.own_kernels, engines.hopper, quantize):
        monkeypatch.setattr(module, "aligned", aligned)
    return copied


def pytest_configure(config):
    # A run that was meant for a GPU must not pass on a CPU by deselecting its tests.
    if os.environ.get("GBMOE_TEST_REQUIRE_CUDA") == "1" and not torch.cuda.is_available():
        raise pytest.UsageError("GBMOE_TEST_REQUIRE_CUDA=1, but torch sees no CUDA device")
    if config.getoption("numprocesses", None):  # this process starts others, and runs no tests
        forked_python.share()


def pytest_collection_modifyitems(config, items):
    """Deselect tests that need a GPU where there is none, `large` tests unless -m asks for them, and of those marked `pairs` what `pairs`
    leaves out; pytest reports how many."""
    unwanted = set()
    if not torch.cuda.is_available():
        unwanted.add("gpu")
    if "large" not in (config.option.markexpr or ""):
        unwanted.add("large")
    gone = {item for item in items if any(item.get_closest_marker(name) for name in unwanted)}
    of_function = collections.defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairs") and not item.get_closest_marker("gpu"):
            of_function[item.nodeid.partition("[")[0]].append(item)
    for each in of_function.values():
        wanted = pairs([tuple((name, repr(value)) for name, value in item.callspec.params.items()) for item in each])
        gone |= {item for number, item in enumerate(each) if number not in wanted}
    if gone:
        config.hook.pytest_deselected(items=[item for item in items if item in gone])
        items[:] = [item for item in items if item not in gone]


def pairs(combinations: list[tuple]) -> set[int]:
    """Numbers of combinations of values, few in which every two values that occur together in any do so."""
    left = [set(itertools.combinations(values, 2)) | set(values) for values in combinations]
    chosen = set()
    while most := max(map(len, left)):
        best = next(number for number, missing in enumerate(left) if len(missing) == most)
        chosen.add(best)
        covered = set(left[best])
        for missing in left:
            missing -= covered
    return chosen


def pytest_collection_finish(session):
    """In a process of pytest-xdist, those of a group must be known by it, or several processes start what the group shares."""
    if getattr(session.config.option, "loadgroup", False):
        apart = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group") and "@" not in item.nodeid]
        if apart:
            raise pytest.UsageError(f"pytest {pytest.__version__} and this pytest-xdist would not keep groups together: {apart[0]}")
    # What is there now stays: modules and tests are so many objects that to look through them again and again took a fifth of the time.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def fresh_losses():
    """Clear what layers keep for the losses, so that no test finds what the layers of another one have kept."""
    gbmoe.clear_load_balancing_loss()
    gbmoe.clear_router_zloss()
    yield
    gbmoe.clear_load_balancing_loss()
    gbmoe.clear_router_zloss()


@pytest.fixture(autouse=True)
def fresh_choices():
    """Forget the choices of engines, so that no test gets one that was made under another test's patches."""
    engines.forget()
    yield
    engines.forget()


@pytest.fixture
def float32_products():
    """A function that sets in which precision products of float32 are computed, "tf32" or "ieee", for this test alone. pytest's
    monkeypatch, from 9.2 on, deletes an attribute that is found by __getattr__, as torch.backends' are, rather than set it back."""
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    yield lambda precision: setattr(matmul, "fp32_precision", precision)
    matmul.fp32_precision = before


@pytest.fixture
def group_of_one():
    """This process is a default group by itself."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def little_gpu_memory_kept():
    """Give the GPU's memory back after a test that took much of it: torch keeps it, and then the processes next to this one find none."""
    yield
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > GPU_BYTES_KEPT:
        torch.cuda.empty_cache()


@pytest.fixture(params=DEVICES)
def device(request):
    """Each device of this machine, with its free memory full of NaN."""
    exact_inputs.poison(request.param)
    return torch.device(request.param)


@pytest.fixture(params=[("cpu", "reference"), *(pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in engines.ENGINES)],
                ids="-".join)
def engine_on(request):
    """(engine name, device) for every engine on every device it is made for, with free memory full of NaN."""
    place, name = request.param
    exact_inputs.poison(place)
    reason = engines.ENGINES[name].unavailable(torch.device(place))
    if reason is not None:
        pytest.skip(f"{name}: {reason}")
    return name, torch.device(place)


def assert_as_accurate_as(result, baseline, reference, what="result", factor=2.0):
    """The error of `result` against the float64 `reference` is at most `factor` times the baseline's in the same dtype.

    The error is ||result - reference|| / ||reference||. The largest error of a single element is a noisier measure, and may be twice
    that multiple of the baseline's. gbmoe/testing/accuracy.py says what is allowed where the baseline has almost no error.
    """
    assert result.dtype == baseline.dtype, f"{what}: dtype {result.dtype}, expected {baseline.dtype}"
    assert result.shape == reference.shape, f"{what}: shape {list(result.shape)}, expected {list(reference.shape)}"
    assert torch.isfinite(result).all() or not torch.isfinite(baseline).all(), f"{what}: holds NaN or Inf"
    error = accuracy.relative_error(result, reference)
    allowed = accuracy.allowed_error(accuracy.relative_error(baseline, reference), result.dtype, factor=factor)
    assert error <= allowed, f"{what}: relative error {error:.3e}, allowed {allowed:.3e}"
    if result.numel():
        worst, allowed = (float((t.double() - reference.double()).abs().max()) for t in (result, baseline))
        allowed = accuracy.allowed_error(allowed, result.dtype, factor=2 * factor, scale=float(reference.abs().max()))
        assert worst <= allowed, f"{what}: largest error {worst:.3e}, allowed {allowed:.3e}"
