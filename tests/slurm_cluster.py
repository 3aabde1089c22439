"""A Slurm cluster on this machine, made of Debian's packages: munge, a controller, and two nodes with ports of their own.

Nothing outside a temporary folder is used or changed, so that a Slurm cluster which the machine belongs to is not disturbed.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# The Debian package of each program.
PACKAGES = {"munged": "munge", "slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client",
            "shellcheck": "shellcheck"}
NODES = ("node0", "node1")
# Each node has two cores, whatever the machine has, so that jobs overlap. There are neither cgroups nor accounting. cred_expire is how
# long a requeued job waits (2 minutes by default, at least 5 s); KillWait is how long a job may go on after SIGTERM.
CONFIGURATION = """\
ClusterName=gbmoe
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0
KillWait=10
NodeName=node0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2
PartitionName=all Nodes=ALL Default=YES
"""


def require(*programs: str) -> None:
    """Skip the test where a program is missing; in CI, which is root on a Debian machine, install it or fail."""
    if "/usr/sbin" not in os.environ["PATH"].split(os.pathsep):  # Debian's folder for daemons is not on every user's PATH
        os.environ["PATH"] += os.pathsep + "/usr/sbin"
    missing = [program for program in programs if shutil.which(program) is None]
    if missing and os.environ.get("CI") == "true" and os.geteuid() == 0 and shutil.which("apt-get"):
        packages = [PACKAGES[program] for program in missing]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            subprocess.run(["apt-get", "-qq", *command], check=True, env=environment)
    elif missing:
        pytest.skip(f"{', '.join(missing)} not found (Debian: {', '.join(PACKAGES[program] for program in missing)})")


def wait_until(condition: Callable[[], object], seconds: float, what: str, logs: Path | None = None) -> None:
    """Wait until `condition` holds, asking every fifth of a second. After `seconds` raise AssertionError with the files of `logs`."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            shown = [f"{file}:\n{file.read_text()}" for file in sorted(logs.iterdir())] if logs else []
            raise AssertionError("\n".join([f"expected {what} within {seconds:g} s", *shown]))
        time.sleep(0.2)


def free_ports(number: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


class Cluster:
    """Runs Slurm's commands on the cluster whose slurm.conf is in `folder`."""

    def __init__(self, folder: Path):
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        self.environment = {**inherited, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *command: object) -> str:
        """Run a command and return its output. Raises AssertionError with its errors where it fails."""
        done = subprocess.run([*map(str, command)], env=self.environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}{done.stderr}"
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """Slurm's record of a job, or of a task of an array ("12_3")."""
        facts = self.run("scontrol", "show", "job", number, "--oneliner").split()
        return dict(fact.split("=", 1) for fact in facts if "=" in fact)

    def end(self, number: str, logs: Path, seconds: float = 300) -> dict[str, str]:
        """Wait until a job has ended, successfully or not, and return its record."""
        ends = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        wait_until(lambda: self.job(number)["JobState"] in ends, seconds, f"the end of job {number}", logs)
        return self.job(number)


@contextlib.contextmanager
def slurm_cluster() -> Iterator[Cluster]:
    """Start the daemons and yield the cluster; at the end cancel all jobs and end the daemons."""
    require("munged", "slurmctld", "slurmd", "sbatch")
    with contextlib.ExitStack() as stack:
        # Not in pytest's folder, whose path can be longer than the path of a socket may be.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gbmoe-slurm-")))
        for name in ("state", *NODES):
            (folder / name).mkdir()
        key = folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        (folder / "slurm.conf").write_text(CONFIGURATION.format(
            host=socket.gethostname().partition(".")[0], user=getpass.getuser(), folder=folder, ports=free_ports(3)))
        (folder / "cgroup.conf").write_text("# no cgroups\n")
        cluster = Cluster(folder)

        def daemon(*command: object) -> None:
            with open(folder / "daemons.log", "a") as log:
                process = subprocess.Popen([*map(str, command)], env=cluster.environment, stdin=subprocess.DEVNULL,
                                           stdout=log, stderr=log)
            stack.callback(process.wait, timeout=30)
            stack.callback(process.terminate)

        daemon("munged", "--foreground", "--force", f"--key-file={key}", f"--socket={folder}/munge.socket",
               f"--pid-file={folder}/munged.pid", f"--log-file={folder}/munged.log", f"--seed-file={folder}/munge.seed")
        wait_until((folder / "munge.socket").exists, 20, "munged's socket")
        daemon("slurmctld", "-D")
        for node in NODES:
            daemon("slurmd", "-D", "-N", node)

        def idle() -> bool:
            command = ["sinfo", "--noheader", "--Node", "--format=%T"]
            states = subprocess.run(command, env=cluster.environment, capture_output=True, text=True).stdout.split()
            return states == ["idle"] * len(NODES)

        try:
            wait_until(idle, 30, "two idle nodes")
            yield cluster
        finally:
            # A slurmd that ends does not end its jobs.
            subprocess.run(["scancel", "--user", getpass.getuser()], env=cluster.environment, check=False)
            wait_until(idle, 30, "two idle nodes at the end")
