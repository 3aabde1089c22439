"""scripts/slurm/: its jobs on a Slurm that the tests start, interrupted as a cluster interrupts them; all on the CPU.

    pytest tests/test_slurm.py
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.known_suites import SUITES
from tests.forked_python import python
from tests.slurm_cluster import Cluster, require, slurm_cluster, wait_until

# One process of pytest-xdist: one cluster, and one apt-get where programs are missing.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("slurm")]

ROOT = Path(__file__).resolve().parents[1]
SLURM = ROOT / "scripts" / "slurm"
SITES = SLURM / "sites"
SITE = """\
every_job=() gpu_jobs=() cpu_jobs=() gpus_per_node=0 cpus_per_gpu=1
activate() {{ export CUDA_VISIBLE_DEVICES=; {activate} }}
python=({python})
"""
TASKS = 2
BENCH = "--quick --rivals bmm"
STEPS = 120
TRAINING = ("--steps", STEPS, "--layers", 2, "--experts", 4, "--hidden", 64, "--heads", 2, "--ffn", 64,
            "--length", 64, "--batch", 4, "--warmup", 4, "--eval-every", 10, "--eval-windows", 8, "--log-every", 1)


# ------------------------------------------------------------------------------------------------------ without Slurm


def test_shellcheck_finds_nothing():
    require("shellcheck")
    scripts = [*ROOT.glob("scripts/*.sh"), *SLURM.rglob("*.sh"), *SLURM.glob("*.sbatch"), ROOT / ".ci" / "run"]
    done = subprocess.run(["shellcheck", *scripts], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_only_the_site_file_knows_the_site():
    for path in [*SLURM.glob("*.sh"), *SLURM.glob("*.sbatch")]:
        assert not re.search(r"--(account|partition|constraint|qos|gpus|mem)\b|module load", path.read_text()), path


def submit_dry(*arguments: object) -> subprocess.CompletedProcess:
    return subprocess.run([SLURM / "submit.sh", *map(str, arguments)], capture_output=True, text=True)


def options(line: str) -> dict[str, str]:
    """The sbatch options of a line that --dry-run printed."""
    found = [word.removeprefix("--").partition("=") for word in shlex.split(line) if word.startswith("--")]
    return {name: value for name, _, value in found}


@pytest.mark.parametrize("site, gpus, gpu_nodes, cpu_nodes", [
    ("constraint.sh", "gpu:4", {"constraint": "a100"}, {"constraint": "cpu"}),
    ("partition.sh", "gpu:h200:8", {"partition": "gpu"}, {"partition": "standard"}),
])
def test_dry_run_prints_the_chain_and_does_nothing(site, gpus, gpu_nodes, cpu_nodes, tmp_path):
    run = tmp_path / "a run"
    done = submit_dry(SITES / site, "--suite", "layers", "--bench", BENCH, "--tasks", 5, "--nodes", 2,
                      "--time", "02:00:00", "--run", run, "--dry-run", "--expert-parallel", "--", "--steps", 7, "a text")
    assert done.returncode == 0, done.stderr
    lines = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert list(lines) == ["build", "bench", "merge", "train"]
    build, bench, merge, train = map(options, lines.values())
    for job in (build, bench, train):
        assert job["account"] == "my_project" and gpu_nodes.items() <= job.items()
    assert merge["account"] == "my_project" and cpu_nodes.items() <= merge.items() and "gres" not in merge
    assert bench["array"] == "0-4" and bench["gres"].startswith("gpu:") and bench["gres"].endswith(":1")
    assert train["nodes"] == "2" and train["gres"] == gpus and train["time"] == "02:00:00"
    dependencies = [job.get("dependency") for job in (build, bench, merge, train)]
    assert dependencies == [None, "afterok:BUILD_ID", "afterany:BENCH_ID", "afterok:BUILD_ID,singleton"]
    given = ["--expert-parallel", "--steps", "7", "a text"]
    assert shlex.split(lines["train"])[-8:] == [str(SITES / site), str(run), "layers", BENCH, *given]
    assert not run.exists()


@pytest.mark.parametrize("arguments, message", [
    ([], "expected a site file; examples are in scripts/slurm/sites"),
    (["no.sh"], "expected a site file that can be read, got 'no.sh'"),
    (["{site}", "--tasks", "0"], "--tasks: expected a number greater than 0, got '0'"),
    (["{site}", "--only", "bench,plot"], "--only: expected build, bench, merge or train, got 'plot'"),
    (["{site}", "--suite"], "--suite: expected a value, got none"),
    (["{site}", "--suite", "layer"], "--suite: expected smoke, nyu, layers, "),
    (["{site}", "--gpus", "3"], "unknown option --gpus"),
    (["{empty}"], "to set every_job"),
])
def test_bad_input_says_what_was_expected(arguments, message, tmp_path):
    (tmp_path / "empty.sh").touch()
    files = {"site": SITES / "partition.sh", "empty": tmp_path / "empty.sh"}
    done = submit_dry("--dry-run", *(argument.format(**files) for argument in arguments))
    assert done.returncode == 2 and message in done.stderr and not done.stdout


@pytest.mark.parametrize("suite", SUITES)
def test_every_suite_can_be_submitted(suite):
    done = submit_dry(SITES / "partition.sh", "--suite", suite, "--dry-run")
    assert done.returncode == 0 and f" {suite} " in done.stdout, done.stderr


def test_a_suite_of_several_ranks_gets_the_gpus_of_a_node(tmp_path):
    done = submit_dry(SITES / "partition.sh", "--suite", "parallel", "--dry-run")
    jobs = {line.split()[0]: options(line) for line in done.stdout.splitlines()}
    assert jobs["bench"]["gres"] == "gpu:h200:8" and jobs["bench"]["cpus-per-task"] == "96", done.stderr
    assert jobs["build"]["gres"] == "gpu:h200:1" and jobs["train"]["gres"] == "gpu:h200:8"
    one = tmp_path / "one.sh"
    one.write_text((SITES / "partition.sh").read_text().replace("gpus_per_node=8", "gpus_per_node=1"))
    done = submit_dry(one, "--suite", "parallel", "--dry-run")
    assert done.returncode == 2 and "--suite parallel: expected a site with several GPUs on a node, or none, got 1" in done.stderr


def job(script: str, site: Path, run: Path, suite: str, **environment: str) -> str:
    """What a job prints that Slurm would start; `site` has a python that prints its arguments."""
    variables = {"SLURM_JOB_NAME": script, "SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_COUNT": "1"}
    done = subprocess.run(["bash", SLURM / f"{script}.sbatch", ROOT, site, run, suite, "--quick"], cwd=ROOT, capture_output=True,
                          text=True, env={**os.environ, **variables, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("gpus, ranks", [(0, 2), (4, 4)])
def test_a_suite_of_several_ranks_runs_under_torchrun(gpus, ranks, tmp_path):
    site = tmp_path / "site.sh"
    site.write_text(f"cpus_per_gpu=1 gpus_per_node={gpus} python=(echo python)\nactivate() {{ :; }}\n")
    (tmp_path / "configurations.tsv").write_text("0\tlayer/a\n")
    device = "cuda" if gpus else "cpu"
    measured = f"gbmoe bench --suite parallel --device {device} --quick --config 0 --output {tmp_path}/parts"
    assert f"python -m torch.distributed.run --standalone --nproc-per-node={ranks} -m {measured}\n" in job(
        "bench", site, tmp_path, "parallel")
    job("build", site, tmp_path, "parallel")
    listed = (tmp_path / "configurations.tsv").read_text()
    assert listed == f"python -m gbmoe bench --suite parallel --device {device} --quick --list-configs\n"


@pytest.mark.parametrize("compiled", [True, False])
def test_a_compiled_wheel_in_the_environment_was_hidden_by_the_checkout(compiled, tmp_path):
    """The jobs need nvcc for a checkout, and a node may have none."""
    installed = tmp_path / "site-packages" / "gbmoe"
    installed.mkdir(parents=True)
    main = "import os; print('the installed one, with benchmarks/ of', os.environ.get('GBMOE_CHECKOUT'))\n"  # no wheel has any
    for name in ("__init__.py", "__main__.py", *(["_C.so"] if compiled else [])):
        (installed / name).write_text(main if name == "__main__.py" else "")
    (tmp_path / "site-packages" / "torch").mkdir()
    (tmp_path / "site-packages" / "torch" / "__init__.py").write_text("raise SystemExit('the checkout')\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "configurations.tsv").write_text("0\tlayer/a\n")
    # As site-packages is: after the folders of PYTHONPATH.
    (tmp_path / "python").write_text(f"""#!{sys.executable}
