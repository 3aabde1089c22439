"""`gbmoe info`: complete as text and as JSON, and the same through `python -m gbmoe`."""

import json
import subprocess

import pytest
import torch

import gbmoe
from gbmoe import engines, extension
from gbmoe.cli import describe_system, main
from gbmoe.extension import loader
from gbmoe.layers.arguments import default_device
from tests.forked_python import python


def test_text_names_versions_device_extension_and_every_engine(capsys):
    assert main(["info"]) == 0
    lines = dict(line.split("  ", 1) for line in capsys.readouterr().out.replace("\n  ", "\n> ").splitlines() if "  " in line)
    lines = {name: value.strip() for name, value in lines.items()}
    assert lines["gbmoe"].startswith(gbmoe.__version__) and lines["torch"] == torch.__version__
    assert lines["device"].startswith(default_device().type)
    for name, reason in (engines.availability(default_device()) | engines.recipes_availability(default_device())).items():
        assert lines[f"> {name}"] == (f"no: {reason}" if reason else "yes")
    for dtype, names in engines.taken_by_auto(default_device()).items():
        assert lines[f"> {dtype}"] == ", ".join(names) != ""
    status = extension.status()
    assert lines["extension"] == ("loaded" if status.loaded else f"not loaded: {status.reason}")
    assert lines.get("> what helps") == status.remedy


def test_json_is_one_object_with_the_same_facts():
    done = subprocess.run([python(device=default_device()), "-m", "gbmoe", "info", "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["versions"]["gbmoe"] == gbmoe.__version__ and found["versions"]["torch"] == torch.__version__
    assert found["machine"]["device"] == default_device().type and found["machine"]["name"]
    assert set(found["engines"]) == {*engines.ENGINES, *engines.FLOAT8_ENGINES}
    for engine in found["engines"].values():
        assert engine["available"] == (engine["reason"] is None)
    assert found["engines"]["reference"]["available"]
    assert found["auto"] == engines.taken_by_auto(default_device())
    assert found["extension"]["loaded"] == (found["extension"]["reason"] is None)


def test_extension_says_what_it_was_built_against(tmp_path, monkeypatch, capsys):
    built = tmp_path / "_C.so"
    built.write_bytes(b"\x7fELF...\0libcublas.so.13\0libtorch_cuda.so\0")
    monkeypatch.setattr(loader, "AHEAD_OF_TIME", built)
    monkeypatch.setattr(extension, "status", lambda: extension.Status(True, built, None, None, ("8.0", "9.0+PTX"), "a note"))
    described = describe_system.describe_extension()
    assert described["loaded"] and described["path"] == str(built) and described["compiled"] == "ahead of time"
    assert described["built_against"] == {"cuda_major": 13, "torch_at_least": "2.10"}
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert str(built) in out and "CUDA 13, stable ABI of torch 2.10" in out
    assert "architectures  " in out and "8.0, 9.0+PTX" in out and "a note" in out and described["architectures"] == ["8.0", "9.0+PTX"]


def test_an_absent_device_is_refused(capsys):
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="2"):
            main(["verify", "--device", "cuda"])
        assert "sees no CUDA device" in capsys.readouterr().err
