"""One configuration at a time: a result that is there is taken for this run's only where it is."""

import pytest

from gbmoe.cli import main


@pytest.mark.parametrize("arguments, words", [
    (["--config", "0"], "--config and --output belong together"),
    (["--config", "99", "--output", "parts"], "--config: expected 0 to 4, got 99"),
])
def test_arguments_that_make_no_sense(arguments, words, capsys):
    assert main(["bench", "--suite", "smoke", "--device", "cpu", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_result_of_another_run_was_taken_for_this_ones(tmp_path, capsys):
    command = ["bench", "--device", "cpu", "--quick", "--config", "0", "--output", str(tmp_path)]
    first = ["--shape", "48,32,40,4,2", "--engines", "auto", "--rivals", "none"]
    assert main([*command, *first]) == 0
    assert main([*command, *first]) == 0
    assert "is there already" in capsys.readouterr().out
    for other, words in (
        (["--shape", "16,8,24,8,1", *first[2:]],
         "is of configuration layer/t48-h32-f40-e4-k2/uniform, and this run of layer/t16-h8-f24-e8-k1/uniform"),
        ([*first, "--dtype", "bf16"], "is of dtype float32, and this run of bfloat16"),
        ([*first[:3], "auto,reference", *first[4:]], "is of engines auto, and this run of auto, reference"),
        ([*first[:4], "--rivals", "bmm"], "is of rivals nobody, and this run of bmm"),
        ([*first, "--memory-limit", "8"], "is of memory_limit None, and this run of 8.0"),
    ):
        assert main([*command, *other]) == 2
        captured = capsys.readouterr()
        assert f"layers-0000.json {words}; --force does it again" in captured.err and not captured.out
    assert main([*command, *other, "--force"]) == 0
