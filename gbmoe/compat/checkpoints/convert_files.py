"""convert_checkpoint: a checkpoint's files in the other layout, and the Arguments of its layers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from gbmoe._atomic_files import appears_complete
from gbmoe.compat.checkpoints.arguments_of_config import ARGUMENTS_FILE, Config, as_source
from gbmoe.compat.checkpoints.files import INDEX, Tensors, check_index, copy_others, output_bytes, read_index, shards, write
from gbmoe.compat.checkpoints.recognise import Layer
from gbmoe.compat.checkpoints.tensor_conversion import Output, plan


def convert_checkpoint(source: str | os.PathLike, target: str | os.PathLike, to: str, *, experts: str = "fused",
                       report: Callable[[str], object] = lambda line: None,
                       progress: Callable[[int, int, str], object] = lambda done, total, what: None) -> None:
    """Write the checkpoint at `source` to `target`, its MoE layers in another layout; that of the source is recognised.

    One tensor of the result is in memory at a time, which may hold the matrices of all experts of a layer; the source is mapped. A
    converted tensor goes into the file that held its first source. Metadata, and a directory's other files (configuration,
    tokenizer), are copied unchanged. The target has a temporary name until it is complete, and is removed after an error or an
    interruption.

    config.json, in the directory or in that of the file, says what the model computes. Layers that no dMoE computes are refused, in
    both directions, and so is a layout of experts that from_pretrained does not load for that model. With to="megablocks" the
    Arguments that reproduce the layers are reported and written to gbmoe_arguments.json in the target or, where that is a file, to
    TARGET.gbmoe_arguments.json; read_arguments reads them. Without a config.json nothing of this can be known: the layers are
    converted, and a warning is reported.

    Args:
        source: a .safetensors file, or a directory with model.safetensors or with model.safetensors.index.json and the
            files that it names.
        target: a file or a directory, as the source; it must not exist.
        to: "transformers", "megablocks", or the layout of a training framework, as in to_framework.
        experts: with to="transformers", as in to_transformers.
        report: called with a line for every file that was written or left out, a line with the Arguments, and lines that begin
            with "warning: ".
        progress: called before each tensor of the result is made, with the bytes of tensors that are written, those of all, and its name.

    Raises:
        ImportError: without the package safetensors.
        OSError: FileExistsError or FileNotFoundError for target and source, and any other error of the file system.
        ValueError: as to_megablocks; and where no dMoE computes what config.json describes, or its model type is unknown, with the
            fields, their values and what would be needed. BrokenCheckpoint also where an index and its files differ, or config.json
            and the layers' sizes, and for a file that is not a complete safetensors file or has a tensor that torch cannot hold.
    """
    source, target = Path(source), Path(target)
    _require_free(target)
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{target.absolute().parent}: no such directory")
    index = read_index(source)
    with ExitStack() as stack:
        tensors = Tensors(shards(source, index), stack)
        if index is not None:
            check_index(index, source, tensors)
        config = _config(source)
        if config is not None and to == "transformers":
            config.require_loaded(experts)
        outputs, layers = plan(tensors.signatures(), to, experts, config.name if config else "deepseek_v3")
        arguments = config.arguments(layers) if config else None
        by_file = tensors.by_file(outputs)
        arguments_file = None if source.is_dir() else target.with_name(f"{target.name}.{ARGUMENTS_FILE}")
        if arguments is not None and to == "megablocks" and arguments_file is not None:
            _require_free(arguments_file)
        for warning in _warnings(source, to, config, layers):
            report(f"warning: {warning}")
        begin = _counted(by_file, tensors, progress)
        with appears_complete(target) as partial_target:
            if source.is_dir():
                partial_target.mkdir()
                _write_folder(source, partial_target, by_file, tensors, index, report, begin)
            else:
                write(partial_target, by_file[source], tensors, tensors.metadata(source), begin)
                report(f"wrote {target}")
            if arguments is not None and to == "megablocks":
                with appears_complete(arguments_file or partial_target / ARGUMENTS_FILE) as partial_file:
                    partial_file.write_text(json.dumps(arguments, indent=2) + "\n", encoding="utf-8")
                report(f"wrote {arguments_file or ARGUMENTS_FILE}")
                report(f"each MoE layer is gbmoe.dMoE({as_source(arguments)})")


def _counted(by_file: dict[Path, list[Output]], tensors: Tensors, progress: Callable[[int, int, str], object]
             ) -> Callable[[Output], object]:
    """A function to be called before each output is made, which calls `progress`."""
    total, done = sum(output_bytes(output, tensors) for outputs in by_file.values() for output in outputs), 0

    def begin(output: Output) -> None:
        nonlocal done
        progress(done, total, output.name)
        done += output_bytes(output, tensors)

    return begin


def _require_free(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(f"{target}: exists already")


def _config(source: Path) -> Config | None:
    path = (source if source.is_dir() else source.parent) / "config.json"
    return Config(path) if path.is_file() else None


def _warnings(source: Path, to: str, config: Config | None, layers: list[Layer]) -> list[str]:
    warnings = []
    if config is None:
        unknown = {"megablocks": "a dMoE computes these layers, and with which Arguments",
                   "transformers": "these layers are the model's, and whether from_pretrained loads this layout of its experts",
                   }.get(to, f"{to} computes these layers")
        warnings.append(f"{source}: there is no config.json, so it is not known whether {unknown}")
    if to == "megablocks" and any(layer.router_dtype != layer.dtype for layer in layers):
        different = next(layer for layer in layers if layer.router_dtype != layer.dtype)
        warnings.append(f"{source}: {different.prefix}: the router is {different.router_dtype}, the experts are {different.dtype}:"
                        " load_state_dict rounds it, unless the router of the dMoE was cast before")
    return warnings


def _write_folder(source: Path, folder: Path, by_file: dict[Path, list[Output]], tensors: Tensors, index: dict | None,
                  report: Callable[[str], object], begin: Callable[[Output], object]) -> None:
    for path, outputs in by_file.items():
        write(folder / path.name, outputs, tensors, tensors.metadata(path), begin)
        report(f"wrote {path.name}")
    if index is not None:
        weight_map = {output.name: path.name for path, outputs in by_file.items() for output in outputs}
        index["weight_map"] = dict(sorted(weight_map.items()))
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    converted = {INDEX, *(path.name for path in tensors.path_of.values())}
    others = [path for path in sorted(source.iterdir()) if path.name not in converted]
    # Arguments come from config.json and the tensors that are converted, not from a file that an earlier conversion wrote.
    copy_others(others, folder, report, leave_out={ARGUMENTS_FILE})
