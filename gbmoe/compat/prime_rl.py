"""prime-rl 0.8.0: the experts of its trainer's grouped_mm computed by gbmoe.

    import gbmoe.compat.prime_rl
    gbmoe.compat.prime_rl.register()

It replaces prime_rl.trainer.models.layers.moe._run_experts_grouped_mm_impl, by which _run_experts_grouped_mm, the DeepEP path and
_run_experts_fp8_grouped_mm compute. Routers, expert parallelism, parameters and checkpoints remain prime-rl's own.

LoRA of experts computes its products itself: there prime_rl.trainer.models.layers.lora.multi_moe.MultiLoRAGroupedExperts.forward is
replaced.

Shape suffixes are in gbmoe/compat/_bfloat16_experts.py.
"""

from __future__ import annotations

import functools
import inspect

import torch

from gbmoe.compat._bfloat16_experts import bfloat16_experts
from gbmoe.compat._releases import require_parameters, require_release
from gbmoe.float8 import Float8BlockScaling
from gbmoe.lora_factors import ExpertLora, LoraFactors

__all__ = ["experts_forward", "register"]

_ADAPTER = "gbmoe.compat.prime_rl"
_PARAMETERS = ("w1", "w2", "w3", "x", "num_tokens_per_expert", "fp8")


def register(fp8_recipe: Float8BlockScaling | None = None) -> None:
    """Let prime-rl's grouped experts be computed by gbmoe, in this process. Calling it again changes nothing.

    Args:
        fp8_recipe: for experts with fp8=True, whose products of rows are then computed as the recipe says. Without a recipe prime-rl's
            own DeepGEMM computes them. A later call with another recipe takes its place.

    Raises:
        ImportError: for another release than 0.8.0, and where the function has other parameters.
    """
    require_release(_ADAPTER, "prime-rl", ("0.8.0",))
    from prime_rl.trainer.models.layers import moe
    theirs = inspect.unwrap(moe._run_experts_grouped_mm_impl)
    require_parameters(_ADAPTER, theirs, _PARAMETERS)

    @functools.wraps(theirs)
    def forward(w1, w2, w3, x, num_tokens_per_expert, fp8=False):
        if fp8 and fp8_recipe is None:
            return theirs(w1, w2, w3, x, num_tokens_per_expert, fp8=True)
        return experts_forward(w1, w2, w3, x, num_tokens_per_expert, fp8_recipe=fp8_recipe if fp8 else None)

    moe._run_experts_grouped_mm_impl = forward
    _register_lora()


def _register_lora() -> None:
    from prime_rl.trainer.models.layers.lora import multi_moe
    theirs = inspect.unwrap(multi_moe.MultiLoRAGroupedExperts.forward)
    require_parameters(_ADAPTER, theirs, ("self", "x", "num_tokens_per_expert"))

    @functools.wraps(theirs)
    def forward(self, x, num_tokens_per_expert):
        # Its loop over experts computes in the dtype of x, and dropout has rows of its own for the factors.
        if not self.use_grouped_mm or (self.training and not isinstance(self.lora_dropout, torch.nn.Identity)):
            return theirs(self, x, num_tokens_per_expert)
        which = self._lora_num_tokens.argmax().item()
        scale = self._scaling_factors[which].item()
        lora = ExpertLora(**{ours: LoraFactors(*(_local(getattr(self, f"{name}_lora_{factor}")[which]) for factor in "AB"), scale)
                             for ours, name in (("w1", "w1"), ("w2", "w2"), ("v1", "w3"))})
        base = self.base_layer
        return bfloat16_experts(x, num_tokens_per_expert, *(_local(w) for w in (base.w1, base.w2, base.w3)), lora=lora)

    multi_moe.MultiLoRAGroupedExperts.forward = forward


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def experts_forward(
    w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, x: torch.Tensor, num_tokens_per_expert: torch.Tensor, *, engine: str = "auto",
    fp8_recipe: Float8BlockScaling | None = None,
) -> torch.Tensor:
    """What _run_experts_grouped_mm_impl computes, by gbmoe.grouped_mlp, in bfloat16 whatever the dtypes. Differentiable in x, w1, w2, w3.

    Args:
        w1, w3: gate and up [E,F,H], plain tensors of any floating dtype; those in bfloat16 are read where they lie.
        w2: down [E,H,F].
        x: [R,H] in expert order, any floating dtype. Rows after the sum of the counts come out as zeros.
        num_tokens_per_expert: [E] on the device of x, whole numbers of any dtype.
        engine, fp8_recipe: see gbmoe.grouped_mlp.

    Returns:
        [R,H], dtype of x.

    Raises:
        TypeError, ValueError: of grouped_mlp.
    """
    return bfloat16_experts(x, num_tokens_per_expert, w1, w2, w3, engine=engine, fp8_recipe=fp8_recipe)
