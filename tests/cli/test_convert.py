"""`gbmoe convert`: files written or the reason, and no trace of a conversion that was stopped."""

import json
import os
import signal
import subprocess
import sys
from itertools import islice

import pytest
import torch

from gbmoe.cli import main
from gbmoe.compat import checkpoints
from gbmoe.compat.checkpoints import files
from tests.altered import altered, paths
from tests.forked_python import python

safetensors_torch = pytest.importorskip("safetensors.torch", reason="needs safetensors")

MODEL = {"m.gate.weight": torch.randn(4, 8), "m.experts.gate_up_proj": torch.randn(4, 32, 8),
         "m.experts.down_proj": torch.randn(4, 8, 16), "norm.weight": torch.randn(8)}


@pytest.fixture
def source(tmp_path):
    safetensors_torch.save_file(MODEL, tmp_path / "source.safetensors")
    return tmp_path / "source.safetensors"


def test_there_and_back_in_every_layout(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "megablocks"), "--to", "megablocks"]) == 0
    assert capsys.readouterr().out == f"wrote {tmp_path / 'megablocks'}\n"
    for experts in ([], *(["--experts", name] for name in ("fused", "gate_proj", "w1"))):
        target = tmp_path / "-".join(["back", *experts[1:]])
        assert main(["convert", str(tmp_path / "megablocks"), str(target), "--to", "transformers", *experts]) == 0
        layout = experts[1] if experts else "fused"
        expected = checkpoints.to_transformers(checkpoints.to_megablocks(MODEL), layout)
        assert safetensors_torch.load_file(target).keys() == expected.keys()
    assert (tmp_path / "back").read_bytes() == (tmp_path / "back-fused").read_bytes() == source.read_bytes()
    assert main(["convert", str(source), str(tmp_path / "torchtitan"), "--to", "torchtitan"]) == 0
    assert "warning: " in (printed := capsys.readouterr().err) and "torchtitan computes these layers" in printed
    assert main(["convert", str(tmp_path / "torchtitan"), str(tmp_path / "again"), "--to", "transformers"]) == 0
    assert (tmp_path / "again").read_bytes() == source.read_bytes() != (tmp_path / "torchtitan").read_bytes()