import os, sys
code = "import sys; sys.path.append({str(tmp_path / 'site-packages')!r}); import runpy; "
script, *rest = sys.argv[1:]
if script == "-m":
    code += f"sys.argv = {{rest!r}}; runpy.run_module({{rest[0]!r}}, run_name='__main__', alter_sys=True)"
else:
    code += f"sys.path[0] = {{os.path.dirname(script)!r}}; runpy.run_path({{script!r}}, run_name='__main__')"
os.execv({sys.executable!r}, [{sys.executable!r}, "-S", "-c", code])
""")
    (tmp_path / "python").chmod(0o755)
    site = tmp_path / "site.sh"
    site.write_text(f"cpus_per_gpu=1 gpus_per_node=0 python=({tmp_path}/python)\nactivate() {{ unset PYTHONPATH; }}\n")
    if compiled:
        printed = job("bench", site, tmp_path / "run", "smoke")
        assert f"== gbmoe is the installed one, compiled with its kernels, in {installed}\n" in printed
        assert printed.endswith(f"the installed one, with benchmarks/ of {ROOT}\n")
    else:
        with pytest.raises(AssertionError, match="the checkout"):
            job("bench", site, tmp_path / "run", "smoke")


def fake_slurm(folder: Path, refused: str) -> dict[str, str]:
    """An environment with an sbatch that refuses one job, and a scancel that writes down what it is given."""
    (folder / "sbatch").write_text(f'#!/bin/bash\n[[ $* != *{refused}.sbatch* ]] || {{ echo "no such account" >&2; exit 1; }}\necho 17\n')
    (folder / "scancel").write_text(f'#!/bin/bash\necho "$@" >{folder}/cancelled\n')
    for program in ("sbatch", "scancel"):
        (folder / program).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}


def test_without_sbatch_nothing_is_left_behind(tmp_path):
    (tmp_path / "bin").mkdir()
    for program in ("bash", "dirname", "realpath", "basename"):
        (tmp_path / "bin" / program).symlink_to(shutil.which(program))
    done = subprocess.run(["bash", SLURM / "submit.sh", SITES / "partition.sh", "--run", tmp_path / "a" / "run"], capture_output=True,
                          text=True, env={**os.environ, "PATH": str(tmp_path / "bin")})
    assert done.returncode == 2 and done.stderr == ("submit.sh: expected Slurm's sbatch, found none on PATH; --dry-run prints the"
                                                    " commands\n")
    assert os.listdir(tmp_path) == ["bin"]


@pytest.mark.parametrize("refused", ["build", "bench"])
def test_a_refused_job_leaves_neither_jobs_nor_folders_behind(refused, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "a").mkdir()
    environment = fake_slurm(tmp_path / "bin", refused)
    done = subprocess.run([SLURM / "submit.sh", SITES / "partition.sh", "--run", tmp_path / "a" / "new" / "run"], capture_output=True,
                          text=True, env=environment)
    assert done.returncode == 2 and f"no such account\nsubmit.sh: expected sbatch to take the job {refused}" in done.stderr
    assert os.listdir(tmp_path / "a") == []  # which was there before
    cancelled = tmp_path / "bin" / "cancelled"
    assert (cancelled.read_text() if cancelled.exists() else "") == ("" if refused == "build" else "17\n")


def test_cdpath_does_not_lead_to_another_checkout(tmp_path):
    (tmp_path / "scripts" / "slurm").mkdir(parents=True)
    command = ["scripts/slurm/submit.sh", SITES / "partition.sh", "--only", "build", "--dry-run"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "CDPATH": str(tmp_path)}, capture_output=True, text=True)
    assert options(done.stdout)["chdir"] == str(ROOT), done.stderr


def free_port(first: int) -> int:
    done = subprocess.run([sys.executable, SLURM / "free_port.py", str(first)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_another_program_listens_at_is_not_chosen(address):
    first = free_port(20000)
    with socket.create_server((address, first)):
        assert first < free_port(first) < 32768
    assert free_port(first) == first


def test_a_node_that_is_still_being_set_up_outlives_the_signal_before_the_time_limit(tmp_path):
    """Slurm's USR1, which reaches every process of a step, in the middle of the site's activate; and paths with spaces."""
    site, run = tmp_path / "a site.sh", tmp_path / "a run"
    site.write_text("cpus_per_gpu=1 gpus_per_node=0 python=(printf '%s\\n')\nactivate() { kill -USR1 $$; }\n")
    environment = {**os.environ, "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1",
                   "SLURM_NODEID": "0", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", "RENDEZVOUS_PORT": "10007"}
    command = [SLURM / "train_node.sh", ROOT, site, run, "smoke", "", "--steps", "7", "a text"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-5:] == ["--out", str(run / "train"), "--steps", "7", "a text"]


# --------------------------------------------------------------------------------------------------------- on a Slurm


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm_cluster() as cluster:
        yield cluster


def write_site(folder: Path, python: str, activate: str = "") -> Path:
    site = folder / "site.sh"
    site.write_text(SITE.format(python=python, activate=activate))
    return site


def submit(cluster: Cluster, site: Path, run: Path, *arguments: object) -> dict[str, str]:
    """The number of each job that was submitted."""
    printed = cluster.run(SLURM / "submit.sh", site, "--run", run, "--tasks", TASKS, "--bench", BENCH, *arguments)
    return dict(re.findall(r"^(\w+) +(\d+)$", printed, re.MULTILINE))


def logs(run: Path, pattern: str) -> str:
    return "".join(path.read_text() for path in sorted((run / "logs").glob(pattern)))


def part(run: Path, index: int) -> Path:
    return run / "parts" / f"smoke-{index:04d}.json"


def parts(run: Path) -> dict[Path, int]:
    """The results of single configurations and when each was written."""
    return {path: path.stat().st_mtime_ns for path in (run / "parts").glob("smoke-*.json")}


def configurations(run: Path) -> list[str]:
    """The suite's, in the order of their index."""
    lines = (run / "configurations.tsv").read_text().splitlines()
    assert [line.partition("\t")[0] for line in lines] == [str(index) for index in range(len(lines))]
    return [line.partition("\t")[2] for line in lines]


