"""Fine-tune a Mixture-of-Experts model of Hugging Face transformers with gbmoe's experts.

    pip install '.[transformers]'    # in a checkout of gbmoe
    python examples/transformers_finetuning.py                       # a small Qwen3-MoE with random weights, on any machine
    python examples/transformers_finetuning.py --model Qwen/Qwen3-30B-A3B --text book.txt --length 512
    python examples/transformers_finetuning.py --lora 16             # adapters of the experts; needs 'gbmoe[training]'

Two lines are gbmoe's: `register()`, and `experts_implementation="gbmoe"`. The text is read as bytes where the model has no tokenizer.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

import gbmoe.compat.transformers
from gbmoe.layers.arguments import default_device


def small_model() -> Qwen3MoeForCausalLM:
    """A model over bytes, small enough for a CPU."""
    config = Qwen3MoeConfig(vocab_size=256, hidden_size=64, intermediate_size=128, moe_intermediate_size=64, num_hidden_layers=2,
                            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2)
    model = Qwen3MoeForCausalLM(config)
    model.set_experts_implementation("gbmoe")
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a transformers model with gbmoe's experts.")
    parser.add_argument("--model", help="a name on the hub, or a folder (default: a small model with random weights)")
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what is learnt (default: this file)")
    parser.add_argument("--length", type=int, default=64, help="tokens a sequence")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters of this rank, and nothing else")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    device = default_device()
    gbmoe.compat.transformers.register()
    if arguments.model:
        model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16, experts_implementation="gbmoe")
        ids = AutoTokenizer.from_pretrained(arguments.model)(arguments.text.read_text(), return_tensors="pt").input_ids[0]
    else:
        model, ids = small_model(), torch.tensor(list(arguments.text.read_bytes()))
    if arguments.lora:
        from peft import LoraConfig, get_peft_model
        model = get_peft_model(model, LoraConfig(r=arguments.lora, lora_alpha=2 * arguments.lora,
                                                 target_parameters=["experts.gate_up_proj", "experts.down_proj"]))
    model.to(device).train()
    sequences = ids[: len(ids) // arguments.length * arguments.length].view(-1, arguments.length).to(device)

    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=arguments.lr)
    for step in range(arguments.steps):
        batch = sequences[torch.arange(4 * step, 4 * step + 4) % len(sequences)]
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
