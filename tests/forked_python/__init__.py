"""A python that is called as sys.executable is, and starts programs in hundredths of a second, because torch is imported already.

`python()` is its path, and `spawn` starts ranks with it. `python("torch")` has imported torch alone, for tests of importing gbmoe.

What is called (client.py, a small process) hands its arguments, environment, folder and open files to a server, which has imported what
programs import (server.py). A fork of the server runs the program; the client passes signals on to it, ends when it ends, with the same
status, and takes it along where it is killed. Programs that start sys.executable or processes of multiprocessing, as torchrun does, start
this python again.

The processes of pytest-xdist share the servers, which tests/conftest.py announces. A server imports when it is first called.

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
SHARED = "GBMOE_TEST_FORKED_PYTHON"  # the environment variable with the folder of the servers that processes share


def python(imported: str = "gbmoe", device: torch.device | str = "cpu") -> str:
    """The path of a python that has imported "gbmoe" or "torch"; for programs on another device than the CPU, sys.executable."""
    return _started(imported) if torch.device(device).type == "cpu" else sys.executable


@functools.cache
def _started(imported: str) -> str:
    """The path of the python of a server: one that is shared, or a new one, which ends with this process."""
    shared = os.environ.get(SHARED)
    path = os.path.join(shared, imported, "python") if shared else _start(Path(_new_folder()), imported)
    subprocess.run([path, "-c", ""], check=True)  # so that a test that waits for its program does not wait for the imports
    return path


def share() -> None:
    """Start servers for the processes that this one starts."""
    folder = _new_folder()
    for imported in ("gbmoe", "torch"):
        _start(Path(folder, imported), imported)
    os.environ[SHARED] = folder


def _new_folder() -> str:
    folder = tempfile.mkdtemp(prefix="gbmoe-python-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _start(folder: Path, imported: str) -> str:
    """Start a server in `folder`, which ends with this process, and return the path of its python."""
    folder.mkdir(exist_ok=True)
    client = folder / "python"
    client.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
    client.chmod(0o755)
    # Where there is a driver, the check makes torch ask NVML for devices, because CUDA's answer starts a thread, and there may be none.
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
                   "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
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
