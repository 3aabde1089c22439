"""Reinforcement learning in which the trainer takes the experts that the generator chose.

    python examples/replay.py      # on a GPU with batch_invariant=True logits agree bit for bit; on a CPU, where it is refused, to rounding

A generator decodes token by token, and records the ids of each token's experts. A trainer sees whole sequences as one batch, and replays
these ids, in the first update with the generator's weights, in the second with its own, whose routers would choose otherwise. What a
token's logits are made of has the same bits in both: experts and head by batch_invariant=True, the rest one element at a time.

Shape suffixes: S positions, B sequences, T = S * B tokens, L layers, K slots a token, H hidden, V words.
"""

import torch
import torch.nn.functional as F

import gbmoe
from gbmoe.layers.arguments import default_device

HIDDEN, WORDS, LAYERS, LENGTH, SEQUENCES = 64, 32, 3, 16, 32


class Policy(torch.nn.Module):
    """A small language model: in front of each layer of experts a token is mixed with those before it."""

    def __init__(self, device: torch.device):
        super().__init__()
        self.on_gpu = device.type == "cuda"
        args = gbmoe.Arguments(hidden_size=HIDDEN, ffn_hidden_size=64, moe_num_experts=16, moe_top_k=4, mlp_type="glu",
                               activation_fn=F.silu, moe_normalize_expert_weights=1, moe_loss_weight=0, bias=False, fp16=False,
                               bf16=self.on_gpu, device=device, batch_invariant=self.on_gpu,
                               init_method=lambda w: torch.nn.init.normal_(w, std=0.2))
        self.embedding = torch.nn.Embedding(WORDS, HIDDEN, device=device, dtype=args.dtype)
        self.layers = torch.nn.ModuleList(gbmoe.dMoE(args) for _ in range(LAYERS))
        self.head_VH = torch.nn.Parameter(torch.randn(WORDS, HIDDEN, device=device, dtype=args.dtype) * 0.1)

    def forward(self, words_SB: torch.Tensor, memory: list[torch.Tensor] | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Logits [S,B,V] in float32, and what later tokens need to know of these."""
        x_SBH = self.embedding(words_SB)
        memory = [torch.zeros_like(x_SBH[0])] * LAYERS if memory is None else memory
        later = []
        for layer, past_BH in zip(self.layers, memory):
            mixed = []
            for x_BH in x_SBH:
                past_BH = 0.5 * past_BH + x_BH
                mixed.append(past_BH)
            later.append(past_BH)
            x_SBH = x_SBH + layer(torch.tanh(torch.stack(mixed)))
        x_TH = x_SBH.flatten(0, 1)
        tokens = torch.tensor([x_TH.size(0)])
        logits_TV = gbmoe.gmm(x_TH, self.head_VH[None], tokens, trans_b=True, batch_invariant=self.on_gpu)
        return logits_TV.view(*words_SB.shape, WORDS).float(), later


@torch.no_grad()
def generate(generator: Policy, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words [S+1,B], the logits [S,B,V] by which they were drawn, and the ids [T,L,K] of the experts of all tokens but the last ones."""
    words, logits, memory = [torch.zeros(1, SEQUENCES, dtype=torch.int64, device=device)], [], None
    with gbmoe.record_experts(generator, dtype=torch.int16) as recorded:
        for _ in range(LENGTH):
            logits_1BV, memory = generator(words[-1], memory)
            logits.append(logits_1BV)
            words.append(torch.multinomial(logits_1BV[0].softmax(-1), 1).T)
    return torch.cat(words), torch.cat(logits), gbmoe.stack_experts(recorded)


@torch.no_grad()
def share_of_other_experts(policy: Policy, words_SB: torch.Tensor, ids_TLK: torch.Tensor) -> float:
    """The share of tokens and layers for which the policy would choose other experts now."""
    with gbmoe.record_experts(policy, dtype=torch.int16) as recorded:
        policy(words_SB)
    now_TLK = gbmoe.stack_experts(recorded)
    return (now_TLK.sort(-1).values != ids_TLK.sort(-1).values).any(-1).float().mean().item()


def main() -> None:
    torch.manual_seed(0)
    device = default_device()
    generator, trainer = Policy(device), Policy(device)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=5e-3)
    for step in range(6):
        generator.load_state_dict(trainer.state_dict())
        words, logits_SBV, ids_TLK = generate(generator, device)
        seen, chosen = words[:-1], words[1:]
        reward_SB = (chosen == (seen + 1) % WORDS).float() + (chosen % 2 == 0).float()  # count, or at least be even
        advantage_SB = (reward_SB - reward_SB.mean()) / (reward_SB.std() + 1e-6)
        old_SB = logits_SBV.log_softmax(-1).gather(-1, chosen[..., None])[..., 0]
        for update in range(2):
            others = share_of_other_experts(trainer, seen, ids_TLK)
            with gbmoe.replay_experts(trainer, gbmoe.unstack_experts(trainer, ids_TLK)):
                now_SBV, _ = trainer(seen)
                ratio_SB = (now_SBV.log_softmax(-1).gather(-1, chosen[..., None])[..., 0] - old_SB).exp()
                loss = -torch.min(ratio_SB * advantage_SB, ratio_SB.clamp(0.8, 1.2) * advantage_SB).mean()
                loss.backward()  # within the context, in which checkpointed layers would take the same experts again
            difference = (now_SBV.detach() - logits_SBV).abs().max().item()
            print(f"step {step}, update {update}: reward {reward_SB.mean().item():.3f}, logits differ by {difference:.2e} of"
                  f" {logits_SBV.abs().max().item():.2e}, {others:.1%} of the choices would be others without replay")
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
