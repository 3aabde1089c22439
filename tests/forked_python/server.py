"""Once a client calls, imports what programs import, then runs each program in a fork of itself: server.py SOCKET PYTHON IMPORTED"""

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import io
import itertools
import json
import multiprocessing
import os
import re
import runpy
import select
import selectors
import signal
import socket
import sys
import threading
import types
import weakref

# Not torch.distributed.run and other modules that are run with -m, which must not have been imported before.
IMPORTED = {
    "torch": ("torch",),
    "gbmoe": ("gbmoe.cli", "gbmoe.compat", "gbmoe.parallel.training", "torch.distributed.nn", "torch.distributed.launcher.api",
              "torch.distributed.elastic.agent.server.local_elastic_agent",
              "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend", "torch._dynamo.backends.debugging",
              "torch._inductor.compile_fx"),
}
OPTIONAL = {"torch": (), "gbmoe": ("matplotlib.pyplot", "rich.progress", "rich.table", "hypothesis", "pytest")}


def receive(connection: socket.socket) -> tuple[dict, list[int]]:
    """A client's request, and its open files."""
    length, ancillary, _, _ = connection.recvmsg(8, socket.CMSG_SPACE(250 * array.array("i").itemsize))
    files = array.array("i")
    files.frombytes(ancillary[0][2])
    with connection.makefile("rb") as stream:
        return json.loads(stream.read(int.from_bytes(length, "little"))), list(files)


def take(files: list[int], numbers: list[int]) -> None:
    """Give the files the numbers that they have in the client. What else is open is closed, for the one number or for good."""
    above = max(numbers) + 1
    files = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    os.closerange(0, above)
    for file, number in zip(files, numbers):
        os.dup2(file, number)
    os.closerange(above, max(files) + 1)


def open_standard_files(unbuffered: bool) -> None:
    """Of sys, as an interpreter that starts does."""
    sys.stdin = sys.__stdin__ = open(0)  # noqa: SIM115
    for number, name, errors in ((1, "stdout", "strict"), (2, "stderr", "backslashreplace")):
        file = open(number, "wb")  # noqa: SIM115
        stream = io.TextIOWrapper(file, encoding="utf-8", errors=errors, line_buffering=number == 2 or os.isatty(number),
                                  write_through=unbuffered)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run_program(arguments: list[str], path: list[str]) -> None:
    """As the interpreter does with these arguments."""
    main = types.ModuleType("__main__")
    main.__builtins__ = __builtins__
    first, *rest = arguments
    if first == "-m":
        sys.argv, sys.path[:] = rest, [os.getcwd(), *path]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    if first == "-c":
        code, rest = compile(rest[0], "<string>", "exec"), ["-c", *rest[1:]]
        folder = ""
    else:
        with open(first, "rb") as file:
            code, rest = compile(file.read(), first, "exec"), arguments
        main.__file__, folder = first, os.path.dirname(os.path.realpath(first))
    sys.argv, sys.path[:], sys.modules["__main__"] = rest, [folder, *path], main
    exec(code, main.__dict__)


def status_of(run, *arguments) -> int:
    """The exit status of a program that is to be ended by os._exit. KeyboardInterrupt ends it by the signal, as in an interpreter."""
    try:
        try:
            run(*arguments)
        finally:
            threading._shutdown()
            atexit._run_exitfuncs()
        return 0
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return (ended.code or 0) & 0xFF
        print(ended.code, file=sys.stderr)
    except KeyboardInterrupt:
        sys.excepthook(*sys.exc_info())
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        flush()
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    return 1


def flush() -> int:
    """0, or the status of an interpreter that cannot write what it has printed."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return 120
    return 0


def become(request: dict, files: list[int], site: list[str], python: str) -> int:
    """Run the program in this process, a fresh fork; returns its exit status."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
    os.chdir(request["folder"])
    os.umask(request["umask"])
    os.environ.clear()
    os.environ.update(request["environment"])
    options = list(itertools.takewhile(lambda word: re.match("-[^cm]", word), request["argv"]))
    take(files, request["files"])
    open_standard_files("-u" in options)
    sys.executable = python
    multiprocessing.set_executable(python)
    gc.enable()
    path = [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    status = status_of(run_program, request["argv"][len(options):], path + site)
    return flush() or status


def serve(listener: socket.socket, site: list[str], python: str) -> None:
    """Until stdin is closed."""
    ready = selectors.DefaultSelector()
    ready.register(listener, selectors.EVENT_READ)
    ready.register(0, selectors.EVENT_READ)
    running: dict[int, tuple[int, socket.socket]] = {}  # by the file that tells that it has ended: the process, and its client
    while True:
        for key, _ in ready.select():
            if key.fileobj == 0:
                for process, _ in running.values():
                    os.kill(process, signal.SIGKILL)
                return
            if key.fileobj is listener:
                client, _ = listener.accept()
                request, files = receive(client)
                process = os.fork()
                if process == 0:
                    os._exit(become(request, files, site, python))
                for file in files:
                    os.close(file)
                client.sendall(b"%d\n" % process)
                ended = os.pidfd_open(process)
                running[ended] = process, client
                ready.register(ended, selectors.EVENT_READ)
                ready.register(client, selectors.EVENT_READ, process)
            elif key.fileobj in running:
                process, client = running.pop(key.fileobj)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                ready.unregister(key.fileobj)
                os.close(key.fileobj)
                if client.fileno() in ready.get_map():
                    ready.unregister(client)
                try:
                    client.sendall(b"%d\n" % status)
                except OSError:  # the client was killed, and so was the program
                    pass
                client.close()
            else:  # a client says nothing more, so that it has ended: it was killed
                ready.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)


def import_all(imported: str) -> None:
    """And leave nothing that each fork would have to do again: a collection of what is imported, or taking it apart at the end."""
    for module in IMPORTED[imported]:
        importlib.import_module(module)
    for module in OPTIONAL[imported]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    gc.collect()
    gc.disable()
    gc.freeze()
    for finalizer in list(weakref.finalize._registry):  # torch.library's, which undefine thousands of operators
        finalizer.atexit = False
    threads = [open(f"/proc/self/task/{thread}/comm").read().strip() for thread in os.listdir("/proc/self/task")]  # noqa: SIM115
    assert len(threads) == 1, f"a process that is forked may have one thread, this one has {', '.join(threads)}"


def main() -> None:
    address, python, imported = sys.argv[1:]
    given = os.environ["PYTHONPATH"].split(os.pathsep)
    site = [folder for folder in sys.path[1:] if folder not in given]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("listens", flush=True)
    ready, _, _ = select.select([listener, 0], [], [])
    if listener in ready:
        import_all(imported)
        serve(listener, site, python)


if __name__ == "__main__":
    main()
