"""compiler_processes.py: the compilers end with the process that started them, however it ends."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.forked_python import python

ROOT = Path(__file__).parent.parent.parent
# Builds with a compiler that does not end, on any machine.
ENDLESS_BUILD = """
import pathlib, signal, sys
from gbmoe.extension import build
from gbmoe.extension.jobs import Jobs
home = pathlib.Path(sys.argv[1])
build._library_roots = lambda nvcc, torch: [home]
build.compile_flags = lambda nvcc, torch, chosen: []
if sys.argv[2] == "handled":  # as a program does that cleans up
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
nvcc, torch = build.Nvcc(home / "nvcc", (13, 0), frozenset({"90"})), build.Torch(home, "13.0", "2.13.0")
build.build(home / "sources", home / "out" / "object.so", nvcc, torch, ["9.0"], Jobs(2, "two"))
"""
# Starts a pass that outlives it, as nvcc does.
ENDLESS_NVCC = """#!/usr/bin/env bash
mktemp >/dev/null
bash -c 'echo $$ >"$1/pids/$$"; sleep 600' pass "{home}"
"""


def alive(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""  # a zombie has none
    except OSError:
        return False


@pytest.mark.parametrize("number, handled, status", [
    (signal.SIGTERM, "handled", 128 + signal.SIGTERM), (signal.SIGTERM, "default", -signal.SIGTERM),
    (signal.SIGKILL, "default", -signal.SIGKILL), (signal.SIGINT, "default", -signal.SIGINT)])
def test_a_build_that_is_ended_ends_its_compilers_and_leaves_no_files(tmp_path, number, handled, status):
    for name in ("lib64/libcublas.so.13", *(f"sources/{i}.cu" for i in range(5)), "pids/", "temporary/"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).mkdir() if name.endswith("/") else (tmp_path / name).touch()
    (tmp_path / "nvcc").write_text(ENDLESS_NVCC.format(home=tmp_path))
    (tmp_path / "nvcc").chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary"), "PYTHONPATH": str(ROOT)}
    # A shell without job control starts processes in the background with SIGINT ignored, and the tests may be one.
    process = subprocess.Popen([python(), "-c", ENDLESS_BUILD, str(tmp_path), handled], env=environment,
                               preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    temporary = tmp_path / "temporary"
    try:
        while len(list((tmp_path / "pids").iterdir())) < 2 and process.poll() is None:
            time.sleep(0.1)
        process.send_signal(number)
        assert process.wait(timeout=60) == status
        started = [int(path.name) for path in (tmp_path / "pids").iterdir()]
        deadline = time.monotonic() + 60
        while (any(map(alive, started)) or any(temporary.iterdir())) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = [pid for pid in started if alive(pid)]
    finally:
        process.kill()
        for pid in filter(alive, (int(path.name) for path in (tmp_path / "pids").iterdir())):
            os.kill(pid, signal.SIGKILL)
    assert left == [] and len(started) == 2  # none was begun after the signal
    assert list(temporary.iterdir()) == [] and list((tmp_path / "out").iterdir()) == []
