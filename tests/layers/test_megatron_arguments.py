"""from_megatron: what each of Megatron-LM's options becomes, and what is refused. Megatron need not be installed."""

import math
import types
from functools import partial

import pytest
import torch
import torch.nn.functional as F

import gbmoe
from gbmoe.layers import Arguments, from_megatron, megatron_arguments
from gbmoe.layers.arguments import DEFAULT_ACTIVATION_FN
from gbmoe.layers.megatron_arguments import REFUSED, TRANSLATED, WITHOUT_EFFECT, quick_gelu
from gbmoe.ops.activations import activation_name, relu_squared

# Options of Megatron-Core 0.20's TransformerConfig that concern experts, as it has them when nothing else is asked for than experts.
CONFIG = dict(
    num_moe_experts=8, hidden_size=32, ffn_hidden_size=128, num_layers=6, add_bias_linear=False, gated_linear_unit=False,
    activation_func=F.gelu, activation_func_clamp_value=None, glu_linear_offset=0.0, activation_func_fp8_input_store=False,
    init_method_std=0.02, fp16=False, bf16=False, params_dtype=torch.float32, fp8=None, fp8_recipe="delayed", fp4=None, use_mup=False,
    tensor_model_parallel_size=1, pipeline_model_parallel_size=1, virtual_pipeline_model_parallel_size=None, context_parallel_size=1,
    expert_model_parallel_size=1, expert_tensor_parallel_size=1, batch_invariant_mode=False,
    moe_shared_expert_intermediate_size=None, moe_shared_expert_gate=False, moe_shared_expert_overlap=False,
    moe_shared_expert_glu_interleave_size=None, moe_layer_freq=1, moe_ffn_hidden_size=None, moe_router_load_balancing_type="aux_loss",
    moe_router_topk=2, moe_enable_routing_replay=False, moe_router_topk_limited_devices=None, moe_router_padding_for_quantization=False,
    moe_router_padding_for_fp8=False, moe_router_num_groups=None, moe_router_group_topk=None, moe_router_pre_softmax=False,
    moe_router_topk_scaling_factor=None, moe_router_score_function="softmax", moe_router_dtype=None, moe_router_enable_expert_bias=False,
    moe_router_bias_update_rate=1e-3, moe_router_quantile_balancing_ema=0.0, moe_router_force_load_balancing=False,
    moe_router_force_biased=None, moe_grouped_gemm=False, moe_use_grouped_tensor=False, moe_single_grouped_weight=False,
    moe_single_grouped_bias=False, moe_aux_loss_coeff=0.0, moe_z_loss_coeff=None, moe_input_jitter_eps=None, moe_token_dropping=False,
    moe_token_dispatcher_type="allgather", moe_enable_deepep=False, moe_flex_dispatcher_backend="deepep",
    moe_permute_fusion_into_hybridep=False, moe_hybridep_pad_uneven_dispatch_inputs=False, moe_per_layer_logging=False,
    moe_expert_capacity_factor=None, moe_pad_expert_input_to_capacity=False, moe_pad_experts_for_cuda_graph_inference=False,
    moe_token_drop_policy="probs", moe_layer_recompute=False, moe_permute_fusion=False, moe_router_fusion=False,
    moe_apply_probs_on_input=False, moe_latent_size=None, moe_flex_dispatcher_num_sms=None, moe_deepep_num_sms=None,
    moe_hybridep_num_sms=None, moe_hybridep_num_blocks_permute=None, moe_hybridep_num_blocks_unpermute=None,
    moe_hybridep_num_sms_preprocessing=108, moe_ncclep_zero_copy=False, moe_dispatch_fwd_dtype="bf16", moe_combine_bwd_dtype="bf16",
    moe_mlp_glu_interleave_size=None, moe_expert_rank_capacity_factor=None, moe_paged_stash=False, moe_paged_stash_page_size=64,
    moe_paged_stash_buffer_size_factor_cuda=1.1, moe_paged_stash_buffer_size_factor_cpu=0.0,
)
# The same as Megatron-LM's parsed arguments, which name some of them otherwise.
NAMESPACE = {name: value for name, value in CONFIG.items()
             if name not in ("num_moe_experts", "gated_linear_unit", "activation_func")} | dict(
    num_experts=8, swiglu=False, squared_relu=False, quick_geglu=False, openai_gelu=False, onnx_safe=None,
    init_method_xavier_uniform=False, num_layers_per_virtual_pipeline_stage=None, lr=1e-4)


