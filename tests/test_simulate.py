"""scripts/simulate_expert_parallelism.py: it runs, what it says is near what was measured, and bad input is refused."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "simulate_expert_parallelism.py"


@pytest.fixture(scope="module")
def script():
    sys.path.append(str(SCRIPT.parent))  # for the module next to it
    spec = importlib.util.spec_from_file_location("simulate_expert_parallelism", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_model_is_within_ten_percent_of_what_was_measured(script, capsys):
    assert script.main(["--check"]) == 0, capsys.readouterr()
    found = script.comparisons(script.Gpu(), script.MEASURED_LINKS)
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(found)
    names = {name for name, *_ in found}
    assert names >= {f"{name}, {what}" for name in ("mixtral", "qwen3", "dsv3") for what in ("two GPUs, ms", "pull, us")}
    for _, modelled, measured in found:
        assert modelled == pytest.approx(measured, rel=0.10)


def test_check_fails_where_the_model_is_off(script, capsys):
    assert script.main(["--check", "--push", "100"]) == 1
    assert "more than 10% off: mixtral, push, us" in capsys.readouterr().err


def rows_of(out):
    return [line.split() for line in out.splitlines() if line.split()[0].isdigit()]


def test_tables_from_8_to_4096_ranks(script, capsys):
    assert script.main([]) == 0
    out = capsys.readouterr().out
    rows = rows_of(out)
    assert [int(row[0]) for row in rows] == 2 * [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert "mixtral" in out and "deepseek-v3" in out
    # Not more ranks share experts than there are.
    assert {row[1] for row in rows[:10]} == {"8"} and rows[-1][1] == "256"
    assert all(0 < float(row[7]) < float(row[9]) for row in rows)


def test_options_reach_the_model(script, capsys):
    base = ["--shape", "4096,2048,1024,64,8", "--ranks", "64"]
    times = {}
    for more in ((), ("--network", "400"), ("--skew", "0.8"), ("--skew", "0.8", "--shadows", "8"),
                 ("--ranks-per-node", "64"), ("--ranks-per-node", "64", "--no-peer-memory"), ("--tflops", "350")):
        assert script.main([*base, *more]) == 0
        row, = rows_of(capsys.readouterr().out)
        times[more] = float(row[9])
    assert times[("--network", "400")] < times[()] < min(times[("--skew", "0.8")], times[("--tflops", "350")])
    assert times[("--skew", "0.8", "--shadows", "8")] < times[("--skew", "0.8")]
    assert times[("--ranks-per-node", "64")] < times[("--ranks-per-node", "64", "--no-peer-memory")] < times[()]
    assert script.main([*base, "--ranks", "16", "--chunks", "2"]) == 0
    assert rows_of(capsys.readouterr().out)[0][5] == "2"
    assert script.main([*base, "--ranks", "256", "--group", "all"]) == 0
    assert rows_of(capsys.readouterr().out)[0][1] == "256"


@pytest.mark.parametrize("arguments", [
    ["--shape", "1,2,3"], ["--shape", "1,2,3,4,5"], ["--ranks", "0"], ["--network", "-1"], ["--network", "inf"], ["--pull", "a:b"],
    ["--pull", "8192:0"], ["--skew", "nan"], ["--skew", "1e20"], ["--group", "none"], ["--chunks", "-1"]])
def test_bad_input_names_the_option(script, arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(arguments)
    assert ended.value.code == 2
    assert arguments[0] in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("arguments, words", [
    ("--shape 1,64,32,60,4 --ranks 8", "--ranks 8: Arguments: moe_num_experts: expected a multiple of 8 ranks, got 60"),
    ("--shape 1,64,32,8,2 --ranks 12 --group all --ranks-per-node 4",
     "--ranks 12: Arguments: expert_parallel_group: expected a multiple of 8 ranks, got 12"),
    ("--shape 1,64,30,8,2 --ranks 32 --group all", "--ranks 32: Arguments: ffn_hidden_size: expected a multiple of 4 shards, got 30"),
    ("--shape 1,64,32,24,2 --ranks 12", "--ranks 12: --ranks-per-node: expected a divisor of the group's 12 ranks, got 8"),
    ("--shape 1,64,32,8,2 --ranks 12", "--ranks 12: --group: expected a divisor of 12 ranks, got 8"),
    ("--shape 1,64,32,8,2 --ranks 16 --group all --shadows 2",
     "--ranks 16: --shadows: expected 0 where ranks share an expert (16 ranks, 8 experts), got 2")])
def test_times_were_printed_of_groups_that_gbmoe_refuses(script, arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        script.main(arguments.split())
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert printed.err.splitlines()[-1].endswith(words)
