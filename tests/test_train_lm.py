"""scripts/train_lm.py, run as its user runs it: a process of its own, on the CPU, at sizes of a few seconds.

Where the process begins to matter after its imports, it is one of tests/forked_python.

    pytest tests/test_train_lm.py
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import gbmoe
from tests.forked_python import python

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("train_lm")]  # the trainings that most tests look at run once

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_lm.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEPS, LAYERS, EXPERTS = 40, 2, 4
# A held-out loss a step makes steps long enough to be interrupted between two.
SIZES = ("--device", "cpu", "--steps", STEPS, "--layers", LAYERS, "--experts", EXPERTS, "--hidden", 64, "--heads", 2,
         "--ffn", 64, "--length", 64, "--batch", 4, "--warmup", 4, "--eval-every", 1, "--eval-windows", 8, "--log-every", 1)
# One float32 operation rounds by 6e-8; sums of hundreds of terms and tens of updates leave this much between two orders of
# summation. A wrong weight, expert or gradient shows in the second loss already, and by far more.
ROUNDING = 1e-4


def command(*arguments: object, interpreter: str | None = None) -> dict:
    """subprocess arguments: the script on no GPU, with the gbmoe that the tests import."""
    path = os.pathsep.join(filter(None, [str(Path(gbmoe.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return {"args": [interpreter or python(), *map(str, arguments)], "env": environment, "text": True}


def ctrl_c_as_on_a_terminal() -> None:
    """A shell without job control starts processes in the background with SIGINT ignored, and the tests may be one."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(*arguments: object, launcher: tuple = ()) -> subprocess.Popen:
    return subprocess.Popen(**command(*launcher, SCRIPT, *SIZES, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            preexec_fn=ctrl_c_as_on_a_terminal)


def end(process: subprocess.Popen) -> str:
    """Wait for a run that is to succeed; return what it printed."""
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return printed


def interrupt(*arguments: object, number: int, after_step: int, launcher: tuple = ()) -> tuple[int, str]:
    """Run, signal once after_step is printed; return the exit status and what was printed from then on."""
    process = start(*arguments, launcher=launcher)
    for line in process.stdout:
        if line.startswith(f"step {after_step}/"):
            process.send_signal(number)
            break
    printed, _ = process.communicate(timeout=60)
    return process.returncode, printed


def read_log(out: Path) -> dict:
    return json.loads((out / "log.json").read_text())


def losses(log: dict) -> list[tuple[int, float]]:
    """Every step's loss, and every held-out loss."""
    return [(entry["step"], entry["loss"]) for entry in log["train"] + log["heldout"]]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    """A folder with three text files, a hidden one and a binary one."""
    folder = tmp_path_factory.mktemp("text")
    for index, name in enumerate(("a.txt", "b.py", "deeper/c.md")):
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(f"{index} times {n} is {index * n}, naïvely.\n" for n in range(200)), encoding="utf-8")
    (folder / "binary.bin").write_bytes(b"\xff\xfe\x00" * 100)
    (folder / ".hidden").write_text("secret")
    return folder


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> dict[str, Path]:
    """--out of a run of each implementation that nobody interrupted, with what it printed; the three run side by side."""
    outs = {impl: tmp_path_factory.mktemp(impl) for impl in ("gbmoe", "bmm", "reference")}
    processes = [start(text, "--impl", impl, "--out", out) for impl, out in outs.items()]
    for process, out in zip(processes, outs.values()):
        (out / "printed").write_text(end(process))
    return outs


@pytest.mark.parametrize("impl", ["bmm", "reference"])
def test_curve_is_the_same_within_rounding(impl, finished):
    gbmoe_log, other = read_log(finished["gbmoe"]), read_log(finished[impl])
    assert [step for step, _ in losses(other)] == [*range(1, STEPS + 1)] * 2
    assert [loss for _, loss in losses(other)] == pytest.approx([loss for _, loss in losses(gbmoe_log)], rel=ROUNDING)
    assert gbmoe_log["train"][-1]["loss"] < 0.8 * gbmoe_log["train"][0]["loss"]


