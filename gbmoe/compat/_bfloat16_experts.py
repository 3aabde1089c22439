"""The experts that torchtitan and prime-rl compute: silu-gated, in bfloat16 whatever the dtype of rows and weights.

Shape suffixes: R rows, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

import torch

from gbmoe.float8 import Float8BlockScaling
from gbmoe.lora_factors import ExpertLora
from gbmoe.ops import grouped_mlp
from gbmoe.weight_layout import WeightLayout

__all__ = ["bfloat16_experts"]

_LAYOUT = WeightLayout(down_transposed=True)


def bfloat16_experts(
    x_RH: torch.Tensor, counts_E: torch.Tensor, w1_EFH: torch.Tensor, w2_EHF: torch.Tensor, w3_EFH: torch.Tensor, *,
    engine: str = "auto", fp8_recipe: Float8BlockScaling | None = None, lora: ExpertLora | None = None,
) -> torch.Tensor:
    """out[r] = (silu(x[r] @ w1[e].T) * (x[r] @ w3[e].T)) @ w2[e].T with e the expert of row r, by gbmoe.grouped_mlp.

    Weights in bfloat16 are read where they lie; others are cast, as both packages do. Differentiable in x and the weights.

    Args:
        x_RH: [R,H] in expert order, any floating dtype. Rows after the sum of the counts come out as zeros, see grouped_mlp.
        counts_E: rows of each expert [E]; whole numbers of any dtype, as torch.histc returns floats. They stay on their device.
        w1_EFH, w3_EFH: gate and up [E,F,H], any floating dtype.
        w2_EHF: down [E,H,F].
        engine, fp8_recipe, lora: see grouped_mlp; factors are cast, too.

    Returns:
        [R,H], dtype of x.

    Raises:
        TypeError, ValueError: of grouped_mlp.
    """
    counts_E = counts_E if counts_E.dtype in (torch.int32, torch.int64) else counts_E.to(torch.int32)
    out_RH = grouped_mlp(x_RH.bfloat16(), counts_E, w1_EFH.bfloat16(), w2_EHF.bfloat16(), w3_EFH.bfloat16(), activation="silu",
                         engine=engine, fp8_recipe=fp8_recipe, layout=_LAYOUT, lora=lora)
    return out_RH.type_as(x_RH)
