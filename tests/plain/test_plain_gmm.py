"""gbmoe.plain.plain_gmm, the oracle, against loops that cannot be misread."""

import pytest
import torch

from gbmoe.plain import plain_gmm
from gbmoe.testing import moe_shapes


@pytest.mark.parametrize("sizes", moe_shapes.GROUP_SIZES.values(), ids=moe_shapes.GROUP_SIZES)
@pytest.mark.parametrize("accumulate", [False, True])
def test_gmm(sizes, accumulate):
    rows, inner, columns = sum(sizes), 5, 7
    a, b = torch.randn(rows, inner, dtype=torch.float64), torch.randn(len(sizes), inner, columns, dtype=torch.float64)
    right = torch.randn(rows, columns, dtype=torch.float64)
    for trans_a, trans_b in ((False, False), (False, True), (True, False)):
        operand = right if trans_a else b.transpose(1, 2).contiguous() if trans_b else b
        shape = (len(sizes), inner, columns) if trans_a else (rows, columns)
        start = torch.randn(shape, dtype=torch.float64)
        out = start.clone() if accumulate else torch.full(shape, float("nan"), dtype=torch.float64)
        plain_gmm.gmm(a, operand, list(sizes), trans_a, trans_b, out, accumulate)
        expected = start.clone() if accumulate else torch.zeros(shape, dtype=torch.float64)
        row = 0
        for e, size in enumerate(sizes):
            for r in range(row, row + size):
                if trans_a:
                    expected[e] += torch.outer(a[r], right[r])
                else:
                    expected[r] += a[r] @ b[e]
            row += size
        torch.testing.assert_close(out, expected)
