"""The operators, one file each: route, route_tokens, gmm, the padded gather and scatter, expert_mlp, grouped_mlp; and expert_path, which
computes nothing."""

from gbmoe.ops.expert_path import ExpertPath, expert_path
from gbmoe.ops.experts import expert_mlp
from gbmoe.ops.gmm import gmm
from gbmoe.ops.grouped_mlp import grouped_mlp
from gbmoe.ops.permute import padded_gather, padded_scatter
from gbmoe.ops.route_operator import Routing, route
from gbmoe.ops.route_tokens import route_tokens

from gbmoe.ops import router_linear  # noqa: F401  # isort: skip (of the layer's router, not public)

__all__ = [
    "ExpertPath", "Routing", "expert_mlp", "expert_path", "gmm", "grouped_mlp", "padded_gather", "padded_scatter", "route", "route_tokens",
]
