"""scripts/*.sh with a python that only pretends: what a signal reaches, and where they look for the checkout.

    pytest tests/test_scripts.py
"""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
# Takes every step of the setup for done; as the training or the tests it notes that it runs and with which arguments, and waits.
PYTHON = """#!/usr/bin/env bash
case "$*" in
  *test_processes.py) echo 2 ;;
  *train_lm.py* | "-m pytest"*)
    trap 'echo terminated >"{folder}/ended"; exit 143' TERM
    printf '%s\\n' "$@" >"{folder}/arguments"
    while [[ -e "{folder}/a checkout" ]]; do sleep 0.1; done
    ;;
esac
"""


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    """An environment whose python is the fake one."""
    python = tmp_path / "an environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(PYTHON.format(folder=tmp_path))
    python.chmod(0o755)
    return {**os.environ, "VIRTUAL_ENV": str(python.parents[1])}


def checkout(folder: Path) -> Path:
    """The scripts in a checkout of their own, whose path has a space."""
    # What other processes compile meanwhile comes and goes.
    shutil.copytree(SCRIPTS, folder / "a checkout" / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    return folder / "a checkout"


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh"])
def test_a_signal_reaches_what_the_script_runs(script, environment, tmp_path):
    root = checkout(tmp_path)
    process = subprocess.Popen([root / "scripts" / script, "an argument"], env=environment, stdout=subprocess.DEVNULL)
    try:
        while not (tmp_path / "arguments").exists() and process.poll() is None:
            time.sleep(0.05)
        process.terminate()
        assert process.wait(timeout=30) == 128 + signal.SIGTERM
        assert (tmp_path / "ended").exists()
    finally:
        shutil.rmtree(tmp_path / "a checkout")
        process.kill()
    assert "an argument" in (tmp_path / "arguments").read_text().splitlines()


def test_cdpath_does_not_lead_to_another_checkout(environment, tmp_path):
    root, elsewhere = checkout(tmp_path), tmp_path / "elsewhere"
    (elsewhere / "scripts").mkdir(parents=True)
    command = ["bash", "-c", 'source scripts/setup_env.sh >/dev/null; printf %s "$root"']
    done = subprocess.run(command, cwd=root, env={**environment, "CDPATH": str(elsewhere)}, capture_output=True, text=True)
    assert done.stdout == str(root), done.stderr


# As where torch is built for CUDA and there is no nvcc: installing with kernels would fail.
NO_COMPILER = """#!/usr/bin/env bash
case "$*" in
  *gbmoe.extension.install) echo "nvcc was not found"; exit 1 ;;
  *--no-build-isolation*) echo "GBMOE_BUILD=$GBMOE_BUILD" ;;
esac
"""


@pytest.mark.parametrize("asked, installed", [("", True), ("1", False)])
def test_without_a_compiler_the_scripts_say_so_and_install_without_kernels(environment, tmp_path, asked, installed):
    (tmp_path / "an environment" / "bin" / "python").write_text(NO_COMPILER)
    done = subprocess.run(["bash", "-euc", "source scripts/setup_env.sh"], cwd=checkout(tmp_path), capture_output=True, text=True,
                          env={**environment, "GBMOE_BUILD": asked, "GBMOE_REQUIRE_EXTENSION": ""})
    assert (done.returncode == 0) == installed and "nvcc was not found" in done.stdout
    assert ("NO CUDA KERNELS" in done.stdout and done.stdout.endswith("GBMOE_BUILD=0\n")) == installed


def test_ci_installs_each_extra_once(environment, tmp_path):
    (tmp_path / "an environment" / "bin" / "python").write_text('#!/usr/bin/env bash\n[[ $* != *-e* ]] || echo "${!#}"\n')
    root = checkout(tmp_path)

    def installed(extras, **more):
        command = ["bash", "-euo", "pipefail", "-c", 'source scripts/setup_env.sh; echo "[${GBMOE_INSTALLED-unset}]"']
        done = subprocess.run(command, cwd=root, env={**environment, **more, "extras": extras}, stdout=subprocess.PIPE, text=True,
                              check=True)
        *said, variable = done.stdout.splitlines()
        assert variable == "[unset]"  # what the script runs, installs again
        return [line.removeprefix(str(root)) for line in said if line.startswith(str(root))]

    ci = {"GBMOE_INSTALLED": str(tmp_path / "installed")}
    assert installed("lint", **ci) == ["[cli,plot,test,lint]"]
    assert installed("", **ci) == installed("lint", **ci) == []
    assert installed("lint,docs", **ci) == ["[cli,plot,test,lint,docs]"]
    assert installed("docs", **ci) == [] and installed("docs") == ["[cli,plot,test,docs]"]


@pytest.mark.parametrize("given, selected", [([], "-m not slow"), (["--slow"], "-m slow"), (["--all"], ""), (["--all", "x"], "--all x")])
def test_the_tests_of_ci_are_those_of_the_test_command_and_the_slow_ones(given, selected, environment, tmp_path):
    python = '#!/usr/bin/env bash\ncase "$*" in *test_processes.py) echo 2 ;; "-m pytest"*) echo "pytest: ${*:3}" ;; esac\n'
    (tmp_path / "an environment" / "bin" / "python").write_text(python)
    done = subprocess.run([checkout(tmp_path) / "scripts" / "test.sh", *given], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"pytest: -n 2 --dist loadgroup {selected}".rstrip()


@pytest.mark.parametrize("cores, gpu_gib, expected", [(2, None, 3), (64, None, 65), (16, 139, 10), (16, 79, 6), (4, 79, 4), (16, 8, 1)])
def test_processes_of_tests_are_as_many_as_a_gpu_has_memory_for(cores, gpu_gib, expected):
    processes = runpy.run_path(str(SCRIPTS / "test_processes.py"))["processes"]
    assert processes(cores, None if gpu_gib is None else gpu_gib << 30) == expected
