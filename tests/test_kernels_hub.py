"""packaging/kernels_hub.py: what it lays out can be loaded in the way of Hugging Face's `kernels`, and by that where it is installed."""

import base64
import hashlib
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import gbmoe

ROOT = Path(__file__).resolve().parents[1]
# What kernels 0.17.2 does (kernels/importer.py).
LOADER = """
import importlib.util, json, sys
from pathlib import Path

def load(variant):
    name = json.loads((variant / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception:
        del sys.modules[name]
        raise
    return module
"""
# A layer, and modules that are imported later.
PROGRAM = LOADER + """
import torch
package = load(Path(sys.argv[1]))
assert package.gbmoe.__file__ == str(Path(sys.argv[1], "gbmoe", "__init__.py")), package.gbmoe
args = package.Arguments(hidden_size=16, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, bias=False, fp16=False, device="cpu")
package.dMoE(args)(torch.randn(5, 1, 16)).sum().backward()
import gbmoe.parallel
assert gbmoe is package.gbmoe and gbmoe.parallel.__file__.startswith(sys.argv[1])
assert not any(Path(entry).resolve().is_relative_to(Path(sys.argv[1]).resolve()) for entry in sys.path)
"""
OF_KERNELS = """
import sys
from pathlib import Path
import torch
from kernels import LocalLayerRepository, Mode, get_local_kernel, kernelize, replace_kernel_forward_from_hub, use_kernel_mapping
from kernels._rust import Digest, DigestAlgorithm, Metadata
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

folder = Path(sys.argv[1])
package = get_local_kernel(folder)
args = package.Arguments(hidden_size=16, ffn_hidden_size=32, moe_num_experts=4, moe_top_k=2, bias=False, fp16=False)
package.dMoE(args)(torch.randn(5, 1, 16)).sum().backward()
variant, = (folder / "build").iterdir()
Metadata.read_from_file(variant / "metadata.json").digest.validate(Digest.hash_variant(DigestAlgorithm.SHA256, variant))

replace_kernel_forward_from_hub(GptOssMLP, "MegaBlocksMoeMLP")
model = GptOssForCausalLM(GptOssConfig(vocab_size=100, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
                                       num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=2))
ids = torch.randint(100, (2, 16))
model.set_experts_implementation("eager")
expected = model(ids).logits
layer = LocalLayerRepository(folder, layer_name="MegaBlocksMoeMLP")
with use_kernel_mapping({"MegaBlocksMoeMLP": {"cpu": layer}}):
    kernelize(model, device="cpu", mode=Mode.TRAINING | Mode.TORCH_COMPILE, use_fallback=False)
with torch.profiler.profile() as profile:
    logits = model(ids).logits
assert any(event.key == "gbmoe::expert_mlp" for event in profile.key_averages())
torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
"""


@pytest.fixture(scope="module")
def lay_out():
    return runpy.run_path(str(ROOT / "packaging" / "kernels_hub.py"))["lay_out"]


def wheel(folder, name, facts=None):
    """A wheel of the checkout's Python; with `facts` as if it had an extension."""
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for source in sorted((ROOT / "gbmoe").rglob("*.py")):
            archive.write(source, source.relative_to(ROOT).as_posix())
        archive.writestr("gbmoe-0.2.0.dist-info/METADATA", "")
        if facts is not None:
            archive.writestr("gbmoe/_C.so", b"")
            archive.writestr("gbmoe/_C.so.json", json.dumps(facts))
    return path


