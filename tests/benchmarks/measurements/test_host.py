"""The suite of the host's time: complete, verified, in tables that can be read; its parts sum to the whole."""

import contextlib

import pytest
import torch

from benchmarks.measurements import host_parts, host_time
from benchmarks.result_files import reading
from gbmoe.cli import main
from gbmoe.cli.bench.measurements.measurement import FORWARD, Subject
from gbmoe.cli.bench.running import rival_process, verify_and_time
from gbmoe.cli.bench.running.verify_and_time import Conditions
from gbmoe.testing import cuda_graphs, moe_shapes
from tests.cli.bench.rows import printed

CPU = torch.device("cpu")
CASE = moe_shapes.MoeCase("tiny", 24, 16, 32, 4, 2, "glu")
PASSES = ("forward, no gradients", "forward", "forward+backward")


@pytest.fixture
def one_layer(monkeypatch):
    monkeypatch.setattr(moe_shapes, "HOST_CASES", moe_shapes.HOST_CASES[:1])


def test_the_suite_is_complete_and_readable(bench, one_layer, tmp_path, capsys):
    status, content, rows = bench(suite="host")
    assert status == 0, [row["problem"] for row in rows.values() if "problem" in row]
    shape = "64x1024-e8k2-small/uniform"
    expected = {f"host/{shape}/{computation}/{by}" for computation in PASSES for by in ("gbmoe-auto", "nn.Linear")}
    parts = {f"host-parts/{shape}/{computation}/gbmoe-auto" for computation in PASSES}
    assert set(rows) == expected | parts and content["runs"][0]["dtype"] == "bfloat16"
    for name, row in rows.items():
        assert row["verified"] and row["median"] > 0 and "tflops" not in row and "kernels" not in row, name
        assert ("backward" in row) == name.endswith(("backward/gbmoe-auto", "backward/nn.Linear"))
        assert ("parts" in row) == (name in parts)
        if "parts" in row:
            assert list(row["parts"]) == list(host_parts.PARTS) and min(row["parts"].values()) >= 0
            assert sum(row["parts"].values()) == pytest.approx(row["median"], rel=1e-4)
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 120 and "e+0" not in out
    host, where = ([line for line in printed(out) if heading in line] for heading in ("us", "forward+backward us"))
    assert len(host) == 6 and len(where) == 1 + len(host_parts.PARTS)
    assert [line["part of the host's time"] for line in where] == ["all", *host_parts.PARTS]
    assert all(float(line[f"{computation} us"]) >= 0 for line in where for computation in PASSES)
    file, page = tmp_path / "rows.json", tmp_path / "page.md"
    assert reading.read(file)["rows"] == content["rows"]
    assert main(["bench", "report", str(file), "--output", str(page)]) == 0 and "The host's work" in page.read_text()


@pytest.mark.gpu
def test_the_kernels_of_a_graph_are_next_to_the_hosts_time(bench, one_layer):
    status, content, rows = bench(suite="host", place="cuda")
    assert status == 0, [row["problem"] for row in rows.values() if "problem" in row]
    for row in content["rows"]:
        if row["kind"] == "host":
            assert row["kernels"] > 0 or row["uncaptured"], row["name"]
    assert all("kernels" in row for row in content["rows"] if row["by"] == "nn.Linear")


@pytest.mark.parametrize("by, engine", [("gbmoe", "auto"), (host_time.LINEAR, None)])
@pytest.mark.parametrize("computation, records, steps", [(PASSES[0], False, 1), (PASSES[1], True, 1), (PASSES[2], True, 2)])
def test_what_is_timed_is_what_the_row_says(by, engine, computation, records, steps, monkeypatch):
    waits = []
    monkeypatch.setattr(host_time, "wait", waits.append)
    subject = host_time.HostMeasurement(CASE, by, engine, "uniform", computation).build(CPU, torch.bfloat16)
    subject.reset()
    assert waits == [CPU] and len(subject.steps()) == steps
    for step in subject.steps():
        step()
    out = subject.out_TH if by == "gbmoe" else subject.out_TF
    weight = next(subject.layer.parameters())
    assert out.requires_grad == records and (weight.grad is not None) == (steps == 2) == (subject.x_TH.grad is not None)
    subject.reset()
    assert weight.grad is None and subject.x_TH.grad is None and len(waits) == 2


