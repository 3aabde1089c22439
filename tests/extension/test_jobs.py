"""jobs.py: no more compilers run than the process may use."""

import os

import pytest

from gbmoe.extension import jobs
from gbmoe.extension.toolkit import CompileError


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of 8 CPUs and 64 GiB without any limit, and a folder for the files of control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    monkeypatch.setattr(jobs, "_free_memory", lambda: 64 << 30)
    monkeypatch.setattr(jobs, "_CGROUPS", tmp_path)
    monkeypatch.setattr(jobs, "_cgroup_folders", lambda: [tmp_path / "job", tmp_path])
    for name in ("MAX_JOBS", "SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "job").mkdir()
    return tmp_path


def test_the_cpus_of_the_process_count_and_not_those_of_the_machine(machine):
    assert jobs.jobs() == jobs.Jobs(8, "CPUs of this process: 8")


@pytest.mark.parametrize("name, value, count", [
    ("MAX_JOBS", "3", 3), ("MAX_JOBS", "64", 8), ("SLURM_CPUS_PER_TASK", "2", 2), ("SLURM_CPUS_ON_NODE", "4", 4)])
def test_max_jobs_and_slurm_limit_the_jobs(machine, monkeypatch, name, value, count):
    monkeypatch.setenv(name, value)
    found = jobs.jobs()
    assert found.count == count and (count == 8 or name in found.reason)


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5"])
def test_a_max_jobs_that_is_no_number_is_refused(machine, monkeypatch, value):
    monkeypatch.setenv("MAX_JOBS", value)
    with pytest.raises(CompileError, match="MAX_JOBS: expected a number greater than 0, got"):
        jobs.jobs()


@pytest.mark.parametrize("files, count", [
    ({"job/cpu.max": "250000 100000"}, 2), ({"job/cpu.max": "max 100000"}, 8), ({"cpu.max": "50000 100000"}, 1),
    ({"job/cpu.cfs_quota_us": "300000", "job/cpu.cfs_period_us": "100000"}, 3),
    ({"job/cpu.cfs_quota_us": "-1", "job/cpu.cfs_period_us": "100000"}, 8),
    ({"job/memory.max": str(5 << 30), "job/memory.current": str(2 << 30)}, 3),
    ({"job/memory.max": str(5 << 30), "job/memory.current": str(2 << 30), "job/memory.stat": f"anon 1\ninactive_file {1 << 30}\n"}, 4),
    ({"job/memory.max": "max", "job/memory.current": "1"}, 8),
    ({"job/memory.max": str(1 << 29), "job/memory.current": "0"}, 1)])
def test_a_containers_limits_count(machine, files, count):
    for name, text in files.items():
        (machine / name).write_text(text + "\n")
    assert jobs.jobs().count == count


def test_free_memory_counts(machine, monkeypatch):
    monkeypatch.setattr(jobs, "_free_memory", lambda: 5 << 29)
    assert jobs.jobs() == jobs.Jobs(2, "free memory: 2.5 GiB")


def test_jobs_that_are_asked_for_decide(machine, monkeypatch):
    monkeypatch.setenv("MAX_JOBS", "1")
    assert jobs.jobs(20).count == 20


def test_the_control_groups_of_this_process_can_be_read():
    assert all(jobs._CGROUPS == folder or jobs._CGROUPS in folder.parents for folder in jobs._cgroup_folders())
    assert jobs.jobs().count >= 1