def of(base=CONFIG, **changes):
    return from_megatron(types.SimpleNamespace(**{**base, **changes}))


def test_megatrons_own_names_gave_one_expert():
    args = from_megatron(types.SimpleNamespace(num_experts=8, moe_router_topk=2))
    assert (args.moe_num_experts, args.moe_top_k, args.moe_normalize_expert_weights) == (8, 2, 1)
    assert (args.moe_loss_weight, args.bias, args.mlp_type) == (0.1, True, "mlp")  # of which it says nothing


@pytest.mark.parametrize("base", [CONFIG, NAMESPACE], ids=["TransformerConfig", "Namespace"])
def test_what_megatron_has_unless_it_is_told_otherwise(base):
    args = of(base)
    expected = Arguments(
        hidden_size=32, ffn_hidden_size=128, num_layers=6, bias=False, activation_fn=F.gelu, moe_num_experts=8, moe_top_k=2,
        moe_normalize_expert_weights=1, moe_loss_weight=0.0, moe_lbl_in_fp32=True, moe_zloss_weight=0, fp16=False,
        init_method=args.init_method, output_layer_init_method=args.output_layer_init_method)
    assert args == expected
    assert args.init_method.keywords == dict(mean=0.0, std=0.02)
    assert args.output_layer_init_method.keywords == dict(mean=0.0, std=0.02 / math.sqrt(12))


def squared_relu(x):
    return torch.pow(F.relu(x), 2)


