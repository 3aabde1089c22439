"""The operators, one file each: route, gmm, the padded gather and scatter, expert_mlp."""

from gbmoe.ops.experts import expert_mlp
from gbmoe.ops.gmm import gmm
from gbmoe.ops.permute import padded_gather, padded_scatter
from gbmoe.ops.route import Routing, route

from gbmoe.ops import flops  # noqa: F401  # isort: skip (behind the operators that it says the costs of)

__all__ = ["Routing", "expert_mlp", "gmm", "padded_gather", "padded_scatter", "route"]
