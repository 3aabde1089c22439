"""Tests of the adapters, and what several of them share: a check of the maps that CUDA kernels trust, and fresh processes."""

import importlib.util
import json
import subprocess
import textwrap

import pytest
import torch

from gbmoe.slot_map import SlotMap
from tests.forked_python import python


def assert_maps_agree(slots):
    """Check that row_of_slot and slot_of_row name the same rows, each once: the kernels write rows by the first and clear by the second.

    Plain PyTorch reads only row_of_slot, so that on a CPU no result would show a wrong slot_of_row.
    """
    row_of_slot_TK, slot_of_row_P, _, counts_T = slots
    assert type(slots) is SlotMap
    for tensor in slots:
        assert tensor is None or tensor.dtype == torch.int32
    assert row_of_slot_TK.numel() == 0 or row_of_slot_TK.size(1) == 1 or row_of_slot_TK.stride(1) == 1
    used_TK = row_of_slot_TK >= 0
    if counts_T is not None:
        used_TK = used_TK & (torch.arange(row_of_slot_TK.size(1), device=used_TK.device) < counts_T.unsqueeze(1))
    rows = row_of_slot_TK[used_TK].long().sort().values
    assert torch.equal(rows, (slot_of_row_P >= 0).nonzero().flatten())


def checked(operator):
    """gather_slots or scatter_slots with assert_maps_agree before it; while torch.compile traces the check is left out."""
    def call(rows, slots, **options):
        if not torch.compiler.is_compiling():
            assert_maps_agree(slots)
        return operator(rows, slots, **options)
    return call


def in_a_fresh_process(code, hidden=()):
    """Run `code` in a new process in which the modules `hidden` cannot be imported; return what it puts into the dict `seen`."""
    prologue = f"import json, sys\nsys.modules.update(dict.fromkeys({tuple(hidden)!r}))\nseen = {{}}\n"
    code = prologue + textwrap.dedent(code) + "\nprint(json.dumps(seen))"
    done = subprocess.run([python("torch"), "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MEGABLOCKS_NEEDS_A_GPU = importlib.util.find_spec("triton") is not None


def skip_where_megablocks_needs_a_gpu(device):
    """Skip a test that calls MegaBlocks' own gathers and scatters on a CPU where Triton is installed: they are Triton kernels there."""
    if MEGABLOCKS_NEEDS_A_GPU and torch.device(device).type == "cpu":
        pytest.skip("MegaBlocks' Triton kernels do not run on a CPU, and stand-ins are for where there is no Triton")
