"""MoE layers in checkpoints: MegaBlocks' layout to Hugging Face transformers' and back, bit for bit.

The two layouts of a layer, whose names begin with any prefix (model.layers.0.mlp., transformer.blocks.0.ffn., none):

    MegaBlocks (and gbmoe.dMoE)    transformers
    router.layer.weight [E,H]      gate.weight [E,H]
    experts.mlp.w1 [E*F,H]         experts.gate_up_proj [E,2F,H], gate above up; without a gate experts.up_proj [E,F,H]
    experts.mlp.v1 [E*F,H]         its up half; there is no v1 without a gate
    experts.mlp.w2 [E*F,H]         experts.down_proj [E,H,F]
    shared_expert.*_proj.weight    shared_experts.*_proj.weight

This is the layout that transformers 5 has in memory, here called "fused". On disk most of its models still have a tensor for each
expert: save_pretrained writes these by default, and published checkpoints hold them. All three layouts can be read and written, and
from_pretrained loads all three:

    "gate_proj"    experts.0.gate_proj.weight [F,H], experts.0.up_proj.weight [F,H], experts.0.down_proj.weight [H,F]
    "w1"           experts.0.w1.weight, experts.0.w3.weight, experts.0.w2.weight: the same tensors under Mixtral's names

Prefixes and all other tensors stay as they are. A layer that holds anything else (an output bias, biases of the experts or the
router, DeepSeek-V3's correction bias, the gate of Qwen2-MoE's shared expert) has no counterpart in the other layout; it is refused
with the names that do not fit. Checkpoints must be whole: one rank's part of an expert-parallel model looks like a smaller layer.

Shape suffixes: E experts, H hidden, F ffn hidden, N columns of one expert's matrices: F or, fused with a gate, 2F.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gbmoe._atomic_files import appears_complete, one_line, read_json

__all__ = ["EXPERT_LAYOUTS", "LAYOUTS", "BrokenCheckpoint", "convert_checkpoint", "to_megablocks", "to_transformers"]

LAYOUTS = ("transformers", "megablocks")
# The names of gate, up and down in transformers' layouts with a tensor for each expert.
_PER_EXPERT = {"gate_proj": ("gate_proj", "up_proj", "down_proj"), "w1": ("w1", "w3", "w2")}
EXPERT_LAYOUTS = ("fused", *_PER_EXPERT)


class BrokenCheckpoint(ValueError):
    """Raised, with a message of one line, where something is not a checkpoint in any layout: an incomplete file, a broken index, a
    layer with a size of zero, a dtype that cannot be read. A sound layer that has no counterpart in the other layout raises a plain
    ValueError."""


def to_megablocks(state_dict: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict with its MoE layers in MegaBlocks' layout, for gbmoe.dMoE and for MegaBlocks.

    Args:
        state_dict: of a transformers model or of one MoE block; any dtype and device.

    Returns:
        A new dict. Converted tensors are copies, all others are those of `state_dict`.

    Raises:
        ValueError: where there is no MoE layer, or with the names that do not fit. BrokenCheckpoint, a subclass, for a layer with a
            size of zero or with a dtype that packs several values into a byte.

    Example:
        >>> block = {"gate.weight": torch.zeros(4, 8), "experts.gate_up_proj": torch.zeros(4, 2 * 16, 8),
        ...          "experts.down_proj": torch.zeros(4, 8, 16)}
        >>> {name: list(value.shape) for name, value in to_megablocks(block).items()}
        {'router.layer.weight': [4, 8], 'experts.mlp.w1': [64, 8], 'experts.mlp.v1': [64, 8], 'experts.mlp.w2': [64, 8]}
    """
    return _converted(state_dict, "megablocks", "fused")


def to_transformers(state_dict: Mapping[str, torch.Tensor], experts: str = "fused") -> dict[str, torch.Tensor]:
    """The state dict with its MoE layers in transformers' layout; the inverse of to_megablocks.

    Args:
        state_dict: that of a model with gbmoe.dMoE or MegaBlocks' layers, or of one such layer; any dtype and device. The number of
            experts is that of the router's rows.
        experts: "fused", "gate_proj" or "w1"; see the top of this file.

    Returns, Raises: as to_megablocks.
    """
    return _converted(state_dict, "transformers", experts)


