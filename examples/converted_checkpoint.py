"""Convert a checkpoint of transformers to MegaBlocks' layout, load a layer of it into gbmoe.dMoE, and compare the outputs.

    pip install '.[transformers]'    # in a checkout of gbmoe
    python examples/converted_checkpoint.py      # makes a small Mixtral of its own, in a temporary folder

`python -m gbmoe convert SOURCE TARGET --to megablocks` does the same on the command line.
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import MixtralConfig, MixtralForCausalLM

import gbmoe
from gbmoe.compat import checkpoints

PREFIX = "model.layers.0.block_sparse_moe."


def main() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                           num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2)
    model = MixtralForCausalLM(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "mixtral"), Path(folder, "mixtral-megablocks")
        model.save_pretrained(source)
        checkpoints.convert_checkpoint(source, target, "megablocks", report=print)
        args = checkpoints.read_arguments(target, device="cpu", moe_loss_weight=0)  # what the file does not have is yours to choose
        tensors = load_file(target / "model.safetensors")

    layer = gbmoe.dMoE(args)
    layer.load_state_dict({name.removeprefix(PREFIX): t for name, t in tensors.items() if name.startswith(PREFIX)})
    x = torch.randn(2, 16, config.hidden_size)
    with torch.no_grad():
        expected, out = model.model.layers[0].mlp(x), layer.eval()(x)
    expected = expected[0] if isinstance(expected, tuple) else expected
    print(f"largest difference of the outputs: {(out - expected).abs().max():.1e}, of {expected.abs().max():.1e}")


if __name__ == "__main__":
    main()
