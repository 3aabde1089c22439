"""prime-rl's experts with LoRA of several adapters, of which the one with the most tokens counts; in bfloat16, an expert at a time."""

import torch
import torch.nn.functional as F


class MultiLoRAGroupedExperts(torch.nn.Module):
    def __init__(self, base_layer, rank, n_adapters, alpha=32.0, dropout=0.0):
        super().__init__()
        self.base_layer, self.use_grouped_mm = base_layer, True
        self.lora_dropout = torch.nn.Dropout(dropout) if dropout > 0.0 else torch.nn.Identity()
        self._lora_num_tokens, self._scaling_factors = torch.zeros(n_adapters), torch.full((n_adapters,), alpha / rank)
        for name in ("w1", "w2", "w3"):
            experts, out, inner = getattr(base_layer, name).shape
            for factor, shape in (("A", (experts, rank, inner)), ("B", (experts, out, rank))):
                parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=getattr(base_layer, name).dtype)) for _ in range(n_adapters)]
                setattr(self, f"{name}_lora_{factor}", torch.nn.ParameterList(parameters))

    def forward(self, x, num_tokens_per_expert):
        which = self._lora_num_tokens.argmax().item()

        def product(rows, name, e):
            a, b = (getattr(self, f"{name}_lora_{factor}")[which][e].bfloat16() for factor in "AB")
            return rows @ getattr(self.base_layer, name)[e].bfloat16().t() + self._scaling_factors[which].item() * (rows @ a.t() @ b.t())

        out = []
        for e, rows in enumerate(x.bfloat16().split(num_tokens_per_expert.long().tolist())):
            out.append(product(F.silu(product(rows, "w1", e)) * product(rows, "w3", e), "w2", e))
        return torch.cat(out).type_as(x)