TAKEN = {
    "moe_apply_probs_on_input": (dict(moe_apply_probs_on_input=True), dict(moe_apply_probs_on_input=True)),
    "moe_router_topk": (dict(moe_router_topk=3), dict(moe_top_k=3)),
    "moe_router_topk, one": (dict(moe_router_topk=1, moe_router_pre_softmax=True), dict(moe_top_k=1, moe_normalize_expert_weights=None)),
    "moe_router_pre_softmax": (dict(moe_router_pre_softmax=True), dict(moe_normalize_expert_weights=None)),
    "moe_router_group_topk": (dict(moe_router_num_groups=1, moe_router_group_topk=1), dict(moe_top_k=2)),
    "moe_router_num_groups": (dict(moe_router_num_groups=4), dict(moe_top_k=2)),
    "moe_router_dtype": (dict(moe_router_dtype="fp32"), dict(moe_zloss_in_fp32=True, moe_router_dtype="fp32")),
    "moe_router_topk_scaling_factor": (dict(moe_router_topk_scaling_factor=2.5), dict(moe_router_topk_scaling_factor=2.5)),
    "moe_router_topk_scaling_factor, none": (dict(moe_router_topk_scaling_factor=0.0), dict(moe_router_topk_scaling_factor=None)),
    "moe_router_score_function": (dict(moe_router_score_function="sigmoid"),
                                  dict(moe_router_score_function="sigmoid", moe_normalize_expert_weights=1, moe_router_pre_softmax=True)),
    "moe_router_score_function, one": (dict(moe_router_score_function="sqrtsoftplus", moe_router_topk=1),
                                       dict(moe_router_score_function="sqrtsoftplus", moe_normalize_expert_weights=None)),
    "moe_router_score_function, none": (dict(moe_router_score_function=None), dict(moe_router_score_function="softmax")),
    "moe_router_enable_expert_bias": (dict(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
                                      dict(moe_router_enable_expert_bias=True)),
    "moe_router_bias_update_rate": (dict(moe_router_bias_update_rate=0.5), dict(moe_router_bias_update_rate=0.5)),
    "moe_router_bias_update_rate, none": (dict(moe_router_bias_update_rate=None), dict(moe_router_bias_update_rate=1e-3)),
    "moe_router_group_topk, limited": (dict(moe_router_num_groups=4, moe_router_group_topk=2), dict(
        moe_router_num_groups=4, moe_router_group_topk=2, moe_router_group_best=None, moe_router_pre_softmax=False,
        moe_normalize_expert_weights=1)),
    "moe_shared_expert_gate": (dict(moe_shared_expert_intermediate_size=8, moe_shared_expert_gate=True),
                               dict(shared_expert=True, moe_shared_expert_gate=True)),
    "moe_input_jitter_eps": (dict(moe_input_jitter_eps=1e-2), dict(moe_jitter_eps=1e-2)),
    "moe_ffn_hidden_size": (dict(moe_ffn_hidden_size=48), dict(ffn_hidden_size=48)),
    "moe_ffn_hidden_size, alone": (dict(moe_ffn_hidden_size=48, ffn_hidden_size=None), dict(ffn_hidden_size=48)),
    "moe_aux_loss_coeff": (dict(moe_aux_loss_coeff=0.25), dict(moe_loss_weight=1.5)),
    "moe_aux_loss_coeff, lists": (dict(moe_router_load_balancing_type=["aux_loss", "seq_aux_loss"], moe_aux_loss_coeff=[0.25, 0.0]),
                                  dict(moe_loss_weight=1.5)),
    "moe_router_load_balancing_type": (dict(moe_router_load_balancing_type="none", moe_aux_loss_coeff=0.25),
                                       dict(moe_loss_weight=0, moe_router_load_balancing_type="none")),
    "moe_router_load_balancing_type, without a coefficient": (
        dict(moe_router_load_balancing_type="seq_aux_loss"), dict(moe_loss_weight=0, moe_router_load_balancing_type="seq_aux_loss")),
    "moe_router_load_balancing_type, of sequences": (
        dict(moe_router_load_balancing_type="seq_aux_loss", moe_aux_loss_coeff=0.25),
        dict(moe_loss_weight=1.5, moe_router_load_balancing_type="seq_aux_loss", moe_lbl_in_fp32=True)),
    "moe_router_load_balancing_type, one of a list": (
        dict(moe_router_load_balancing_type=["aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[0.0, 0.25]),
        dict(moe_loss_weight=1.5, moe_router_load_balancing_type="global_aux_loss", moe_lbl_in_fp32=True)),
    "moe_layer_freq": (dict(moe_layer_freq=2, moe_aux_loss_coeff=0.25), dict(num_layers=3, moe_loss_weight=0.75)),
    "moe_layer_freq, list": (dict(moe_layer_freq=[0, 1, 1, 1, 1, 1], moe_aux_loss_coeff=0.5), dict(num_layers=5, moe_loss_weight=2.5)),
    "moe_z_loss_coeff": (dict(moe_z_loss_coeff=1e-3), dict(moe_zloss_weight=1e-3)),
    "moe_shared_expert_intermediate_size": (dict(moe_shared_expert_intermediate_size=80),
                                            dict(shared_expert=True, shared_expert_hidden_size=80, shared_expert_weighted_sum=False)),
    "moe_expert_capacity_factor, off": (dict(moe_expert_capacity_factor=-1.0), dict()),
    "activation_func": (dict(activation_func=F.silu, gated_linear_unit=True), dict(mlp_type="glu", activation_fn=F.silu)),
    "activation_func, squared relu": (dict(activation_func=squared_relu), dict(mlp_type="mlp", activation_fn=relu_squared)),
    "activation_func, quick": (dict(activation_func=megatron_arguments.quick_gelu, gated_linear_unit=True),
                               dict(mlp_type="glu", activation_fn=quick_gelu)),
    "activation_func, other": (dict(activation_func=torch.tanh), dict(activation_fn=torch.tanh)),
    "bf16": (dict(bf16=True), dict(fp16=False, bf16=True)),
    "bf16, params_dtype": (dict(bf16=True, params_dtype=torch.bfloat16), dict(fp16=False, bf16=True)),
    "fp16": (dict(fp16=True), dict(fp16=True, bf16=False)),
    "params_dtype": (dict(params_dtype=torch.bfloat16), dict(fp16=False, bf16=True)),
    "expert_model_parallel_size": (dict(expert_model_parallel_size=4), dict(moe_expert_model_parallelism=True)),
    "expert_tensor_parallel_size": (dict(tensor_model_parallel_size=4), dict(moe_num_experts=8)),
    "pipeline_model_parallel_size": (dict(pipeline_model_parallel_size=2), dict(pipeline_model_parallel_size=2)),
    "virtual_pipeline_model_parallel_size": (dict(virtual_pipeline_model_parallel_size=3), dict(num_layers_per_virtual_pipeline_stage=2)),
    "num_layers_per_virtual_pipeline_stage": (dict(num_layers_per_virtual_pipeline_stage=2, moe_layer_freq=2),
                                              dict(num_layers=3, num_layers_per_virtual_pipeline_stage=1)),
    "init_method": (dict(init_method=torch.nn.init.zeros_), dict(init_method=torch.nn.init.zeros_)),
    "fp8": (dict(fp8="hybrid", fp8_recipe=gbmoe.Float8BlockScaling()), dict(fp8_recipe=gbmoe.Float8BlockScaling())),
    "batch_invariant_mode": (dict(batch_invariant_mode=True), dict(batch_invariant=True)),
    "moe_lbl_in_fp32 of MegaBlocks": (dict(moe_aux_loss_coeff=0.25, moe_lbl_in_fp32=False), dict(moe_lbl_in_fp32=False)),
    "agreeing names": (dict(num_experts=8, moe_num_experts=8, moe_top_k=2, moe_normalize_expert_weights=1.0, mlp_type="mlp",
                            moe_loss_weight=0.0), dict(moe_num_experts=8)),
}
TAKEN_FROM_NAMESPACE = {
    "swiglu": (dict(swiglu=True), dict(mlp_type="glu", activation_fn=F.silu)),
    "squared_relu": (dict(squared_relu=True), dict(mlp_type="mlp", activation_fn=relu_squared)),
    "quick_geglu": (dict(quick_geglu=True), dict(mlp_type="glu", activation_fn=quick_gelu)),
    "openai_gelu": (dict(openai_gelu=True), dict(mlp_type="mlp", activation_fn=DEFAULT_ACTIVATION_FN)),
    "gated_linear_unit": (dict(gated_linear_unit=True), dict(mlp_type="glu", activation_fn=F.gelu)),
    "lists of one": (dict(moe_router_load_balancing_type=["aux_loss"], moe_aux_loss_coeff=[0.25]), dict(moe_loss_weight=1.5)),
    "num_experts as a list": (dict(num_experts=[4]), dict(moe_num_experts=4)),
    "activation_fn of MegaBlocks": (dict(openai_gelu=True, activation_fn=partial(F.gelu, approximate="tanh")), dict(mlp_type="mlp")),
}


@pytest.mark.parametrize("base, changes, fields", [
    *(pytest.param(CONFIG, *row, id=name) for name, row in TAKEN.items()),
    *(pytest.param(NAMESPACE, *row, id=name) for name, row in TAKEN_FROM_NAMESPACE.items())])
def test_each_option_becomes_a_field(base, changes, fields):
    args = of(base, **changes)
    assert {name: getattr(args, name) for name in fields} == fields


def test_every_option_is_tested():
    assert {name.partition(",")[0] for name in TAKEN} >= TRANSLATED
    assert CANNOT.keys() == REFUSED.keys()
    assert not (REFUSED.keys() & WITHOUT_EFFECT | REFUSED.keys() & TRANSLATED | TRANSLATED & WITHOUT_EFFECT)


@pytest.mark.parametrize("name", sorted(WITHOUT_EFFECT))
def test_options_that_change_no_layer(name):
    fixed = dict(init_method=torch.nn.init.zeros_, output_layer_init_method=torch.nn.init.zeros_)
    assert of(**fixed, **{name: "set"}) == of(**fixed)


CANNOT = {
    "moe_router_score_function": "tanh", "moe_router_dtype": "fp64", "moe_router_topk_limited_devices": 2,
    "moe_router_force_load_balancing": True,
    "moe_router_force_biased": -1.0, "moe_enable_routing_replay": True, "moe_token_dropping": True, "moe_expert_capacity_factor": 1.0,
    "moe_expert_rank_capacity_factor": 1.5, "moe_latent_size": 16,
    "moe_dispatch_fwd_dtype": "mxfp8", "moe_combine_bwd_dtype": "mxfp8", "moe_extended_tp": True, "add_bias_linear": True,
    "disable_bias_linear": False, "activation_func_clamp_value": 10.0, "glu_linear_offset": 1.0,
    "activation_func_fp8_input_store": True, "fp4": "e2m1", "use_mup": True,
    "init_method_xavier_uniform": True,
}


@pytest.mark.parametrize("name, value", CANNOT.items())
def test_options_that_no_layer_can_do_are_named(name, value):
    with pytest.raises(ValueError, match=f"from_megatron: {name}: expected .*, got {value!r}"):
        of(**{name: value})


@pytest.mark.parametrize("base, changes, words", [
    (CONFIG, dict(num_experts=4), "num_moe_experts: expected num_experts == 4, got 8"),
    (CONFIG, dict(moe_num_experts=4), "moe_num_experts: expected 8, as Megatron's options say, got 4"),
    (CONFIG, dict(moe_top_k=1), "moe_top_k: expected 2, as Megatron's options say, got 1"),
    (CONFIG, dict(moe_loss_weight=0.1), "moe_loss_weight: expected 0.0, as Megatron's options say, got 0.1"),
    (CONFIG, dict(moe_zloss_weight=0.1), "moe_zloss_weight: expected 0, .* got 0.1"),
    (CONFIG, dict(moe_jitter_eps=0.1, moe_input_jitter_eps=0.2), "moe_jitter_eps: expected 0.2, .* got 0.1"),
    (CONFIG, dict(bias=True), "bias: expected False, .* got True"),
    (CONFIG, dict(mlp_type="glu"), "mlp_type: expected 'mlp', .* got 'glu'"),
    (CONFIG, dict(activation_fn=F.silu), "activation_fn: expected .*gelu"),
    (CONFIG, dict(moe_normalize_expert_weights=2), "moe_normalize_expert_weights: expected 1, .* got 2"),
    (CONFIG, dict(moe_normalize_expert_weights=0), "moe_normalize_expert_weights: expected 1, .* got 0"),
    (CONFIG, dict(moe_normalize_expert_weights=1, moe_router_pre_softmax=True), "moe_normalize_expert_weights: expected None or 0 where"),
    (CONFIG, dict(moe_expert_model_parallelism=True), "moe_expert_model_parallelism: expected False, .* got True"),
    (CONFIG, dict(shared_expert=False, moe_shared_expert_intermediate_size=8), "shared_expert: expected True, .* got False"),
    (CONFIG, dict(moe_router_topk=None), "moe_router_topk: expected the number of experts a token, got None"),
    (CONFIG, dict(moe_router_topk=1), "moe_router_pre_softmax: expected True where moe_router_topk is 1: .*, got False"),
    (CONFIG, dict(moe_router_group_topk=2), "moe_router_num_groups: expected the number of groups with .*, got None"),
    (CONFIG, dict(moe_router_load_balancing_type="sinkhorn"),
     "moe_router_load_balancing_type: expected one of aux_loss, seq_aux_loss, global_aux_loss, none, got 'sinkhorn'"),
    (CONFIG, dict(moe_router_load_balancing_type="quantile_balancing"), "moe_router_load_balancing_type: .*, got 'quantile_balancing'"),
    (CONFIG, dict(moe_router_load_balancing_type=["aux_loss", "global_aux_loss"], moe_aux_loss_coeff=[0.1, 0.1]),
     r"balancing_type: expected one loss with a coefficient, got \['aux_loss', 'global_aux_loss'\]"),
    (CONFIG, dict(moe_router_load_balancing_type=["aux_loss", "none"], moe_aux_loss_coeff=[0.1]),
     "moe_aux_loss_coeff: expected a value for"),
    (CONFIG, dict(num_layers=None, moe_aux_loss_coeff=0.1), "num_layers: expected the number of layers with moe_aux_loss_coeff"),
    (CONFIG, dict(num_layers=None), "num_layers: expected the number of layers with init_method_std, got None"),
    (CONFIG, dict(moe_aux_loss_coeff=0.1, context_parallel_size=2),
     "context_parallel_size: expected 1 with moe_aux_loss_coeff: .* got 2"),
    (CONFIG, dict(moe_layer_freq=[1, 0]), "moe_layer_freq: expected an int of at least 1, or a list of 0 and 1 for each of num_layers"),
    (CONFIG, dict(moe_layer_freq="[1]*6"), "moe_layer_freq: expected an int of at least 1, or a list of 0 and 1 for each of num_layers"),
    (CONFIG, dict(moe_layer_freq=5, virtual_pipeline_model_parallel_size=3), "moe_layer_freq: expected as many layers with"),
    (CONFIG, dict(virtual_pipeline_model_parallel_size=4), "virtual_pipeline_model_parallel_size: expected stages of equal size"),
    (CONFIG, dict(ffn_hidden_size=None), "ffn_hidden_size: expected a size, got None"),
    (CONFIG, dict(expert_tensor_parallel_size=2), "expert_tensor_parallel_size: expected 1 .*, got 2"),
    (CONFIG, dict(expert_tensor_parallel_size=None, tensor_model_parallel_size=2), "tensor_model_parallel_size: expected 1 .*, got 2"),
    (CONFIG, dict(moe_shared_expert_intermediate_size=8, tensor_model_parallel_size=2),
     "tensor_model_parallel_size: expected 1 with moe_s"),
    (CONFIG, dict(fp16=True, bf16=True), "bf16: expected False with fp16, got True"),
    (CONFIG, dict(bf16=True, params_dtype=torch.float16),
     "params_dtype: expected torch.bfloat16, as fp16 and bf16 say, or torch.float32"),
    (CONFIG, dict(params_dtype=torch.float64), "params_dtype: expected torch's default dtype torch.float32, .*, got torch.float64"),
    (CONFIG, dict(fp8="hybrid"), "fp8: expected None, or an fp8_recipe that is a gbmoe.Float8BlockScaling, got 'hybrid'"),
    (CONFIG, dict(moe_of_next_year=True), "moe_of_next_year: expected an option that gbmoe knows, or that is off, got True"),
    (CONFIG, dict(swiglu=True), "activation_func: expected that of swiglu"),
    (NAMESPACE, dict(swiglu=True, squared_relu=True), "squared_relu: expected False with swiglu, got True"),
    (NAMESPACE, dict(swiglu=True, gated_linear_unit=False), "gated_linear_unit: expected True with swiglu, got False"),
])
def test_what_contradicts_itself_or_is_not_known_is_named(base, changes, words):
    with pytest.raises(ValueError, match="from_megatron: .*" + words):
        of(base, **changes)


def test_all_that_is_wrong_is_named_at_once():
    with pytest.raises(ValueError, match="moe_router_score_function: .*tanh.*; moe_latent_size: .*; moe_router_num_groups: .*"):
        of(moe_router_score_function="tanh", moe_latent_size=16, moe_router_group_topk=4)


def test_options_of_megablocks_in_megatrons_arguments_without_its_own_experts():
    """MegaBlocks' branch of Megatron-LM has both; num_experts is not set, and what else Megatron has for experts means nothing."""
    both = {**NAMESPACE, "num_experts": None, "moe_router_topk": 2, "swiglu": True, "add_bias_linear": True, "moe_aux_loss_coeff": 0.5}
    args = of(both, moe_num_experts=4, moe_top_k=1, moe_loss_weight=0.2, mlp_impl="grouped")
    assert (args.moe_num_experts, args.moe_top_k, args.moe_loss_weight, args.mlp_type, args.mlp_impl) == (4, 1, 0.2, "mlp", "gbmoe")
    assert args.bias and args.activation_fn is DEFAULT_ACTIVATION_FN and not args.fp16
    with pytest.raises(ValueError, match="from_megatron: num_experts: expected the number of experts, got None"):
        of(both)


@pytest.mark.parametrize("options, came", [(None, "NoneType"), (dict(num_experts=8, moe_router_topk=2), "dict")])
def test_what_has_no_attributes_gave_one_expert(options, came):
    with pytest.raises(TypeError, match=f"from_megatron: megatron_args: expected an object with options as attributes, .* got {came}"):
        from_megatron(options)


class Attributes(dict):
    """As configuration packages have them: entries are attributes, which dir() does not list."""

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def test_an_unknown_option_of_a_dictionary_with_attributes_was_passed_over():
    args = from_megatron(Attributes(CONFIG))
    assert (args.moe_num_experts, args.moe_top_k) == (8, 2)
    with pytest.raises(ValueError, match="moe_of_next_year: expected an option that gbmoe knows, or that is off, got 3"):
        from_megatron(Attributes(CONFIG, moe_of_next_year=3))


def test_experts_for_each_layer_are_named():
    with pytest.raises(ValueError, match=r"moe_num_experts: expected an int of at least 1, got \[8, 4\]"):
        of(NAMESPACE, num_experts=[8, 4])


def test_the_group_must_be_that_of_the_expert_parallel_ranks(group_of_one):
    with pytest.raises(ValueError, match="expert_parallel_group: expected the group of the expert_model_parallel_size == 2 .* of 1"):
        of(expert_model_parallel_size=2)


@pytest.mark.parametrize("pre_softmax", [False, True])
@pytest.mark.parametrize("coefficients", [dict(moe_aux_loss_coeff=0.3), dict(moe_z_loss_coeff=0.2)], ids=str)
def test_the_layer_and_its_losses_are_megatrons(pre_softmax, coefficients):
    """Against what Megatron's TopKRouter, SequentialMLP and auxiliary losses compute, in float64."""
    torch.manual_seed(0)
    args = of(gated_linear_unit=True, activation_func=F.silu, moe_router_pre_softmax=pre_softmax, num_layers=2, moe_lbl_in_fp32=False,
              init_method_std=0.5, **coefficients)
    args.device = "cpu"
    layers = [gbmoe.dMoE(args).double() for _ in range(2)]
    x = torch.randn(20, 1, 32, dtype=torch.float64)
    gbmoe.clear_load_balancing_loss()
    gbmoe.clear_router_zloss()
    outs = [layer(x) for layer in layers]
    loss = gbmoe.batched_load_balancing_loss(args) + (gbmoe.batched_router_zloss(args).sum() if args.moe_zloss_weight else 0)
    gbmoe.clear_load_balancing_loss()
    gbmoe.clear_router_zloss()
    expected_loss = 0.0
    for layer, out in zip(layers, outs):
        x_TH = x.flatten(0, 1)
        logits_TE = x_TH @ layer.router.layer.weight.t()
        scores_TE = logits_TE.softmax(-1)
        if pre_softmax:
            weights_TK, ids_TK = scores_TE.topk(2)
        else:
            chosen_TK, ids_TK = logits_TE.topk(2)
            weights_TK = chosen_TK.softmax(-1)
        w1, w2, v1 = (getattr(layer.experts.mlp, name).view(8, -1, 32) for name in ("w1", "w2", "v1"))
        expected_TH = torch.stack([sum(weight * (F.silu(w1[e] @ token) * (v1[e] @ token)) @ w2[e] for weight, e in zip(weights, ids))
                                   for token, weights, ids in zip(x_TH, weights_TK, ids_TK)])
        torch.testing.assert_close(out.flatten(0, 1), expected_TH)
        counts_E = ids_TK.flatten().bincount(minlength=8).double()
        expected_loss += coefficients.get("moe_aux_loss_coeff", 0) * 8 / (2 * 20 * 20) * (scores_TE.sum(0) * counts_E).sum()
        expected_loss += coefficients.get("moe_z_loss_coeff", 0) * logits_TE.logsumexp(-1).square().mean()
    torch.testing.assert_close(loss, expected_loss)


def test_squared_relu_has_a_kernel():
    x = torch.randn(7, requires_grad=True)
    assert activation_name(relu_squared) == "relu_squared"
    assert torch.equal(relu_squared(x), squared_relu(x))
