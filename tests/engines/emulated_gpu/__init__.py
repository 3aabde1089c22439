"""The kernels of csrc/tensor_core/ and csrc/low_rank/ on a CPU: their own source, compiled by the C++ compiler, with the instructions of
a GPU emulated.

`operators()` stands in for the extension's operators of these kernels where their tensors are on the CPU, so that the engine itself
runs on them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from gbmoe import extension
from tests import csrc_operators

_HERE = Path(__file__).parent
_RANGES = 10
_DTYPES = [torch.bfloat16, torch.float16, torch.float32]
_STAND_INS = {"common.cuh": "common.cuh", "emulated_gpu.h": "emulated_gpu.h", "approximations.cuh": "approximations.cuh",
              "early_launch.cuh": "early_launch.cuh", "ptx.cuh": "tensor_core/ptx.cuh"}


class _Activation(ctypes.Structure):
    """ActivationOf, field by field."""
    _fields_ = [("kind", ctypes.c_int), *((name, ctypes.c_float) for name in ("alpha", "limit", "gate_limit", "gate_offset")),
                ("wide", ctypes.c_double * 4)]

    @classmethod
    def of(cls, kind_and_constants: tuple[float, ...]) -> _Activation:
        kind, *constants = kind_and_constants
        constants = constants or [1.0, math.inf, math.inf, 0.0]
        return cls(int(kind), *constants, (ctypes.c_double * 4)(*constants))


class _Pitch(ctypes.Structure):
    """Pitch, field by field."""
    _fields_ = [("row", ctypes.c_int), ("group", ctypes.c_int64)]

    @classmethod
    def of(cls, stack: torch.Tensor) -> _Pitch:
        return cls(stack.stride(-2), stack.stride(0) if stack.dim() == 3 else 0)


class _Bias(ctypes.Structure):
    """Bias, field by field."""
    _fields_ = [("data", ctypes.c_void_p), ("of_group", ctypes.c_int64), ("of_column", ctypes.c_int64)]

    @classmethod
    def of(cls, bias: torch.Tensor | None) -> _Bias:
        return cls() if bias is None else cls(bias.data_ptr(), *bias.stride())


class _Places(ctypes.Structure):
    """Places, field by field."""
    _fields_ = [("count", ctypes.c_int), ("second", ctypes.c_int), ("number", ctypes.c_int * 256)]

    @classmethod
    def of(cls, numbers: Sequence[int], groups: int) -> _Places:
        return cls(len(numbers), 0 if len(numbers) <= groups else groups, (ctypes.c_int * 256)(*numbers))


class _Arguments(ctypes.Structure):
    """tensor_core::Arguments, field by field."""
    _fields_ = [("sizes", ctypes.c_void_p), ("sizes_are_int64", ctypes.c_bool),
                *((name, ctypes.c_int) for name in (
                    "groups", "rows", "size_m", "size_n", "size_k", "operand_pairs", "panel_tiles")),
                ("activation", _Activation), ("a", ctypes.c_void_p * 2), ("b", ctypes.c_void_p * 2), ("pitch_b", _Pitch),
                ("out", ctypes.c_void_p * 3), ("pitch_out", _Pitch), ("places", _Places)]


class _FewRowsArguments(ctypes.Structure):
    """few_rows::Arguments, field by field."""
    _fields_ = [("sizes", ctypes.c_void_p), ("sizes_are_int64", ctypes.c_bool), ("groups", ctypes.c_int), ("rows", ctypes.c_int),
                ("x", ctypes.c_void_p), ("slot_of_row", ctypes.c_void_p),
                *((name, ctypes.c_int) for name in ("tokens", "top_k", "row_blocks", "size_n", "size_k")),
                ("b", ctypes.c_void_p * 2), ("pitch_b", _Pitch), ("paired", ctypes.c_bool), ("bias", _Bias * 2),
                ("activation", _Activation), ("out", ctypes.c_void_p * 3), ("step", ctypes.c_int),
                ("reads_early", ctypes.c_bool), ("next_begins_early", ctypes.c_bool), ("out_is_float", ctypes.c_bool), ("places", _Places)]


class _Rows(ctypes.Structure):
    """low_rank::Rows, field by field."""
    _fields_ = [("sizes", ctypes.c_void_p), ("sizes_are_int64", ctypes.c_bool), ("groups", ctypes.c_int), ("rows", ctypes.c_int),
                ("is_half", ctypes.c_bool), ("top_k", ctypes.c_int), ("slots", ctypes.c_uint32), ("slot_of_row", ctypes.c_void_p)]


class _Product(ctypes.Structure):
    """low_rank::Product, field by field."""
    _fields_ = [*((name, ctypes.c_int) for name in ("inner", "ranks", "pairs")), ("along_r", ctypes.c_bool), ("stages", ctypes.c_int),
                ("a", ctypes.c_void_p * 2), ("b", ctypes.c_void_p * 2), ("pitch_b", _Pitch), ("to_float", ctypes.c_bool),
                ("out", ctypes.c_void_p)]


class _Gradient(ctypes.Structure):
    """low_rank::Gradient, field by field."""
    _fields_ = [("ranks", ctypes.c_int), ("columns", ctypes.c_int), ("left", ctypes.c_void_p), ("right", ctypes.c_void_p),
                ("out", ctypes.c_void_p), ("pitch_out", _Pitch)]

    @classmethod
    def of(cls, left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> _Gradient:
        assert right.dtype == left.dtype == out.dtype and out.data_ptr() % 16 == 0
        return cls(out.size(1), out.size(2), left.data_ptr(), right.data_ptr(), out.data_ptr(), _Pitch.of(out))


class _LowRankArguments(ctypes.Structure):
    """low_rank::Arguments, field by field."""
    _fields_ = [("rows", _Rows), ("share", ctypes.c_uint64), ("product", _Product), ("gradients", _Gradient * 3),
                ("stages_of_gradients", ctypes.c_int), ("gradient_tiles", ctypes.c_int)]


class _Run(ctypes.Structure):
    """emulated_gpu::Run, field by field."""
    _fields_ = [("ctas", ctypes.c_int), ("late_copies", ctypes.c_int), ("large_memory", ctypes.c_int), ("seed", ctypes.c_uint),
                ("ranges", ctypes.c_int),
                ("begin", ctypes.c_size_t * _RANGES), ("end", ctypes.c_size_t * _RANGES)]


class Kernels:
    """The kernels, whose functions are compiled when they are first called, for each dtype alone: a few tests need few of the instances."""

    def __init__(self, folder: Path):
        """Copy the kernels with their stand-ins into `folder`."""
        self.folder, source = folder, folder / "csrc"
        for room in ("tensor_core", "low_rank"):
            shutil.copytree(extension.source_folder() / room, source / room)
        for name in ("group_sizes.cuh", "activation_formulas.cuh", "pitch.cuh", "places.cuh"):
            shutil.copy(extension.source_folder() / name, source / name)
        for name, place in _STAND_INS.items():
            shutil.copy(_HERE / name, source / place)
        self.library = functools.cache(self._compiled)

    def _compiled(self, function: str, dtype: int) -> ctypes.CDLL:
        library = self.folder / f"{function}_{dtype}.so"
        options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas",
                   "-fno-extern-tls-init",  # the shared memory needs no initialisation
                   "-U_FORTIFY_SOURCE",     # longjmp leads to another stack
                   f"-DEMULATED_{function}", f"-DDTYPE={dtype}"]
        torch_headers = Path(torch.__file__).parent / "include"
        subprocess.run(["g++", *options, "-I", str(self.folder), "-I", str(torch_headers), str(_HERE / "instances.cpp"),
                        "-o", str(library)], check=True)
        kernels = ctypes.CDLL(str(library))
        kernels.failure.restype = ctypes.c_char_p
        return kernels


def _end(tensor: torch.Tensor, places: Sequence[int] = ()) -> int:
    """The address after the last element of a tensor with any strides, or of matrices at these places."""
    last = max(places, default=0) * tensor.stride(0) + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


def _pointers(*tensors):
    return tuple(None if t is None else t.data_ptr() for t in tensors)


def low_rank_arguments(sizes, rows, slot_of_row, top_k, product, gradients):
    """(low_rank::Arguments, the most ranks) of csrc/low_rank/'s operators, as `operators` has them."""
    wide = gradients[0][1] if product is None else product[0]
    of_rows = _Rows(sizes.data_ptr(), sizes.dtype == torch.int64, sizes.numel(), rows, wide.dtype == torch.float16, top_k,
                    wide.size(0) * top_k, None if slot_of_row is None else slot_of_row.data_ptr())
    arguments = _LowRankArguments(rows=of_rows, gradients=(_Gradient * 3)(*(_Gradient.of(*gradient) for gradient in gradients)))
    if product is not None:
        a, b, a2, b2, along_r, out = product
        arguments.product = _Product(a.size(1), out.size(1), 1 if a2 is None else 2, along_r, 0, _pointers(a, a2), _pointers(b, b2),
                                     _Pitch.of(b), out.dtype == torch.float32, out.data_ptr())
    return arguments, max(out.size(-1 if out.dim() == 2 else 1) for out in (*(product or ())[5:], *(made for *_, made in gradients)))


