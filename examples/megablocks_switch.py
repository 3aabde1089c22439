"""Switch a MegaBlocks layer to gbmoe: load its state dict into gbmoe.dMoE, compare the outputs, and train a few steps.

    gbmoe install-megablocks            # MegaBlocks 0.10.0, unmodified, with the torch that is installed
    python examples/megablocks_switch.py

It runs on a CPU, too. There MegaBlocks' own kernels do not, so that its layer has gbmoe compute the experts.
"""

import torch
import torch.nn.functional as F

import gbmoe
import gbmoe.compat.megablocks

gbmoe.compat.megablocks.register()  # before the first import of megablocks

from megablocks.layers.arguments import Arguments  # noqa: E402
from megablocks.layers.dmoe import dMoE  # noqa: E402

DEVICE = gbmoe.layers.arguments.default_device()
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
OPTIONS = {"hidden_size": 128, "ffn_hidden_size": 256, "moe_num_experts": 8, "moe_top_k": 2, "mlp_type": "glu", "activation_fn": F.silu,
           "bias": False, "return_bias": False, "fp16": False, "bf16": DTYPE == torch.bfloat16, "device": DEVICE}


def main() -> None:
    torch.manual_seed(0)
    theirs = dMoE(Arguments(mlp_impl="gbmoe", **OPTIONS))
    args = gbmoe.Arguments(**OPTIONS)
    ours = gbmoe.dMoE(args)
    ours.load_state_dict(theirs.state_dict())  # the same names and shapes

    x = torch.randn(64, 4, 128, device=DEVICE, dtype=DTYPE)
    with torch.no_grad():
        expected, out = theirs.eval()(x), ours.eval()(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    print(f"largest difference of the outputs: {(out - expected).abs().max():.1e}, of {expected.abs().max():.1e}")

    ours.train()
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    for step in range(5):
        loss = (ours(x) - x).float().square().mean() + gbmoe.batched_load_balancing_loss(args)
        loss.backward()
        gbmoe.clear_load_balancing_loss()  # once a step
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