def _converted(state_dict, to, experts):
    outputs = _plan({name: (list(value.shape), value.dtype) for name, value in state_dict.items()}, to, experts)
    return {output.name: output.value(state_dict) if output.build is None
            else output.value(state_dict).clone(memory_format=torch.contiguous_format) for output in outputs}


# ----------------------------------------------------------------------------------------------- names, shapes, dtypes

# (shape, dtype) of every tensor; dtypes are only compared with each other, so files and torch may name them differently.
_Signatures = Mapping[str, tuple[list[int], object]]

_ROUTER = {"megablocks": "router.layer.weight", "transformers": "gate.weight"}
_SHARED = {"megablocks": "shared_expert.", "transformers": "shared_experts."}
_IN_A_LAYER = re.compile(r"((?:.*?\.)?)experts\..+")
_ONE_EXPERT = re.compile(r"experts\.(\d+)\.(\w+)\.weight")
_FAULTS_SHOWN = 10
# Dtypes with several values in a byte, by the names of files and of torch. No layout here says what their rows and columns mean.
_PACKED = ("F4", "F6_E2M3", "F6_E3M2", "torch.float4_e2m1fn_x2")
# The largest header that readers of the format accept, and a number of bytes that every tensor exceeds in the header.
_MOST_HEADER_BYTES, _FEWEST_BYTES_A_TENSOR = 100_000_000, 64


