"""The operators: gmm, padded_gather, padded_scatter, expert_mlp; one file each."""

from gbmoe.ops.experts import expert_mlp
from gbmoe.ops.gmm import gmm
from gbmoe.ops.permute import padded_gather, padded_scatter

__all__ = ["expert_mlp", "gmm", "padded_gather", "padded_scatter"]
