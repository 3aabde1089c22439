"""A layer that has made many steps of changing shapes holds no more than one that has made few."""

import gc

import pytest
import torch

from gbmoe import Arguments, clear_load_balancing_loss, dMoE


@pytest.mark.parametrize("device, thousands", [pytest.param("cpu", 1, marks=pytest.mark.slow),
                                               pytest.param("cuda", 10, marks=pytest.mark.gpu)])
def test_thousands_of_steps_of_changing_shapes_leave_nothing(device, thousands):
    layer = dMoE(Arguments(hidden_size=16, ffn_hidden_size=24, moe_num_experts=4, moe_top_k=2, mlp_type="glu", bias=False, fp16=False,
                           bf16=True, device=device))
    layers = [layer, layer, dMoE(Arguments(hidden_size=16, ffn_hidden_size=24, moe_num_experts=4, moe_top_k=1, bias=False, fp16=False,
                                           bf16=True, device=device))]
    draw = torch.Generator().manual_seed(0)

    def steps(count):
        for step in range(count):
            tokens = int(torch.randint(0, 24, (1,), generator=draw))
            x = torch.randn(tokens, 1, 16, generator=draw).bfloat16().to(device)
            x.requires_grad_(step % 3 > 0)
            with torch.set_grad_enabled(step % 5 > 0):
                out = layers[step % 3](x)
            if out.requires_grad:
                out.sum().backward()
            layers[step % 3].zero_grad()
            clear_load_balancing_loss()

    def held():
        gc.collect()
        tensors = sum(type(each) is torch.Tensor for each in gc.get_objects())
        return len(gc.get_objects()), tensors, torch.cuda.memory_allocated() if device == "cuda" else 0

    steps(250 * thousands)  # every kind of call has come several times
    objects, tensors, allocated = held()
    steps(750 * thousands)
    after = held()
    assert after[1:] == (tensors, allocated)
    assert after[0] <= objects + 50, f"{after[0] - objects} objects more"
