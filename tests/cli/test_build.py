"""`gbmoe build`: the cache is filled on a machine without a GPU, and taken on one without a compiler."""

import re

import pytest
import torch

from gbmoe import extension
from gbmoe.cli import main
from gbmoe.extension import build, loader
from tests.extension.conftest import toolkit  # noqa: F401  the fixture
from tests.extension.toolkit_of_paper import again


@pytest.fixture
def login_node(toolkit, monkeypatch):  # noqa: F811
    """A machine with a compiler and without a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return toolkit


def test_what_a_login_node_has_compiled_is_loaded_on_a_compute_node_without_nvcc(login_node, monkeypatch, capsys):
    assert main(["build", "--arch", "8.0", "9.0", "--jobs", "1"]) == 0
    out = capsys.readouterr().out
    assert "for 8.0, 9.0: about" in out and "with 1 job (as asked for)" in out and re.search(r"^\[1/1\] one\.cu: \d+ s$", out, re.MULTILINE)
    assert "8.0, 9.0" in extension.status().reason  # `info` says so there
    monkeypatch.setattr("gbmoe.extension.toolkit._nvcc_candidates", lambda: [])
    status = again()
    assert status.loaded and status.architectures == ("8.0", "9.0") and str(status.path) in out


def test_without_arch_it_takes_visible_gpus_then_the_list_then_all(login_node, monkeypatch):
    def compiled():
        assert main(["build"]) == 0
        return next(one.architectures for one in loader.usable() if one.path not in seen and not seen.add(one.path))
    seen = set()
    assert compiled() == ("7.5", "8.0", "8.6", "9.0+PTX", "12.0+PTX")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5+PTX")
    assert compiled() == ("7.5+PTX",)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: (8, 9))
    assert main(["build"]) == 0 and login_node.links() == 2  # 8.6 serves it
    next(one.path for one in loader.usable() if "8.6" in one.architectures).unlink()
    assert compiled() == ("8.6+PTX",)
    monkeypatch.setattr("gbmoe.extension.toolkit._nvcc_candidates", lambda: [])
    assert main(["build"]) == 0  # a node that has a driver alone, and a filled cache


def test_what_is_there_is_not_compiled_again_unless_it_is_broken(login_node, capsys):
    assert main(["build", "--arch", "8.0", "9.0+PTX"]) == 0
    assert main(["build", "--arch", "9.0"]) == 0 and login_node.links() == 1
    assert "nothing to do: " in capsys.readouterr().out
    one, = loader.usable()
    one.path.write_bytes(b"an obj")
    assert main(["build", "--arch", "8.0", "9.0+PTX"]) == 0 and login_node.links() == 2
    assert build.whole(one.path)


@pytest.mark.parametrize("words, status, said", [
    (["--arch", "fast"], 2, "--arch: expected entries such as 8.0"), (["--arch", "8.1"], 2, "cannot compile for 8.1; it knows 75, 80")])
def test_architectures_that_cannot_be_are_the_users_error(login_node, capsys, words, status, said):
    assert main(["build", *words]) == status and said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--jobs", "0"], ["--jobs", "two"], ["--arch"]])
def test_a_wrong_command_line_has_status_2(words):
    with pytest.raises(SystemExit, match="2"):
        main(["build", *words])


def test_without_a_compiler_or_with_a_failing_one_it_says_why_and_what_helps(login_node, monkeypatch, capsys):
    (login_node.home / "fails").touch()
    assert main(["build", "--arch", "9.0"]) == 1 and "no space" in capsys.readouterr().err
    monkeypatch.setenv("MAX_JOBS", "many")
    assert main(["build", "--arch", "9.0"]) == 1 and "MAX_JOBS: expected a number" in capsys.readouterr().err
    monkeypatch.setattr("gbmoe.extension.toolkit._nvcc_candidates", lambda: [])
    assert main(["build", "--arch", "9.0"]) == 1
    assert re.search("nvcc was not found.*\n.*install nvcc 13.x", capsys.readouterr().err)