@dataclass(frozen=True)
class _Output:
    """A tensor of the result: build(*sources), with the given shape, possibly a view. Without `build` it is its one source."""
    name: str
    sources: tuple[str, ...]
    build: Callable[..., torch.Tensor] | None = None
    shape: tuple[int, ...] = ()

    def value(self, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
        sources = [tensors[name] for name in self.sources]
        return sources[0] if self.build is None else self.build(*sources)


def _plan(signatures: _Signatures, to: str, experts: str) -> list[_Output]:
    """Every tensor of the result. Raises ValueError where the other layout cannot hold the layers.

    A shape with a size of zero takes no bytes, so its other sizes may be arbitrarily large. Therefore lists with an entry for each
    expert are made only after such shapes are refused and all shapes fit each other: then there are at most as many experts as bytes.
    """
    if to not in LAYOUTS or experts not in EXPERT_LAYOUTS:
        raise ValueError(f"convert: expected to in {LAYOUTS} and experts in {EXPERT_LAYOUTS}, got {to!r}, {experts!r}")
    prefixes = dict.fromkeys(match[1] for match in map(_IN_A_LAYER.fullmatch, signatures) if match)
    if not prefixes:
        raise ValueError(f"convert to {to}: there is no MoE layer: no name holds 'experts.'")
    layers: dict[str, dict[str, Any]] = {prefix: {} for prefix in prefixes}
    outputs, faults = [], []
    for name, signature in signatures.items():
        prefix = next((parent for parent in _parents(name) if parent in layers), None)
        if prefix is None:
            outputs.append(_Output(name, (name,)))
        else:
            layers[prefix][name.removeprefix(prefix)] = signature
    for prefix, tensors in layers.items():
        _require_sound(prefix, tensors)
        expected, converted = _layer(tensors, to, experts)
        faults += [one_line(f"{prefix}{fault}") for fault in _faults(tensors, expected)]
        if not faults:
            outputs += [replace(output, name=prefix + output.name, sources=tuple(prefix + name for name in output.sources))
                        for output in converted]
    if faults:
        more = [f"and {len(faults) - _FAULTS_SHOWN} more"] if len(faults) > _FAULTS_SHOWN else []
        raise ValueError("\n  ".join([f"convert to {to}: these tensors do not fit:", *faults[:_FAULTS_SHOWN], *more]))
    return outputs


def _parents(name: str) -> Iterator[str]:
    """'a.b.c' -> 'a.b.', 'a.', ''."""
    while name:
        name = name[: name[:-1].rfind(".") + 1]
        yield name


def _require_sound(prefix: str, tensors: _Signatures) -> None:
    for name, (shape, dtype) in tensors.items():
        if 0 in shape:
            raise BrokenCheckpoint(one_line(f"{prefix}{name}: expected sizes above 0, got shape {shape}"))
        if str(dtype) in _PACKED:
            raise BrokenCheckpoint(one_line(f"{prefix}{name}: expected a dtype of whole bytes, got {dtype}"))


def _faults(tensors: _Signatures, expected: Mapping[str, list[int]]) -> list[str]:
    """What differs from the expected shapes. Names are reported first, and shapes only if all names fit, then dtypes, because a fault in
    one causes faults in the next."""
    names = [f"{name}: missing" for name in expected if name not in tensors]
    names += [f"{name}: unexpected, shape {shape}" for name, (shape, _) in tensors.items() if name not in expected]
    shapes = [f"{name}: expected shape {shape}, got {tensors[name][0]}" for name, shape in expected.items()
              if not names and tensors[name][0] != shape]
    dtypes = {name: dtype for name, (_, dtype) in tensors.items() if name.startswith("experts.")}
    first = next(iter(dtypes.values()), None)
    return names or shapes or [f"{name}: expected {first}, as of the layer's other experts, got {dtype}"
                               for name, dtype in dtypes.items() if dtype != first]


def _layer(tensors: _Signatures, to: str, layout: str) -> tuple[dict[str, list[int]], Iterable[_Output]]:
    """The shapes that one layer should have according to the sizes found in it, and the outputs made of it if it has them."""
    source = "transformers" if to == "megablocks" else "megablocks"
    experts, hidden = _shape(tensors, _ROUTER[source], 2)
    found = [match for match in map(_ONE_EXPERT.fullmatch, tensors) if match]
    kinds = {match[2] for match in found}
    if kinds and experts > len(tensors):
        experts = len({match[1] for match in found})  # a wrong router is then one fault, not a missing name for each of its rows
    gated = bool(tensors.keys() & {"experts.mlp.v1", "experts.gate_up_proj"} or kinds & {"gate_proj", "w1", "w3"})
    if to == "transformers":
        expected, outputs = _experts_from_megablocks(tensors, experts, hidden, gated, layout)
    elif kinds:
        layout = "w1" if "w2" in kinds else "gate_proj"
        expected, outputs = _experts_from_one_each(tensors, experts, hidden, gated, layout)
    else:
        expected, outputs = _experts_from_fused(tensors, experts, hidden, gated)
    expected[_ROUTER[source]] = [experts, hidden]
    others = [_Output(_ROUTER[to], (_ROUTER[source],))]
    shared, shared_target = _SHARED[source], _SHARED[to]
    if any(name.startswith(shared) for name in tensors):
        ffn = _shape(tensors, f"{shared}up_proj.weight", 2)[0]
        for name in ("gate_proj", "up_proj", "down_proj") if gated else ("up_proj", "down_proj"):
            expected[f"{shared}{name}.weight"] = [hidden, ffn] if name == "down_proj" else [ffn, hidden]
            others.append(_Output(f"{shared_target}{name}.weight", (f"{shared}{name}.weight",)))
    return expected, itertools.chain(outputs, others)


def _shape(tensors: _Signatures, name: str, rank: int) -> list[int]:
    """The tensor's shape, or zeros where it is absent or has another rank, which _faults then reports."""
    shape = tensors[name][0] if name in tensors else []
    return shape if len(shape) == rank else [0] * rank


def _experts_from_fused(tensors, experts, hidden, gated):
    up, inward = ("experts.gate_up_proj", ("w1", "v1")) if gated else ("experts.up_proj", ("w1",))
    down = "experts.down_proj"
    ffn = _shape(tensors, down, 3)[2]
    expected = {up: [experts, len(inward) * ffn, hidden], down: [experts, hidden, ffn]}
    rows = (experts * ffn, hidden)
    outputs = [_Output(f"experts.mlp.{name}", (up,), partial(_rows_of_part, part=part, parts=len(inward)), rows)
               for part, name in enumerate(inward)]
    return expected, [*outputs, _Output("experts.mlp.w2", (down,), _rows_of_transposed, rows)]


def _experts_from_one_each(tensors, experts, hidden, gated, layout):
    gate, up, down = _PER_EXPERT[layout]
    ffn = _shape(tensors, f"experts.0.{down}.weight", 2)[1]
    expected, outputs = {}, []
    for target, kind in (("w1", gate), ("v1", up), ("w2", down)) if gated else (("w1", up), ("w2", down)):
        names = tuple(f"experts.{e}.{kind}.weight" for e in range(experts))
        expected |= dict.fromkeys(names, [hidden, ffn] if kind == down else [ffn, hidden])
        build = _stacked_transposed if kind == down else _stacked
        outputs.append(_Output(f"experts.mlp.{target}", names, build, (experts * ffn, hidden)))
    return expected, outputs


def _experts_from_megablocks(tensors, experts, hidden, gated, layout):
    inward, w2 = tuple(f"experts.mlp.{name}" for name in ("w1", "v1")[: 1 + gated]), "experts.mlp.w2"
    ffn = _shape(tensors, w2, 2)[0] // max(1, experts)
    expected = {name: [experts * ffn, hidden] for name in (*inward, w2)}
    if layout == "fused":
        up = "experts.gate_up_proj" if gated else "experts.up_proj"
        return expected, [
            _Output(up, inward, partial(_fused, experts=experts), (experts, len(inward) * ffn, hidden)),
            _Output("experts.down_proj", (w2,), partial(_transposed, experts=experts), (experts, hidden, ffn)),
        ]
    if layout == "w1" and not gated:
        raise ValueError("convert to transformers: experts: expected 'fused' or 'gate_proj' for experts without a gate,"
                         f" got {layout!r}")
    if experts * (2 + gated) * _FEWEST_BYTES_A_TENSOR > _MOST_HEADER_BYTES:
        raise ValueError(f"convert to transformers: experts: expected 'fused' for {experts} experts, got {layout!r}: the header"
                         " of a file has no room for a tensor of each")
    return expected, _one_each_from_megablocks(inward, w2, experts, hidden, ffn, layout)


def _one_each_from_megablocks(inward, w2, experts, hidden, ffn, layout) -> Iterator[_Output]:
    gate, up, down = _PER_EXPERT[layout]
    for e in range(experts):
        for kind, name in zip((gate, up) if len(inward) == 2 else (up,), inward):
            yield _Output(f"experts.{e}.{kind}.weight", (name,), partial(_one, e=e, experts=experts), (ffn, hidden))
        build = partial(_one_transposed, e=e, experts=experts)
        yield _Output(f"experts.{e}.{down}.weight", (w2,), build, (hidden, ffn))


# The `build` of an _Output.


def _rows_of_part(stack_ENH, part, parts):
    return stack_ENH.chunk(parts, dim=1)[part].flatten(0, 1)


def _rows_of_transposed(stack_EHF):
    return stack_EHF.transpose(1, 2).flatten(0, 1)


def _stacked(*matrices_FH):
    return torch.cat(matrices_FH)


def _stacked_transposed(*matrices_HF):
    return torch.cat([matrix.t() for matrix in matrices_HF])


def _fused(*stacks, experts):
    return torch.cat([rows.unflatten(0, (experts, -1)) for rows in stacks], dim=1)


def _transposed(rows, experts):
    return rows.unflatten(0, (experts, -1)).transpose(1, 2)


def _one(rows, e, experts):
    return rows.unflatten(0, (experts, -1))[e]


def _one_transposed(rows, e, experts):
    return _one(rows, e, experts).t()


# ---------------------------------------------------------------------------------------------------------------- files

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
# Files with these suffixes may hold weights in the old layout, so they are not copied.
_WEIGHT_SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack"))
_CHUNK_BYTES = 1 << 26
# No model's names are nearly as long, and looking up the parents of a name takes time proportional to the square of its length.
_LONGEST_NAME = 1000


def convert_checkpoint(source: str | os.PathLike, target: str | os.PathLike, to: str, *, experts: str = "fused",
                       report: Callable[[str], object] = lambda line: None) -> None:
    """Write the checkpoint at `source` to `target`, its MoE layers in the other layout.

    One tensor of the result is in memory at a time, which may hold the matrices of all experts of a layer; the source is mapped. A
    converted tensor goes into the file that held its first source. Metadata, and a directory's other files (configuration, tokenizer),
    are copied unchanged. The target has a temporary name until it is complete, and is removed after an error or an interruption.

    Args:
        source: a .safetensors file, or a directory with model.safetensors or with model.safetensors.index.json and the
            files that it names.
        target: a file or a directory, as the source; it must not exist.
        to: "transformers" or "megablocks".
        experts: with to="transformers", as in to_transformers.
        report: called with a line for every file that was written or left out.

    Raises:
        ImportError: without the package safetensors.
        OSError: FileExistsError or FileNotFoundError for target and source, and any other error of the file system.
        ValueError: as to_megablocks. BrokenCheckpoint also where an index and its files differ, and for a file that is not a complete
            safetensors file or has a tensor that torch cannot hold.
    """
    source, target = Path(source), Path(target)
    if os.path.lexists(target):
        raise FileExistsError(f"{target}: exists already")
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{target.absolute().parent}: no such directory")
    index = _read_index(source)
    with ExitStack() as stack:
        tensors = _Tensors(_shards(source, index), stack)
        if index is not None:
            _check_index(index, source, tensors)
        plan = tensors.by_file(_plan(tensors.signatures(), to, experts))
        with appears_complete(target) as partial_target:
            if not source.is_dir():
                _write(partial_target, plan[source], tensors, tensors.metadata(source))
                report(f"wrote {target}")
                return
            partial_target.mkdir()
            for path, outputs in plan.items():
                _write(partial_target / path.name, outputs, tensors, tensors.metadata(path))
                report(f"wrote {path.name}")
            if index is not None:
                weight_map = {output.name: path.name for path, outputs in plan.items() for output in outputs}
                index["weight_map"] = dict(sorted(weight_map.items()))
                (partial_target / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
            converted = {_INDEX, *(path.name for path in tensors.path_of.values())}
            others = [path for path in sorted(source.iterdir()) if path.name not in converted]
            _copy_others(others, partial_target, report)


class _Tensors(Mapping):
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
                raise BrokenCheckpoint(one_line(f"{path}: in another file as well: {', '.join(twice[:_FAULTS_SHOWN])}"))
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

    def by_file(self, outputs: list[_Output]) -> dict[Path, list[_Output]]:
        """The outputs that go into each file: those whose first source is in it."""
        plan: dict[Path, list[_Output]] = {}
        for output in outputs:
            plan.setdefault(self.path_of[output.sources[0]], []).append(output)
        return plan


def _read_index(source: Path) -> dict | None:
    path = source / _INDEX
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
    return isinstance(file, str) and file not in ("", ".", "..", _INDEX) and not set(file) & {"/", os.sep, "\0"}


def _shards(source: Path, index: dict | None) -> list[Path]:
    if index is not None:
        return [source / name for name in dict.fromkeys(index["weight_map"].values())]
    if source.is_dir() and not (source / _SINGLE).exists():
        raise FileNotFoundError(f"{source}: has neither {_SINGLE} nor {_INDEX}")
    return [source / _SINGLE if source.is_dir() else source]


def _check_index(index: dict, source: Path, tensors: _Tensors) -> None:
    found = {(name, path.name) for name, path in tensors.path_of.items()}
    differ = sorted({name for name, _ in found ^ set(index["weight_map"].items())})
    if differ:
        raise BrokenCheckpoint(one_line(f"{source / _INDEX}: differs from its files in {', '.join(differ[:_FAULTS_SHOWN])}"))


def _copy_others(paths: list[Path], folder: Path, report) -> None:
    for path in paths:
        if path.is_file() and not _WEIGHT_SUFFIXES.intersection(path.suffixes):
            shutil.copy(path, folder)
        else:
            report(f"left out {path.name}")


def _write(path: Path, outputs: list[_Output], tensors: _Tensors, metadata: Mapping[str, str] | None) -> None:
    """Write a safetensors file one tensor after the other; the library can only write tensors that are all in memory.

    The format is the header's length in 8 bytes, the header as JSON, padded with spaces to a multiple of 8 bytes, and the data. As
    in the library's files the widest dtypes come first, so that every tensor is aligned.
    """
    width_of = {output.name: tensors[output.sources[0]].element_size() for output in outputs}
    outputs = sorted(outputs, key=lambda output: (-width_of[output.name], output.name))
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    end = 0
    for output in outputs:
        (shape, dtype), size = tensors.signature(output.sources[0]), tensors[output.sources[0]].nbytes
        if output.build is not None:
            shape, size = list(output.shape), math.prod(output.shape) * width_of[output.name]
        header[output.name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _MOST_HEADER_BYTES:
        raise ValueError(f"{path.name}: expected a header of at most {_MOST_HEADER_BYTES} bytes, as readers do, got {len(encoded)}")
    with open(path, "xb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for output in outputs:
            _write_bytes(file, output.value(tensors))
        file.flush()
        os.fsync(file.fileno())


def _write_bytes(file: BinaryIO, tensor: torch.Tensor) -> None:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    for piece in flat.split(_CHUNK_BYTES) if flat.numel() else ():
        chunk = bytearray(piece.numel())
        torch.frombuffer(chunk, dtype=torch.uint8).copy_(piece)
        file.write(chunk)
