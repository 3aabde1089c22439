"""What the tests of gbmoe.compat.megatron share: small experts, their parameters, and what other parts of Megatron give them."""

import contextlib
import importlib
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.compat import expert_rows
from tests.compat.expert_rows import FFN, HIDDEN, values

EXPERTS = len(expert_rows.COUNTS)


class Group:
    """As much of a process group as experts ask."""

    def __init__(self, rank=0, size=1):
        self._rank, self._size = rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size


def groups(ep=(0, 1), tp=(0, 1)):
    return SimpleNamespace(ep=Group(*ep), expt_tp=Group(*tp), expt_dp=Group())


def configured(megatron, **fields):
    """A TransformerConfig; what its own checks would refuse without TransformerEngine is set afterwards."""
    later = {name: fields.pop(name) for name in (
        "delay_wgrad_compute", "moe_single_grouped_weight", "fp8", "fp8_recipe", "fp4", "moe_paged_stash", "use_kitchen", "fp8_param",
        "first_last_layers_bf16", "activation_func_fp8_input_store", "quant_recipe", "expert_gtp_weight_remat_size", "offload_modules",
        "fine_grained_activation_offloading", "moe_mlp_glu_interleave_size", "use_te_activation_func") if name in fields}
    sizes = {"num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": FFN,
             "moe_router_topk": 2, "moe_grouped_gemm": True, "use_cpu_initialization": True, "add_bias_linear": False,
             "gated_linear_unit": True, "activation_func": F.silu}
    config = megatron.transformer_config.TransformerConfig(**{**sizes, **fields})
    for name, value in later.items():
        setattr(config, name, value)
    return config


def built(megatron, *, of=None, single=None, **fields):
    return megatron.adapter.GroupedExperts(EXPERTS, configured(megatron, **fields), pg_collection=of or groups(),
                                           single_grouped_weight=single)


def parameters(dtype, *, gated=True, bias=False):
    """Those of all experts by their names, and a prefix to be cut off where one tensor has all."""
    width = FFN * (1 + gated)
    stacks = {"linear_fc1.weight": values(EXPERTS, width, HIDDEN, dtype=dtype, seed=2, inner=HIDDEN),
              "linear_fc2.weight": values(EXPERTS, HIDDEN, FFN, dtype=dtype, seed=3, inner=FFN)}
    if bias:
        stacks |= {"linear_fc1.bias": values(EXPERTS, width, dtype=dtype, seed=5), "linear_fc2.bias": values(EXPERTS, HIDDEN, dtype=dtype,
                                                                                                         seed=6)}
    return stacks


def each_expert(stacks):
    return {f"{name}{e}": t for name, stack in stacks.items() for e, t in enumerate(stack)}


def halves(h):
    return torch.chunk(h, 2, -1)


def main_grads(module, *, reversed_buffer=False):
    """Give parameters what Megatron's DDP gives them: main_grads in one buffer, and the mark."""
    for linear in (module.linear_fc1, module.linear_fc2):
        of = list(linear.parameters())
        buffer = torch.zeros(sum(p.numel() for p in of), device=of[0].device)
        for parameter, part in zip(of[::-1] if reversed_buffer else of, buffer.split(of[0].numel())):
            parameter.main_grad, parameter.grad_added_to_main_grad = part.view(parameter.shape), False


def routed(tokens=40, experts=6, topk=2):
    logits = values(tokens, experts, dtype=torch.float32, seed=1) + torch.arange(experts) * 0.01
    ids = logits.topk(topk).indices
    routing_map = torch.zeros(tokens, experts, dtype=torch.bool).scatter_(1, ids, True)
    return values(tokens, HIDDEN, dtype=torch.float32, seed=2), torch.softmax(logits, -1) * routing_map, routing_map


def options_of(builder):
    """The keywords that GroupedExperts has, of an ExpertsBuilder."""
    return {name: value for name, value in builder.keywords.items() if name != "submodules"}


def providers(megatron):
    """Megatron's own modules, and TransformerEngine's where that is installed."""
    found = [megatron.backends.LocalSpecProvider]
    if megatron.transformer_engine.HAVE_TE:
        found.append(importlib.import_module("megatron.core.extensions.transformer_engine_spec_provider").TESpecProvider)
    return found


@contextlib.contextmanager
def on_a_cpu(rank=0, ranks=1, store=None, **parallel):
    """Megatron-Core with gloo: the devices that it takes from torch.cuda are the CPU, and CUDA's random numbers have no states. What it
    would compile runs eagerly: with a GPU, torch.compile asks for the properties of the current device.

    Where TransformerEngine is installed, Megatron's router takes its GEMM and the local specification its last norm, which want a GPU."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import transformer_block
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    tracker = random.get_cuda_rng_tracker()
    with mock.patch.multiple(torch.cuda, current_device=lambda: torch.device("cpu"), current_stream=mock.MagicMock(),
                             synchronize=mock.MagicMock(), Stream=mock.MagicMock(), stream=mock.MagicMock()), \
            mock.patch.object(tracker, "fork", lambda *_: contextlib.nullcontext()), torch.compiler.set_stance("force_eager"), \
            mock.patch.object(moe_utils, "te_general_gemm", None), mock.patch.object(transformer_block, "LayerNormImpl", WrappedTorchNorm):
        dist.init_process_group("gloo", store=store or dist.HashStore(), rank=rank, world_size=ranks)
        parallel_state.initialize_model_parallel(**parallel)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
