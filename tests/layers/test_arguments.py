"""Arguments: MegaBlocks' fields and defaults, and what is refused."""

import copy
import dataclasses
import inspect
import pickle
import types

import pytest
import torch

import gbmoe
from gbmoe.float8 import Float8BlockScaling
from gbmoe.layers import Arguments, LearnedRouter, ParallelDroplessMLP, from_megatron

# Names and defaults of megablocks 0.10.0's Arguments, in its order; None where the default is no plain value.
MEGABLOCKS = dict(
    hidden_size=1024, ffn_hidden_size=4096, num_layers=1, bias=True, return_bias=True, moe_num_experts=1, moe_top_k=1,
    moe_capacity_factor=1, moe_normalize_expert_weights=None, moe_loss_weight=0.1, moe_jitter_eps=None, moe_lbl_in_fp32=False,
    moe_expert_model_parallelism=False, expert_parallel_group=None, pipeline_model_parallel_size=1,
    num_layers_per_virtual_pipeline_stage=None, memory_optimized_mlp=False, mlp_type="mlp", fp16=True, bf16=False,
    uniform_expert_assignment=False, shared_expert=False, fc_cls=torch.nn.Linear, fc_kwargs={}, remat_act_fn=True,
    shared_expert_hidden_size=4096, shared_expert_weighted_sum=False, moe_zloss_weight=0, moe_zloss_in_fp32=False,
)


def test_defaults_are_megablocks():
    args = Arguments()
    assert {name: getattr(args, name) for name in MEGABLOCKS} == MEGABLOCKS
    names = {field.name for field in dataclasses.fields(Arguments)}
    assert names - set(MEGABLOCKS) == {"activation_fn", "mlp_impl", "device", "init_method", "output_layer_init_method", "engine",
                                        "batch_invariant", "fp8_recipe", "keep_gathered_rows",
                                        "expert_parallel",
                                        "one_matrix_per_expert", "moe_shared_expert_gate", "moe_router_score_function",
                                        "moe_router_pre_softmax", "moe_router_num_groups", "moe_router_group_topk",
                                        "moe_router_group_best", "moe_router_topk_scaling_factor", "moe_router_enable_expert_bias",
                                        "moe_router_bias_update_rate", "moe_router_linear_bias", "moe_router_dtype",
                                        "moe_router_load_balancing_type", "batch_first", "moe_expert_linear_bias",
                                        "moe_apply_probs_on_input", "weight_layout"}
    assert args.mlp_impl == "gbmoe"
    assert args.activation_fn.func is torch.nn.functional.gelu and args.activation_fn.keywords == {"approximate": "tanh"}
    weight = torch.empty(400, 400)
    args.init_method(weight)
    assert abs(float(weight.std()) - 0.02) < 1e-3 and abs(float(weight.mean())) < 1e-3


def test_device_is_the_cpu_without_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Arguments().device == torch.device("cpu")


@pytest.mark.gpu
def test_device_is_the_current_cuda_device():
    assert Arguments().device == torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("fields, dtype", [
    (dict(), torch.float16), (dict(bf16=True), torch.float16), (dict(fp16=False, bf16=True), torch.bfloat16),
    (dict(fp16=False), torch.float32)])
def test_dtype(fields, dtype):
    assert Arguments(**fields).dtype == dtype


@pytest.mark.parametrize("fields, words", [
    (dict(moe_num_experts=4, moe_top_k=5), "moe_top_k: expected at most moe_num_experts == 4, got 5"),
    (dict(mlp_impl="grouped"), "mlp_impl: expected one of gbmoe, bmm, reference, got 'grouped' \\(one of MegaBlocks'"),
    (dict(device="gpu"), "device: expected what torch.device takes, got 'gpu'"),
    (dict(activation_fn="silu"), "activation_fn: expected a callable, such as torch.nn.functional.silu, got 'silu'"),
    (dict(moe_normalize_expert_weights=-1),
     "moe_normalize_expert_weights: expected None or 0 for none, or a positive p of the norm, got -1"),
    (dict(mlp_impl="fast"), "mlp_impl: expected one of gbmoe, bmm, reference, got 'fast'"),
    (dict(mlp_type="moe"), "mlp_type: expected one of mlp, glu, got 'moe'"),
    (dict(expert_parallel_transport="carrier pigeon"), "expert_parallel_transport: expected one of auto, peer_memory, exchange, got"),
    (dict(expert_parallel_rows=0), "expert_parallel_rows: expected None or a positive number, how many times the mean, got 0"),
    (dict(hidden_size=0), "hidden_size: expected an int of at least 1, got 0"),
    (dict(ffn_hidden_size=2.5), "ffn_hidden_size: expected an int of at least 1, got 2.5"),
    (dict(moe_loss_weight=None), "moe_loss_weight: expected a number of at least 0, got None"),
    (dict(moe_loss_weight=-1), "moe_loss_weight: expected a number of at least 0, got -1"),
    (dict(moe_jitter_eps="a"), "moe_jitter_eps: expected a number of at least 0, got 'a'"),
    (dict(pipeline_model_parallel_size=0), "pipeline_model_parallel_size: expected an int of at least 1, got 0"),
    (dict(num_layers_per_virtual_pipeline_stage=0), "num_layers_per_virtual_pipeline_stage: expected None or an int of at least 1, got 0"),
    (dict(engine="warp"), "engine: expected one of auto, .*got 'warp'"),
    (dict(activation_fn=None), "activation_fn: expected a callable, .*, got None"),
])
def test_refused(fields, words):
    with pytest.raises(ValueError, match="Arguments: " + words):
        Arguments(**fields)


