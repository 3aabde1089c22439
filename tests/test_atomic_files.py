"""Files whole or not at all, and JSON that can be written again as it was read."""

import json
import os

import pytest

from gbmoe import _atomic_files


def test_writers_of_one_process_id_leave_each_other_alone(tmp_path):
    target = tmp_path / "target"
    with pytest.raises(KeyboardInterrupt), _atomic_files.appears_complete(target, replaces=True) as outer:
        outer.write_text("outer")
        _atomic_files.write_text(target, "inner")
        raise KeyboardInterrupt
    assert target.read_text() == "inner" and os.listdir(tmp_path) == ["target"]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path):
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "file").write_text("before")
    _atomic_files.write_text(tmp_path / "link", "after")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "after"
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)
    try:
        _atomic_files.write_text(tmp_path / "pipe", "through")
        assert os.read(end, 100) == b"through"
    finally:
        os.close(end)
    assert sorted(os.listdir(tmp_path)) == ["file", "link", "pipe"]


@pytest.mark.parametrize("data", [
    b"", b"{", b"NaN", b"[-Infinity]", b"1e999", b"[" * 100_000, b"[" * 900 + b"]" * 900, b"1" + 5000 * b"0", b'"\\ud800"',
    b'{"\\udfff": 1}', b'"\xff"', b"\xff\xfe1\x00", b'"\n"', b"01", b"{} {}",
])
def test_what_cannot_be_written_again_is_no_json(data, tmp_path):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match="^not JSON: "):
        _atomic_files.read_json(tmp_path / "file")


def test_json_is_read(tmp_path):
    value = {"a": [1, 2.5, None, True, {"b": "\u00e4\U0001f600"}]}
    for _ in range(45):
        value = [value]
    (tmp_path / "file").write_text(json.dumps(value))
    assert _atomic_files.read_json(tmp_path / "file") == value


def test_a_message_is_one_line_of_what_a_terminal_shows():
    assert _atomic_files.one_line("a\nb\x1b[2J\ud800 \u00e4") == "a b\\x1b[2J\\ud800 \u00e4"
    assert _atomic_files.one_line("x" * 50, 10) == "xxxxxxx..."
