"""Train with the experts' products in float8: e4m3 with DeepSeek-V3's scales, weights quantised once for all micro-batches of a step.

    python examples/float8_training.py      # fast on Hopper (H100, H200); a CPU gives comparable numbers, slowly

Parameters, gradients and checkpoints stay in bfloat16. docs/float8.md has what it gains and what it costs.
"""

import torch
import torch.nn.functional as F

import gbmoe
from gbmoe import float8
from gbmoe.layers.arguments import default_device

MICRO_BATCHES = 4


def train(recipe: gbmoe.Float8BlockScaling | None) -> list[float]:
    """The losses of a few steps with this recipe; None is bfloat16."""
    torch.manual_seed(0)
    args = gbmoe.Arguments(hidden_size=128, ffn_hidden_size=256, moe_num_experts=8, moe_top_k=2, mlp_type="glu", activation_fn=F.silu,
                           bias=False, fp16=False, bf16=True, device=default_device(), moe_loss_weight=0, fp8_recipe=recipe)
    layer = gbmoe.dMoE(args)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
    x = torch.randn(MICRO_BATCHES, 256, args.hidden_size, device=args.device, dtype=torch.bfloat16)
    losses = []
    for _ in range(5):
        with float8.cached_weights(layer):  # weights do not change between two steps of the optimizer
            step = [(layer(rows) - rows).float().square().mean() for rows in x]
            (sum(step) / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in step) / MICRO_BATCHES)
    return losses


def main() -> None:
    recipes = {"bfloat16": None, "float8": gbmoe.Float8BlockScaling(),
               "float8, gradients of weights too": gbmoe.Float8BlockScaling(float8_weight_gradients=True)}
    for name, recipe in recipes.items():
        print(f"{name:33}", *(f"{loss:.4f}" for loss in train(recipe)))


if __name__ == "__main__":
    main()
