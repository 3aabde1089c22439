"""`gbmoe convert`: files written or the reason and status 1, and no trace of a conversion that was stopped."""

import os
import signal
import subprocess
import sys

import pytest
import torch

from gbmoe.cli import main
from gbmoe.compat import checkpoints

safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs safetensors")

MODEL = {"m.gate.weight": torch.randn(4, 8), "m.experts.gate_up_proj": torch.randn(4, 32, 8),
         "m.experts.down_proj": torch.randn(4, 8, 16), "norm.weight": torch.randn(8)}


@pytest.fixture
def source(tmp_path):
    safetensors_torch.save_file(MODEL, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def test_there_and_back_in_every_layout(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "megablocks"), "--to", "megablocks"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'megablocks'}\n"
    for experts in ([], *(["--experts", name] for name in checkpoints.EXPERT_LAYOUTS)):
        target = tmp_path / "-".join(["back", *experts[1:]])
        assert main(["convert", str(tmp_path / "megablocks"), str(target), "--to", "transformers", *experts]) == 0
        layout = experts[1] if experts else "fused"
        expected = checkpoints.to_transformers(checkpoints.to_megablocks(MODEL), layout)
        assert safetensors_torch.load_file(target).keys() == expected.keys()
    assert (tmp_path / "back").read_bytes() == (tmp_path / "back-fused").read_bytes() == source.read_bytes()


def test_a_refusal_names_what_does_not_fit_and_writes_nothing(source, tmp_path, capsys):
    safetensors_torch.save_file(MODEL | {"m.experts.down_proj_bias": torch.zeros(4, 8)}, source)
    assert main(["convert", str(source), str(tmp_path / "target"), "--to", "megablocks"]) == 1
    printed = capsys.readouterr()
    assert printed.out == "" and "m.experts.down_proj_bias: unexpected" in printed.err
    assert main(["convert", str(source), str(source), "--to", "megablocks"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["source.safetensors"]


def test_a_missing_package_is_named(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["convert", str(source), str(tmp_path / "target"), "--to", "megablocks"]) == 1
    assert "needs safetensors: pip install" in capsys.readouterr().err


def test_arguments_without_sense_end_with_status_2(source, tmp_path, capsys):
    arguments = ["convert", str(source), str(tmp_path / "target")]
    assert main([*arguments, "--to", "megablocks", "--experts", "w1"]) == 2
    assert "--experts goes with --to transformers" in capsys.readouterr().err
    for rest in ([], ["--to", "other"], ["--to", "transformers", "--experts", "other"]):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, *rest])
    assert os.listdir(tmp_path) == ["source.safetensors"]


def test_a_job_told_to_end_removes_what_it_wrote(source, tmp_path, monkeypatch):
    def killed(file, tensor):
        file.write(b"half")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(checkpoints, "_write_bytes", killed)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        main(["convert", str(source), str(tmp_path / "target"), "--to", "megablocks"])
    assert os.listdir(tmp_path) == ["source.safetensors"]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_the_command_imports_no_package_that_it_may_lack():
    probe = "import sys, gbmoe.cli; assert not {'safetensors', 'transformers', 'numpy'} & (set(sys.modules) - before)"
    subprocess.run([sys.executable, "-c", f"import sys, torch; before = set(sys.modules); {probe}"], check=True)
