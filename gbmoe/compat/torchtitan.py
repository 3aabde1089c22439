"""torchtitan 0.3.0: its routed experts computed by gbmoe, chosen by an override.

    --override.imports gbmoe.compat.torchtitan.experts
    --override.imports 'gbmoe.compat.torchtitan.experts={"float8": true}'

Importing this module imports torchtitan, as modules with overrides do. Router, dispatchers, parallelism, parameters and checkpoints remain
torchtitan's own.

Shape suffixes, torchtitan's: R rows of the experts on this rank, E experts, D model dimension, F ffn hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from gbmoe._checks import require
from gbmoe.compat._bfloat16_experts import bfloat16_experts
from gbmoe.compat._releases import require_release
from gbmoe.float8 import Float8BlockScaling

__all__ = ["GroupedExperts", "experts"]

require_release("gbmoe.compat.torchtitan", "torchtitan", ("0.3.0",))

import spmd_types as spmd  # noqa: E402  # what torchtitan brings: after its release is known
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.distributed.spmd_types import spmd_mesh_size  # noqa: E402
from torchtitan.distributed.utils import get_spmd_backend  # noqa: E402
from torchtitan.models.common import moe  # noqa: E402


class GroupedExperts(moe.GroupedExperts):
    """torchtitan's GroupedExperts, with its parameters w1_EFD, w3_EFD, w2_EDF and its state dict, on gbmoe.grouped_mlp.

    Its forward reads the weights where they lie and waits for nobody: one product up, with silu and the gate in its epilogue, and one
    down. Rows after the sum of the counts, which torchtitan leaves unwritten, are zeros, and so are their gradients.

    Raises:
        TypeError: for a subclass: torchtitan's converters make subclasses that quantise what this forward does not call.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(moe.GroupedExperts.Config):
        """torchtitan's fields (dim, hidden_dim, num_experts, param_init, sharding_config), and how gbmoe computes.

        Attributes:
            engine: of the products, see gbmoe.engines.
            float8: products of rows by gbmoe.Float8BlockScaling(); with the engine "auto".
        """

        engine: str = "auto"
        float8: bool = False

    def __init__(self, config: Config):
        require(type(self) is GroupedExperts, "gbmoe.compat.torchtitan", "model.converters",
                "none that quantises experts which gbmoe computes (float8 is an argument of the override)", type(self).__name__, TypeError)
        super().__init__(config)
        self.engine = config.engine
        self.fp8_recipe = Float8BlockScaling() if config.float8 else None

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """The experts of rows that the dispatcher has put into expert order.

        Args:
            x_RD: [R,D], any floating dtype; as in torchtitan the products are in bfloat16.
            num_tokens_per_expert_E: [E], on the device of x.

        Returns:
            [R,D], dtype of x.
        """
        w1_EFD, w2_EDF, w3_EFD = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1_EFD, self.w2_EDF, self.w3_EFD))
        counts_E = _of_this_rank(num_tokens_per_expert_E)
        return bfloat16_experts(x_RD, counts_E, w1_EFD, w2_EDF, w3_EFD, engine=self.engine, fp8_recipe=self.fp8_recipe)


def _of_this_rank(counts_E: torch.Tensor) -> torch.Tensor:
    """The counts; where torchtitan checks types (debug.spmd_typechecking), typed as it types offsets: no parts of a sum over ranks."""
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking() and spmd_mesh_size("ep") == 1:
        counts_E = counts_E.clone()  # the type of the dispatcher's tensor stays as it is
        for axis in ("dp", "cp"):
            spmd.mutate_type(counts_E, axis, src=spmd.P, dst=spmd.V)
    return counts_E


@override(target=moe.GroupedExperts.Config, exact=True, description="Routed experts by gbmoe.grouped_mlp.")
def experts(cfg: moe.GroupedExperts.Config, engine: str = "auto", float8: bool = False) -> GroupedExperts.Config:
    """torchtitan's override: every GroupedExperts becomes the one above. Its subclasses (quantised experts, gpt-oss's) stay as they are.

    Args:
        cfg: the configuration that torchtitan found.
        engine, float8: see GroupedExperts.Config.

    Raises:
        ValueError: from torchtitan, for an argument that is none of these.
    """
    return derive(cfg, GroupedExperts.Config, engine=engine, float8=float8)
