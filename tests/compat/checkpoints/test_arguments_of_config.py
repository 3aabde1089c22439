"""config.json to Arguments: what a dMoE cannot compute is refused with the field that says so; so is what is no configuration."""

import json
import shutil

import pytest
import torch
import torch.nn.functional as F

import gbmoe
from gbmoe.cli import main
from gbmoe.compat.checkpoints import BrokenCheckpoint, convert_checkpoint, read_arguments, to_megablocks
from gbmoe.compat.checkpoints.arguments_of_config import Config
from gbmoe.compat.checkpoints.models import MODEL_TYPES
from gbmoe.compat.checkpoints.refused import REFUSED
from tests.compat.checkpoints.examples import EXPERTS, FFN, HIDDEN, MLP, SHARED, assert_same, block

safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs safetensors")


def config_of(model_type, **values):
    """A configuration of the sizes of examples.block()."""
    kind = MODEL_TYPES.get(model_type, MODEL_TYPES["mixtral"])
    return {"model_type": model_type, "hidden_size": HIDDEN, kind.ffn: FFN, kind.experts[0]: EXPERTS, kind.top_k[0]: 2} | values


HUNYUAN = {name.replace("gate.", "gate.wg."): value for name, value in block().items()} | {
    name.replace("shared_experts", "shared_mlp"): value for name, value in
    block({name: [FFN if size == 16 else size for size in shape] for name, shape in SHARED.items()}).items()}


def hunyuan(**values):
    return config_of("hunyuan_v1_moe", **values)


