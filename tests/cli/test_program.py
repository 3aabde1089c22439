"""The command line as a process: how it is called, how signals end it, what it shows meanwhile, and its exit status."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import gbmoe
from gbmoe.cli import main
from gbmoe.compat.checkpoints import files
from tests.cli.bench.rows import content, layer_row
from tests.forked_python import python

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MODULE, PROGRAM = ("-m", "gbmoe"), ("-c", "import sys; sys.argv[0] = '/bin/gbmoe'; from gbmoe.__main__ import program; program()")


def start(arguments, call=MODULE, interpreter=None, **more):
    """The command, with Ctrl-C taking effect even where these tests run with SIGINT ignored."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **more.pop("environment", {})}
    command = [interpreter or python(), *call, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                            **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | more)


def wait_until(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


# -------------------------------------------------------------------------------------------------------------- how to call


@pytest.mark.parametrize("call", [MODULE, PROGRAM], ids=["module", "program"])
def test_version_is_a_line_that_begins_with_the_name_and_the_version(call):
    out, err = start(["--version"], call).communicate(timeout=120)
    assert re.fullmatch(rf"gbmoe {re.escape(gbmoe.__version__)} \(torch {re.escape(torch.__version__)}, CUDA \S+, extension .+\)\n", out)
    assert err == ""


@pytest.mark.gpu
def test_version_does_not_start_cuda():
    process = start([], interpreter=sys.executable,
                    call=("-c", "import torch; from gbmoe.cli import main; main(['--version']); assert not torch.cuda.is_initialized()"))
    assert process.communicate(timeout=120)[1] == "" and process.returncode == 0


def test_without_a_command_the_commands_are_listed_with_examples(capsys):
    assert main([]) == 0
    printed = capsys.readouterr()
    for name in ("info", "verify", "bench", "convert", "install-megablocks"):
        assert re.search(rf"^    {name}\s", printed.out, re.MULTILINE)
    examples = printed.out.partition("examples:\n")[2].splitlines()
    assert 4 <= len(examples) <= 6 and all(line.startswith("  python -m gbmoe ") for line in examples) and printed.err == ""


@pytest.mark.parametrize("command", ["info", "verify", "bench", "convert", "install-megablocks"])
def test_help_of_each_command_ends_with_examples(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert "examples:\n" in capsys.readouterr().out


def test_the_installed_program_and_the_module_are_the_same():
    assert 'gbmoe = "gbmoe.__main__:program"' in (ROOT / "pyproject.toml").read_text()


def test_output_that_nobody_reads_ends_quietly():
    process = start(["info"])
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=120) == 141


def test_a_closed_output_is_no_error():
    closes = "import os; os.close(1); os.execv(os.sys.executable, [os.sys.executable, '-m', 'gbmoe', '--version'])"
    process = start(["--version"], ("-c", closes), sys.executable, stdout=None)
    assert process.communicate(timeout=120)[1] == "" and process.returncode == 0


# -------------------------------------------------------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("call", [MODULE, PROGRAM], ids=["module", "program"])
def test_ctrl_c_while_torch_is_imported_ends_with_a_line(call, tmp_path):
    (tmp_path / "torch").mkdir()
    started = tmp_path / "started"
    (tmp_path / "torch" / "__init__.py").write_text(f"import time; open({str(started)!r}, 'w').close(); time.sleep(60)")
    process = start(["verify"], call, sys.executable, environment={"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])})
    wait_until(started.exists)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "gbmoe verify: interrupted\n") and process.returncode == 130


@pytest.mark.parametrize("importer", ["import gbmoe", "import sys; sys.argv = ['-m']; import gbmoe"])
def test_importing_gbmoe_leaves_ctrl_c_to_the_program(importer):
    probe = f"import signal; {importer}; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    process = start([], ("-c", probe), python("torch"))
    assert process.communicate(timeout=120)[1] == "" and process.returncode == 0


def test_verify_shows_progress_on_a_terminal_and_ctrl_c_ends_it_with_a_line():
    ours, theirs = pty.openpty()
    process = start(["verify", "--device", "cpu"], stderr=theirs)
    os.close(theirs)
    shown = b""
    while not re.search(rb"\rgbmoe verify: \d+ of \d+: [^\r]+, engine [^\r]+, bfloat16", shown):
        shown += os.read(ours, 1000)
    process.send_signal(signal.SIGINT)
    try:
        while piece := os.read(ours, 1000):
            shown += piece
    except OSError:  # how a terminal says that nobody writes any more
        pass
    os.close(ours)
    assert process.communicate(timeout=60)[0] == "" and process.returncode == 130
    assert shown.decode().splitlines()[-1].rpartition("\r")[2] == "gbmoe verify: interrupted" and b"Traceback" not in shown


def test_ctrl_c_during_a_conversion_removes_what_it_wrote(tmp_path, monkeypatch):
    source = checkpoint(tmp_path)

    def interrupted(file, tensor):
        file.write(b"half")
        for _ in range(3):  # impatient: the removal is not interrupted
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(files, "_write_bytes", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="^gbmoe convert$"):
            main(["convert", str(source), str(tmp_path / "target"), "--to", "megablocks"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert os.listdir(tmp_path) == [source.name]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


# A rival that has started a program, as one that compiles has, and then takes long.
BENCH = ("-c", """
import sys
from gbmoe.cli.bench import rivals
rivals.RIVALS["Slow"] = "tests.cli.bench.fakes:Slow"
sys.argv[0] = "gbmoe"
from gbmoe.__main__ import program
program()
""")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes as Linux shows them")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_rival_and_what_it_started_end_with_the_benchmark(number, tmp_path):
    log = tmp_path / "log"
    process = start(["bench", "--suite", "smoke", "--device", "cpu", "--rivals", "Slow", "--engines", "reference", "--timing", "bursts",
                     "--quick", "--config", 0, "--output", tmp_path / "parts"],
                    BENCH, sys.executable, environment={"GBMOE_TEST_LOG": str(log), "TMPDIR": str(tmp_path)}, start_new_session=True)
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    rival, child = map(int, log.read_text().split())
    os.killpg(process.pid, number)
    _, err = process.communicate(timeout=60)
    wait_until(lambda: not runs(rival) and not runs(child), 30)
    if number == signal.SIGINT:
        assert process.returncode == 130 and err.splitlines()[-1] == "gbmoe bench: interrupted" and "Traceback" not in err
        assert not list(tmp_path.glob("gbmoe-bench-*")) and not os.listdir(tmp_path / "parts")


def test_ctrl_c_while_the_server_of_the_rivals_starts_shows_no_traceback(tmp_path):
    """The server imports torch for seconds, and the first process of a rival waits for it."""
    script = """
import signal, sys, threading, time
from gbmoe.__main__ import program
from gbmoe.cli.bench.running import rival_process
start = rival_process._start_server
def started():
    start()
    threading.Timer(0.3, lambda: __import__("os").killpg(0, signal.SIGINT)).start()
rival_process._start_server = started
program()
"""
    process = start(["bench", "--suite", "smoke", "--device", "cpu", "--rivals", "bmm", "--engines", "reference", "--timing", "bursts",
                     "--quick", "--config", 0, "--output", tmp_path / "parts"],
                    ("-c", script), sys.executable, environment={"TMPDIR": str(tmp_path)}, start_new_session=True)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130 and err.splitlines()[-1] == "gbmoe bench: interrupted" and "Traceback" not in err
    assert not list(tmp_path.glob("gbmoe-bench-*"))


def test_ctrl_c_ends_ranks_that_wait_for_others(tmp_path):
    """The second rank never comes, so that the first waits for it in C++, where Python runs no handler."""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                   "MASTER_PORT": "0"}
    script = """
import sys
from benchmarks.running import rank_processes
joined = rank_processes.Ranks.joined
def said(*arguments):
    print("waits", flush=True)
    return joined(*arguments)
rank_processes.Ranks.joined = said
from gbmoe.__main__ import program
program()
"""
    process = start(["bench", "--suite", "parallel", "--device", "cpu", "--rivals", "none"], ("-c", script), environment=environment)
    assert process.stdout.readline() == "waits\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130 and re.fullmatch("gbmoe( bench)?: interrupted", err.splitlines()[-1]) and "Traceback" not in err


# --------------------------------------------------------------------------------------------------------------- exit status


def checkpoint(folder):
    save = pytest.importorskip("safetensors.torch", reason="needs safetensors").save_file
    save({"m.gate.weight": torch.ones(4, 8), "m.experts.gate_up_proj": torch.ones(4, 32, 8),
          "m.experts.down_proj": torch.ones(4, 8, 16)}, folder / "source.safetensors")
    return folder / "source.safetensors"


USER_ERRORS = [
    "verfy", "info --jsn", "verify --device gpu", "bench", "bench --suite smoke --device cpu --quick --json {file}/x/rows.json",
    "bench --suite smoke --device cpu --quick --json /proc/rows.json", "bench --suite smoke --device cpu --quick --json {folder}",
    "bench --suite smoke --device cpu --config 0 --output {file}", "bench --suite smoke --device cpu --config 0 --output /proc/parts",
    *(f"bench {command} {{{name}}} {option}" for name in ("absent", "empty", "hostile", "folder", "nul")
      for command, option in (("merge", "--json {new}.json"), ("plot", "--output {new}"), ("report", "--output {new}.md"))),
    "bench merge {rows} --json {file}/x", "bench plot {rows} --output {file}", "bench report {rows} --output {file}/x",
    "bench plot {rows} --output {new} --only no.svg", "bench report {rows} --output {new}.md --readme {absent}",
    "bench merge {rows} --baseline nobody --json {new}.json", "bench merge {rows} {absent} --json {new}.json",
    *(f"convert {{{name}}} {{new}} --to megablocks" for name in ("absent", "empty", "hostile", "folder", "nul")),
    "convert {model} {file} --to megablocks", "convert {model} {model} --to megablocks", "convert {model} {absent}/x --to megablocks",
    "convert {model} /proc/model --to megablocks", "convert {model} {new} --to mixtral", "convert {model} {new} --to transformers",
    "install-megablocks --python {absent}", "install-megablocks --python {file}", "install-megablocks --python {new}\n",
]


@pytest.mark.parametrize("words", USER_ERRORS)
def test_an_error_of_the_user_has_status_2_and_a_line(words, tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures need matplotlib, which scripts/test.sh installs")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("{}")
    (tmp_path / "empty").touch()
    (tmp_path / "hostile").write_bytes(b"\xff\0" + 2000 * b"[\x1b]0;\x07")
    from gbmoe.testing import moe_shapes
    (tmp_path / "rows").write_text(json.dumps(content("smoke", [layer_row(moe_shapes.SMOKE_CASES[0], "gbmoe-auto", 1e-3)])))
    names = {name: str(tmp_path / name) for name in ("folder", "file", "empty", "hostile", "rows", "absent", "new")} | {"nul": "a\0b"}
    names["model"] = str(checkpoint(tmp_path))
    try:
        status = main([word.format(**names) for word in words.split(" ")])
    except SystemExit as ended:
        status = ended.code
    err = capsys.readouterr().err
    assert status == 2, (status, err)
    assert re.search("^gbmoe", err, re.MULTILINE) and err.replace("\n", "").isprintable()


def test_a_folder_that_becomes_unwritable_meanwhile_ends_the_benchmark_with_status_2(tmp_path, monkeypatch, capsys):
    from gbmoe.cli.bench import result_file

    def full(path, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(result_file, "write", full)
    assert main(["bench", "--suite", "smoke", "--device", "cpu", "--quick", "--timing", "bursts", "--engines", "reference", "--rivals",
                 "none", "--config", "0", "--output", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"gbmoe bench: {tmp_path / 'smoke-0000.json'}: No space left on device"