def test_a_refusal_names_what_does_not_fit_and_writes_nothing(source, tmp_path, capsys):
    safetensors_torch.save_file(MODEL | {"m.experts.down_proj_bias": torch.zeros(4, 8)}, source)
    assert main(["convert", str(source), str(tmp_path / "target"), "--to", "megablocks"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "m.experts.down_proj_bias: unexpected" in printed.err
    assert main(["convert", str(source), str(source), "--to", "megablocks"]) == 2
    assert "exists already" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["source.safetensors"]


def test_a_missing_package_is_named(source, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    assert main(["convert", str(source), str(tmp_path / "target"), "--to", "megablocks"]) == 1
    assert "needs safetensors: pip install" in capsys.readouterr().err


def test_arguments_without_sense_end_with_status_2(source, tmp_path, capsys):
    arguments = ["convert", str(source), str(tmp_path / "target")]
    assert main([*arguments, "--to", "megablocks", "--experts", "w1"]) == 2
    assert "--experts goes with --to transformers" in capsys.readouterr().err
    for rest in ([], ["--to", "other"], ["--to", "transformers", "--experts", "other"]):
        with pytest.raises(SystemExit, match="2"):
            main([*arguments, *rest])
    assert os.listdir(tmp_path) == ["source.safetensors"]


def test_a_job_told_to_end_removes_what_it_wrote(source, tmp_path, monkeypatch):
    def killed(file, tensor):
        file.write(b"half")
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(files, "_write_bytes", killed)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        main(["convert", str(source), str(tmp_path / "target"), "--to", "megablocks"])
    assert os.listdir(tmp_path) == ["source.safetensors"]
    assert signal.getsignal(signal.SIGTERM) is handler


def test_progress_counts_the_bytes_of_every_tensor(source, tmp_path):
    said = []
    checkpoints.convert_checkpoint(source, tmp_path / "target", "megablocks", progress=lambda *what: said.append(what))
    with open(tmp_path / "target", "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    total = max(entry["data_offsets"][1] for entry in header.values())
    assert said == [(entry["data_offsets"][0], total, name) for name, entry in
                    sorted(header.items(), key=lambda item: item[1]["data_offsets"])]


def test_the_command_imports_no_package_that_it_may_lack():
    probe = "import sys, gbmoe.cli; assert not {'safetensors', 'transformers', 'numpy'} & (set(sys.modules) - before)"
    subprocess.run([python("torch"), "-c", f"import sys, torch; before = set(sys.modules); {probe}"], check=True)


def file_of(header, data=b""):
    header = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(header).to_bytes(8, "little") + header + data


def zeros(**tensors):
    """A file of zero tensors; each keyword is a name, with __ for a dot, and its value a dtype and a shape."""
    header, data = {}, b""
    for name, (dtype, bits, shape) in tensors.items():
        count = 1
        for size in shape:
            count *= size
        offsets = [len(data), len(data) + count * bits // 8]
        header[name.replace("__", ".")] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        data += bytes(count * bits // 8)
    return file_of(header, data)


def outcome(capsys, source, target, to, *more):
    """The exit status of a conversion that ended as it should: whole, or without a trace."""
    before = sorted(os.listdir(target.parent))
    status = main(["convert", str(source), str(target), "--to", to, *more])
    err = capsys.readouterr().err
    if status == 0:
        target.unlink()
    else:
        assert status == 2 and err.startswith("gbmoe convert: ") and len(err) < 12_000
        # The lines of a refusal are of a well-formed file: another layout's, or nobody's.
        assert err[:-1].isprintable() or "these tensors do not fit" in err or "there is no MoE layer" in err, err
    assert sorted(os.listdir(target.parent)) == before
    return status


@pytest.mark.parametrize("to, experts", [("megablocks", "fused"), ("megablocks", "w1"), ("transformers", "gate_proj")])
def test_altered_headers_are_converted_or_refused_without_a_traceback(to, experts, tmp_path, capsys):
    tensors = checkpoints.to_megablocks(MODEL)
    tensors = checkpoints.to_transformers(tensors, experts) if to == "megablocks" else tensors
    more = ["--experts", experts] if to == "transformers" else []
    file = safetensors_torch.save(tensors, {"format": "pt"})
    length = int.from_bytes(file[:8], "little")
    header, data = json.loads(file[8 : 8 + length]), file[8 + length :]
    source, statuses = tmp_path / "altered", []
    for number, path in enumerate(paths(header)):
        for what, changed in islice(altered(header, path), number % 8, None, 8):
            source.write_bytes(file_of(changed, data))
            try:
                statuses.append(outcome(capsys, source, tmp_path / "target", to, *more))
            except Exception as error:
                raise AssertionError(f"{path} altered: {what}") from error
    for cut in (0, 7, 8, 9, 8 + length - 1, 8 + length, len(file) - 1):
        source.write_bytes(file[:cut])
        assert outcome(capsys, source, tmp_path / "target", to, *more) == 2
    for claimed in (0, 1, length - 1, length + 1, 10**8 + 1, 2**63, 2**64 - 1):
        source.write_bytes(claimed.to_bytes(8, "little") + file[8:])
        assert outcome(capsys, source, tmp_path / "target", to, *more) == 2
    assert statuses.count(2) > len(statuses) / 2


LAYER = {"gate__weight": ("F32", 32, [2, 4]), "experts__up_proj": ("F32", 32, [2, 3, 4]),
         "experts__down_proj": ("F32", 32, [2, 4, 3])}
PREFIXED = {f"mlp__{name}": kind for name, kind in LAYER.items()}
BROKEN = {
    "no experts": ({"gate__weight": ("F32", 32, [0, 4]), "experts__up_proj": ("F32", 32, [0, 3, 4]),
                    "experts__down_proj": ("F32", 32, [0, 4, 3])}, ": expected sizes above 0, got shape [0, 4"),
    "no features": (LAYER | {"experts__up_proj": ("F32", 32, [2, 0, 4]), "experts__down_proj": ("F32", 32, [2, 4, 0])},
                    ": expected sizes above 0, got shape [2, "),
    "two values in a byte": (LAYER | {"experts__up_proj": ("F4", 4, [2, 4, 4]), "experts__down_proj": ("F4", 4, [2, 4, 4])},
                             "_proj: expected a dtype of whole bytes, got F4"),
    "six bits": (LAYER | {"experts__up_proj": ("F6_E2M3", 6, [2, 3, 4]), "experts__down_proj": ("F6_E2M3", 6, [2, 4, 3])},
                 "_proj: expected a tensor that torch can hold, got F6_E2M3 of shape [2, "),
    "six bits elsewhere": (PREFIXED | {"other": ("F6_E3M2", 6, [4])},
                           "other: expected a tensor that torch can hold, got F6_E3M2 of shape [4]"),
    "a size that torch has no number for": (PREFIXED | {"other": ("F32", 32, [2**63, 0])},
                                            f"other: expected a tensor that torch can hold, got F32 of shape [{2**63}, 0]"),
}


@pytest.mark.parametrize("tensors, message", BROKEN.values(), ids=BROKEN)
def test_layers_of_nothing_and_dtypes_of_no_layout_end_with_status_2(tensors, message, tmp_path, capsys):
    (tmp_path / "broken").write_bytes(zeros(**tensors))
    assert main(["convert", str(tmp_path / "broken"), str(tmp_path / "target"), "--to", "megablocks"]) == 2
    line, = capsys.readouterr().err.splitlines()
    assert message in line
    assert os.listdir(tmp_path) == ["broken"]


def test_packed_tensors_beside_the_layers_are_taken_over(tmp_path):
    (tmp_path / "source").write_bytes(zeros(**PREFIXED, other=("F4", 4, [2, 8])))
    assert main(["convert", str(tmp_path / "source"), str(tmp_path / "target"), "--to", "megablocks"]) == 0
    with pytest.importorskip("safetensors").safe_open(tmp_path / "target", "pt") as file:
        assert file.get_slice("other").get_shape() == [2, 8] and file.get_slice("other").get_dtype() == "F4"


@pytest.mark.parametrize("data, message", [
    (b'{"weight_map": {"norm.weight": ["model.safetensors"]}}', "norm.weight: expected a file's name, without a folder, got ['mod"),
    (b'{"weight_map": {"norm.weight": null}}', "expected a file's name, without a folder, got None"),
    (b'{"weight_map": {"norm.weight": "../source.safetensors"}}', "got '../source.safetensors'"),
    (b'{"weight_map": {"norm.weight": "a\\u0000b"}}', "expected a file's name"),
    (b'{"weight_map": {"norm.weight": "\\ud800"}}', "not JSON"),
    (b'{"weight_map": {"norm.weight": "folder"}}', "folder: expected a file"),
    (b'{"weight_map": {}, "metadata": {"total_size": NaN}}', "not JSON: NaN is not a number in JSON"),
    (b'{"weight_map": {}, "metadata": {"total_size": 1e999}}', "not JSON: 1e999 is too large"),
    (b'{"weight_map": ' + 100_000 * b'{"a": ', "not JSON"),
    (b'{"weight_map": {}, "metadata": ' + 900 * b"[" + 900 * b"]" + b"}", "not JSON: expected at most 50 levels"),
    (b'{"weight_map": {"\xff": "model.safetensors"}}', "not JSON"),
    (b"[]", "expected a weight_map"), (b"", "not JSON"), (b'{"weight_map": []}', "expected a weight_map"),
])
def test_an_odd_index_ends_with_status_2_and_a_line(data, message, source, tmp_path, capsys):
    folder = tmp_path / "folder"
    (folder / "folder").mkdir(parents=True)
    source.rename(folder / "model.safetensors")
    (folder / "model.safetensors.index.json").write_bytes(data)
    assert main(["convert", str(folder), str(tmp_path / "target"), "--to", "megablocks"]) == 2
    line, = capsys.readouterr().err.splitlines()
    assert message in line and line.isprintable()
    assert os.listdir(tmp_path) == ["folder"]


def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    end = os.open(tmp_path / "pipe", os.O_RDWR)  # somebody writes, so that a reader that does open it comes back
    try:
        assert main(["convert", str(tmp_path / "pipe"), str(tmp_path / "target"), "--to", "megablocks"]) == 2
    finally:
        os.close(end)
    assert capsys.readouterr().err == f"gbmoe convert: {tmp_path / 'pipe'}: expected a file\n"


def test_a_full_disk_named_no_file_and_a_folder_broke_its_line(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "a\nb"
    folder.mkdir()
    assert main(["convert", str(folder), str(tmp_path / "target"), "--to", "megablocks"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has neither" in line

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(checkpoints, "convert_checkpoint", full)
    assert main(["convert", "model", str(tmp_path / "target"), "--to", "megablocks"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "No space left on device" in line and str(tmp_path / "target") in line