@pytest.fixture
def saved(tmp_path):
    """saved(config, tensors) -> a directory with the two files; config is a dict, or text, or None for no config.json."""
    def save(config, tensors=None):
        folder = tmp_path / "source"
        folder.mkdir()
        tensors = block(prefix="model.layers.0.mlp.") if tensors is None else tensors
        safetensors_torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        if config is not None:
            (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return folder
    return save


# ------------------------------------------------------------------------------------------------------------ refusals

# Model type, field, value, and what the reason has to say after the field's name.
UNCOMPUTABLE = [
    ("deepseek_v2", "topk_method", "noaux_tc",
     "expected 'greedy' or 'group_limited_greedy', got 'noaux_tc': it needs a method that transformers has"),
    ("deepseek_v2", "scoring_func", "sigmoid", "expected 'softmax', got 'sigmoid': it needs one meaning"),
    ("deepseek_v2", "norm_topk_prob", True, "expected False or None, got True: it needs one meaning"),
    ("deepseek_v2", "mlp_bias", True, "expected False, got True: it needs biases of the shared expert"),
    ("deepseek_v3", "scoring_func", "softmax", "expected 'sigmoid', got 'softmax': it needs one meaning"),
    ("kimi_k2", "topk_method", "greedy", "expected 'noaux_tc', got 'greedy': it needs one meaning"),
    ("ernie4_5_moe", "moe_norm_min", 0.1, "expected 1e-12 or 0, got 0.1: it needs a bound for the sum"),
    ("ernie4_5_moe", "use_bias", True, "expected False or None, got True: it needs biases of the shared expert"),
    ("hunyuan_v1_moe", "norm_topk_prob", False, "expected True, got False: it needs one meaning"),
    ("minimax_m2", "use_routing_bias", False, "expected True, got False: it needs one meaning"),
    ("minimax_m2", "shared_intermediate_size", 64, "expected 0, got 64: it needs one meaning"),
    ("cohere2_moe", "expert_selection_fn", "sqrt", "expected 'softmax' or 'sigmoid', got 'sqrt': it needs a function that"),
    ("mixtral", "router_jitter_noise", 0.01, "expected 0, got 0.01: it needs jitter of what the experts get"),
    ("minimax", "router_jitter_noise", 0.01, "expected 0, got 0.01: it needs jitter of what the experts get"),
    *((name, "hidden_act", "quick_gelu", "expected 'silu' or .*, got 'quick_gelu': it needs a name for it")
      for name, kind in MODEL_TYPES.items() if not kind.clamped_silu),
    *((name, "quantization_config", {"bits": 4}, "expected None, got {'bits': 4}: it needs weights that are") for name in MODEL_TYPES),
]


@pytest.mark.parametrize("to", ["megablocks", "transformers"])
@pytest.mark.parametrize("model_type, field, value, reason", UNCOMPUTABLE)
def test_layers_that_no_dmoe_computes_are_refused_by_their_field(model_type, field, value, reason, to, saved, tmp_path):
    tensors = block(prefix="model.layers.0.mlp.")
    source = saved(config_of(model_type) | {field: value}, tensors if to == "megablocks" else to_megablocks(tensors))
    expected = rf"config.json: a dMoE does not compute these layers of {model_type}:\n  {field}: {reason}"
    with pytest.raises(ValueError, match=expected) as refused:
        convert_checkpoint(source, tmp_path / "target", to)
    assert not isinstance(refused.value, BrokenCheckpoint) and len(str(refused.value).splitlines()) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_layers_with_different_numbers_of_experts_a_token_are_refused(saved, tmp_path):
    with pytest.raises(ValueError, match="moe_topk and num_experts_per_tok: expected one number for all layers, got 1, 2: it needs Arg"):
        convert_checkpoint(saved(hunyuan(moe_topk=[2, 1]), HUNYUAN), tmp_path / "target", "megablocks")
    assert not (tmp_path / "target").exists()


def test_deepseek_v2_with_groups_and_a_scaling_factor_was_written_without_a_word(saved, tmp_path, capsys):
    config = config_of("deepseek_v2", topk_method="group_limited_greedy", n_group=2, topk_group=1, routed_scaling_factor=16.0,
                       n_shared_experts=0)
    source = saved(config, block(prefix="model.layers.1.mlp."))
    assert main(["convert", str(source), str(tmp_path / "target"), "--to", "megablocks"]) == 0
    assert "moe_router_topk_scaling_factor=16.0" in capsys.readouterr().out
    function = read_arguments(tmp_path / "target", device="cpu").router_function
    assert (function.num_groups, function.group_topk, function.group_best, function.scale) == (2, 1, 1, 16)


def test_a_field_that_has_no_effect_is_not_a_reason_to_refuse(saved, tmp_path):
    config = config_of("cohere2_moe", shared_expert_combination_strategy="average")
    convert_checkpoint(saved(config), tmp_path / "target", "megablocks")
    with pytest.raises(ValueError, match="shared_expert_combination_strategy: expected 'sum', got 'average': it needs the mean"):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_shared_experts": 1}))
        Config(tmp_path / "config.json")


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_refused_model_type_is_told_what_it_needs(model_type, saved, tmp_path):
    with pytest.raises(ValueError, match="model_type: ") as refused:
        convert_checkpoint(saved(config_of(model_type)), tmp_path / "target", "megablocks")
    assert repr(model_type) in str(refused.value) and all(need in str(refused.value) for need in REFUSED[model_type])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_an_unknown_model_type_is_refused_and_the_known_ones_are_named(saved, tmp_path, capsys):
    source = saved(config_of("novel_moe"))
    for to in ("megablocks", "transformers"):
        assert main(["convert", str(source), str(tmp_path / "target"), "--to", to]) == 2
        err = capsys.readouterr().err
        assert "model_type: expected one of cohere2_moe, deepseek_v2, deepseek_v3, " in err
        assert "got 'novel_moe': whether a dMoE computes" in err
    assert not (tmp_path / "target").exists()


# ------------------------------------------------------------------------------------------------- broken configurations

BROKEN = {
    "not JSON": ("{", "config.json: not JSON"),
    "deep": ("[" * 100_000, "config.json: not JSON"),
    "no object": ("[1]", "config.json: expected an object, got list"),
    "no model_type": ({"hidden_size": HIDDEN}, "config.json: model_type: expected a name, got None"),
    "a list as model_type": ({"model_type": ["mixtral"]}, "config.json: model_type: expected a name, got ['mixtral']"),
    "a size as text": (config_of("mixtral", hidden_size="24"), "hidden_size: expected an int of at least 1, got '24'"),
    "a size that is true": (config_of("mixtral", hidden_size=True), "hidden_size: expected an int of at least 1, got True"),
    "experts of each layer": (config_of("mixtral", num_local_experts=[4]), "expected an int of at least 1, got [4]"),
    "no experts": (config_of("mixtral", num_local_experts=0),
                   "num_local_experts and num_experts: expected an int of at least 1, got 0"),
    "synonyms that differ": (config_of("mixtral", num_experts=8),
                             "num_local_experts and num_experts: expected an int of at least 1, got 4, 8"),
    "no top-k": ({key: value for key, value in config_of("deepseek_v2").items() if key != "num_experts_per_tok"},
                 "num_experts_per_tok: expected an int of at least 1, got None"),
    "more than all experts": (config_of("mixtral", num_experts_per_tok=5),
                              "num_experts_per_tok: expected at most the number of experts, 4, got 5"),
    "other experts": (config_of("mixtral", num_local_experts=8), "model.layers.0.mlp.: experts: expected 8, as"),
    "another hidden size": (config_of("mixtral", hidden_size=32), "model.layers.0.mlp.: hidden size: expected 32, as"),
    "another ffn hidden size": (config_of("mixtral", intermediate_size=41),
                                "model.layers.0.mlp.: ffn hidden size: expected 41, as"),
    "transformers' defaults": ({"model_type": "mixtral"}, "model.layers.0.mlp.: experts: expected 8, as"),
    "groups that do not divide the experts": (config_of("mistral4", n_group=3, topk_group=1, n_shared_experts=0),
                                              "moe_router_num_groups: expected a divisor of moe_num_experts == 4, got 3"),
    "a factor as text": (config_of("mistral4", routed_scaling_factor="2", n_shared_experts=0),
                         "moe_router_topk_scaling_factor: expected None or a number, got '2'"),
    "a factor of null, which was taken for 1": (config_of("mistral4", routed_scaling_factor=None, n_shared_experts=0),
                                                "routed_scaling_factor: expected a value, got null"),
    "groups of null, which were taken for none": (
        config_of("deepseek_v2", topk_method="group_limited_greedy", n_group=None, topk_group=None, n_shared_experts=0),
        "n_group: expected a value, got null"),
    "no shared expert": (config_of("deepseek_v2"), "model.layers.0.mlp.: hidden size of the shared expert: expected 80, as"),
}


@pytest.mark.parametrize("to", ["megablocks", "transformers"])
@pytest.mark.parametrize("config, message", BROKEN.values(), ids=BROKEN)
def test_a_config_that_does_not_fit_ends_with_status_2_and_a_line(config, message, to, saved, tmp_path, capsys):
    tensors = block(prefix="model.layers.0.mlp.")
    source = saved(config, tensors if to == "megablocks" else to_megablocks(tensors))
    assert main(["convert", str(source), str(tmp_path / "target"), "--to", to]) == 2
    line, = capsys.readouterr().err.splitlines()
    assert message in line and line.isprintable()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_config_of_other_bytes_is_refused(saved, tmp_path):
    source = saved({})
    (source / "config.json").write_bytes(b'{"model_type": "\xff"}')
    with pytest.raises(BrokenCheckpoint, match="config.json: not JSON"):
        convert_checkpoint(source, tmp_path / "target", "megablocks")


MISFITS = {
    "a shared expert too many": ("mixtral", block() | block(SHARED),
                                 "hidden size of the shared expert: expected None, as .*, got 16"),
    "a bias for the choice": ("mixtral", block() | block({"gate.e_score_correction_bias": [EXPERTS]}),
                              "a bias for the choice of experts: expected False, as .*, got True"),
    "no bias for the choice": ("minimax_m2", block(), "a bias for the choice of experts: expected True, as .*, got False"),
    "no gate": ("mixtral", block(MLP), "experts with a gate: expected True, as .*, got False"),
    "two dtypes": ("mixtral", block(prefix="a.") | block(prefix="b.", dtype=torch.bfloat16),
                   "dtype of the experts: expected (F32|BF16), as in the first layer, got (F32|BF16)"),
}


@pytest.mark.parametrize("model_type, tensors, message", MISFITS.values(), ids=MISFITS)
def test_layers_that_differ_from_the_config_are_refused(model_type, tensors, message, saved, tmp_path):
    with pytest.raises(BrokenCheckpoint, match=message):
        convert_checkpoint(saved(config_of(model_type), tensors), tmp_path / "target", "megablocks")


def test_a_dtype_of_no_dmoe_is_refused(saved, tmp_path):
    tensors = {name: value.to(torch.float8_e4m3fn) for name, value in block().items()}
    with pytest.raises(ValueError, match="expected dtype BF16, F16, F32, F64, got F8_E4M3"):
        convert_checkpoint(saved(config_of("mixtral"), tensors), tmp_path / "target", "megablocks")


# ------------------------------------------------------------------------------------------------------- what is written


def test_arguments_are_printed_and_written(saved, tmp_path, capsys):
    config = config_of("deepseek_v2", n_shared_experts=0, time_step_limit=float("inf"))  # Infinity, as transformers writes it
    source = saved(config, block(dtype=torch.bfloat16))
    assert main(["convert", str(source), str(tmp_path / "target"), "--to", "megablocks"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.splitlines()[1:] == [
        "wrote gbmoe_arguments.json",
        "each MoE layer is gbmoe.dMoE(gbmoe.Arguments(hidden_size=24, ffn_hidden_size=40, moe_num_experts=4, moe_top_k=2,"
        " moe_normalize_expert_weights=None, mlp_type='glu', activation_fn=torch.nn.functional.silu, bias=False,"
        " moe_router_topk_scaling_factor=1.0, moe_router_dtype='fp32', fp16=False, bf16=True))"]
    arguments = read_arguments(tmp_path / "target", device="cpu", moe_loss_weight=0.01)
    assert arguments == gbmoe.Arguments(hidden_size=24, ffn_hidden_size=40, moe_num_experts=4, moe_top_k=2, mlp_type="glu",
                                        activation_fn=F.silu, bias=False, fp16=False, bf16=True, device="cpu", moe_loss_weight=0.01,
                                        moe_router_topk_scaling_factor=1, moe_router_dtype="fp32")
    assert read_arguments(tmp_path / "target" / "gbmoe_arguments.json").bf16


def test_a_file_of_a_model_finds_the_config_beside_it(saved, tmp_path):
    source, lines = saved(config_of("mixtral", hidden_act="gelu_pytorch_tanh")), []
    convert_checkpoint(source / "model.safetensors", tmp_path / "layers.safetensors", "megablocks", report=lines.append)
    written = tmp_path / "layers.safetensors.gbmoe_arguments.json"
    assert lines[:2] == [f"wrote {tmp_path / 'layers.safetensors'}", f"wrote {written}"]
    arguments = read_arguments(written)
    assert arguments.activation_fn.keywords == {"approximate": "tanh"} and arguments.dtype == torch.float32


def test_arguments_of_another_conversion_are_not_overwritten_nor_taken_over(saved, tmp_path):
    source = saved(config_of("mixtral"))
    (tmp_path / "layers.gbmoe_arguments.json").write_text("precious")
    with pytest.raises(FileExistsError, match="layers.gbmoe_arguments.json: exists already"):
        convert_checkpoint(source / "model.safetensors", tmp_path / "layers", "megablocks")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layers.gbmoe_arguments.json", "source"]
    assert (tmp_path / "layers.gbmoe_arguments.json").read_text() == "precious"

    (source / "gbmoe_arguments.json").write_text("stale")
    convert_checkpoint(source, tmp_path / "megablocks", "megablocks")
    assert read_arguments(tmp_path / "megablocks").moe_num_experts == EXPERTS
    lines = []
    convert_checkpoint(tmp_path / "megablocks", tmp_path / "back", "transformers", report=lines.append)
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]
    assert "left out gbmoe_arguments.json" in lines


@pytest.mark.parametrize("to, unknown", [("megablocks", "whether a dMoE computes these layers, and with which Arguments"),
                                         ("transformers", "whether from_pretrained loads this layout of its experts")])
def test_without_a_config_there_is_a_warning(to, unknown, saved, tmp_path, capsys):
    tensors = block(prefix="model.layers.0.mlp.")
    source = saved(None, tensors if to == "megablocks" else to_megablocks(tensors))
    assert main(["convert", str(source), str(tmp_path / "target"), "--to", to]) == 0
    printed = capsys.readouterr()
    assert printed.out == "wrote model.safetensors\n"
    assert printed.err.startswith(f"gbmoe convert: warning: {source}: there is no config.json") and unknown in printed.err
    assert sorted(path.name for path in (tmp_path / "target").iterdir()) == ["model.safetensors"]


def test_routers_of_another_dtype_are_pointed_out(saved, tmp_path):
    tensors, lines = block(dtype=torch.bfloat16), []
    tensors["gate.weight"] = tensors["gate.weight"].float()
    convert_checkpoint(saved(config_of("mixtral"), tensors), tmp_path / "target", "megablocks", report=lines.append)
    assert lines[0].startswith("warning: ") and "the router is F32, the experts are BF16" in lines[0]


def test_a_model_whose_layers_are_all_dense_has_nothing_to_convert(saved, tmp_path):
    source = saved(config_of("qwen3_moe", mlp_only_layers=[0]), {"model.layers.0.mlp.up_proj.weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match="there is no MoE layer"):
        convert_checkpoint(source, tmp_path / "target", "megablocks")


GPT_OSS = {"router.weight": [EXPERTS, HIDDEN], "router.bias": [EXPERTS], "experts.gate_up_proj": [EXPERTS, HIDDEN, 2 * FFN],
           "experts.gate_up_proj_bias": [EXPERTS, 2 * FFN], "experts.down_proj": [EXPERTS, FFN, HIDDEN],
           "experts.down_proj_bias": [EXPERTS, HIDDEN]}


def test_gpt_oss_in_bits_of_any_dtype_comes_back(saved, tmp_path):
    tensors = block(GPT_OSS, torch.bfloat16, "model.layers.0.mlp.")
    source = saved(config_of("gpt_oss", swiglu_limit=5), tensors)
    convert_checkpoint(source, tmp_path / "megablocks", "megablocks")
    ours = safetensors_torch.load_file(tmp_path / "megablocks" / "model.safetensors")
    assert {name.rpartition(".")[2]: list(value.shape) for name, value in ours.items() if "_bias" in name} == {
        "w1_bias": [EXPERTS, FFN], "v1_bias": [EXPERTS, FFN], "w2_bias": [EXPERTS, HIDDEN]}
    for name in ("w1_bias", "v1_bias"):
        of_both = tensors["model.layers.0.mlp.experts.gate_up_proj_bias"].view(torch.int16)
        assert torch.equal(ours[f"model.layers.0.mlp.experts.mlp.{name}"].view(torch.int16), of_both[:, name == "v1_bias" :: 2])
    arguments = read_arguments(tmp_path / "megablocks", device="cpu")
    assert arguments.activation_fn == gbmoe.ClampedSilu(1.702, 5, 5, 1) and arguments.moe_expert_linear_bias and arguments.bf16
    convert_checkpoint(tmp_path / "megablocks", tmp_path / "back", "transformers")
    assert_same(safetensors_torch.load_file(tmp_path / "back" / "model.safetensors"), tensors)


@pytest.mark.parametrize("missing, message", [
    ("experts.down_proj_bias", "experts.down_proj_bias: missing"), ("router.bias", "a bias of the router: expected True, .*, got False"),
    ("every bias", "biases of the experts: expected True, as in .*, got False")])
def test_gpt_oss_without_a_bias_is_refused(missing, message, saved, tmp_path):
    shapes = {name: shape for name, shape in GPT_OSS.items() if name != missing and (missing != "every bias" or "proj_bias" not in name)}
    with pytest.raises(ValueError, match=message):
        convert_checkpoint(saved(config_of("gpt_oss"), block(shapes)), tmp_path / "target", "megablocks")


def test_gpt_oss_in_mxfp4_is_refused_with_the_reason(saved, tmp_path):
    """By config.json, and where there is none by the names of its blocks and scales."""
    shapes = {name: shape for name, shape in GPT_OSS.items() if not name.endswith("_proj")}
    blocks = {f"experts.{name}_proj_{part}": torch.zeros(EXPERTS, 8, 3, dtype=torch.uint8)
              for name in ("gate_up", "down") for part in ("blocks", "scales")}
    config = config_of("gpt_oss", quantization_config={"quant_method": "mxfp4"})
    for given, message in ((config, "quantization_config: .*mxfp4.*: it needs weights that are not quantised: save the model dequantised"),
                           (None, r"experts.gate_up_proj_blocks: quantised \(MXFP4\)")):
        folder = saved(given, block(shapes) | blocks)
        with pytest.raises(ValueError, match=message):
            convert_checkpoint(folder, tmp_path / "target", "megablocks")
        shutil.rmtree(folder)


def test_llama4_has_the_fields_of_its_language_model_in_a_config_of_their_own(saved, tmp_path):
    shapes = {"router.weight": [EXPERTS, HIDDEN], "experts.gate_up_proj": [EXPERTS, HIDDEN, 2 * FFN],
              "experts.down_proj": [EXPERTS, FFN, HIDDEN],
              "shared_expert.gate_proj.weight": [FFN, HIDDEN], "shared_expert.up_proj.weight": [FFN, HIDDEN],
              "shared_expert.down_proj.weight": [HIDDEN, FFN]}
    tensors = block(shapes, prefix="language_model.model.layers.0.feed_forward.")
    text = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": EXPERTS, "model_type": "llama4_text"}
    convert_checkpoint(saved({"model_type": "llama4", "text_config": text}, tensors), tmp_path / "megablocks", "megablocks")
    arguments = read_arguments(tmp_path / "megablocks", device="cpu")
    assert arguments.moe_apply_probs_on_input and arguments.moe_router_score_function == "sigmoid" and arguments.moe_top_k == 1
    assert arguments.shared_expert_hidden_size == FFN
    convert_checkpoint(tmp_path / "megablocks", tmp_path / "back", "transformers")
    assert_same(safetensors_torch.load_file(tmp_path / "back" / "model.safetensors"), tensors)
    for name, config in (("list", {"model_type": "llama4", "text_config": [1]}),
                         ("quantised", {"model_type": "llama4", "text_config": text, "quantization_config": {"bits": 8}})):
        (tmp_path / "source" / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match={"list": "text_config: expected an object", "quantised": "quantization_config"}[name]):
            convert_checkpoint(tmp_path / "source", tmp_path / name, "megablocks")


# --------------------------------------------------------------------------------------------------------- read_arguments

ODD = {
    "a field of nothing": ({"hidden_sizes": 8}, r"expected an object with fields of gbmoe.Arguments and dtype, got \['hidden_sizes'\]"),
    "a dtype in two ways": ({"bf16": True}, r"got \['bf16'\]"),
    "a list": ([], "got list"),
    "no activation": ({"activation_fn": None}, "activation_fn: expected one of silu, gelu, gelu_tanh, relu, clamped.*, got None"),
    "another activation": ({"activation_fn": "mish"}, "activation_fn: expected one of silu, .*, got 'mish'"),
    "a clamped activation of two constants": ({"activation_fn": "clamped_silu 1.0 7.0"}, "activation_fn: expected one of silu, .*7.0'"),
    "a clamp at nothing": ({"activation_fn": "clamped_silu 1.0 0.0 1.0 0.0"}, "activation_fn: expected one of silu, .*, got 'clamped"),
    "a list as activation": ({"activation_fn": ["silu"]}, r"activation_fn: expected one of silu, .*, got \['silu'\]"),
    "another dtype": ({"dtype": "float8_e4m3fn"}, "dtype: expected one of float16, bfloat16, float32, float64, got 'float8_e4m3fn'"),
    "not the default dtype": ({"dtype": "float64"}, r"dtype: expected torch.get_default_dtype\(\), float32, or fp16 .*, got float64"),
    "a size of nothing": ({"hidden_size": 0}, "Arguments: hidden_size: expected an int of at least 1, got 0"),
}


@pytest.mark.parametrize("change, message", ODD.values(), ids=ODD)
def test_an_odd_file_is_refused_by_its_field(change, message, tmp_path):
    values = {"hidden_size": 8, "activation_fn": "silu", "dtype": "bfloat16"}
    (tmp_path / "gbmoe_arguments.json").write_text(json.dumps(values | change if isinstance(change, dict) else change))
    with pytest.raises(ValueError, match=message):
        read_arguments(tmp_path)


def test_the_caller_may_choose_another_dtype(tmp_path):
    (tmp_path / "gbmoe_arguments.json").write_text('{"hidden_size": 8, "activation_fn": "relu", "dtype": "float64"}')
    assert read_arguments(tmp_path, fp16=False, bf16=True).dtype == torch.bfloat16
    torch.set_default_dtype(torch.float64)
    try:
        assert read_arguments(tmp_path).dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