def test_signals_save_and_the_resumed_run_has_the_same_losses_bit_for_bit(text, finished, tmp_path):
    for number, after_step in ((signal.SIGTERM, 3), (signal.SIGUSR1, 12)):
        status, output = interrupt(text, "--out", tmp_path, number=number, after_step=after_step)
        stopped_after = len(read_log(tmp_path)["train"])
        assert status == 0
        assert f"stopped by {number.name}: saved {tmp_path / 'checkpoint.pt'} after step {stopped_after}/{STEPS}" in output
        assert after_step <= stopped_after < STEPS
    end(start(text, "--out", tmp_path))
    assert losses(read_log(tmp_path)) == losses(read_log(finished["gbmoe"]))


def test_a_signal_that_is_sent_again_and_again_does_not_spoil_the_exit(text, tmp_path):
    process = start(text, "--out", tmp_path)
    while not process.stdout.readline().startswith("step 3/"):
        assert process.poll() is None
    while process.poll() is None:
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.001)
    assert process.returncode == 0 and "stopped by SIGUSR1" in process.communicate()[0]


def test_log_holds_what_a_reader_needs(text, finished):
    log = read_log(finished["gbmoe"])
    content = b"".join(path.read_bytes() for path in text.rglob("[abc].*"))
    entropy = -sum(n / len(content) * math.log(n / len(content)) for n in Counter(content).values())
    assert log["text"]["files"] == 3
    assert log["text"]["bytes"] == len(content)
    assert log["text"]["heldout_bytes"] == len(content) // 10
    assert log["text"]["unigram_entropy"] == pytest.approx(entropy, rel=1e-12)
    assert log["args"]["impl"] == "gbmoe" and log["args"]["paths"] == [str(text)]
    assert log["versions"].keys() == {"gbmoe", "torch", "python"}
    assert log["ranks"] == 1 and log["device"] and log["parameters"] > 0 and "commit" in log
    assert log["tokens_per_s"] > 0 and log["seconds"] > 0
    for entry in log["train"]:
        assert len(entry["balance"]) == LAYERS and all(1 <= balance <= EXPERTS for balance in entry["balance"])
        assert entry["tokens_per_s"] > 0


def test_losses_and_entropy_are_printed(finished):
    log, printed = read_log(finished["gbmoe"]), (finished["gbmoe"] / "printed").read_text()
    heldout, entropy = log["heldout"][-1]["loss"], log["text"]["unigram_entropy"]
    assert f"held-out loss {heldout:.4f} nats/byte ({heldout / math.log(2):.3f} bits/byte)" in printed
    assert f"unigram entropy {entropy:.4f}" in printed and f"gap {entropy - heldout:.4f}" in printed


def test_why_there_is_no_picture_is_the_true_cause(tmp_path):
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("import a_package_that_matplotlib_needs\n")
    log = {"heldout": [{"step": 1, "loss": 2.0}], "text": {"unigram_entropy": 3.0}, "seconds": 1.0, "tokens_per_s": 5.0}
    program = (f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(SCRIPT.parent)!r}]; import pathlib, train_lm; "
               "[sys.modules.pop(name) for name in list(sys.modules) if name.partition('.')[0] == 'matplotlib']; "
               f"train_lm.summarize({log!r}, pathlib.Path({str(tmp_path)!r}))")
    done = subprocess.run([python(), "-c", program], capture_output=True, text=True, check=True)
    said = "no loss.png: matplotlib cannot be imported: No module named 'a_package_that_matplotlib_needs'\n"
    assert done.stdout.startswith(said)


