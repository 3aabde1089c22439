"""Tests of the adapters, and what several of them need: maps that the CUDA kernels may trust, fresh processes."""

import importlib.util
import json
import subprocess
import sys
import textwrap

import pytest
import torch


def assert_maps_agree(row_of_slot_TK, slot_of_row_P, columns_TK, counts_T):
    """The kernels write where row_of_slot says and clear where slot_of_row is negative: both must name the same rows, once.

    Plain PyTorch reads row_of_slot only, so that on a CPU no result would show a wrong slot_of_row.
    """
    for tensor in (row_of_slot_TK, slot_of_row_P, columns_TK, counts_T):
        assert tensor is None or tensor.dtype == torch.int32
    assert row_of_slot_TK.numel() == 0 or row_of_slot_TK.size(1) == 1 or row_of_slot_TK.stride(1) == 1
    used_TK = row_of_slot_TK >= 0
    if counts_T is not None:
        used_TK = used_TK & (torch.arange(row_of_slot_TK.size(1), device=used_TK.device) < counts_T.unsqueeze(1))
    rows = row_of_slot_TK[used_TK].long().sort().values
    assert torch.equal(rows, (slot_of_row_P >= 0).nonzero().flatten())


def checked(operator):
    """gbmoe::padded_gather or padded_scatter behind that check; left out while torch.compile traces."""
    def call(rows, row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, *rest):
        if not torch.compiler.is_compiling():
            assert_maps_agree(row_of_slot_TK, slot_of_row_P, columns_TK, counts_T)
        return operator(rows, row_of_slot_TK, slot_of_row_P, columns_TK, counts_T, *rest)
    return call


def in_a_fresh_process(code, hidden=()):
    """What `code` leaves in the dict `seen`, run where none of the modules `hidden` can be imported."""
    prologue = f"import json, sys\nsys.modules.update(dict.fromkeys({tuple(hidden)!r}))\nseen = {{}}\n"
    code = prologue + textwrap.dedent(code) + "\nprint(json.dumps(seen))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


MEGABLOCKS_NEEDS_A_GPU = importlib.util.find_spec("triton") is not None


def skip_where_megablocks_needs_a_gpu(device):
    """For tests that call MegaBlocks' own gathers and scatters: where Triton is installed they are written in it."""
    if MEGABLOCKS_NEEDS_A_GPU and torch.device(device).type == "cpu":
        pytest.skip("MegaBlocks' Triton kernels do not run on a CPU, and stand-ins are for where there is no Triton")
