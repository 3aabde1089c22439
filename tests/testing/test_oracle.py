"""What the definitions return, besides their numbers."""

import torch

from gbmoe.testing import oracle


def test_best_experts_were_a_view_with_a_stride():
    """Kernels read ids as rows that lie one after the other."""
    ids_TK = oracle.best_experts(torch.tensor([[0.1, 0.9, 0.5], [2.0, 2.0, 1.0]]), 2)
    assert ids_TK.tolist() == [[1, 2], [0, 1]] and ids_TK.is_contiguous()
