"""One rule of accuracy: what the tests allow, `gbmoe verify` allows, and no more."""

import math

import pytest
import torch

from gbmoe.testing import accuracy
from gbmoe.testing.accuracy import allowed_error
from tests.conftest import FLOATS, assert_as_accurate_as, dtype_id


def passes_a_test(result, baseline, exact):
    try:
        assert_as_accurate_as(result, baseline, exact)
    except AssertionError:
        return False
    return True


def passes_verify(result, baseline, exact):
    return accuracy.judge({"out": result}, {"out": exact}, {"out": baseline}).passed


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
@pytest.mark.parametrize("baseline_ulps", [0, 1, 4, 16])
def test_tests_allowed_what_verify_did_not(dtype, baseline_ulps):
    """Tests allowed a float64 result to be off by 32 units in the last place; verify allowed 8."""
    exact = torch.full((64,), 1.0, dtype=torch.float64)

    def off(ulps):
        return (exact + ulps * torch.finfo(dtype).eps).to(dtype)

    last = max(2 * baseline_ulps, 8 if dtype == torch.float64 else 1)
    for ulps in (0, last // 2, last, last + 1, 4 * last):
        result, baseline = off(ulps), off(baseline_ulps)
        assert passes_a_test(result, baseline, exact) == passes_verify(result, baseline, exact) == (ulps <= last), ulps


@pytest.mark.parametrize("dtype", FLOATS, ids=dtype_id)
def test_what_is_allowed(dtype):
    eps = torch.finfo(dtype).eps
    assert allowed_error(1.0, dtype) == 2.0 and allowed_error(1.0, dtype, factor=3.0) == 3.0
    assert allowed_error(0.0, dtype) == (8 if dtype == torch.float64 else 1) * eps
    assert allowed_error(0.0, dtype, scale=10.0) == 10 * allowed_error(0.0, dtype)
    below = allowed_error(eps / 8, dtype)
    assert below == (eps / 4 if dtype in (torch.bfloat16, torch.float16) else allowed_error(0.0, dtype))
    assert allowed_error(math.inf, dtype) == math.inf
