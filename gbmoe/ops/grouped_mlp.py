"""grouped_mlp: the experts of rows that another dispatcher has brought into expert order.

Shape suffixes: R rows, E experts, H hidden, F ffn hidden.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from gbmoe._checks import FLOATING, require, require_tensor
from gbmoe.float8 import Float8BlockScaling
from gbmoe.lora_factors import ExpertLora
from gbmoe.ops.experts import expert_mlp
from gbmoe.ops.gradient_sink import WeightGradientSink
from gbmoe.plan import RoutingPlan
from gbmoe.separate_weights import StackOrList
from gbmoe.weight_layout import MEGABLOCKS, WeightLayout


def grouped_mlp(
    x_RH: torch.Tensor, counts_E: torch.Tensor, w1_EFH: StackOrList, w2_EFH: StackOrList, v1_EFH: StackOrList | None = None,
    *, weights_R: torch.Tensor | None = None, activation: str | Callable = "silu", engine: str = "auto",
    recompute_activation: bool = True, batch_invariant: bool = False, fp8_recipe: Float8BlockScaling | None = None,
    check: str = "auto", layout: WeightLayout = MEGABLOCKS, w1_bias: torch.Tensor | None = None, w2_bias: torch.Tensor | None = None,
    v1_bias: torch.Tensor | None = None, gradient_sink: WeightGradientSink | None = None, lora: ExpertLora | None = None,
) -> torch.Tensor:
    """out[r] = weights[r] * mlp_e(x[r]) with e the expert of row r: the first counts[0] rows are expert 0's, the next expert 1's.

    It is for programs that permute tokens themselves: it takes the rows that an all-to-all or DeepEP delivers, as the GroupedExperts
    modules of torchtitan, prime-rl and NeMo Automodel do. mlp_e is that of expert_mlp. Rows are read where they lie: nothing is gathered
    or padded, and without weights nothing is scattered (with them one kernel reads the results and writes them weighed). Differentiable
    in x, weights, w1, w2 and v1, any of which may be frozen. It is expert_mlp with RoutingPlan.from_counts, whose errors it raises.

    Args:
        x_RH: [R,H], bfloat16, float16, float32 or float64. Rows after the sum of the counts have no expert, may hold anything,
            come out as zeros and get gradients of zero, so that a buffer of a fixed size may be handed over.
        counts_E: rows of each expert, int32 or int64 [E]; on the device of x, where the host does not wait for them (unless an engine
            needs them on the host, see gbmoe.engines), or on the CPU. Zeros are fine.
        w1_EFH, w2_EFH, v1_EFH: [E,F,H], or in `layout`; dtype and device of x (under autocast they are cast with x). Views of other
            layouts are read where they lie, but gradients of halves of one matrix are made apart and put together by autograd. Each may
            also be a list of matrices, see expert_mlp.
        weights_R: the router's weight of each row [R], any floating dtype; None counts every row once. Multiplied in float32
            (float64 for float64) with the row as it is stored, and rounded once.
        activation, engine, recompute_activation, batch_invariant, fp8_recipe: see expert_mlp.
        check: of the counts, see RoutingPlan.from_counts.
        layout: where the matrices lie, if it is not in w1, w2 and v1 of [E,F,H]; see gbmoe.WeightLayout.
        w1_bias, w2_bias, v1_bias, gradient_sink, lora: see expert_mlp.

    Returns:
        [R,H], dtype of x, or under autocast that of its products.

    Raises:
        TypeError, ValueError: naming the argument, what was expected and what came.

    Example:
        >>> x, counts = torch.randn(6, 16), torch.tensor([3, 0, 2])
        >>> w1, w2, v1 = (torch.randn(3, 32, 16) for _ in range(3))
        >>> out = grouped_mlp(x, counts, w1, w2, v1, weights_R=torch.rand(6))
        >>> out.shape, bool((out[5] == 0).all())
        (torch.Size([6, 16]), True)
    """
    require_tensor(x_RH, "grouped_mlp", "x", rank=2, dtypes=FLOATING)
    if weights_R is not None:
        require_tensor(weights_R, "grouped_mlp", "weights", rank=1, dtypes=FLOATING, device=x_RH.device)
        require(weights_R.size(0) == x_RH.size(0), "grouped_mlp", "weights", lambda: f"{x_RH.size(0)} entries, one a row of x",
                weights_R.size(0))
        weights_R = weights_R.unsqueeze(1)
    if not isinstance(w1_EFH, (list, tuple, torch.nn.ParameterList)):  # which expert_mlp checks
        require_tensor(w1_EFH, "grouped_mlp", "w1", rank=3)
    plan = RoutingPlan.from_counts(counts_E, x_RH.size(0), device=x_RH.device, check=check)
    require(plan.num_experts == len(w1_EFH), "grouped_mlp", "counts", lambda: f"{len(w1_EFH)} entries, one for each expert of w1",
            plan.num_experts)
    return expert_mlp(x_RH, plan, w1_EFH, w2_EFH, v1_EFH, weights_TK=weights_R, activation=activation, engine=engine,
                      recompute_activation=recompute_activation, batch_invariant=batch_invariant, fp8_recipe=fp8_recipe, layout=layout,
                      w1_bias=w1_bias, w2_bias=w2_bias, v1_bias=v1_bias, gradient_sink=gradient_sink, lora=lora)
