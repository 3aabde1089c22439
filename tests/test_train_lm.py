"""scripts/train_lm.py, run as its user runs it: a process of its own, on the CPU, at sizes of a few seconds.

    pytest tests/test_train_lm.py
"""

from __future__ import annotations

import json
import math
import os
import pty
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

import gbmoe

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_lm.py"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STEPS, LAYERS, EXPERTS = 40, 2, 4
# A held-out loss a step makes steps long enough to be interrupted between two.
SIZES = ("--device", "cpu", "--steps", STEPS, "--layers", LAYERS, "--experts", EXPERTS, "--hidden", 64, "--heads", 2,
         "--ffn", 64, "--length", 64, "--batch", 4, "--warmup", 4, "--eval-every", 1, "--eval-windows", 8, "--log-every", 1)
# One float32 operation rounds by 6e-8; sums of hundreds of terms and tens of updates leave this much between two orders of
# summation. A wrong weight, expert or gradient shows in the second loss already, and by far more.
ROUNDING = 1e-4


def command(*arguments: object) -> dict:
    """subprocess arguments: the script on no GPU, with the gbmoe that the tests import."""
    path = os.pathsep.join(filter(None, [str(Path(gbmoe.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""}
    return {"args": [sys.executable, *map(str, arguments)], "env": environment, "text": True}


def start(*arguments: object, launcher: tuple = ()) -> subprocess.Popen:
    return subprocess.Popen(**command(*launcher, SCRIPT, *SIZES, *arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE)


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
               f"train_lm.summarize({log!r}, pathlib.Path({str(tmp_path)!r}))")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
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


@pytest.mark.parametrize("arguments, status, message", [
    (["{text}/binary.bin"], 1, "expected at least one UTF-8 text file in {text}/binary.bin, got none among 1 files"),
    (["{text}/no"], 1, "expected an existing file or folder, got {text}/no"),
    (["{text}", "--length", "4000"], 1, "expected at least 40010 bytes of text in {text} for --length 4000, got "),
    (["{text}", "--impl", "sparse"], 2, "argument --impl: invalid choice: 'sparse'"),
    (["{text}", "--hidden", "32"], 1, "expected --hidden 64 (got 32); give another --out, or --fresh to start anew"),
    (["{text}/a.txt"], 1, "expected the text that it was trained on (got another)"),
], ids=["no-text", "no-file", "short-text", "impl", "other-model", "other-text"])
def test_bad_input_says_what_was_expected(arguments, status, message, text, finished):
    process = start("--out", finished["gbmoe"], *(argument.format(text=text) for argument in arguments))
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status
    assert message.format(text=text) in errors
    assert "Traceback" not in errors


def test_two_ranks_stop_together_and_the_resumed_run_has_the_losses_of_one_rank(text, finished, tmp_path):
    # torchrun passes the signal on, and says by its own status that it got one. Every save checks that the weights agree.
    _, printed = interrupt(text, "--out", tmp_path, number=signal.SIGTERM, after_step=3, launcher=TORCHRUN)
    assert "stopped by" in printed and 3 <= len(read_log(tmp_path)["train"]) < STEPS
    assert f"resumed from {tmp_path / 'checkpoint.pt'}" in end(start(text, "--out", tmp_path, launcher=TORCHRUN))
    assert read_log(tmp_path)["ranks"] == 2
    # The same global batches; only the load-balancing loss, which each rank computes of its own tokens, is another.
    one_rank = [loss for _, loss in losses(read_log(finished["gbmoe"]))]
    assert [loss for _, loss in losses(read_log(tmp_path))] == pytest.approx(one_rank, rel=2e-3)
