"""torchtitan 0.3.0: its routed experts computed by gbmoe, chosen by an override.

    --override.imports gbmoe.compat.torchtitan.experts
    --override.imports 'gbmoe.compat.torchtitan.experts={"float8": true}'
    --override.imports gbmoe.compat.torchtitan.moe_layer

`experts` replaces GroupedExperts alone, whose rows torchtitan's dispatcher brings. `moe_layer` replaces dispatch, experts and combine of
each MoE; with expert parallelism rows then travel by gbmoe's transports. Router, parallelism, parameters and checkpoints remain
torchtitan's own. Importing this module imports torchtitan, as modules with overrides do.

Shape suffixes, torchtitan's: B batch, L sequence length, T = B * L tokens, K top-k, R rows of the experts on this rank, E experts,
e experts on this rank, D model dimension, F ffn hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from gbmoe._checks import require, require_choice
from gbmoe.compat._bfloat16_experts import bfloat16_experts
from gbmoe.compat._releases import require_release
from gbmoe.compat._spread_experts import TRANSPORTS, SpreadExperts, routed_experts
from gbmoe.float8 import Float8BlockScaling

__all__ = ["GroupedExperts", "RoutedExperts", "experts", "moe_layer"]

require_release("gbmoe.compat.torchtitan", "torchtitan", ("0.3.0",))

import spmd_types as spmd  # noqa: E402  # what torchtitan brings: after its release is known
from torchtitan.config import derive, override  # noqa: E402
from torchtitan.distributed.spmd_types import spmd_mesh_size  # noqa: E402
from torchtitan.distributed.utils import get_spmd_backend  # noqa: E402
from torchtitan.models.common import moe  # noqa: E402
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher  # noqa: E402


class GroupedExperts(moe.GroupedExperts):
    """torchtitan's GroupedExperts, with its parameters w1_EFD, w3_EFD, w2_EDF and its state dict, on gbmoe.grouped_mlp.

    Its forward reads the weights where they lie, and the host does not wait. It makes one product up, with silu and the gate in its
    epilogue, and one down. Rows after the sum of the counts, which torchtitan leaves unwritten, are zeros, and so are their gradients.

    Raises:
        TypeError: for a subclass. torchtitan's converters make subclasses, which quantise functions that this forward does not call.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(moe.GroupedExperts.Config):
        """torchtitan's fields (dim, hidden_dim, num_experts, param_init, sharding_config), and how gbmoe computes.

        Attributes:
            engine: of the products, see gbmoe.engines.
            float8: compute products of rows by gbmoe.Float8BlockScaling(); needs the engine "auto".
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


class RoutedExperts(moe.RoutedExperts):
    """torchtitan's RoutedExperts, with its parameters inner_experts.{w1_EFD, w3_EFD, w2_EDF}, computed from tokens to their sums by gbmoe.

    Without an "ep" mesh it is gbmoe.expert_mlp. With one a token's row travels once to each rank that holds any of its experts, and one
    sum comes back. Weights may be sharded by FSDP2 with the transformer block, as torchtitan does it, or by tensor parallelism.

    Raises:
        TypeError: for inner_experts of another class than torchtitan's GroupedExperts (quantised experts, gpt-oss's).
    """

    @dataclass(kw_only=True, slots=True)
    class Config(moe.RoutedExperts.Config):
        """torchtitan's fields (inner_experts, token_dispatcher, ...), and how gbmoe computes.

        Attributes:
            engine: of the products, see gbmoe.engines.
            float8: compute products of rows by gbmoe.Float8BlockScaling(); needs the engine "auto".
            transport: how rows travel between ranks: "peer_memory", "exchange", or "auto" for the first where all ranks can map each
                other's memory.
        """

        engine: str = "auto"
        float8: bool = False
        transport: str = "auto"

    def __init__(self, config: Config):
        require(type(config.inner_experts) is moe.GroupedExperts.Config, "gbmoe.compat.torchtitan", "inner_experts",
                "torchtitan's GroupedExperts.Config (experts that a converter quantises, or of another formula, are left to torchtitan:"
                " narrow what the override claims, or leave it out)", type(config.inner_experts).__qualname__, TypeError)
        require_choice("gbmoe.compat.torchtitan", "transport", config.transport, TRANSPORTS)
        super().__init__(config)
        self.engine, self.transport = config.engine, config.transport
        self.fp8_recipe = Float8BlockScaling() if config.float8 else None
        self.spread: SpreadExperts | None = None

    def parallelize(self, parallel_dims) -> None:
        """torchtitan's, which shards the experts; then the ranks of the "ep" mesh agree about how rows travel. Collective."""
        super().parallelize(parallel_dims)
        mesh = parallel_dims.get_optional_mesh("ep")
        if mesh is not None and mesh.size() > 1:
            self.spread = SpreadExperts(mesh.get_group(), self.inner_experts.num_experts, mesh.device_type, self.transport)

    def forward(self, x_BLD: torch.Tensor, topk_scores_BLK: torch.Tensor, topk_expert_ids_BLK: torch.Tensor,
                num_local_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        """The weighted sum of each token's experts; as in torchtitan the products are in bfloat16.

        Args:
            x_BLD: [B,L,D], this rank's tokens, any floating dtype.
            topk_scores_BLK, topk_expert_ids_BLK: [B,L,K], of the router.
            num_local_tokens_per_expert_E: not read, because the plan counts the tokens.

        Returns:
            [B,L,D], dtype of x: sums in float32, rounded to bfloat16 once.

        Raises:
            NotImplementedError: under debug.spmd_typechecking.
            ValueError: where the weights are not those of this rank's experts, for example where FSDP shards inner_experts apart from the
                block.
        """
        if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
            raise NotImplementedError("gbmoe.compat.torchtitan.moe_layer: debug.spmd_typechecking: expected false, as gbmoe's collectives"
                                      " have no types; the override `experts` can be checked")
        held = self.inner_experts
        weights = [(w.to_local() if isinstance(w, DTensor) else w).bfloat16() for w in (held.w1_EFD, held.w2_EDF, held.w3_EFD)]
        ranks = 1 if self.spread is None else self.spread.where.world
        require(weights[0].size(0) * ranks == held.num_experts, "gbmoe.compat.torchtitan", "inner_experts",
                lambda: f"the weights of {held.num_experts // ranks} experts when the layer runs", weights[0].size(0))
        x_TD, scores_TK, ids_TK = (t.reshape(-1, t.size(-1)) for t in (x_BLD, topk_scores_BLK, topk_expert_ids_BLK))
        compute = routed_experts if self.spread is None else self.spread
        out_TD = compute(x_TD.bfloat16(), ids_TK, scores_TK, *weights, engine=self.engine, fp8_recipe=self.fp8_recipe)
        return out_TD.to(x_BLD.dtype).view(x_BLD.shape)


@override(target=moe.MoE.Config, exact=True, description="Dispatch, routed experts and combine by gbmoe.")
def moe_layer(cfg: moe.MoE.Config, engine: str = "auto", float8: bool = False, transport: str = "auto") -> moe.MoE.Config:
    """torchtitan's override: every MoE keeps its router, shared experts and buffers, and its routed experts become the ones above.

    The dispatcher of the configuration (moe_comm_backend) is not used. Not together with the override `experts`.

    Args:
        cfg: the configuration that torchtitan found.
        engine, float8, transport: see RoutedExperts.Config.

    Raises:
        ValueError: from torchtitan, for an argument that is none of these.
    """
    found = cfg.routed_experts
    routed = derive(found, RoutedExperts.Config, engine=engine, float8=float8, transport=transport,
                    token_dispatcher=derive(found.token_dispatcher, AllToAllTokenDispatcher.Config))
    return derive(cfg, moe.MoE.Config, routed_experts=routed)
