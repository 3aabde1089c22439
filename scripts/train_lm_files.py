"""The files of a run of train_lm.py: its folder, the checkpoint in it, and how a file is written.

Faults are found before the first step, and raise InputError with a message of one line.
"""

from __future__ import annotations

import os
import tempfile
import textwrap
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch

CHECKPOINT, LOG = "checkpoint.pt", "log.json"
# The entries of a checkpoint, of the log in it, and of each step in the log, with their types.
ENTRIES = {"model": dict, "optimizer": dict, "scaler": dict, "rng": torch.Tensor, "step": int, "log": dict}
LOG_ENTRIES = {"args": dict, "text": dict, "train": list, "heldout": list, "seconds": float, "parameters": int, "device": str}
STEP_ENTRIES = {"step": int, "loss": float, "tokens_per_s": float}


class InputError(Exception):
    """The user's input cannot be used; the message says what was expected and what came."""


def in_one_line(error: BaseException) -> str:
    """The error's type and message, without line breaks and shortened."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Call write(temporary path), then rename the file: a reader finds the old file or the new one, complete, at any moment.

    An error or a signal leaves no temporary file. A crash of the machine leaves no file whose content has not reached the disk.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_folder(out: Path) -> None:
    """Make the folder of the run if it is missing. Raises InputError if the run's files cannot be written to it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise InputError(f"--out: expected a folder that can be made and written to, got {out} ({in_one_line(error)})") from None
    for path in (out / CHECKPOINT, out / LOG, out / "loss.png"):
        if path.is_dir():
            raise InputError(f"--out: expected a file or nothing at {path}, got a folder")


def not_a_checkpoint(path: Path, what: str) -> InputError:
    return InputError(f"{path}: expected a checkpoint of train_lm.py, got {what}; give another --out, or --fresh to start anew")


def read_checkpoint(path: Path) -> dict:
    """The checkpoint, on the CPU, with the entries that `Trainer.save` writes.

    Raises:
        InputError: if the file is empty, truncated, another program's, or cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not check the checksums that torch.save writes
        if damaged:
            raise zipfile.BadZipFile(f"bad checksum of {damaged}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about files of other programs
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch.load raises many kinds of errors for a file that is not a checkpoint
        raise not_a_checkpoint(path, f"a file that does not read as one ({in_one_line(error)})") from None
    missing = missing_entry(checkpoint, ENTRIES) or missing_entry(checkpoint["log"], LOG_ENTRIES)
    steps = [] if missing else checkpoint["log"]["train"]
    missing = missing or next(filter(None, (missing_entry(entry, STEP_ENTRIES) for entry in steps)), None)
    if missing:
        raise not_a_checkpoint(path, f"one without {missing}")
    if not 0 < checkpoint["step"] == len(steps):
        raise not_a_checkpoint(path, f"step {checkpoint['step']} with a log of {len(steps)} steps")
    return checkpoint


def missing_entry(found: object, entries: dict[str, type]) -> str | None:
    """What `found` lacks to be a dict with these entries and types, in words; None if it lacks nothing."""
    if not isinstance(found, dict):
        return f"a dict of entries (but a {type(found).__name__})"
    return next((f"an entry {name!r} of type {kind.__name__}" for name, kind in entries.items()
                 if not isinstance(found.get(name), kind)), None)


def check_optimizer(optimizer: torch.optim.AdamW) -> None:
    """Raise ValueError if a parameter's moments are missing or have another shape, which load_state_dict does not check."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name in ("exp_avg", "exp_avg_sq"):
                moment = optimizer.state[parameter].get(name)
                shape = list(moment.shape) if isinstance(moment, torch.Tensor) else None
                if shape != list(parameter.shape):
                    raise ValueError(f"optimizer: expected {name} of shape {list(parameter.shape)}, got {shape}")
