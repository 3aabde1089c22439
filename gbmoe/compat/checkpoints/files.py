"""safetensors files and their index, read and written one tensor at a time."""

from __future__ import annotations

import json
import math
import os
import shutil
import stat
from collections.abc import Callable, Container, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gbmoe._atomic_files import one_line, read_json
from gbmoe.compat.checkpoints.recognise import BrokenCheckpoint
from gbmoe.compat.checkpoints.tensor_conversion import FAULTS_SHOWN, MOST_HEADER_BYTES, Output

_SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# Files with these suffixes may hold weights in the old layout, so they are not copied.
_WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))
_CHUNK_BYTES = 1 << 26
# No model's names are nearly as long, and looking up the parents of a name takes time proportional to the square of its length.
_LONGEST_NAME = 1000


class Tensors(Mapping):
    """The tensors of safetensors files by name, mapped into memory."""

    def __init__(self, paths: list[Path], stack: ExitStack):
        try:
            from safetensors import SafetensorError, safe_open
        except ModuleNotFoundError as error:
            if error.name != "safetensors":  # safetensors is installed, but something that it needs is not
                raise
            raise ImportError("converting files needs safetensors: pip install 'gbmoe[transformers]', or pip install"
                              " safetensors") from error
        self._files: dict[Path, Any] = {}
        self.path_of: dict[str, Path] = {}
        for path in paths:
            if not stat.S_ISREG(path.stat().st_mode):  # raises FileNotFoundError with its name; opening a pipe would wait for ever
                raise BrokenCheckpoint(f"{path}: expected a file")
            try:
                self._files[path] = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise BrokenCheckpoint(one_line(f"{path}: expected a whole safetensors file: {error}")) from error
            names = self._files[path].keys()
            twice = [name for name in names if name in self.path_of]
            if twice:
                raise BrokenCheckpoint(one_line(f"{path}: in another file as well: {', '.join(twice[:FAULTS_SHOWN])}"))
            long = next((name for name in names if len(name) > _LONGEST_NAME), None)
            if long:
                raise BrokenCheckpoint(f"{path}: expected names of at most {_LONGEST_NAME} characters, got {one_line(long, 60)}")
            self.path_of |= dict.fromkeys(names, path)

    def __getitem__(self, name):
        path = self.path_of[name]
        try:
            return self._files[path].get_tensor(name)
        except Exception as error:  # the reader raises many kinds of errors for dtypes and shapes that torch does not know
            shape, dtype = self.signature(name)
            raise BrokenCheckpoint(one_line(f"{path}: {name}: expected a tensor that torch can hold, got {dtype} of shape {shape}: {error}")
                                   ) from error

    def __iter__(self):
        return iter(self.path_of)

    def __len__(self):
        return len(self.path_of)

    def signature(self, name: str) -> tuple[list[int], str]:
        """(shape, dtype) as the file's header has them."""
        header = self._files[self.path_of[name]].get_slice(name)
        return header.get_shape(), header.get_dtype()

    def signatures(self) -> dict[str, tuple[list[int], str]]:
        """The signatures of all tensors. Raises BrokenCheckpoint where one of them cannot be read."""
        for name in self:
            self[name]  # this maps the tensor and reads no data
        return {name: self.signature(name) for name in self}

    def metadata(self, path: Path) -> dict[str, str] | None:
        return self._files[path].metadata()

    def by_file(self, outputs: list[Output]) -> dict[Path, list[Output]]:
        """The outputs that go into each file: those whose first source is in it."""
        plan: dict[Path, list[Output]] = {}
        for output in outputs:
            plan.setdefault(self.path_of[output.sources[0]], []).append(output)
        return plan


def read_index(source: Path) -> dict | None:
    path = source / INDEX
    if not path.is_file():
        return None
    try:
        index = read_json(path)
    except ValueError as error:
        raise BrokenCheckpoint(one_line(f"{path}: {error}")) from None
    if not isinstance(index, dict) or not isinstance(index.get("weight_map"), dict):
        raise BrokenCheckpoint(f"{path}: expected a weight_map")
    for name, file in index["weight_map"].items():
        if not _is_file_name(file):
            raise BrokenCheckpoint(one_line(f"{path}: weight_map: {name}: expected a file's name, without a folder, got {file!r}"))
    return index


def _is_file_name(file: object) -> bool:
    """Whether it is a name without a folder, so that the file is written into the target's folder, under a name of its own."""
    return isinstance(file, str) and file not in ("", ".", "..", INDEX) and not set(file) & {"/", os.sep, "\0"}


def shards(source: Path, index: dict | None) -> list[Path]:
    if index is not None:
        return [source / name for name in dict.fromkeys(index["weight_map"].values())]
    if source.is_dir() and not (source / _SINGLE).exists():
        raise FileNotFoundError(f"{one_line(source)}: has neither {_SINGLE} nor {INDEX}")
    return [source / _SINGLE if source.is_dir() else source]


def check_index(index: dict, source: Path, tensors: Tensors) -> None:
    found = {(name, path.name) for name, path in tensors.path_of.items()}
    differ = sorted({name for name, _ in found ^ set(index["weight_map"].items())})
    if differ:
        raise BrokenCheckpoint(one_line(f"{source / INDEX}: differs from its files in {', '.join(differ[:FAULTS_SHOWN])}"))


def copy_others(paths: list[Path], folder: Path, report: Callable[[str], object], leave_out: Container[str] = ()) -> None:
    """Copy the files that hold no weights and are not named in `leave_out`; report the others, and folders."""
    for path in paths:
        if path.is_file() and not _WEIGHT_SUFFIXES.intersection(path.suffixes) and path.name not in leave_out:
            shutil.copy(path, folder)
        else:
            report(f"left out {path.name}")


def output_bytes(output: Output, tensors: Tensors) -> int:
    """The size of its data in a file."""
    source = tensors[output.sources[0]]
    return source.nbytes if output.build is None else math.prod(output.shape) * source.element_size()


def write(path: Path, outputs: list[Output], tensors: Tensors, metadata: Mapping[str, str] | None,
          begin: Callable[[Output], object] = lambda output: None) -> None:
    """Write a safetensors file one tensor after the other; the library can only write tensors that are all in memory.

    The format is the header's length in 8 bytes, the header as JSON, padded with spaces to a multiple of 8 bytes, and the data. As
    in the library's files the widest dtypes come first, so that every tensor is aligned. `begin` is called before a tensor is made.
    """
    width_of = {output.name: tensors[output.sources[0]].element_size() for output in outputs}
    outputs = sorted(outputs, key=lambda output: (-width_of[output.name], output.name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for output in outputs:
        (shape, dtype), size = tensors.signature(output.sources[0]), output_bytes(output, tensors)
        if output.build is not None:
            shape = list(output.shape)
        header[output.name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > MOST_HEADER_BYTES:
        raise ValueError(f"{path.name}: expected a header of at most {MOST_HEADER_BYTES} bytes, as readers do, got {len(encoded)}")
    with open(path, "xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for output in outputs:
            begin(output)
            _write_bytes(file, output.value(tensors))
        file.flush()
        os.fsync(file.fileno())


def _write_bytes(file: BinaryIO, tensor: torch.Tensor) -> None:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for piece in flat.split(_CHUNK_BYTES) if flat.numel() else ():
        chunk = bytearray(piece.numel())
        torch.frombuffer(chunk, dtype=torch.uint8).copy_(piece)
        file.write(chunk)