def merged(run: Path) -> set[str]:
    """The configurations that have rows in the joined result."""
    return {row["setting"] for row in json.loads((run / "smoke.json").read_text())["rows"]}


@dataclass(frozen=True)
class Chain:
    """What is left of a chain that was interrupted: its folder, its jobs, the parts that were there when it was and when
    it ended, the configurations that it merged, and the folder of the same training without interruption."""

    run: Path
    site: Path
    alone: Path
    ids: dict[str, str]
    early_parts: dict[Path, int]
    parts: dict[Path, int]
    merged: set[str]


def start_training(*arguments: object) -> subprocess.Popen:
    """train_lm.py without Slurm, two processes of this machine; sums of two terms are the same whatever their order."""
    launcher = (python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = map(str, (*launcher, ROOT / "scripts" / "train_lm.py", "--device", "cpu", *arguments))
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def chain(request, cluster, tmp_path_factory) -> Chain:
    """All four jobs. In the middle one task of the array is requeued and another cancelled; the training gets what Slurm
    sends it before the time limit, and is then requeued by hand. Ends when they have."""
    folder = tmp_path_factory.mktemp("chain")
    # Slurm signals the processes that a step has started: torchrun itself, and what stands for its ranks.
    real, forked = map(shlex.quote, (sys.executable, python()))
    site = write_site(folder, forked, f"[[ $SLURM_JOB_NAME != gbmoe-train-* ]] || {{ python=({real}); export PYTHON_EXEC={forked}; }}")
    run, alone, text = folder / "a run", folder / "alone", folder / "a text"
    text.write_text("".join(f"{n} times {n} is {n * n}.\n" for n in range(2000)))
    uninterrupted = start_training("--out", alone, "--expert-parallel", *TRAINING, text)

    ids = submit(cluster, site, run, "--only", "build,bench,merge")
    wait_until(part(run, 1).exists, 300, "the first result of task 1", run / "logs")
    cluster.run("scancel", f"{ids['bench']}_1")
    wait_until(part(run, 0).exists, 300, "the first result of task 0", run / "logs")
    cluster.run("scontrol", "requeue", f"{ids['bench']}_0")
    early_parts = parts(run)

    # Only now, so that it does not end before its interruptions; and the port that its number stands for is somebody else's.
    for port in range(10001 + int(ids["merge"]), 10006 + int(ids["merge"])):
        with contextlib.suppress(OSError):
            request.addfinalizer(socket.create_server(("127.0.0.1", port)).close)
    ids |= submit(cluster, site, run, "--only", "train", "--nodes", 2, "--expert-parallel", "--", *TRAINING, text)
    wait_until(lambda: "step 10/" in logs(run, "train-*"), 300, "ten steps of training", run / "logs")
    cluster.run("scancel", "--batch", "--signal=USR1", ids["train"])  # what --signal=B:USR1@120 does
    wait_until(lambda: "resumed from" in logs(run, "train-*"), 300, "the training to go on", run / "logs")
    cluster.run("scontrol", "requeue", ids["train"])

    cluster.end(ids["train"], run / "logs")
    cluster.end(ids["merge"], run / "logs")
    assert uninterrupted.wait(timeout=300) == 0
    return Chain(run, site, alone, ids, early_parts, parts(run), merged(run))


def test_a_requeued_task_runs_only_what_it_had_not(cluster, chain):
    task = cluster.job(f"{chain.ids['bench']}_0")
    assert task["JobState"] == "COMPLETED" and task["Restarts"] == "1"
    assert chain.early_parts.items() <= chain.parts.items()  # none was written again
    log = logs(chain.run, f"bench-{chain.ids['bench']}_0.log")
    assert ", restart 0," in log and ", restart 1," in log


def test_merge_names_what_a_cancelled_task_left_out_and_reports_the_rest(cluster, chain):
    assert cluster.job(f"{chain.ids['bench']}_1")["JobState"] == "CANCELLED"
    assert cluster.job(chain.ids["merge"])["JobState"] == "FAILED"
    names = configurations(chain.run)
    missing = {index for index in range(len(names)) if part(chain.run, index) not in chain.parts}
    assert missing and all(index % TASKS == 1 for index in missing)  # the tasks take turns
    log = logs(chain.run, "merge-*")
    for index, name in enumerate(names):
        assert (f"no result of {name}" in log) == (index in missing)
    assert chain.merged == set(names) - {names[index] for index in missing}
    assert (chain.run / "smoke.md").read_text() and list((chain.run / "pictures").glob("*.png"))


def test_the_same_submission_again_makes_the_result_whole(cluster, chain):
    ids = submit(cluster, chain.site, chain.run, "--only", "bench,merge")
    job = cluster.end(ids["merge"], chain.run / "logs")
    assert job["JobState"] == "COMPLETED", logs(chain.run, f"merge-{ids['merge']}.log")
    names = configurations(chain.run)
    assert merged(chain.run) == set(names)
    assert parts(chain.run).keys() == {part(chain.run, index) for index in range(len(names))}
    assert chain.parts.items() <= parts(chain.run).items()  # nothing was measured again


def test_training_resumes_after_each_requeue_and_has_the_losses_of_an_uninterrupted_run(cluster, chain):
    job = cluster.job(chain.ids["train"])
    assert job["JobState"] == "COMPLETED" and job["Restarts"] == "2" and job["NumNodes"] == "2"
    log = logs(chain.run, "train-*")
    assert "stopped by SIGUSR1" in log and log.count("resumed from") == 2
    assert "srun: error" not in logs(chain.run, f"train-{chain.ids['train']}.log").partition(", restart 1,")[0]
    expected, got = (json.loads((folder / "log.json").read_text()) for folder in (chain.alone, chain.run / "train"))
    for kind in ("train", "heldout"):
        assert [(e["step"], e["loss"]) for e in got[kind]] == [(e["step"], e["loss"]) for e in expected[kind]]


def test_a_failed_build_ends_the_chain(cluster, tmp_path):
    run = tmp_path / "run"
    ids = submit(cluster, write_site(tmp_path, "false"), run)
    for job, state in (("build", "FAILED"), ("bench", "CANCELLED"), ("train", "CANCELLED"), ("merge", "FAILED")):
        assert cluster.end(ids[job], run / "logs")["JobState"] == state, job


def test_a_node_that_fails_ends_the_training_on_all(cluster, tmp_path):
    fails = f"""bash -c '[[ $SLURM_NODEID == 0 ]] || exit 7; exec "$@"' python {shlex.quote(python())}"""
    run = tmp_path / "run"
    ids = submit(cluster, write_site(tmp_path, fails), run, "--only", "train", "--nodes", 2)
    # The other node would wait for minutes.
    assert cluster.end(ids["train"], run / "logs", 60)["JobState"] == "FAILED"
    assert "exit code 7" in logs(run, "train-*")


def test_a_training_that_saved_nothing_is_not_queued_again(cluster, tmp_path):
    run = tmp_path / "run"
    ids = submit(cluster, write_site(tmp_path, "bash -c 'echo started; sleep 3'"), run, "--only", "train")
    wait_until(lambda: "started" in logs(run, "train-*"), 60, "the job to start", run / "logs")
    cluster.run("scancel", "--batch", "--signal=USR1", ids["train"])
    job = cluster.end(ids["train"], run / "logs", 60)
    assert job["JobState"] == "FAILED" and job["Restarts"] == "0"
    assert "expected a new checkpoint since this job began, got none" in logs(run, "train-*")
