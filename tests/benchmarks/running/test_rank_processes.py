"""`gbmoe bench --suite parallel` in two processes on the CPU: its file is complete, and a rank that is wrong has no time on any."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.measurements.parallel_layer import Part
from benchmarks.result_files import reading
from gbmoe.cli import main
from gbmoe.cli.bench.measurements.measurement import Refusal
from gbmoe.layers import dmoe, expert_weights
from gbmoe.testing.moe_shapes import MoeCase
from tests.cli.bench.rows import ROUNDED
from tests.cli.bench.running.test_rival_process import TIMES
from tests.forked_python import python, spawn

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]
BENCH = ["bench", "--suite", "parallel", "--device", "cpu", "--quick"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What torchrun's two processes printed, and the result file."""
    file = tmp_path_factory.mktemp("parallel") / "rows.json"
    command = [python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gbmoe", *BENCH,
               "--json", str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=file.parent, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    return done, file


@pytest.mark.xdist_group("parallel suite")
def test_all_rows_are_there_and_right(ran):
    done, file = ran
    content = reading.read(file)
    run, = content["runs"]
    assert run["ranks"] == 2 and run["dtype"] == "float32" and reading.missing(content) == []
    assert run["peers_left_out"] == dict.fromkeys(("megablocks-grouped", "ligercute"), "runs on CUDA devices only, not on cpu")
    rows = {row["name"]: row for row in content["rows"]}
    for case in ("mixtral", "qwen3", "dsv3"):
        for routing in ("uniform", "skewed"):
            for computation in ("forward", "forward+backward"):
                contest = f"layer/{case}-small/{routing}/{computation}"
                for by in ("one-gpu", "auto", "exchange"):
                    row = rows.pop(f"{contest}/gbmoe-{by}")
                    assert row["verified"] and row["error"] <= row["limit"] and TIMES <= set(row) and row["tflops"] > 0
                    assert ("backward" in row) == (computation == "forward+backward")
                    if by == "one-gpu":
                        base = row
                    assert row["speedup"] == pytest.approx(base["median"] / row["median"], rel=ROUNDED)
                for by in ("peer_memory", *(("peer_memory-loans",) if routing == "skewed" else ())):
                    assert rows.pop(f"{contest}/gbmoe-{by}")["outcome"] == "left out"
            for trip in ("dispatch", "combine"):
                row = rows.pop(f"link/{case}-small/{routing}/{trip}/gbmoe-exchange")
                assert row["verified"] and row["bytes"] > 0
                assert row["terabytes"] == pytest.approx(row["bytes"] / row["median"] / 1e12, rel=ROUNDED)
                # A row crosses at most once, 16 to 64 tokens of 48 floats.
                assert row["bytes"] <= row["tokens"] * row["hidden"] * 4
                assert rows.pop(f"link/{case}-small/{routing}/{trip}/gbmoe-peer_memory")["outcome"] == "left out"
    assert not rows
    # The first rank alone prints.
    assert done.stdout.count("x gbmoe-one-gpu") == 1 and "GB/s" in done.stdout and done.stderr.count("[1/") == 1


@pytest.mark.xdist_group("parallel suite")
def test_its_file_is_reported_and_drawn(ran, tmp_path, capsys):
    _, file = ran
    page = tmp_path / "page.md"
    assert main(["bench", "report", str(file), "--output", str(page)]) == 0
    text = page.read_text()
    assert "2 ranks" in text and "| gbmoe-one-gpu | gbmoe-auto |" in text and "One trip over the links" in text
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
    assert main(["bench", "plot", str(file), "--output", str(tmp_path), "--only", "parallel-link-dispatch-speed.svg"]) == 0


@pytest.mark.gpu
@pytest.mark.xdist_group("parallel suite")
@pytest.mark.parametrize("configuration, rows", [(0, 8), (6, 4)])
def test_on_gpus_every_transport_is_right(configuration, rows, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gbmoe", "bench", "--suite",
               "parallel", "--quick", "--rivals", "none", "--config", str(configuration), "--output", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout + done.stderr
    content = reading.read(tmp_path / f"parallel-{configuration:04d}.json")
    assert len(content["rows"]) == rows
    for row in content["rows"]:
        assert row["verified"] or (row["outcome"] == "left out" and row["transport"].startswith("peer_memory")), row["problem"]


# ------------------------------------------------------------------------------------------------------------------- faults


def scaled_output(monkeypatch):
    right = dmoe.parallel_experts
    monkeypatch.setattr(dmoe, "parallel_experts", lambda *args: (lambda out, counts: (out * 1.01, counts))(*right(*args)))


def weight_gradients_of_another_scale(monkeypatch):
    right = expert_weights.ExpertWeights.__init__

    def init(self, args):
        right(self, args)
        self.gradient_scale = 1.0

    monkeypatch.setattr(expert_weights.ExpertWeights, "__init__", init)


def raises(monkeypatch):
    def broken(*_):
        raise RuntimeError("the layer is broken")

    monkeypatch.setattr(dmoe, "parallel_experts", broken)


# What is wrong, on which ranks, what becomes of forward and of forward+backward, and what the row says.
FAULTS = {
    "output of the second rank": (scaled_output, [1], "wrong", "wrong", ": relative error "),
    "scale of gradients": (weight_gradients_of_another_scale, [0, 1], "verified", "wrong", "grad "),
    "raised": (raises, [0, 1], "error", "error", "RuntimeError: the layer is broken"),
}


def free_port():
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return str(bound.getsockname()[1])


def rank_with_faults(rank, folder, ports):
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for (name, (fault, ranks, *_)), port in zip(FAULTS.items(), ports):
        os.environ["MASTER_PORT"] = port
        with pytest.MonkeyPatch.context() as monkeypatch:
            if rank in ranks:
                fault(monkeypatch)
            status = main([*BENCH, "--config", "0", "--output", f"{folder}/{name}"])
        Path(folder, f"{name} {rank}").write_text(str(status))


def test_a_rank_that_is_wrong_has_no_time_on_any(tmp_path):
    spawn(rank_with_faults, (str(tmp_path), [free_port() for _ in FAULTS]), nprocs=2)
    for name, (_, _, *outcomes, problem) in FAULTS.items():
        assert [(tmp_path / f"{name} {rank}").read_text() for rank in range(2)] == ["1", "1"]
        rows = {row["name"]: row for row in json.loads((tmp_path / name / "parallel-0000.json").read_text())["rows"]}
        for computation, outcome in zip(("forward", "forward+backward"), outcomes):
            assert rows[f"layer/mixtral-small/uniform/{computation}/gbmoe-one-gpu"]["verified"]
            for by in ("gbmoe-auto", "gbmoe-exchange"):
                row = rows[f"layer/mixtral-small/uniform/{computation}/{by}"]
                assert row["outcome"] == outcome
                if outcome != "verified":
                    assert problem in row["problem"] and not TIMES & set(row)


# ---------------------------------------------------------------------------------------------------------------- arguments


@pytest.fixture
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("arguments, words", [
    ([], "torchrun --nproc-per-node 2 -m gbmoe bench --suite parallel"),
    (["--engines", "auto"], "--engines: suite parallel takes none"),
    (["--memory-limit", "1"], "--memory-limit: suite parallel takes none"),
])
def test_one_line_says_what_it_wants(arguments, words, alone, capsys):
    assert main([*BENCH, *arguments]) == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("gbmoe bench: ") and words in line


def test_its_configurations_are_listed_by_one_process(alone, capsys):
    assert main([*BENCH, "--list-configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12 and lines[0] == "0\tlayer/mixtral-small/uniform" and lines[-1] == "11\tlink/dsv3-small/skewed"


@pytest.mark.parametrize("ranks, rank, experts, features", [
    (2, 1, (4, 8), (0, 12)), (8, 3, (3, 4), (0, 12)), (16, 3, (3, 4), (0, 6)), (16, 11, (3, 4), (6, 12))])
def test_parts_are_those_of_the_layer(ranks, rank, experts, features):
    part = Part.of(MoeCase("case", 4, 8, 12, 8, 2), rank, ranks)
    assert (part.experts, part.features) == (slice(*experts), slice(*features))


@pytest.mark.parametrize("ranks, words", [(3, "8 experts cannot be divided by 3"), (12, "12 ranks cannot be divided by 8"),
                                          (40, "12 ffn rows cannot be divided by 5")])
def test_parts_that_do_not_come_out_even_are_refused(ranks, words):
    with pytest.raises(Refusal, match=words):
        Part.of(MoeCase("case", 4, 8, 12, 8, 2), 0, ranks)
