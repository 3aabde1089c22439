"""gbmoe.compat.megatron in models of Megatron-Core 0.19.2, on a CPU: losses, Megatron's own DDP, and checkpoints. It needs the package."""

import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing import spawn  # not forked_python's: Megatron's writer of checkpoints starts processes of its own

from tests.compat import interfaces
from tests.compat.megatron.parts import on_a_cpu

pytestmark = pytest.mark.slow
EXPERTS, HIDDEN, VOCABULARY, LENGTH = 4, 32, 64, 16


def configured(**fields):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(**{
        "num_layers": 2, "hidden_size": HIDDEN, "num_attention_heads": 4, "num_moe_experts": EXPERTS, "moe_router_topk": 2,
        "moe_ffn_hidden_size": 48, "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
        "use_cpu_initialization": True, "moe_token_dispatcher_type": "alltoall", "moe_aux_loss_coeff": 1e-2, "attention_dropout": 0.0,
        "moe_router_load_balancing_type": "aux_loss", "hidden_dropout": 0.0, "init_method_std": 0.2, **fields})


def model_of(config, spec, seed=0):
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(seed)
    return GPTModel(config, spec, vocab_size=VOCABULARY, max_sequence_length=LENGTH)


def local_spec(config):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec(config.num_moe_experts, config.moe_grouped_gemm)


def loss_of(model, seed):
    tokens = torch.randint(VOCABULARY, (2, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH), 1).bool()
    return model(tokens[:, :-1], torch.arange(LENGTH).expand(2, LENGTH), mask, labels=tokens[:, 1:]).mean()


def copied(sequential, ours):
    """SequentialMLP's parameters as those of the grouped experts."""
    state = sequential.state_dict()
    for name in [name for name in state if ".local_experts." in name]:
        before, _, after = name.partition(".local_experts.")
        expert, linear, parameter = after.split(".")
        value = state.pop(name)
        if parameter != "_extra_state":
            state[f"{before}.{linear}.{parameter}{expert}"] = value
    missing, unexpected = ours.load_state_dict(state, strict=False)
    assert not unexpected and all(name.endswith("_extra_state") for name in missing)


def losses(model, steps=20, first=0):
    optimizer, seen = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for step in range(steps):
        loss = loss_of(model, 4 * first + step % 4)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return torch.tensor(seen)


# Without biases: Megatron's own experts of local modules add theirs in place to a view, which autograd refuses.
ACTIVATIONS = {"swiglu": {}, "squared_relu": {"gated_linear_unit": False},
               "gpt-oss": {"activation_func_clamp_value": 1.0, "glu_linear_offset": 1.0}}


def activation(name):
    from megatron.core.activations import quick_gelu, squared_relu

    return {"swiglu": F.silu, "squared_relu": squared_relu, "gpt-oss": quick_gelu}[name]