def test_a_wrong_layer_has_no_host_time(monkeypatch):
    monkeypatch.setattr(host_time.HostOfLayer, "outputs", lambda self: {
        name: tensor if name == "experts" else 1.05 * tensor for name, tensor in super(host_time.HostOfLayer, self).outputs().items()})
    row = verify_and_time.measure(host_time.HostMeasurement(CASE, "gbmoe", "auto", "uniform", "forward"), Conditions(CPU, torch.bfloat16))
    assert row["outcome"] == "wrong" and "median" not in row


class _Nothing(Subject):
    of_host = True

    def steps(self):
        return [lambda: None]

    outputs = check = steps

    def further(self, seconds):
        return {"kernels": 2 * seconds}


def test_the_hosts_clock_times_what_is_issued_to_a_gpu(monkeypatch):
    """Events of the device would time its work."""
    seen, time_steps = [], verify_and_time.time_steps
    monkeypatch.setattr(verify_and_time, "time_steps", lambda steps, device, *more: seen.append(device) or time_steps(steps, device, *more))
    monkeypatch.setattr(verify_and_time, "extra_peak_bytes", lambda *_: None)
    row = verify_and_time._times(host_time.HostMeasurement(CASE, "gbmoe", "auto", "uniform", FORWARD), _Nothing(),
                                 Conditions(torch.device("cuda"), torch.bfloat16))
    assert seen == [CPU] and row["kernels"] == 2 * row["median"] and row["tflops"] is None


# ------------------------------------------------------------------------------------------------------------------- graphs


def test_a_rival_that_cannot_be_captured_has_a_reason_and_gbmoe_a_fault(monkeypatch):
    def fail(call):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(cuda_graphs, "captured", fail)
    monkeypatch.setattr(cuda_graphs, "no_host_wait", contextlib.nullcontext)
    arguments = [lambda: None], lambda: None, torch.device("cuda")
    assert host_time.kernels_in_a_graph(*arguments, foreign=True) == {"capture_failed": True, "uncaptured":
        "cannot be captured: RuntimeError: operation not permitted when stream is capturing"}
    with pytest.raises(RuntimeError, match="not permitted"):
        host_time.kernels_in_a_graph(*arguments, foreign=False)


def test_a_rival_that_waits_is_not_captured(monkeypatch):
    """After a capture that fails its process has to end, and the next one compiles the rival's kernels again."""
    def wait():
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(cuda_graphs, "captured", None)
    monkeypatch.setattr(cuda_graphs, "no_host_wait", contextlib.nullcontext)
    assert host_time.kernels_in_a_graph([wait], lambda: None, torch.device("cuda"), foreign=True) == {
        "uncaptured": "waits for the device: RuntimeError: called a synchronizing CUDA operation"}


@pytest.mark.parametrize("found, ended", [({"kernels": 1e-5}, []), ({"uncaptured": "it waits"}, []),
                                          ({"uncaptured": "it cannot", "capture_failed": True}, [True])])
def test_a_process_whose_capture_failed_is_not_asked_again(monkeypatch, found, ended):
    worker, stopped = rival_process.Worker("bmm", Conditions(CPU, torch.bfloat16), 1), []
    monkeypatch.setattr(worker, "_ask", lambda *_, **__: {"outcome": "verified", "verified": True, **found})
    monkeypatch.setattr(worker, "stop", lambda: stopped.append(True))
    row = worker.measure(host_time.HostMeasurement(CASE, "bmm", None, "uniform", "forward"))
    assert stopped == ended and "capture_failed" not in row