def test_from_megatron_takes_what_it_knows():
    args = from_megatron(types.SimpleNamespace(hidden_size=8, ffn_hidden_size=16, moe_num_experts=4, mlp_impl="grouped", lr=1e-4))
    assert (args.hidden_size, args.ffn_hidden_size, args.moe_num_experts, args.mlp_impl) == (8, 16, 4, "gbmoe")
    assert args.shared_expert_hidden_size == 16


def test_from_megatron_took_megatrons_fp8_recipe_for_gbmoes():
    """Megatron-LM always has one, 'delayed' unless it is set."""
    fields = dict(hidden_size=8, ffn_hidden_size=16, moe_num_experts=4)
    assert from_megatron(types.SimpleNamespace(**fields, fp8_recipe="delayed")).fp8_recipe is None
    recipe = Float8BlockScaling()
    assert from_megatron(types.SimpleNamespace(**fields, fp8_recipe=recipe)).fp8_recipe is recipe


class MegaBlocksArguments(types.SimpleNamespace):
    """Has MegaBlocks' fields, and none that gbmoe adds."""


@pytest.mark.parametrize("taker", [gbmoe.dMoE, ParallelDroplessMLP, LearnedRouter, gbmoe.batched_load_balancing_loss,
                                   gbmoe.batched_router_zloss], ids=lambda taker: taker.__name__)
def test_arguments_of_another_library_failed_in_an_attribute_of_ours(taker):
    """dMoE(megablocks_args): AttributeError: 'Arguments' object has no attribute 'router_function'"""
    args = MegaBlocksArguments(**MEGABLOCKS | {"hidden_size": 8, "ffn_hidden_size": 8, "fp16": False}, mlp_impl="grouped", device="cpu")
    with pytest.raises(TypeError) as raised:
        taker(args)
    for said in (f"{taker.__name__}: args: expected gbmoe.Arguments", "gbmoe.layers.from_megatron(args)",
                 f"got {__name__}.MegaBlocksArguments"):
        assert said in str(raised.value)
    made = from_megatron(args)  # what the message says helps
    assert {name: getattr(made, name) for name in MEGABLOCKS} == {name: getattr(args, name) for name in MEGABLOCKS}


@pytest.mark.parametrize("make, message", [
    (lambda: Arguments(hiden_size=64), "Arguments: hiden_size: expected one of its fields; the nearest is hidden_size"),
    (lambda: dataclasses.replace(Arguments(), moe_topk=2), "Arguments: moe_topk: expected one of its fields; the nearest is moe_top_k"),
    (lambda: Arguments(q=1), "Arguments: q: expected one of its fields"),
    (lambda: Float8BlockScaling(power2_scale=True), "Float8BlockScaling: power2_scale: expected one of its fields; the nearest is"
                                                    " power_2_scale"),
])
def test_a_field_that_does_not_exist_names_the_nearest(make, message):
    with pytest.raises(TypeError) as raised:
        make()
    assert str(raised.value) == message


@pytest.mark.parametrize("field, value, near", [
    ("mlp_type", "swiglu", "glu"), ("mlp_impl", "gb_moe", "gbmoe"), ("engine", "hoper", "hopper"),
    ("expert_parallel_transport", "peer-memory", "peer_memory"),
])
def test_a_choice_that_does_not_exist_names_the_nearest(field, value, near):
    with pytest.raises(ValueError, match=rf"^Arguments: {field}: expected one of .*, got '{value}'; the nearest is {near}$"):
        Arguments(**{field: value})


def test_a_choice_of_another_type_names_no_nearest():
    with pytest.raises(ValueError, match=r"got \['mlp'\]$"):
        Arguments(mlp_type=["mlp"])


def test_the_signature_of_arguments_shows_its_fields():
    parameters = inspect.signature(Arguments).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(Arguments)]
    assert parameters["hidden_size"].default == 1024 and "hidden_size: 'int' = 1024" in str(inspect.signature(Arguments))


def test_arguments_can_be_positional_copied_and_pickled():
    args = Arguments(64, 128)
    assert (args.hidden_size, args.ffn_hidden_size) == (64, 128)
    for again in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args)), dataclasses.replace(args)):
        assert (type(again), again.hidden_size, again.ffn_hidden_size) == (Arguments, 64, 128)
