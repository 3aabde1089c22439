"""NeMo Automodel's experts with LoRA, as far as they compute: factors A [E,in,r] and B [E,r,out], probabilities before down's product."""

import torch


def grouped(rows, weight, a, b, scale, counts, bias=None, probs=None):
    out, first = [], 0
    for e, size in enumerate(counts.tolist()):
        here = rows[first:first + size]
        product = here @ weight[e] + (here @ a[e] @ b[e]) * scale
        if bias is not None:
            product = product + (bias[e] if probs is None else bias[e] * probs[first:first + size])
        out.append(product)
        first += size
    return torch.cat(out).to(rows.dtype)


class LoRA(torch.nn.Module):
    def of_rows(self, rows, counts, probs, activation, up, down, up_a, up_b, down_a, down_b):
        biases = (self.gate_up_proj_bias, self.down_proj_bias) if self.expert_bias else (None, None)
        a = activation(grouped(rows, up, up_a, up_b, self.scale, counts, biases[0]), probs)
        return grouped(a, down, down_a, down_b, self.scale, counts, biases[1], probs)


class GroupedExpertsLoRA(LoRA):
    def _forward_grouped_mm(self, x, token_mask, weights, indices, gate_and_up_projs, down_projs, lora_gate_and_up_A, lora_gate_and_up_B,
                            lora_down_A, lora_down_B, n_local_experts, experts_start_idx):
        local = indices.masked_fill(~token_mask.unsqueeze(-1), -1) - experts_start_idx
        flat = torch.where((local >= 0) & (local < n_local_experts), local, n_local_experts).flatten()
        order = flat.argsort(stable=True)
        order = order[flat[order] < n_local_experts]
        counts, tokens = flat.bincount(minlength=n_local_experts)[:n_local_experts], order // indices.size(1)
        out = self.of_rows(x[tokens], counts, weights.flatten()[order].unsqueeze(1), self.expert_activation_grouped, gate_and_up_projs,
                           down_projs, lora_gate_and_up_A, lora_gate_and_up_B, lora_down_A, lora_down_B)
        return torch.zeros(x.shape, dtype=torch.float32, device=x.device).index_add(0, tokens, out.float())


class GroupedExpertsDeepEPLoRA(LoRA):
    def forward(self, x, token_mask, weights, indices):
        rows, counts, probs = self._dispatch_tokens(x, token_mask, weights, indices)
        out = self.of_rows(rows, counts, probs, self.expert_activation, self.gate_and_up_projs, self.down_projs, self.lora_gate_and_up_A,
                           self.lora_gate_and_up_B, self.lora_down_A, self.lora_down_B)
        return self.token_dispatcher.token_unpermutation(out)