@pytest.fixture(scope="module")
def variant(lay_out, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    return lay_out(wheel(folder, "gbmoe-0.2.0-py3-none-any.whl"), folder, 1)


def load(variant):
    names = {}
    exec(LOADER, names)
    return names["load"](variant)


def test_a_variant_is_named_after_what_it_runs_with(lay_out, tmp_path):
    facts = {"sources": "", "cuda_major": 13, "architectures": ["9.0", "12.0+PTX"]}
    names = {}
    for name, major in (("manylinux_2_28_x86_64", 13), ("linux_aarch64", 12)):
        path = wheel(tmp_path, f"gbmoe-0.2.0+cu{major}-py3-none-{name}.whl", facts | {"cuda_major": major})
        target = lay_out(path, tmp_path, 3)
        metadata = json.loads((target / "metadata.json").read_text())
        assert metadata["backend"] == {"type": "cuda", "archs": ["9.0", "12.0+PTX"]} and metadata["version"] == 3
        assert re.fullmatch(r"_gbmoe_cuda_[0-9a-f]{8}", metadata["id"]) and metadata["name"] == "gbmoe"
        names[target.relative_to(tmp_path).as_posix()] = metadata["id"]
    assert list(names) == ["build/torch-stable-abi210-cu130-x86_64-linux", "build/torch-stable-abi210-cu126-aarch64-linux"]
    assert len(set(names.values())) == 2
    version = (ROOT / "gbmoe" / "extension" / "build.py").read_text()
    assert 'TORCH_TARGET_VERSION = "0x020a' in version  # which is what 210 stands for
    with pytest.raises(ValueError, match="expected one for linux"):
        lay_out(wheel(tmp_path, "gbmoe-0.2.0-py3-none-win_amd64.whl", facts), tmp_path, 0)
    with pytest.raises(ValueError, match="expected a wheel of gbmoe"):
        zipfile.ZipFile(tmp_path / "other.whl", "w").close()
        lay_out(tmp_path / "other.whl", tmp_path, 0)


def test_metadata_has_a_digest_of_every_file(variant):
    metadata = json.loads((variant / "metadata.json").read_text())
    found = {path.relative_to(variant).as_posix() for path in variant.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    files = metadata["digest"]["files"]
    assert found == {*files, "metadata.json"} and {"__init__.py", "layers.py", "gbmoe/__init__.py"} < found
    for name in ("layers.py", "gbmoe/plan.py"):
        assert base64.b64decode(files[name]) == hashlib.sha256((variant / name).read_bytes()).digest()


def test_a_process_has_one_gbmoe_and_another_version_is_an_error(variant, monkeypatch):
    package = load(variant)
    assert package.gbmoe is gbmoe and package.dMoE is gbmoe.dMoE and set(gbmoe.__all__) < set(package.__all__)
    assert {name for name in dir(package.layers.MegaBlocksMoeMLP) if name not in dir(torch.nn.Module)} == {"can_torch_compile"}
    monkeypatch.setattr(gbmoe, "__version__", "0.1.0")
    with pytest.raises(ImportError, match=r"expected no other gbmoe than 0\.2\.0.*, got 0\.1\.0 from .*gbmoe/__init__\.py"):
        load(variant)


def run(program, argument, folder, *paths):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", program, str(argument)], cwd=folder, text=True, capture_output=True,
                          env={**environment, "PYTHONPATH": os.pathsep.join(map(str, paths))})
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_it_computes_where_no_gbmoe_is_installed(variant, tmp_path):
    """From links, as in the cache of the hub."""
    linked = tmp_path / "hub"
    for number, source in enumerate(sorted(path for path in variant.rglob("*") if path.is_file() and path.suffix != ".pyc")):
        blob, link = tmp_path / "blobs" / str(number), linked / source.relative_to(variant)
        for path in (blob, link):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(source.read_bytes())
        link.symlink_to(blob)
    run(PROGRAM, linked, tmp_path)


@pytest.mark.slow
def test_kernels_loads_it_and_puts_its_layer_into_a_model(variant, tmp_path):
    """By hand (scripts/test_frameworks.sh); `kernels` brings cryptography and what checks signatures."""
    if importlib.util.find_spec("kernels") is None:
        pytest.skip("kernels is not installed")
    run(OF_KERNELS, variant.parents[1], tmp_path, *(path for path in sys.path if path and Path(path).resolve() != ROOT))
