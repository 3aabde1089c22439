"""Biases of a dMoE's experts, and router weights on what experts get: against a loop over the experts in float64.

Shape suffixes: T tokens, K slots a token, E experts, H hidden, F ffn hidden.
"""

import pytest
import torch
import torch.nn.functional as F

from gbmoe.layers import Arguments, dMoE
from gbmoe.testing import exact_inputs

EXPERTS, HIDDEN, FFN, TOKENS = 4, 16, 24, 40
BIASES = {"mlp": ["w1_bias", "w2_bias"], "glu": ["w1_bias", "w2_bias", "v1_bias"]}


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def arguments(**options):
    return Arguments(**dict(hidden_size=HIDDEN, ffn_hidden_size=FFN, moe_num_experts=EXPERTS, moe_top_k=2, bias=False, fp16=False,
                            device="cpu", activation_fn=F.silu, moe_loss_weight=0) | options)


def by_a_loop(layer, x_TH, on_input):
    """What the layer computes, in plain PyTorch, with the weights and ids of its router."""
    mlp, out_TH = layer.experts.mlp, torch.zeros_like(x_TH)
    _, weights_TK, ids_TK = layer.router(x_TH)
    w1, w2, v1 = mlp.weights_EFH()
    for e in range(EXPERTS):
        token, slot = torch.where(ids_TK == e)
        weight = weights_TK[token, slot, None]
        rows = x_TH[token] * weight if on_input else x_TH[token]
        biases = [getattr(mlp, f"{name}_bias")[e] if hasattr(mlp, f"{name}_bias") else 0 for name in ("w1", "w2", "v1")]
        a = F.silu(rows @ w1[e].t() + biases[0])
        if v1 is not None:
            a = a * (rows @ v1[e].t() + biases[2])
        y = a @ w2[e] + biases[1]
        out_TH = out_TH.index_add(0, token, y if on_input else y * weight)
    return out_TH


@pytest.mark.parametrize("mlp_type", BIASES)
@pytest.mark.parametrize("biased, on_input", [(True, False), (False, True), (True, True)])
def test_output_and_every_gradient_are_those_of_a_loop(double, mlp_type, biased, on_input):
    torch.manual_seed(0)
    layer = dMoE(arguments(mlp_type=mlp_type, moe_expert_linear_bias=biased, moe_apply_probs_on_input=on_input))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    found = []
    x_TH, grad_TH = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN)
    exact_inputs.poison(torch.device("cpu"))
    for of in (layer, lambda x: by_a_loop(layer, x, on_input)):
        x = x_TH.clone().requires_grad_()
        out = of(x)
        found.append((out, *torch.autograd.grad(out, [x, *layer.parameters()], grad_TH)))
    for ours, theirs in zip(*found):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("mlp_type", BIASES)
def test_biases_are_parameters_of_the_experts_and_of_nothing_else(mlp_type):
    """Without them a state dict is MegaBlocks', and with them its weights are."""
    plain = dMoE(arguments(mlp_type=mlp_type)).state_dict()
    for one in (False, True):
        layer = dMoE(arguments(mlp_type=mlp_type, moe_expert_linear_bias=True, one_matrix_per_expert=one))
        state = layer.state_dict()
        assert sorted(state.keys() - plain.keys()) == sorted(f"experts.mlp.{name}" for name in BIASES[mlp_type])
        assert all(state[name].shape == value.shape for name, value in plain.items())
        for name in BIASES[mlp_type]:
            assert list(state[f"experts.mlp.{name}"].shape) == [EXPERTS, HIDDEN if name == "w2_bias" else FFN]
            assert not state[f"experts.mlp.{name}"].any()
        layer.load_state_dict({name: torch.full_like(value, 2.0) for name, value in state.items()})
        assert all((value == 2).all() for value in layer.state_dict().values())


def test_what_reads_no_biases_refuses_them():
    for option in ("moe_expert_linear_bias", "moe_apply_probs_on_input"):
        for name in ("bmm", "reference"):
            with pytest.raises(ValueError, match=f"mlp_impl: expected 'gbmoe' with {option}, got '{name}'"):
                arguments(**{option: True}, mlp_impl=name)
        with pytest.raises(ValueError, match=f"moe_expert_model_parallelism: expected False with {option}, got True"):
            arguments(**{option: True}, moe_expert_model_parallelism=True)
    layer = dMoE(arguments(moe_expert_linear_bias=True, activation_fn=lambda x: x.sin()))
    with pytest.raises(ValueError, match="activation: expected one that has a kernel, with biases"):
        layer(torch.randn(TOKENS, HIDDEN))