if interfaces.is_real("megatron-core"):
    import gbmoe.compat.megatron as adapter

    @pytest.mark.parametrize("single", [False, True], ids=["weight0", "weight"])
    @pytest.mark.parametrize("name", ACTIVATIONS)
    def test_a_small_gpt_trains_to_the_same_losses(name, single):
        fields = {"activation_func": activation(name), **ACTIVATIONS[name]}
        with on_a_cpu():
            config = configured(**fields)
            sequential = model_of(config, local_spec(config))
            ours = model_of(config, adapter.with_gbmoe_experts(local_spec(config), single_grouped_weight=single))
            copied(sequential, ours)
            assert type(ours.decoder.layers[1].mlp.experts) is adapter.GroupedExperts
            own = losses(sequential)
            got = losses(ours)
        assert own[-1] < own[0] - 1
        torch.testing.assert_close(got, own, rtol=1e-3, atol=0)

    @pytest.mark.parametrize("whole", [False, True], ids=["experts", "whole layer"])
    def test_the_experts_of_a_replay_are_computed(whole):
        """As verl's R2 and R3 do it: ids are recorded, and taken again by routers that would choose others; forward and backward."""
        from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

        def step(model):
            loss = loss_of(model, 3)
            model.zero_grad()
            loss.backward()
            return loss.item(), [layer.mlp.router.weight.grad.clone() for layer in model.decoder.layers]

        RouterReplay.clear_global_router_replay_instances()
        try:
            with on_a_cpu():
                config = configured(moe_enable_routing_replay=True)
                sequential = model_of(config, local_spec(config))
                ours = model_of(config, adapter.with_gbmoe_experts(local_spec(config), whole_layer=whole))
                copied(sequential, ours)
                RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
                assert step(ours)[0] == pytest.approx(step(sequential)[0], rel=1e-5)
                recorded = RouterReplay.get_recorded_data()
                assert len(recorded) == 4 and all(map(torch.equal, recorded[:2], recorded[2:]))
                RouterReplay.clear_global_router_replay_action()
                with torch.no_grad():
                    for one, other in zip(sequential.decoder.layers, ours.decoder.layers):
                        one.mlp.router.weight.neg_()
                        other.mlp.router.weight.neg_()
                chosen = step(ours)[0]
                RouterReplay.set_replay_data(recorded)
                RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
                wanted, got = step(sequential), step(ours)
        finally:
            RouterReplay.clear_global_router_replay_instances()
        assert got[0] == pytest.approx(wanted[0], rel=1e-5) and abs(chosen - got[0]) > 1e-3
        for one, other in zip(got[1], wanted[1]):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)

    def test_ddp_adds_gradients_once():
        """Megatron's DDP over several micro-batches, with and without the fusion, with parameters of each expert and of all, and with
        parameters in the buffers of its distributed optimizer."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

        def main_grads(fusion, single, distributed=False):
            config = configured()
            with mock.patch.object(config, "gradient_accumulation_fusion", False):
                model = model_of(config, adapter.with_gbmoe_experts(local_spec(config), single_grouped_weight=single))
            for layer in model.decoder.layers:
                for linear in (layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2):
                    linear.fuse_wgrad_accumulation = fusion  # of experts alone: Megatron's own linear layers want Apex
            wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(
                grad_reduce_in_fp32=True, use_distributed_optimizer=distributed), model)
            for seed in range(3):
                loss_of(wrapped, seed).backward()
            return {name.replace("weight0", "weight"): torch.stack([p.main_grad for other, p in model.named_parameters()
                                                                    if other.startswith(name.removesuffix("0"))]).reshape(-1)
                    for name, p in model.named_parameters() if ".experts." in name and name.endswith(("weight0", "weight"))}

        with on_a_cpu():
            wanted = main_grads(False, False)
            assert all(bool(gradient.any()) for gradient in wanted.values()) and len(wanted) == 4
            for options in ((True, False), (True, True), (False, True), (True, False, True), (True, True, True)):
                got = main_grads(*options)
                for name, gradient in wanted.items():
                    torch.testing.assert_close(got[name], gradient, rtol=1e-4, atol=1e-6)

    # Between ranks Megatron's alltoall dispatcher wants streams of CUDA.
    _OF_RANKS = {"moe_token_dispatcher_type": "allgather"}

    def _saved_and_loaded(rank, folder, ranks):
        from megatron.core import dist_checkpointing
        store = dist.FileStore(f"{folder}/store", ranks)
        with on_a_cpu(rank, ranks, store, expert_model_parallel_size=ranks):
            config = configured(expert_model_parallel_size=ranks, **(_OF_RANKS if ranks > 1 else {}))
            kinds = {"sequential": local_spec(config), "weight0": adapter.with_gbmoe_experts(local_spec(config)),
                     "weight": adapter.with_gbmoe_experts(local_spec(config), single_grouped_weight=True)}
            wanted = None
            saved = model_of(config, kinds["sequential"])
            with torch.no_grad():
                for layer in saved.decoder.layers:  # experts of other ranks are others
                    for parameter in layer.mlp.experts.parameters():
                        parameter.mul_(1 + rank)
            for number, kind in enumerate(("weight0", "weight", "sequential", "weight", "weight0", "sequential")):
                place = f"{folder}/{number}"
                if rank == 0:
                    os.mkdir(place)
                dist.barrier()
                dist_checkpointing.save(saved.sharded_state_dict(), place)
                with torch.no_grad():
                    wanted = loss_of(saved, 7) if wanted is None else wanted
                    loaded = model_of(config, kinds[kind])
                    for parameter in loaded.parameters():
                        parameter.fill_(float("nan"))
                    loaded.load_state_dict(dist_checkpointing.load(loaded.sharded_state_dict(), place))
                    torch.testing.assert_close(loss_of(loaded, 7), wanted, rtol=1e-5, atol=0)
                saved = loaded

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_distributed_checkpoints_load_whichever_experts_saved_them(tmp_path, ranks):
        spawn(_saved_and_loaded, (str(tmp_path), ranks), nprocs=ranks)

    def test_optimizers_find_every_parameter_in_a_sharded_state_dict():
        """Megatron's optimizers save the states of those that they find."""
        from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map

        with on_a_cpu():
            model = model_of(configured(), adapter.with_gbmoe_experts(local_spec(configured())))
            found = get_param_id_to_sharded_param_map(model.sharded_state_dict(), iter(model.parameters()))
            assert sorted(found) == list(range(len(list(model.parameters()))))

    def _trained_by_ranks(rank, folder, ranks, options):
        with on_a_cpu(rank, ranks, dist.FileStore(f"{folder}/store", ranks), expert_model_parallel_size=ranks):
            config = configured(expert_model_parallel_size=ranks, moe_shared_expert_intermediate_size=24, **_OF_RANKS)
            sequential = model_of(config, local_spec(config), seed=rank)
            ours = model_of(config, adapter.with_gbmoe_experts(local_spec(config), **options))
            copied(sequential, ours)
            layer = ours.decoder.layers[1].mlp
            assert (type(layer) is adapter.GbmoeMoELayer) == bool(options.get("whole_layer")) and layer.num_local_experts * ranks == EXPERTS
            own, got = losses(sequential, first=rank), losses(ours, first=rank)
        assert own[-1] < own[0] - 1
        torch.testing.assert_close(got, own, rtol=1e-3, atol=0)

    @pytest.mark.parametrize("options", [{}, {"whole_layer": True}], ids=["experts", "layer"])
    @pytest.mark.parametrize("ranks", [1, 2])
    def test_ranks_that_share_experts_train_to_the_same_losses(tmp_path, ranks, options):
        """Each rank has batches of its own; the layers have a shared expert, too."""
        spawn(_trained_by_ranks, (str(tmp_path), ranks, options), nprocs=ranks)
