"""convert_checkpoint: whole files or none, and no surprise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gbmoe.compat.checkpoints import convert_checkpoint, convert_files, files, to_megablocks, to_transformers
from tests.compat.checkpoints.examples import EXPERTS, FFN, HIDDEN, assert_same, model

CONFIG = {"model_type": "mixtral", "hidden_size": HIDDEN, "intermediate_size": FFN, "num_local_experts": EXPERTS}


@pytest.fixture
def save_file():
    return pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file


def load(path):
    from safetensors.torch import load_file

    index = path / "model.safetensors.index.json"
    if not path.is_dir():
        return load_file(path)
    if not index.exists():
        return load_file(path / "model.safetensors")
    loaded = {}
    for name, file in json.loads(index.read_text())["weight_map"].items():
        loaded[name] = load_file(path / file)[name]
    return loaded


def save_sharded(save_file, tensors, folder, shards=3):
    """A directory as transformers writes it, but cut without regard to layers, and with files next to the weights."""
    folder.mkdir()
    weight_map = {}
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(sorted(tensors.items()))[shard::shards])
        save_file(part, folder / name, metadata={"format": "pt", "shard": str(shard)})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "pytorch_model.bin").write_bytes(b"the old layout")
    (folder / "original").mkdir()
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_file_there_and_back_is_the_same_file(save_file, tmp_path, dtype):
    """Byte for byte, header and metadata included, with tensors of other widths, scalars and empty ones."""
    tensors = model(dtype=dtype) | {"empty": torch.zeros(0, 3), "flags": torch.tensor([True, False, True])}
    save_file(tensors, tmp_path / "a", metadata={"format": "pt"})
    convert_checkpoint(tmp_path / "a", tmp_path / "b", "megablocks")
    assert_same(load(tmp_path / "b"), to_megablocks(tensors))
    convert_checkpoint(tmp_path / "b", tmp_path / "c", "transformers")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "a").read_bytes()
    for experts in ("gate_proj", "w1"):
        convert_checkpoint(tmp_path / "b", tmp_path / experts, "transformers", experts=experts)
        assert_same(load(tmp_path / experts), to_transformers(to_megablocks(tensors), experts))
        convert_checkpoint(tmp_path / experts, tmp_path / f"{experts}-b", "megablocks")
        assert (tmp_path / f"{experts}-b").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_sharded_checkpoint_keeps_its_files_and_metadata(save_file, tmp_path):
    from safetensors import safe_open

    tensors = model(layers=3)
    separate = to_transformers(to_megablocks(tensors), "w1")
    source, lines = save_sharded(save_file, separate, tmp_path / "source"), []
    convert_checkpoint(source, tmp_path / "megablocks", "megablocks", report=lines.append)
    assert_same(load(tmp_path / "megablocks"), to_megablocks(tensors))
    convert_checkpoint(tmp_path / "megablocks", tmp_path / "back", "transformers", experts="w1")
    assert_same(load(tmp_path / "back"), separate)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for folder, more in ((tmp_path / "megablocks", ["gbmoe_arguments.json"]), (tmp_path / "back", [])):
        assert (folder / "config.json").read_bytes() == (source / "config.json").read_bytes()
        assert sorted(os.listdir(folder)) == ["config.json", *more, *shards, "model.safetensors.index.json"]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert index["metadata"] == {"total_size": sum(t.nbytes for t in separate.values())}
        for number, shard in enumerate(shards):
            with safe_open(folder / shard, framework="pt") as file:
                assert file.metadata() == {"format": "pt", "shard": str(number)}
                assert set(file.keys()) == {name for name, path in index["weight_map"].items() if path == shard}
    assert lines[:-1] == [*(f"wrote {shard}" for shard in shards), "left out original", "left out pytorch_model.bin",
                          "wrote gbmoe_arguments.json"]


# ------------------------------------------------------------------------------------ nothing half-written, no surprise


def fail(error, monkeypatch, after):
    """The error in the place of the write number `after`."""
    write, calls = files._write_bytes, []

    def failing(file, tensor):
        calls.append(tensor)
        if len(calls) > after:
            file.write(b"half")
            raise error
        write(file, tensor)

    monkeypatch.setattr(files, "_write_bytes", failing)


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt(), SystemExit(143)], ids=repr)
@pytest.mark.parametrize("after", [0, 5, 19])
@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_an_error_or_interrupt_leaves_nothing_behind(save_file, tmp_path, monkeypatch, error, after, sharded):
    if sharded:
        source = save_sharded(save_file, model(layers=3), tmp_path / "source")
    else:
        source = tmp_path / "source"
        save_file(model(layers=3), source)
    fail(error, monkeypatch, after)
    with pytest.raises(type(error)):
        convert_checkpoint(source, tmp_path / "target", "megablocks")
    assert os.listdir(tmp_path) == ["source"]


@pytest.mark.parametrize("sharded", [False, True], ids=["file", "directory"])
def test_two_conversions_of_one_process_id_leave_each_other_alone(save_file, tmp_path, monkeypatch, sharded):
    """Containers that share a folder count their processes each from 1."""
    source, target, write = tmp_path / "source", tmp_path / "target", files._write_bytes
    save_sharded(save_file, model(), source) if sharded else save_file(model(), source)

    def overtaken(file, tensor):
        monkeypatch.setattr(files, "_write_bytes", write)
        convert_checkpoint(source, target, "megablocks")
        write(file, tensor)

    monkeypatch.setattr(files, "_write_bytes", overtaken)
    with pytest.raises(FileExistsError, match="target: exists already"):
        convert_checkpoint(source, target, "megablocks")
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]
    convert_checkpoint(target, tmp_path / "back", "transformers")


def test_the_target_has_its_name_only_when_it_is_complete(save_file, tmp_path, monkeypatch):
    source, copy = save_sharded(save_file, model(), tmp_path / "source"), convert_files.copy_others

    def watched(*arguments, **options):
        copy(*arguments, **options)
        assert not (tmp_path / "target").exists()

    monkeypatch.setattr(convert_files, "copy_others", watched)
    convert_checkpoint(source, tmp_path / "target", "megablocks")
    assert sorted(os.listdir(tmp_path)) == ["source", "target"]


def test_what_cannot_be_converted_is_refused_before_anything_is_written(save_file, tmp_path):
    source = tmp_path / "source"
    save_file(model() | {"model.layers.1.mlp.experts.gate_up_proj_bias": torch.zeros(4, 80)}, source)
    with pytest.raises(ValueError, match="model.layers.1.mlp.experts.gate_up_proj_bias: unexpected"):
        convert_checkpoint(source, tmp_path / "target", "megablocks")
    with pytest.raises(FileExistsError, match="source: exists already"):
        convert_checkpoint(source, source, "megablocks")
    with pytest.raises(FileNotFoundError, match="nowhere"):
        convert_checkpoint(tmp_path / "nowhere", tmp_path / "target", "megablocks")
    with pytest.raises(FileNotFoundError, match="nowhere: no such directory"):
        convert_checkpoint(source, tmp_path / "nowhere" / "target", "megablocks")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="has neither model.safetensors nor"):
        convert_checkpoint(tmp_path / "empty", tmp_path / "target", "megablocks")
    cut = tmp_path / "cut"
    cut.write_bytes(source.read_bytes()[:-1])
    with pytest.raises(ValueError, match="cut: expected a whole safetensors file"):
        convert_checkpoint(cut, tmp_path / "target", "megablocks")
    assert sorted(os.listdir(tmp_path)) == ["cut", "empty", "source"]


def test_an_index_that_differs_from_its_files_is_refused(save_file, tmp_path):
    source = save_sharded(save_file, model(), tmp_path / "source")
    index = json.loads((source / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.embed_tokens.weight"]
    index["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="differs from its files in model.embed_tokens.weight, model.norm.weight"):
        convert_checkpoint(source, tmp_path / "target", "megablocks")
    first, second = (source / f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2))
    second.write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match="model-00002-of-00003.safetensors: in another file as well: "):
        convert_checkpoint(source, tmp_path / "target", "megablocks")
    (source / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a weight_map"):
        convert_checkpoint(source, tmp_path / "target", "megablocks")


def test_a_package_that_safetensors_lacks_is_not_said_to_be_safetensors(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(b"")
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("import a_package_that_safetensors_needs\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "safetensors"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match="^No module named 'a_package_that_safetensors_needs'$"):
        convert_checkpoint(tmp_path / "source", tmp_path / "target", "megablocks")


def test_without_safetensors_the_message_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "source").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="needs safetensors: pip install"):
        convert_checkpoint(tmp_path / "source", tmp_path / "target", "megablocks")


MEMORY_PROBE = """
import sys
import safetensors
from gbmoe.compat import checkpoints
from gbmoe.compat.checkpoints import files

def own():
    return next(int(line.split()[1]) / 1024 for line in open("/proc/self/status") if line.startswith("RssAnon"))

def watched(file, tensor):
    write(file, tensor)
    peaks.append(own())

write, peaks, files._write_bytes = files._write_bytes, [], watched
before = own()
checkpoints.convert_checkpoint("source", "there", "megablocks")
checkpoints.convert_checkpoint("there", "back", "transformers")
print(max(peaks) - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_number_of_layers(save_file, tmp_path):
    """60 MiB in 16 layers: the memory that is the process' own, and not the mapped source, grows by a few tensors."""
    shapes = {"gate.weight": [4, 128], "experts.gate_up_proj": [4, 1280, 128], "experts.down_proj": [4, 128, 640]}
    tensors = {f"layers.{layer}.mlp.{name}": torch.zeros(shape)
               for layer in range(16) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / "source")
    root = Path(__file__).parents[2]
    grown = subprocess.run([sys.executable, "-c", MEMORY_PROBE], cwd=tmp_path, capture_output=True, text=True, check=True,
                           env=os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path])})
    assert float(grown.stdout) < 20
