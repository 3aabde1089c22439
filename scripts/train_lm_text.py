"""The text that train_lm.py trains on, and the windows of it that a step sees.

Shape suffixes: B sequences, S positions, V byte values.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch

from train_lm_arguments import HELDOUT, VOCABULARY
from train_lm_files import InputError

STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


def text_files(paths: Sequence[str]) -> list[Path]:
    """The files that `paths` name, sorted, hidden ones left out; without paths the standard library's sources."""
    roots = [Path(path) for path in paths] or [Path(sysconfig.get_paths()["stdlib"])]
    suffix, skipped = ("", frozenset()) if paths else (".py", STDLIB_SKIPPED)
    files = {root for root in roots if os.path.isfile(root)}
    for root in roots:
        if not os.path.exists(root):  # unlike Path.exists, this does not raise for a name that is too long
            raise InputError(f"paths: expected an existing file or folder, got {root}")
        for folder, subfolders, names in os.walk(root):
            subfolders[:] = [name for name in subfolders if not name.startswith(".") and name not in skipped]
            files.update(Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith("."))
    return sorted(file for file in files if file.is_file())


def read_text(path: Path) -> bytes:
    """The file's bytes, or no bytes if it cannot be read or is not UTF-8 text."""
    try:
        content = path.read_bytes()
        content.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return b"" if b"\0" in content else content


def load_text(paths: Sequence[str], max_bytes: int, length: int) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """Join the files in a fixed shuffled order, up to max_bytes, and hold out the last tenth, which is a sample of the files.

    Returns:
        The bytes to train on and the held-out bytes, uint8, and a description of them. Its unigram_entropy, the entropy of single
        bytes, is the loss of the best model that sees no context.

    Raises:
        InputError: where there is no text, or where a part has less than one window of length + 1 bytes.
    """
    candidates = text_files(paths)
    # A constant seed: the text does not depend on --seed.
    random.Random(0).shuffle(candidates)
    content, files = bytearray(), 0
    for path in candidates:
        if len(content) >= max_bytes:
            break
        piece = read_text(path)
        files += bool(piece)
        content += piece
    del content[max_bytes:]
    where = ", ".join(paths) or "the standard library"
    if not content:
        raise InputError(f"paths: expected at least one UTF-8 text file in {where}, got none among {len(candidates)} files")
    heldout_bytes = len(content) // HELDOUT
    if heldout_bytes < length + 1:
        raise InputError(f"paths: expected at least {HELDOUT * (length + 1)} bytes of text in {where} for --length {length}, got"
                         f" {len(content)}")
    text = torch.frombuffer(content, dtype=torch.uint8)
    p_V = torch.bincount(text, minlength=VOCABULARY).double() / len(text)
    statistics = {"files": files, "bytes": len(text), "heldout_bytes": heldout_bytes,
                  "unigram_entropy": -float(torch.xlogy(p_V, p_V).sum()), "sha256": hashlib.sha256(content).hexdigest()}
    return text[:-heldout_bytes], text[-heldout_bytes:], statistics


def windows(text: torch.Tensor, starts: Sequence[int], length: int) -> torch.Tensor:
    """int64 [B, S + 1]: `length` bytes from each start, and the one that follows them."""
    return torch.stack([text[start : start + length + 1] for start in starts]).long()


def batch_starts(text: torch.Tensor, args: argparse.Namespace, step: int) -> list[int]:
    """The starts of the windows of a step's batch. They depend on --seed and the step alone, so that a resumed run has the same."""
    draw = random.Random(f"{args.seed}/{step}")
    return [draw.randrange(len(text) - args.length) for _ in range(args.batch)]


def heldout_starts(text: torch.Tensor, args: argparse.Namespace) -> list[int]:
    """The starts of the held-out windows, evenly spaced, and the same at every evaluation."""
    return [w * (len(text) - args.length - 1) // max(1, args.eval_windows - 1) for w in range(args.eval_windows)]
