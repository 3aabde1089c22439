"""experts_implementation="gbmoe" under what people train transformers' models with: Trainer, PEFT, gradient checkpointing, accelerate's
offload. Each gives the losses and parameters that transformers' own implementations of the experts give."""

import copy

import pytest
import torch

from gbmoe.compat import transformers as adapter
from gbmoe.testing import accuracy
from tests.compat.test_transformers import COMMON, MODELS, VOCABULARY

transformers = pytest.importorskip("transformers", minversion="5.8", reason="needs transformers 5.8 or newer")
accelerate = pytest.importorskip("accelerate", reason="Trainer and offload need accelerate")
peft = pytest.importorskip("peft", reason="needs peft")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
OTHERS = ("eager", "grouped_mm")
NAMES = ("mixtral", "qwen3_moe", "gpt_oss")


@pytest.fixture(scope="module", autouse=True)
def registered():
    adapter.register()


@pytest.fixture
def calls(monkeypatch):
    """How often gbmoe's fused operator computed experts."""
    made, original = [], adapter.expert_mlp
    monkeypatch.setattr(adapter, "expert_mlp", lambda *a, **k: made.append(1) or original(*a, **k))
    return made


def tiny(model_type, implementation, seed=0):
    torch.manual_seed(seed)
    config = transformers.CONFIG_MAPPING[model_type](**COMMON | MODELS[model_type], experts_implementation=implementation,
                                                     attn_implementation="eager")
    model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    for name, parameter in model.named_parameters():
        if name.endswith("_bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def batches(count=8, length=12):
    ids = torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def trained(model, folder, checkpointing=False):
    """Two steps of Trainer: (the losses that it logged, the parameters afterwards)."""
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, per_device_train_batch_size=4, learning_rate=1e-3, logging_steps=1, report_to=[],
        use_cpu=True, save_strategy="no", gradient_checkpointing=checkpointing, disable_tqdm=True, seed=3)
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=batches())
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2 and losses[0] != losses[1]
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_the_same(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-4)
    assert ours[1].keys() == theirs[1].keys()
    for name, value in ours[1].items():
        # Adam divides by the gradient's own size, so that a tiny one is a step, too.
        assert accuracy.relative_error(value, theirs[1][name]) < 2e-3, name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("model_type", NAMES)
def test_trainer_gets_the_same_losses_and_parameters(model_type, checkpointing, calls, tmp_path):
    ours = trained(tiny(model_type, "gbmoe"), tmp_path, checkpointing)
    # Two layers, two steps; each layer once more in backward where it is a checkpoint.
    assert len(calls) == (8 if checkpointing else 4)
    for other in OTHERS[:1] if checkpointing else OTHERS:
        assert_the_same(ours, trained(tiny(model_type, other), tmp_path, checkpointing))


ADAPTERS = {
    "attention": dict(target_modules=["q_proj", "v_proj"]),
    "experts": dict(target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"]),
    "attention and experts": dict(target_modules=["q_proj"], target_parameters=["experts.down_proj"]),
}


@pytest.mark.parametrize("of", ADAPTERS)
@pytest.mark.parametrize("model_type", NAMES)
def test_lora_gets_the_same_losses_and_adapters(model_type, of, calls, tmp_path):
    """The fused operator computes experts with adapters, too: their weights are sums that PEFT makes for a call."""
    def adapted(implementation):
        model = tiny(model_type, implementation)
        torch.manual_seed(4)
        config = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, task_type="CAUSAL_LM", **ADAPTERS[of])
        return peft.get_peft_model(model, config)

    ours = trained(adapted("gbmoe"), tmp_path)
    assert len(calls) == 4
    # PEFT makes a class of its own for a module in each forward: none of them is kept.
    assert not any("Parametrized" in kind.__name__ for kind in adapter._KNOWN_GATES)
    assert_the_same(ours, trained(adapted("grouped_mm"), tmp_path))
    trainable = [name for name, parameter in adapted("gbmoe").named_parameters() if parameter.requires_grad]
    before = dict(adapted("gbmoe").named_parameters())
    assert trainable and all("lora" in name for name in trainable)
    assert all(torch.equal(ours[1][name], before[name]) == (name not in trainable) for name in before)


def test_merged_adapters_of_experts_are_computed_as_before(calls):
    model = tiny("qwen3_moe", "gbmoe")
    config = peft.LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, **ADAPTERS["experts"])
    adapted, ids = peft.get_peft_model(model, config).eval(), batches(2)[0]["input_ids"][None]
    with torch.no_grad():
        before = adapted(ids).logits
        merged = adapted.merge_and_unload()
        assert accuracy.relative_error(merged(ids).logits, before) < 1e-5


def offloaded(way, model, folder):
    if way == "cpu_offload":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if way == "disk_offload":
        accelerate.disk_offload(model, str(folder / "weights"), execution_device=torch.device("cpu"))
        return model
    model.save_pretrained(folder / "saved")
    places = {"cpu": {"": "cpu"}, "cpu and disk": {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu",
                                                    "model.layers.1": "disk", "model.norm": "cpu", "lm_head": "cpu"}}
    return type(model).from_pretrained(folder / "saved", device_map=places[way], offload_folder=str(folder / "weights"),
                                       experts_implementation=model.config._experts_implementation)


@pytest.mark.parametrize("way", ["cpu_offload", "disk_offload", "cpu", "cpu and disk"])
@pytest.mark.parametrize("model_type", NAMES)
def test_offloaded_weights_are_there_when_experts_are_computed(model_type, way, calls, tmp_path):
    ids = torch.stack([batch["input_ids"] for batch in batches(2)])
    plain = tiny(model_type, "eager").eval()
    with torch.no_grad():
        expected = plain(ids, labels=ids)
        model = offloaded(way, copy.deepcopy(tiny(model_type, "gbmoe").eval()), tmp_path).eval()
        found = model(ids, labels=ids)
    assert len(calls) == 2
    assert found.loss.item() == pytest.approx(expected.loss.item(), rel=1e-5)
    assert accuracy.relative_error(found.logits, expected.logits) < 1e-5
    if "disk" in way or way == "cpu_offload":
        assert model.model.layers[1].mlp.experts.gate_up_proj.is_meta