# -------------------------------------------------------------------------------------------------------------------- parts


@pytest.mark.parametrize("file, name, part", [
    ("gbmoe/_checks.py", "require_tensor", "checks"), ("gbmoe/ops/experts.py", "check_arguments", "checks"),
    ("gbmoe/_define_operator.py", "is_watched", "checks"), ("gbmoe/_define_operator.py", "_is_watched", "checks"),
    ("gbmoe/_define_operator.py", "call", "dispatcher"),
    ("gbmoe/engines/choice.py", "resolve", "choice"), ("gbmoe/engines/resolved.py", "of", "choice"),
    ("gbmoe/tuning/device.py", "of", "choice"),
    ("gbmoe/ops/experts.py", "expert_mlp", "Python"), ("gbmoe/ops/experts.py", "_setup_context", "autograd"),
    ("gbmoe/ops/saved_for_backward.py", "save", "autograd"),
    ("torch/_ops.py", "__call__", "dispatcher"), ("torch/autograd/function.py", "apply", "autograd"),
    ("torch/nn/modules/module.py", "_call_impl", "modules"), ("/usr/lib/python3/functools.py", "wrapper", None),
    ("<string>", "__init__", None),
    ("~", "<built-in method torch._ops.gbmoe_cuda.gather>", "launches"), ("~", "<built-in method torch._ops.gbmoe.>", "dispatcher"),
    ("~", "<built-in method torch._ops.aten.>", "operators"), ("~", "<built-in method torch.where>", "operators"),
    ("~", "<method 'to' of 'torch._C.TensorBase' objects>", "operators"), ("~", "<built-in method torch._C._nn.pad>", "operators"),
    ("~", "<method 'new_empty' of 'torch._C.TensorBase' objects>", "allocation"), ("~", "<built-in method torch.empty>", "allocation"),
    ("~", "<built-in method apply>", "autograd"), ("~", "<method 'run_backward' of 'torch._C._EngineBase' objects>", "autograd"),
    ("~", "<method 'size' of 'torch._C.TensorBase' objects>", None), ("~", "<built-in method builtins.isinstance>", None),
    ("~", "<built-in method torch._C._len_torch_dispatch_stack>", None), ("~", "<method 'disable' of '_lsprof.Profiler' objects>", None),
])
def test_which_part_a_function_is(file, name, part):
    for package, folder in (("gbmoe/", host_parts._GBMOE), ("torch/", host_parts._TORCH)):
        file = folder + file.removeprefix(package) if file.startswith(package) else file
    assert host_parts.part_of((file, 1, name)) == part


def test_what_the_profile_adds_is_taken_off_and_what_asks_is_part_of_its_caller():
    call, check = ("~", 0, "<built-in method torch.where>"), (f"{host_parts._GBMOE}_checks.py", 1, "require")
    ask = ("~", 0, "<method 'size' of 'torch._C.TensorBase' objects>")
    entries = {call: (1, 1, 5e-6, 5e-6, {}), check: (2, 2, 6e-6, 9e-6, {}), ask: (1, 1, 3e-6, 3e-6, {check: (1, 1, 3e-6, 3e-6)})}
    slow = {key: (a, b, 100 * own, cumulated, callers) for key, (a, b, own, cumulated, callers) in entries.items()}
    parts = host_parts.parts_of([entries, slow, entries], 10e-6)  # one of three was disturbed
    assert parts == pytest.approx(dict.fromkeys(host_parts.PARTS, 0.0) | {"operators": 4e-6, "checks": 6e-6}, abs=1e-12)
    parts = host_parts.parts_of([entries], 20e-6)  # where the profiled call was faster, nothing is taken off
    assert parts["operators"] == 5e-6 and parts["checks"] == pytest.approx(9e-6) and parts["rest"] == pytest.approx(6e-6)
