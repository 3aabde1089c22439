"""What passes find out on the device without a host that waits: that ranks made different passes.

It lies on the device, so that replays of a CUDA graph write it too. Each pass outside of graphs sends a copy of it to the host,
and a later pass looks at those that have arrived.

Shape suffixes: W ranks, N elements of a header.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from gbmoe.launch.peers import DIGEST, HEADER_NUMBERS
from gbmoe.parallel.host_copy import HostCopy


class LateReport:
    """The report of one group's passes on this rank's device.

    Attributes:
        headers_WN: the headers of the last pass in which they differed; zeros where they never did.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, ranks = group, dist.get_world_size(group)
        with torch.inference_mode(False):
            self.headers_WN = torch.zeros(ranks, HEADER_NUMBERS, dtype=torch.int32, device=device)
        self._sent: list[HostCopy] = []

    def send(self) -> None:
        """Send a copy to the host, which does not wait."""
        self._sent.append(HostCopy(self.headers_WN))

    def look(self) -> None:
        """Raise ValueError for what copies that have arrived report. Does not wait."""
        while self._sent and (headers_WN := self._sent[0].if_there()) is not None:
            self._sent.pop(0)
            self._raise_for(headers_WN)

    def check(self) -> None:
        """Raise ValueError for what passes have reported since the last time. Waits for the device."""
        self._sent.clear()
        self._raise_for(self.headers_WN.cpu())

    def forget(self) -> None:
        """Begin anew, without what was reported and not looked at."""
        self._sent.clear()
        self.headers_WN.zero_()

    def _raise_for(self, headers_WN: torch.Tensor) -> None:
        digests_W = headers_WN[:, DIGEST].tolist()
        if len(set(digests_W)) > 1:
            self.forget()
            names = dist.get_process_group_ranks(self._group)
            alike = [[name for name, digest in zip(names, digests_W) if digest == one] for one in dict.fromkeys(digests_W)]
            raise ValueError("expert parallelism: expected all ranks of the group to make the same pass of the same layer, in the same"
                             f" order; in an earlier step, in which no host waited, these made different ones: ranks"
                             f" {', others '.join(', '.join(map(str, ranks)) for ranks in alike)}")