def test_plot_is_a_picture(finished):
    pytest.importorskip("matplotlib")
    assert (finished["gbmoe"] / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_terminal_shows_a_bar_with_loss_tokens_and_balance(text, tmp_path):
    pytest.importorskip("rich")
    reader, terminal = pty.openpty()
    process = subprocess.Popen(**command(SCRIPT, *SIZES, text, "--steps", 3, "--dtype", "bfloat16", "--out", tmp_path),
                               stdout=terminal, stderr=terminal)
    os.close(terminal)
    shown = b""
    try:
        while piece := os.read(reader, 4096):
            shown += piece
    except OSError:  # how Linux says that the other end of a terminal is closed
        pass
    os.close(reader)
    assert process.wait(timeout=60) == 0, shown.decode()
    for wanted in ("step 3/3", "loss ", "tokens/s", "balance ", "━"):
        assert wanted in shown.decode()


@pytest.mark.parametrize("arguments, message", [
    (["{text}/binary.bin"], "expected at least one UTF-8 text file in {text}/binary.bin, got none among 1 files"),
    (["{text}/no"], "expected an existing file or folder, got {text}/no"),
    (["{text}", "--length", "4000"], "expected at least 40010 bytes of text in {text} for --length 4000, got "),
    (["{text}", "--impl", "sparse"], "argument --impl: invalid choice: 'sparse'"),
    (["{text}", "--hidden", "32"], "expected --hidden 64 (got 32); give another --out, or --fresh to start anew"),
    (["{text}/a.txt"], "expected the text that it was trained on (got another)"),
], ids=["no-text", "no-file", "short-text", "impl", "other-model", "other-text"])
def test_bad_input_says_what_was_expected(arguments, message, text, finished, refusal):
    errors = refusal("--out", finished["gbmoe"], paths=tuple(argument.format(text=text) for argument in arguments))
    assert message.format(text=text) in errors


# The same global batches; only the load-balancing loss, which each rank computes of its own tokens, is another.
OTHER_RANKS = 2e-3


def values(log: dict) -> list[float]:
    return [loss for _, loss in losses(log)]


@pytest.fixture(scope="module")
def two_ranks(text, tmp_path_factory) -> dict:
    """The log of two ranks that were interrupted and went on."""
    out = tmp_path_factory.mktemp("two")
    # torchrun passes the signal on, and says by its own status that it got one. Every save checks that the weights agree.
    _, printed = interrupt(text, "--out", out, number=signal.SIGTERM, after_step=3, launcher=TORCHRUN)
    assert "stopped by SIGTERM" in printed and 3 <= len(read_log(out)["train"]) < STEPS
    assert f"resumed from {out / 'checkpoint.pt'}" in end(start(text, "--out", out, launcher=TORCHRUN))
    return read_log(out)


def test_two_ranks_stop_together_and_the_resumed_run_has_the_losses_of_one_rank(two_ranks, finished):
    assert two_ranks["ranks"] == 2
    assert values(two_ranks) == pytest.approx(values(read_log(finished["gbmoe"])), rel=OTHER_RANKS)


def test_experts_spread_over_ranks_have_the_same_losses_and_are_resumed_on_any_number(text, finished, two_ranks, tmp_path):
    """Two ranks are interrupted; two go on as before, and so does one, which has all experts."""
    two, one = tmp_path / "two", tmp_path / "one"
    _, printed = interrupt(text, "--expert-parallel", "--out", two, number=signal.SIGTERM, after_step=3, launcher=TORCHRUN)
    stopped_after = len(read_log(two)["train"])
    assert "stopped by SIGTERM" in printed and 3 <= stopped_after < STEPS
    shutil.copytree(two, one)
    processes = [start(text, "--expert-parallel", "--out", two, launcher=TORCHRUN), start(text, "--out", one)]
    for process, out in zip(processes, (two, one)):
        assert f"resumed from {out / 'checkpoint.pt'} after step {stopped_after}/" in end(process)
    assert values(read_log(two)) == pytest.approx(values(two_ranks), rel=ROUNDING)
    assert values(read_log(one)) == pytest.approx(values(read_log(finished["gbmoe"])), rel=OTHER_RANKS)
    assert read_log(two)["parameters"] == read_log(one)["parameters"] == read_log(finished["gbmoe"])["parameters"]
    spread, whole = (torch.load(out / "checkpoint.pt", weights_only=True) for out in (two, one))
    assert [t.shape for t in spread["model"].values()] == [t.shape for t in whole["model"].values()]


def test_a_rank_that_dies_or_hangs_is_named_by_the_others(text, tmp_path):
    """Without torchrun, which would end the others itself. Both faults side by side: each takes its time."""
    # SIGTSTP is how a program of tests/forked_python gets SIGSTOP.
    ranks, dying = {signal.SIGKILL: 4, signal.SIGTSTP: 2}, {signal.SIGKILL: 2, signal.SIGTSTP: 1}
    with contextlib.ExitStack() as stack:
        groups = {}
        for number, world in ranks.items():
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            out = tmp_path / number.name
            arguments = command(SCRIPT, *SIZES, text, "--expert-parallel", "--timeout", 10, "--steps", 10**6, "--out", out)
            place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            groups[number] = [stack.enter_context(killed_at_the_end(subprocess.Popen(
                **{**arguments, "env": arguments["env"] | place | {"RANK": str(rank)}}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)))
                for rank in range(world)]
        for number, processes in groups.items():
            first = processes[0]
            while not first.stdout.readline().startswith("step 3/"):
                assert first.poll() is None, first.communicate()[1]
            processes[dying[number]].send_signal(number)
        for number, processes in groups.items():
            every, gone = ", ".join(map(str, range(ranks[number]))), dying[number]
            for rank, process in enumerate(processes):
                if rank != gone:
                    _, errors = process.communicate(timeout=60)
                    assert process.returncode == 1
                    said = errors.splitlines()[-1]
                    assert (f"with ranks {every} of the group (this is rank {rank}; rank {gone} did not report it, and may have died or"
                            " hang) failed: ") in said


def test_an_overflow_in_an_expert_of_one_rank_reaches_all(monkeypatch):
    """Or one rank would leave out a step that the others make."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from train_lm_ranks import Ranks

    model = torch.nn.Linear(3, 2)
    model.weight.expert_model_parallel = True
    ranks, told = Ranks(0, 2, torch.device("cpu")), []
    for here, there in ((1.0, 0.0), (math.inf, 0.0), (1.0, math.nan)):
        model.weight.grad, model.bias.grad = torch.full((2, 3), here), torch.ones(2)
        monkeypatch.setattr(Ranks, "sum", lambda self, values, there=there: values + torch.tensor([1.0, 1.0, there]))
        ranks.average_gradients(model, scaled=True)
        told.append(model.bias.grad.tolist())
    assert told[0] == [1.0, 1.0] and math.isnan(sum(told[1])) and math.isnan(sum(told[2]))


# ------------------------------------------------------------------------- what cannot serve is found before the first step


# Imports the script once; then, for each list of arguments on a line of its stdin, a fork of it runs them. Sizes that are not
# refused are to take neither the machine's memory nor for ever.
FORKING = """
import json, os, resource, runpy, signal, sys
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))
script = sys.argv[1]
sys.path.insert(0, os.path.dirname(script))
main = runpy.run_path(script, run_name="train_lm")["main"]
for line in sys.stdin:
    folder, os.environ["WORLD_SIZE"], sys.argv = json.loads(line)
    process = os.fork()
    if process == 0:
        signal.alarm(60)
        for number, name in ((1, "printed"), (2, "errors")):
            os.dup2(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.exit(main(None))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def refusal(text, tmp_path_factory) -> Iterator[Callable[..., str]]:
    """A function that runs the script, which is to refuse the arguments before it trains, and returns its one line."""
    folder = tmp_path_factory.mktemp("refusal")
    process = subprocess.Popen(**command("-c", FORKING, SCRIPT), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def refusal(*arguments: object, paths: tuple = (text,), world: int = 1) -> str:
        argv = [str(argument) for argument in (SCRIPT, *SIZES, "--out", folder / "out", *arguments, *paths)]
        process.stdin.write(json.dumps([str(folder), str(world), argv]) + "\n")
        process.stdin.flush()
        status, errors = process.stdout.readline(), (folder / "errors").read_text()
        assert (int(status), (folder / "printed").read_text()) == (2, ""), errors
        assert len(errors.splitlines()) == 1 and errors.startswith("train_lm: "), errors
        return errors

    yield refusal
    process.communicate(timeout=60)


@pytest.mark.parametrize("name, value, expected", [
    ("seed", 2**64, f"a number from {-2**63} to {2**64 - 1}, got {2**64}"),
    ("seed", -2**63 - 1, f"a number from {-2**63} to {2**64 - 1}, got {-2**63 - 1}"),
    ("steps", 10**400, f"a number from 1 to {2**31 - 1}, got {10**400}"),
    ("hidden", 2**62, f"a number from 1 to {2**31 - 1}, got {2**62}"),
    ("batch", 0, f"a number from 1 to {2**31 - 1}, got 0"),
    ("warmup", -1, f"a number from 1 to {2**31 - 1}, got -1"),
    ("lr", "nan", "a finite number greater than 0, got nan"),
    ("lr", "1e999", "a finite number greater than 0, got inf"),
    ("balance-weight", "-inf", "a finite number greater than 0, got -inf"),
    ("top-k", 5, f"at most the {EXPERTS} experts, got 5"),
    ("max-bytes", 649, "at least 650 for --length 64, got 649"),
    ("device", "cpu:x", "cpu, cuda or cuda:<index>, got 'cpu:x'"),
    ("device", "cuda:", "cpu, cuda or cuda:<index>, got 'cuda:'"),
    ("device", "cuda:0", "a GPU that is there, got 'cuda:0' with 0 GPUs"),
])
def test_an_argument_out_of_range_is_refused(name, value, expected, refusal):
    assert refusal(f"--{name}={value}") == f"train_lm: --{name}: expected {expected}\n"


@pytest.mark.parametrize("arguments, expected", [
    (("--impl", "bmm", "--dtype", "bfloat16"), "--impl: expected gbmoe with --fp8, got bmm"),
    ((), "--dtype: expected bfloat16 or float16 with --fp8, got float32"),
    (("--dtype", "bfloat16", "--ffn", 24), "--ffn: expected a multiple of 16 with --fp8, got 24"),
])
def test_what_float8_does_not_take_is_refused(arguments, expected, refusal):
    assert refusal("--fp8", *arguments) == f"train_lm: {expected}\n"


def test_gradients_of_weights_alone_are_not_in_float8(refusal):
    assert refusal("--fp8-weight-gradients") == "train_lm: --fp8: expected it with --fp8-weight-gradients, got none\n"


@pytest.mark.parametrize("world, arguments, expected", [
    (3, (), "--experts: expected a multiple or a divisor of the 3 ranks with --expert-parallel, got 4"),
    (12, ("--ffn", 32), "--ffn: expected a multiple of the 3 ranks that share an expert, got 32"),
])
def test_experts_that_ranks_cannot_divide_are_refused(world, arguments, expected, refusal):
    # No rank is started: what is wrong is seen before the others are met.
    assert refusal("--expert-parallel", "--batch", 12, "--eval-windows", 12, *arguments, world=world) == f"train_lm: {expected}\n"


@pytest.mark.parametrize("arguments", [
    ("--hidden", 2**30), ("--layers", 2**31 - 1, "--hidden", 2**12), ("--batch", 2**31 - 1, "--length", 512),
    ("--eval-windows", 2**31 - 1, "--length", 512),
], ids=["overflowing-weights", "layers", "batch", "eval-windows"])
def test_sizes_that_no_memory_holds_are_refused(arguments, refusal):
    assert "expected sizes that fit in " in refusal(*arguments)


def test_paths_without_text_are_refused(refusal, tmp_path):
    (tmp_path / "empty").touch()
    (tmp_path / "folder").mkdir()
    for name, files in (("empty", 1), ("folder", 0)):
        path = tmp_path / name
        assert f"at least one UTF-8 text file in {path}, got none among {files} files" in refusal(paths=(path,))
    assert "paths: expected an existing file or folder, got xxx" in refusal(paths=("x" * 300,))


@pytest.mark.parametrize("out", ["{file}", "{file}/run", "/proc", "/proc/run", "{tmp}/" + "x" * 300],
                         ids=["file", "below-a-file", "not-writable", "not-to-be-made", "name-too-long"])
def test_an_out_that_cannot_be_written_to_is_refused(out, refusal, tmp_path):
    (tmp_path / "file").write_text("mine")
    out = out.format(file=tmp_path / "file", tmp=tmp_path)
    assert f"--out: expected a folder that can be made and written to, got {out} (" in refusal("--out", out)
    assert (tmp_path / "file").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("name", ["checkpoint.pt", "log.json", "loss.png"])
def test_a_folder_in_the_place_of_a_file_is_refused(name, refusal, tmp_path):
    (tmp_path / name).mkdir()
    assert f"expected a file or nothing at {tmp_path / name}, got a folder" in refusal("--out", tmp_path, "--fresh")


def rewrite(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """A fault of the checkpoint: what `change` does to its entries."""
    def apply(path: Path) -> None:
        checkpoint = torch.load(path, weights_only=True)
        changed = change(checkpoint)
        torch.save(checkpoint if changed is None else changed, path)
    return apply


def flip(path: Path) -> None:
    """Changes one bit of a weight."""
    content = bytearray(path.read_bytes())
    content[content.index(torch.load(path, weights_only=True)["model"]["0.weight"].numpy().tobytes())] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "flipped bit": flip,
    "text": lambda path: path.write_text("loss 1.5\n" * 100),
    "pickle": lambda path: path.write_bytes(b"\x80\x04]\x94."),
    "other program's": rewrite(lambda checkpoint: {"state_dict": checkpoint["model"]}),
    "tensor": rewrite(lambda checkpoint: torch.zeros(3)),
    "no step": rewrite(lambda checkpoint: checkpoint.update(step="3")),
    "other step": rewrite(lambda checkpoint: checkpoint.update(step=3)),
    "log": rewrite(lambda checkpoint: checkpoint["log"].update(args=None)),
    "log's steps": rewrite(lambda checkpoint: checkpoint["log"].update(train=[None] * STEPS)),
    "shape": rewrite(lambda checkpoint: checkpoint["model"].update({"0.weight": torch.zeros(256, 8)})),
    "weight missing": rewrite(lambda checkpoint: checkpoint["model"].__delitem__("0.weight")),
    "moments' shape": rewrite(lambda checkpoint: checkpoint["optimizer"]["state"][0].update(exp_avg=torch.zeros(3))),
    "moments missing": rewrite(lambda checkpoint: checkpoint["optimizer"].update(state={})),
    "rng": rewrite(lambda checkpoint: checkpoint.update(rng=torch.zeros(3))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_is_damaged_or_foreign_is_refused(damage, refusal, finished, tmp_path):
    path = tmp_path / "checkpoint.pt"
    shutil.copy(finished["gbmoe"] / "checkpoint.pt", path)
    DAMAGES[damage](path)
    damaged = path.read_bytes()
    errors = refusal("--out", tmp_path)
    assert errors.startswith(f"train_lm: {path}: expected a checkpoint of train_lm.py, got ")
    assert errors.endswith("; give another --out, or --fresh to start anew\n")
    assert path.read_bytes() == damaged  # it may be of use to somebody else


def test_fresh_starts_anew_over_a_damaged_checkpoint(text, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    end(start(text, "--out", tmp_path, "--steps", 2, "--fresh"))
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 2


def test_a_damaged_log_is_written_again_from_the_checkpoint(text, finished, tmp_path):
    shutil.copy(finished["gbmoe"] / "checkpoint.pt", tmp_path)
    (tmp_path / "log.json").write_text('{"args":')
    end(start(text, "--out", tmp_path))  # has no step left to do
    assert read_log(tmp_path) == read_log(finished["gbmoe"])


def test_a_write_that_fails_leaves_the_old_file_and_no_temporary_one(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from train_lm_files import replace

    def write(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        replace(tmp_path / "file", write)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"


def rank_errors(logs: Path) -> list[str]:
    """stderr of each rank of a torchrun with --redirects 2 and --log-dir."""
    return [path.read_text() for path in sorted(logs.rglob("stderr.log"))]


def test_two_ranks_refuse_a_damaged_checkpoint_together(text, tmp_path):
    (tmp_path / "checkpoint.pt").write_bytes(b"")
    launcher = (*TORCHRUN, "--redirects", 2, "--log-dir", tmp_path / "logs")
    process = start(text, "--out", tmp_path, launcher=launcher)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "exitcode  : 2" in errors and "step" not in printed
    first, second = rank_errors(tmp_path / "logs")
    assert "expected a checkpoint of train_lm.py" in first and len(first.splitlines()) == 1 and second == ""


def test_a_text_that_one_rank_does_not_have_ends_both_ranks(text, tmp_path):
    shutil.copytree(text, tmp_path / "text-0")
    launcher = (*TORCHRUN, "--redirects", 2, "--log-dir", tmp_path / "logs", "--no-python",
                "bash", "-c", f'exec "$@" {tmp_path}/text-$RANK', "bash", python())
    process = start("--out", tmp_path, launcher=launcher)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode != 0 and "exitcode  : 2" in errors and "step" not in printed
    missing = f"train_lm: paths: expected an existing file or folder, got {tmp_path}/text-1\n"
    assert rank_errors(tmp_path / "logs") == [missing, ""]


# ---------------------------------------------------------------------------------------------- signals at awkward moments


# One step of these takes minutes.
SLOW_STEP = ("--hidden", 512, "--ffn", 1024, "--experts", 8, "--length", 256, "--batch", 64, "--eval-windows", 2)


def begin(*arguments: object, launcher: tuple = (), until: str) -> subprocess.Popen:
    """Start, and read what is printed up to the line with `until`."""
    process = start(*arguments, launcher=launcher)
    for line in process.stdout:
        if until in line:
            return process
    raise AssertionError(process.communicate()[1])


@contextlib.contextmanager
def killed_at_the_end(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Kill a process that does not end by itself, which is the fault under test, so that it does not outlive the test."""
    try:
        yield process
    finally:
        process.kill()


def test_sigterm_before_the_first_step_has_ended_ends_at_once(text, tmp_path):
    with killed_at_the_end(begin(text, "--out", tmp_path, *SLOW_STEP, until=" parameters; ")) as process:
        process.send_signal(signal.SIGTERM)
        printed, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM and "step" not in printed
    assert errors == "train_lm: ended at once by SIGTERM: nothing to save before the first step has ended\n"
    assert not any(tmp_path.iterdir())


def test_sigterm_ends_a_rank_that_waits_for_the_others(text, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = command(SCRIPT, *SIZES, text, "--out", tmp_path)
    arguments["env"] |= {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with killed_at_the_end(subprocess.Popen(**arguments, stderr=subprocess.PIPE)) as process:
        while process.poll() is None:  # until it listens
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM


# A second SIGTERM is another request after half a second, rather than after three.
IMPATIENT = ("-c", """
import os, runpy, signal, sys
del sys.argv[0]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
from train_lm_signals import SAME_REQUEST_S
SAME_REQUEST_S[signal.SIGTERM] = 0.5
runpy.run_path(sys.argv[0], run_name="__main__")
""")


def test_a_second_sigterm_ends_a_step_that_takes_long(text, tmp_path):
    process = begin(text, "--out", tmp_path, "--eval-windows", 10**6, launcher=IMPATIENT, until="step 1/")
    with killed_at_the_end(process):
        process.send_signal(signal.SIGTERM)
        time.sleep(0.7)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors == "train_lm: ended at once by SIGTERM: it came a second time\n"
    assert not any(tmp_path.iterdir())


def test_one_request_that_arrives_twice_still_saves(text, tmp_path):
    """`timeout` sends it twice, and so does Slurm by way of torchrun."""
    with killed_at_the_end(begin(text, "--out", tmp_path, "--eval-windows", 1500, until="step 1/")) as process:
        for _ in range(2):
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert f"stopped by SIGTERM: saved {tmp_path / 'checkpoint.pt'} after step " in printed


def test_ctrl_c_saves_and_a_second_one_does_not_wait(text, tmp_path):
    status, printed = interrupt(text, "--out", tmp_path, number=signal.SIGINT, after_step=3)
    assert status == 130 and f"stopped by SIGINT: saved {tmp_path / 'checkpoint.pt'} after step " in printed
    saved = len(read_log(tmp_path)["train"])
    assert 3 <= saved < STEPS
    with killed_at_the_end(begin(text, "--out", tmp_path / "slow", "--eval-windows", 10**6, until="step 1/")) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and errors == "train_lm: ended at once by SIGINT: it came a second time\n"
    assert not any((tmp_path / "slow").iterdir())


def test_ctrl_c_before_the_first_step_has_ended_ends_at_once_with_a_line(text, tmp_path):
    with killed_at_the_end(begin(text, "--out", tmp_path, *SLOW_STEP, until=" parameters; ")) as process:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and not any(tmp_path.iterdir())
    assert errors == "train_lm: ended at once by SIGINT: nothing to save before the first step has ended\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_ends_at_once_with_a_line(number, tmp_path):
    (tmp_path / "torch").mkdir()
    started = tmp_path / "started"
    (tmp_path / "torch" / "__init__.py").write_text(f"import time; open({str(started)!r}, 'w').close(); time.sleep(60)")
    arguments = command(SCRIPT, interpreter=sys.executable)
    arguments["env"]["PYTHONPATH"] = str(tmp_path)
    with killed_at_the_end(subprocess.Popen(**arguments, stderr=subprocess.PIPE, preexec_fn=ctrl_c_as_on_a_terminal)) as process:
        while not started.exists():
            time.sleep(0.05)
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number
    assert errors == f"train_lm: ended at once by {number.name}: nothing to save before the first step has ended\n"


def test_ctrl_c_under_torchrun_saves_on_all_ranks(text, tmp_path):
    launcher = (*TORCHRUN, "--redirects", 2, "--log-dir", tmp_path / "logs")
    out = tmp_path / "out"
    _, printed = interrupt(text, "--out", out, number=signal.SIGINT, after_step=3, launcher=launcher)
    assert "stopped by SIGINT: saved" in printed and 3 <= len(read_log(out)["train"]) < STEPS
    assert not any("Traceback" in said for said in rank_errors(tmp_path / "logs"))


def test_sigusr1_before_the_first_step_has_ended_saves_it(text, tmp_path):
    process = begin(text, "--out", tmp_path, until=" parameters; ")
    for _ in range(3):
        process.send_signal(signal.SIGUSR1)
    assert "stopped by SIGUSR1" in end(process) and len(read_log(tmp_path)["train"]) < STEPS


def process_of_rank(rank: int, out: Path) -> int:
    """The number of the process that torchrun has started for a rank of the training in `out`."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is somebody else's
            if os.fsencode(out) in (process / "cmdline").read_bytes() and f"\0RANK={rank}\0".encode() in (process / "environ").read_bytes():
                return int(process.name)
    raise AssertionError(f"no process of rank {rank}")


def test_the_first_rank_names_the_signal_that_another_got(text, tmp_path):
    """It said only that there was one, and which of two ranks saw theirs first is chance."""
    with killed_at_the_end(begin(text, "--out", tmp_path, launcher=TORCHRUN, until="step 3/")) as process:
        os.kill(process_of_rank(1, tmp_path), signal.SIGUSR1)
        assert "stopped by SIGUSR1 to another rank: saved" in end(process)


def test_sigterm_before_the_first_step_has_ended_ends_both_ranks(text, tmp_path):
    launcher = (*TORCHRUN, "--redirects", 2, "--log-dir", tmp_path / "logs")
    out = tmp_path / "out"
    with killed_at_the_end(begin(text, "--out", out, *SLOW_STEP, launcher=launcher, until=" parameters; ")) as process:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert "forcefully exiting" not in errors  # what torchrun does to those that do not end
    for said in rank_errors(tmp_path / "logs"):
        assert said == "train_lm: ended at once by SIGTERM: nothing to save before the first step has ended\n"
    assert not any(out.iterdir())
