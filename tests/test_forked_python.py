"""forked_python: its programs are what those of sys.executable are."""

import os
import signal
import subprocess
import sys

import pytest

from tests.forked_python import python, spawn

PYTHONS = pytest.mark.parametrize("interpreter", [sys.executable, "forked"])


def start(interpreter, *arguments, **more):
    command = [python("torch") if interpreter == "forked" else interpreter, *arguments]
    return subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **more)


@PYTHONS
def test_arguments_environment_folder_and_input(interpreter, tmp_path):
    (tmp_path / "script.py").write_text("import helper")
    (tmp_path / "helper.py").write_text("import os, sys; print(sys.argv[1:], os.getcwd(), os.environ['WORD'], sys.stdin.read(), __name__)")
    (tmp_path / "elsewhere").mkdir()
    for call in (["-c", "import helper"], ["-m", "script"], ["-u", "-m", "helper"], [str(tmp_path / "script.py")]):
        process = start(interpreter, *call, "a b", cwd=tmp_path / "elsewhere", stdin=subprocess.PIPE,
                        env={**os.environ, "WORD": "word", "PYTHONPATH": str(tmp_path)})
        name = "__main__" if "helper" in call else "helper"
        assert process.communicate("said") == (f"['a b'] {tmp_path / 'elsewhere'} word said {name}\n", "") and process.returncode == 0


@PYTHONS
@pytest.mark.parametrize("program, status, said", [
    ("import sys; sys.exit(3)", 3, ""), ("import sys; sys.exit('why')", 1, "why\n"), ("", 0, ""),
    ("import os; os.kill(os.getpid(), 9)", -9, ""), ("import atexit, os; atexit.register(os._exit, 4)", 4, ""),
    ("import sys, threading; threading.Thread(target=lambda: sys.stderr.write('after')).start()", 0, "after"),
])
def test_exit_status(interpreter, program, status, said):
    process = start(interpreter, "-c", program)
    assert process.communicate() == ("", said) and process.returncode == status


@PYTHONS
def test_an_exception_is_shown(interpreter):
    process = start(interpreter, "-c", "1 / 0")
    _, errors = process.communicate()
    assert process.returncode == 1 and errors.startswith("Traceback") and errors.endswith("ZeroDivisionError: division by zero\n")


WAITING = "import os, signal, time; signal.signal(signal.SIGUSR1, lambda *_: os._exit(7)); print(os.getpid(), flush=True); time.sleep(60)"


@PYTHONS
@pytest.mark.parametrize("number, status, ignored", [
    (signal.SIGTERM, -signal.SIGTERM, False), (signal.SIGINT, -signal.SIGINT, False), (signal.SIGKILL, -signal.SIGKILL, False),
    (signal.SIGUSR1, 7, False), (signal.SIGUSR1, 7, True)])
def test_signals(interpreter, number, status, ignored):
    """Also one that was ignored where the program was started, and that it wants. What is killed does not go on."""
    process = start(interpreter, "-c", WAITING, preexec_fn=lambda: signal.signal(number, signal.SIG_IGN) if ignored else (
        signal.signal(signal.SIGINT, signal.SIG_DFL)))
    pid = int(process.stdout.readline())
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == status
    with pytest.raises(ProcessLookupError):
        for _ in range(10**6):
            os.kill(pid, 0)


@PYTHONS
def test_programs_of_programs(interpreter):
    process = start(interpreter, "-c", "import subprocess, sys; print(subprocess.check_output([sys.executable, '-c', 'print(2)']))")
    assert process.communicate()[0] == "b'2\\n'\n"


def worker(rank, folder):
    (folder / str(rank)).touch()
    if rank == 1:
        raise ValueError("of rank 1")


def test_ranks_are_processes_of_it(tmp_path):
    with pytest.raises(Exception, match="of rank 1"):
        spawn(worker, (tmp_path,), nprocs=2)
    assert (tmp_path / "1").exists()
