"""What tests/forked_python is called as: hands the program to the server, passes signals on, and ends as the program does."""

import array
import json
import os
import signal
import socket
import sys

PASSED_ON = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGTERM, signal.SIGTSTP,
             signal.SIGCONT)

early: list[int] = []
process = None


def passed_on(number, frame):
    if process is None:
        early.append(number)
        return
    try:
        os.kill(process, signal.SIGSTOP if number == signal.SIGTSTP else number)
    except ProcessLookupError:  # it has ended, and the server is about to say so
        pass


ignored = [number for number in PASSED_ON if signal.getsignal(number) is signal.SIG_IGN]
for number in PASSED_ON:  # a program may want one that it was started to ignore
    signal.signal(number, passed_on)

blocked = list(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
umask, files = os.umask(0), []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        os.fstat(number)
        files.append(number)
    except OSError:  # the one that the list was read from
        pass
request = json.dumps({"argv": sys.argv[1:], "environment": dict(os.environ), "folder": os.getcwd(), "umask": umask,
                      "ignored": ignored, "blocked": blocked, "files": files}).encode()
server = socket.socket(socket.AF_UNIX)
server.connect(os.path.join(os.path.dirname(os.path.realpath(__file__)), "socket"))
server.sendmsg([len(request).to_bytes(8, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files).tobytes())])
server.sendall(request)
answers = server.makefile("r")
process = int(answers.readline())
for number in early:
    passed_on(number, None)
for number in files:  # which are closed when the program closes them
    os.close(number)
status = int(answers.readline() or -signal.SIGKILL)  # none: the server has ended, and all programs with it
if status < 0:
    if -status not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(-status, signal.SIG_DFL)
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.kill(os.getpid(), -status)
os._exit(status)
