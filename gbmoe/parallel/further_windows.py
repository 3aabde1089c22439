"""The windows of rows (windows.py) after the first, forward and backward.

Nearly always all rows fit into the first window, which takes the way of a pass without others. Further windows keep nothing for backward,
which pulls their rows and computes their first products once more. Without rows they cost launches that find nothing to do; and where the
engine has no GEMM that adds to gradients of 16 bits, zeros written to scratch memory of the size of each weight.

Shape suffixes: S tokens of all ranks, K slots a token, E experts of this rank, F ffn hidden of this rank, H hidden, P rows of a window,
R = E * F rows of a weight.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from gbmoe.engines.base import Engine
from gbmoe.launch import peers
from gbmoe.launch.peers import PeerRegion
from gbmoe.ops import expert_forward_backward
from gbmoe.ops.expert_forward_backward import Gradients, Saved, Transport, Weights
from gbmoe.parallel.peer_transport import PeerTransport
from gbmoe.parallel.windows import Windows
from gbmoe.weight_layout import WeightGradients


def forward(windows: Windows, divided_SK: torch.Tensor, first: PeerTransport, experts: Engine,
            matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], activation: str) -> None:
    """Push the sums of the further windows' tokens. Before the first window, which has the barrier, and rows to keep.

    Args:
        divided_SK: of Windows.divided.
        first: the transport of the first window.
        matrices: w1, w2 and v1, [E,F,H] each.
    """
    for slots, sizes_E in windows.further(divided_SK):
        expert_forward_backward.forward(first.of_window(slots), experts, Weights(*matrices), sizes_E, activation, save=False)


def compute_gradients(windows: Windows, divided_SK: torch.Tensor, first: PeerTransport, experts: Engine,
                      matrices: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None], activation: str, wanted: Gradients,
                      gradients: WeightGradients, scale: float) -> None:
    """Push the further windows' gradients, and add theirs of weights to `gradients`. After those of the first window, and before `first`
    waits for what arrives; arguments are those of `forward` and of expert_forward_backward.compute_gradients."""
    for slots, sizes_E in windows.further(divided_SK):
        t, weights = first.of_window(slots), Weights(*matrices)
        saved, added = _saved(t, experts, weights, sizes_E, activation), AddedGradients(gradients, sizes_E, matrices[0].shape)
        expert_forward_backward.compute_gradients(t, experts, weights, sizes_E, activation, saved, wanted, added, scale)


def _saved(t: Transport, experts: Engine, weights: Weights, sizes_E: torch.Tensor, activation: str) -> Saved:
    _, h_PF, g_PF = expert_forward_backward.up(t, experts, weights, sizes_E, activation, save=True)
    assert h_PF is not None
    return Saved(h_PF, g_PF)


class AddedGradients(WeightGradients):
    """The gradients of one window, of which each is added to those of the windows before as soon as it is made.

    Args:
        to: the gradients of the windows before.
        sizes_E: the window's rows of each expert, on the device. Gradients of experts without rows are neither read nor written.
        shape: [E,F,H] of each weight.
    """

    takes_two = False

    def __init__(self, to: WeightGradients, sizes_E: torch.Tensor, shape: torch.Size):
        self._to, self._sizes_E, self._shape = to, sizes_E, shape

    def are_large_for(self, a_PF: Any, experts: int) -> bool:
        return False  # those of the windows before are there

    @functools.cached_property
    def _rows_R2(self) -> torch.Tensor:
        """[r, R + r] for each row r of an expert with rows, otherwise -1, which kernels of rows skip."""
        (experts, ffn), sizes_E = self._shape[:2], self._sizes_E
        rows_2EF = torch.arange(2 * experts * ffn, dtype=torch.int32, device=sizes_E.device).view(2, experts, ffn)
        has_rows_E1 = (sizes_E > 0).unsqueeze(1)
        return torch.where(has_rows_E1, rows_2EF, -1).flatten(1).t().contiguous()

    def write(self, name, experts, left_PF, rows, sizes_E, scale):
        to_EFH = self._to[name]
        if experts.adds_in_16_bits:
            experts.product(left_PF, rows.rows_PH(), sizes_E, trans_a=True, out=to_EFH, accumulate=True)
            return
        both_2EFH = to_EFH.new_empty(2, *to_EFH.shape)
        experts.weight_gradient(left_PF, rows, sizes_E, both_2EFH[1])
        to = PeerRegion.of([to_EFH.flatten(0, 1)])
        peers.pull_rows(to, 0, self._rows_R2[:, :1], both_2EFH[0].flatten(0, 1))
        peers.push_row_sums(both_2EFH.flatten(0, 2), self._rows_R2, None, to, 0)
