"""`gbmoe install-megablocks` with a python that only pretends: what it does to an environment, and when."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from gbmoe.cli import install_megablocks, main
from tests.forked_python import python

# Its state is in files next to it: `absent` modules, `installed` packages, `calls` of pip, and `fails`, the subcommand of pip that does.
PYTHON = """#!/usr/bin/env bash
cd "$(dirname "$0")"
[[ $1 != -c ]] || { cat absent; echo; cat installed; exit; }
command=$4
[[ $command != check ]] || { cat complaints; exit 1; }
echo "$command $*" >>calls
if [[ $* == *--target* ]]; then command=tools; fi
if [[ $command == "$(cat fails)" ]]; then printf 'Collecting\\nERROR: no network\\nhint: none\\n' >&2; exit 1; fi
if [[ $command == "$(cat waits)" ]]; then sleep 600 & echo $! >child; wait; fi
if [[ $command == wheel ]]; then
  [[ $(cat "${PYTHONPATH%%:*}/torch/__init__.py") == "__version__ = '0'" ]] || exit 1
  while [[ $1 != --wheel-dir ]]; do shift; done
  mkdir -p "$2"
  touch "$2"/{megablocks-0.10.0,stanford_stk-0.7.1}-py3-none-any.whl
fi
"""
COMPLAINTS = """numpy-user 1 requires numpy<2, but you have numpy 2.
megablocks 0.10.0 has requirement torch<2.7.1,>=2.7.0, but you have torch 2.13.0.
stanford-stk 0.7.1 requires triton, which is not installed.
"""


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """A folder with such a python, in an environment that lacks MegaBlocks."""
    folder = tmp_path / "environment"
    folder.mkdir()
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    for name, text in {"absent": "", "installed": "", "calls": "", "fails": "", "waits": "", "complaints": COMPLAINTS}.items():
        (folder / name).write_text(text)
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(install_megablocks.tempfile, "tempdir", None)
    return folder


def install(environment):
    return main(["install-megablocks", "--python", os.path.relpath(environment / "python")])


def calls(environment):
    return (environment / "calls").read_text().splitlines()


def test_wheels_are_built_before_the_environment_is_changed_and_pip_check_is_explained(environment, tmp_path, capsys):
    assert install(environment) == 0
    tools, wheel, imported, packages = calls(environment)
    assert "--target" in tools and "--no-build-isolation" in wheel and "megablocks==0.10.0 stanford-stk==0.7.1" in wheel
    assert imported.endswith("-q numpy packaging") and "--no-deps" in packages and "megablocks-0.10.0-py3" in packages
    printed = capsys.readouterr().out
    assert "installed megablocks 0.10.0 and stanford-stk 0.7.1\n" in printed and "`pip check` says the following" in printed
    assert "    megablocks 0.10.0 has requirement torch<2.7.1" in printed and "    stanford-stk 0.7.1 requires triton" in printed
    assert "numpy-user" not in printed and "gbmoe.compat.megablocks.register()" in printed
    assert not os.listdir(tmp_path / "temporary")


def test_what_is_installed_already_is_left_alone(environment, capsys):
    (environment / "installed").write_text("megablocks 0.10.0\nstanford-stk 0.7.1\n")
    assert install(environment) == 0 and calls(environment) == []
    printed = capsys.readouterr().out
    assert "are installed already" in printed and "requirement torch<2.7.1" in printed
    (environment / "installed").write_text("megablocks 0.7.0\nstanford-stk 0.7.1\n")
    assert install(environment) == 0 and len(calls(environment)) == 4


@pytest.mark.parametrize("fails, before", [("tools", 1), ("wheel", 2)])
def test_a_failure_changes_nothing_and_is_said_in_a_line(fails, before, environment, tmp_path, capsys):
    (environment / "fails").write_text(fails)
    assert install(environment) == 1
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("gbmoe install-megablocks: -m pip") and line.endswith(": ERROR: no network")
    assert len(calls(environment)) == before and not os.listdir(tmp_path / "temporary")


@pytest.mark.parametrize("absent", ["pip", "torch"])
def test_an_environment_without_torch_or_pip_is_refused(absent, environment, capsys):
    (environment / "absent").write_text(f"{absent} gbmoe")
    assert install(environment) == 2 and calls(environment) == []
    assert f"expected {absent} in the environment of {environment / 'python'}, found none" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_pip_with_what_it_started_and_leaves_nothing(number, environment, tmp_path):
    (environment / "waits").write_text("wheel")
    process = subprocess.Popen([python(), "-m", "gbmoe", "install-megablocks", "--python", environment / "python"], text=True,
                               stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    child = environment / "child"
    while not (child.exists() and child.read_text().endswith("\n")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number and "Traceback" not in errors
    assert errors == ("gbmoe install-megablocks: interrupted\n" if number == signal.SIGINT else "")
    assert not os.listdir(tmp_path / "temporary")
    with pytest.raises(ProcessLookupError):
        for _ in range(500):  # until init has reaped it
            os.kill(int(child.read_text()), 0)
            time.sleep(0.02)