@contextlib.contextmanager
def operators(kernels: Kernels, *, ctas: int, late_copies: bool, large_memory: bool, seed: int = 0) -> Iterator[None]:
    """Within it, torch.ops.gbmoe_cuda.tensor_core_*, few_rows_* and rank_* take tensors on the CPU.

    `late_copies`: cp.async writes when it is waited for. `large_memory`: with the kernels for multiprocessors that have much shared
    memory.
    """
    def arguments(sizes, rows, columns, panel, **fields):
        assert sizes is None or sizes.dtype in (torch.int32, torch.int64)
        of_sizes = {} if sizes is None else {"sizes": sizes.data_ptr(), "sizes_are_int64": sizes.dtype == torch.int64}
        return _Arguments(groups=1 if sizes is None else sizes.numel(), rows=rows, size_n=columns, panel_tiles=panel, **of_sizes,
                          **{"operand_pairs": 1, **fields})

    def groups_of(sizes):
        return 1 if sizes is None else sizes.numel()

    def call(function, dtype, *leading, of, reads, places=()):
        library = kernels.library(function, _DTYPES.index(dtype))
        begin = [t.data_ptr() for t in reads if t is not None]
        end = [_end(t, places if t.dim() == 3 else ()) for t in reads if t is not None]
        ranges = ctypes.c_size_t * _RANGES
        run = _Run(ctas, late_copies, large_memory, seed, len(begin), ranges(*begin), ranges(*end))
        found = getattr(library, function)(*leading, ctypes.byref(of), ctypes.byref(run))
        assert found, "there is no such instance"
        assert library.failure() is None, library.failure().decode()

    def rows(a, b, a2, b2, places, sizes, trans_b, tiling, out):
        tile_m, tile_n, panel = tiling
        of = arguments(sizes, out.size(0), out.size(1), panel, size_k=a.size(1), operand_pairs=1 if a2 is None else 2, a=_pointers(a, a2),
                       b=_pointers(b, b2), pitch_b=_Pitch.of(b), out=_pointers(out), places=_Places.of(places, groups_of(sizes)))
        call("rows", a.dtype, _DTYPES.index(a.dtype), out.dtype == torch.float32, tile_m, tile_n, trans_b, of=of, reads=(a, b, a2, b2),
             places=places)

    def weights(a, b, sizes, tiling, accumulate, places, out):
        tile_m, tile_n, panel = tiling
        of = arguments(sizes, a.size(0), out.size(2), panel, size_m=out.size(1), a=_pointers(a), b=_pointers(b), out=_pointers(out),
                       pitch_out=_Pitch.of(out), places=_Places.of(places, groups_of(sizes)))
        call("weights", a.dtype, _DTYPES.index(a.dtype), tile_m, tile_n, accumulate, of=of, reads=(a, b))

    def up(x, w1, v1, places, sizes, activation, tiling, a, h, g):
        tile_m, tile_n, panel = tiling
        assert x.dtype == torch.bfloat16
        of = arguments(sizes, a.size(0), a.size(1), panel, size_k=x.size(1), activation=_Activation.of(activation),
                       a=_pointers(x), b=_pointers(w1, v1), pitch_b=_Pitch.of(w1), out=_pointers(a, h, g),
                       places=_Places.of(places, groups_of(sizes)))
        call("up", x.dtype, tile_m, tile_n, v1 is not None, of=of, reads=(x, w1, v1), places=places)

    def few_rows(x, sizes, result, **fields):
        groups = 1 if sizes is None else sizes.numel()
        of_sizes = {} if sizes is None else {"sizes": sizes.data_ptr(), "sizes_are_int64": sizes.dtype == torch.int64}
        row_blocks = max(1, -(-result.size(0) // 8)) if groups == 1 else 1
        return _FewRowsArguments(groups=groups, rows=result.size(0), x=x.data_ptr(), row_blocks=row_blocks, size_n=result.size(1),
                                 size_k=x.size(1), next_begins_early=large_memory, **of_sizes, **{"step": 1, **fields})

    def few_rows_gemm(a, b, places, sizes, trans_b, reads_early, bias, out):
        of = few_rows(a, sizes, out, b=_pointers(b), pitch_b=_Pitch.of(b), out=_pointers(out), reads_early=reads_early,
                      bias=(_Bias * 2)(_Bias.of(bias)), places=_Places.of(places, groups_of(sizes)))
        call("few_rows_gemm", a.dtype, _DTYPES.index(a.dtype), trans_b, of=of, reads=(a, b), places=places)

    def few_rows_linear(x, weight, sizes, out):
        of = few_rows(x, sizes, out, b=_pointers(weight), pitch_b=_Pitch.of(weight), out=_pointers(out),
                      out_is_float=out.dtype == torch.float32)
        call("few_rows_linear", x.dtype, _DTYPES.index(x.dtype), of=of, reads=(x, weight))

    def few_rows_up(x, slot_of_row, top_k, w1, v1, places, w1_bias, v1_bias, sizes, activation, a, h, g):
        transposed, paired = w1.stride(2) != 1, v1 is None and w1.size(1) == 2 * a.size(1)
        slots = {} if slot_of_row is None else {"slot_of_row": slot_of_row.data_ptr(), "tokens": x.size(0), "top_k": top_k}
        of = few_rows(x, sizes, a, b=_pointers(w1, v1), pitch_b=_Pitch.of(w1.mT if transposed else w1), paired=paired,
                      bias=(_Bias * 2)(_Bias.of(w1_bias), _Bias.of(v1_bias)), out=_pointers(a, h, g), step=1 if h is None else h.stride(1),
                      activation=_Activation.of(activation), places=_Places.of(places, groups_of(sizes)), **slots)
        call("few_rows_up", x.dtype, _DTYPES.index(x.dtype), transposed, v1 is not None or paired, of=of, reads=(x, w1, v1), places=places)

    def low_rank(sizes, rows, slot_of_row, top_k, product, gradients):
        """`product` is (a, b, a2, b2, along_r, out) or None, and each of the gradients (left, right, out)."""
        arguments, ranks = low_rank_arguments(sizes, rows, slot_of_row, top_k, product, gradients)
        wide = gradients[0][1] if product is None else product[0]
        reads = [*(product[:4] if product else ()), *(t for left, right, _ in gradients for t in (left, right))]
        call("low_rank", wide.dtype, ranks, of=arguments, reads=reads)

    def rank_product(a, slot_of_row, top_k, b, a2, b2, sizes, along_r, out):
        low_rank(sizes, out.size(0), slot_of_row, top_k, (a, b, a2, b2, along_r, out), [])

    def rank_gradient(left, right, slot_of_row, top_k, sizes, out):
        low_rank(sizes, left.size(0), slot_of_row, top_k, None, [(left, right, out)])

    def rank_product_and_gradients(a, slot_of_row, top_k, b, a2, b2, sizes, along_r, out, *gradients):
        of_three = zip(gradients[::3], gradients[1::3], gradients[2::3])
        given = [gradient for gradient in of_three if gradient[0] is not None]
        low_rank(sizes, out.size(0), slot_of_row, top_k, (a, b, a2, b2, along_r, out), given)

    extension.status()  # where the extension can be loaded, it has defined the operators by now
    library = torch.library.Library("gbmoe_cuda", "FRAGMENT")
    try:
        functions = {"tensor_core_rows": rows, "tensor_core_weights": weights, "tensor_core_up": up, "few_rows_gemm": few_rows_gemm,
                     "few_rows_linear": few_rows_linear, "few_rows_up": few_rows_up, "rank_product": rank_product,
                     "rank_gradient": rank_gradient, "rank_product_and_gradients": rank_product_and_gradients}
        schemas = csrc_operators.schemas()
        for name in functions:
            if not hasattr(torch.ops.gbmoe_cuda, name):
                library.define(schemas[name])
            library.impl(name, functions[name], "CPU")
        yield
    finally:
        library._destroy()
