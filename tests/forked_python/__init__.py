"""A python that is called as sys.executable is, and starts programs in hundredths of a second, because torch is imported already.

`python()` is its path, and `spawn` starts ranks with it. `python("torch")` has imported torch alone, for tests of importing gbmoe.

What is called (client.py, a small process) hands its arguments, environment, folder and open files to a server, which has imported what
programs import (server.py). A fork of the server runs the program; the client passes signals on to it, ends when it ends, with the same
status, and takes it along where it is killed. Programs that start sys.executable or processes of multiprocessing, as torchrun does, start
this python again.

It is no python for tests of what comes before the imports or with them: modules that the server has imported are not replaced by those
of a PYTHONPATH, and options of the interpreter other than -u have no effect. SIGSTOP stops the client alone, SIGTSTP the program. CUDA
is not used here.
"""

import atexit
import contextlib
import functools
import multiprocessing.spawn
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent


def python(imported: str = "gbmoe", device: torch.device | str = "cpu") -> str:
    """The path of a python that has imported "gbmoe" or "torch"; for programs on another device than the CPU, sys.executable."""
    return _started(imported) if torch.device(device).type == "cpu" else sys.executable


@functools.cache
def _started(imported: str) -> str:
    """Start the server, which ends with this process, and return the path of its python."""
    folder = Path(tempfile.mkdtemp(prefix="gbmoe-python-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    client = folder / "python"
    client.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
    client.chmod(0o755)
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, HERE / "server.py", folder / "socket", client, imported]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    atexit.register(server.communicate)
    assert server.stdout.readline() == b"listens\n", "the server of tests/forked_python did not start"
    return str(client)


@contextlib.contextmanager
def multiprocessing_with_it():
    """Processes that multiprocessing starts in its way "spawn" are programs of this python."""
    before = multiprocessing.spawn.get_executable()
    multiprocessing.set_executable(python())
    try:
        yield
    finally:
        multiprocessing.set_executable(before)


def spawn(worker, args=(), nprocs=1, device="cpu"):
    """torch.multiprocessing.spawn, with processes of this python unless they compute on another device than the CPU."""
    with multiprocessing_with_it() if torch.device(device).type == "cpu" else contextlib.nullcontext():
        torch.multiprocessing.spawn(worker, args, nprocs)
