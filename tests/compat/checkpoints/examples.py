"""State dicts of MoE layers, and how they are compared."""

import torch

from gbmoe.testing import exact_inputs

EXPERTS, HIDDEN, FFN = 4, 24, 40
GLU = {"gate.weight": [EXPERTS, HIDDEN], "experts.gate_up_proj": [EXPERTS, 2 * FFN, HIDDEN],
       "experts.down_proj": [EXPERTS, HIDDEN, FFN]}
MLP = {"gate.weight": [EXPERTS, HIDDEN], "experts.up_proj": [EXPERTS, FFN, HIDDEN],
       "experts.down_proj": [EXPERTS, HIDDEN, FFN]}
SHARED = {f"shared_experts.{name}_proj.weight": shape for name, shape in
          {"gate": [16, HIDDEN], "up": [16, HIDDEN], "down": [HIDDEN, 16]}.items()}


def block(shapes=GLU, dtype=torch.float32, prefix=""):
    """A state dict in which every element has a bit pattern of its own, NaNs and infinities among them."""
    tensors = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        low, high = torch.iinfo(integers).min, torch.iinfo(integers).max
        values = torch.randint(low, high, shape, dtype=integers, generator=exact_inputs.generator("cpu", seed))
        tensors[prefix + name] = values.view(dtype)
    return tensors


def model(layers=2, **options):
    """Layers of different contents under the names of a model, the other tensors between them."""
    tensors = {"model.embed_tokens.weight": torch.randn(9, HIDDEN),
               "model.layers.0.mlp.up_proj.weight": torch.randn(5, HIDDEN)}
    for layer in range(1, layers + 1):
        prefix = f"model.layers.{layer}."
        tensors[f"{prefix}input_layernorm.weight"] = torch.randn(HIDDEN)
        tensors |= {name: value.roll(layer) for name, value in block(prefix=f"{prefix}mlp.", **options).items()}
        tensors[f"{prefix}self_attn.count"] = torch.tensor(layer)
    return tensors


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(bits(found[name]), bits(value)), name
