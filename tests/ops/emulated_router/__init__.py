"""The router's kernels for logits of any type on a CPU: their own source, compiled by the C++ compiler, with the instructions of a GPU
emulated as in tests/engines/emulated_gpu. Those for bfloat16 alone are not: they are made of instructions for pairs of numbers."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import torch

from gbmoe import extension
from gbmoe.launch import router
from gbmoe.tuning import router_kernels as tuning

_HERE = Path(__file__).parent
_STAND_INS = {"common.cuh": "common.cuh", "early_launch.cuh": "early_launch.cuh", "approximations.cuh": "router/approximations.cuh"}
_SCALAR_TYPES = {torch.float16: 5, torch.float32: 6, torch.bfloat16: 15}  # of torch


class _Config(ctypes.Structure):
    """RouterConfig, field by field; and so are those below."""
    _fields_ = [(name, ctypes.c_int64) for name in tuning.RouterConfig._fields]


class _Numbers(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("dtype", ctypes.c_int8)]

    @classmethod
    def of(cls, tensor):
        return cls(None, 6) if tensor is None else cls(tensor.data_ptr(), _SCALAR_TYPES[tensor.dtype])


class _Shape(ctypes.Structure):
    _fields_ = [("tokens", ctypes.c_int64), ("experts", ctypes.c_int), ("slots", ctypes.c_int), ("p", ctypes.c_float)]


class _Function(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_int) for name in ("kind", "groups", "group_topk", "group_best")), ("normalize", ctypes.c_bool),
                ("epsilon", ctypes.c_float), ("scale", ctypes.c_float)]


class _Tensors(ctypes.Structure):
    _fields_ = [("logits", _Numbers), *((name, ctypes.c_void_p) for name in ("bias", "padding", "given")), ("scores", _Numbers),
                ("weights", _Numbers), ("ids", ctypes.c_void_p), ("logsumexp", ctypes.c_void_p)]


class _Gradients(ctypes.Structure):
    _fields_ = [("logits", _Numbers), ("ids", ctypes.c_void_p), ("padding", ctypes.c_void_p), ("grad_scores", _Numbers),
                ("grad_weights", _Numbers), ("grad_logsumexp", ctypes.c_void_p), ("grad", _Numbers)]


class _Run(ctypes.Structure):
    """emulated_gpu::Run, field by field."""
    _fields_ = [("ctas", ctypes.c_int), ("late_copies", ctypes.c_int), ("large_memory", ctypes.c_int), ("seed", ctypes.c_uint),
                ("ranges", ctypes.c_int), ("begin", ctypes.c_size_t * 4), ("end", ctypes.c_size_t * 4)]


def compile_kernels(folder: Path) -> ctypes.CDLL:
    """Compile the kernels with their stand-ins in `folder`, and load them."""
    source = folder / "csrc"
    shutil.copytree(extension.source_folder() / "router", source / "router")
    for name, place in _STAND_INS.items():
        shutil.copy(_HERE / name, source / place)
    shutil.copy(_HERE.parents[1] / "engines" / "emulated_gpu" / "emulated_gpu.h", source / "emulated_gpu.h")
    library = folder / "router.so"
    options = ["-std=c++17", "-Og", "-shared", "-fPIC", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-fno-extern-tls-init",
               "-U_FORTIFY_SOURCE", "-ffp-contract=off"]
    subprocess.run(["g++", *options, "-I", str(folder), "-I", str(Path(torch.__file__).parent / "include"), str(_HERE / "instances.cpp"),
                    "-o", str(library)], check=True)
    kernels = ctypes.CDLL(str(library))
    kernels.failure.restype = ctypes.c_char_p
    return kernels


class Router:
    """forward and backward as route and route_backward of gbmoe.launch.router, by the emulated kernels."""

    def __init__(self, kernels: ctypes.CDLL, seed: int = 0):
        self._kernels, self._seed = kernels, seed

    def _call(self, function, *arguments):
        run = _Run(0, 0, 0, self._seed, 0)
        by_reference = [ctypes.byref(a) if isinstance(a, ctypes.Structure) else a for a in (*arguments, run)]
        assert function(*by_reference), "there is no such instance"
        assert self._kernels.failure() is None, self._kernels.failure().decode()

    def forward(self, logits, expert_bias, padding_mask, given, top_k, function, scores_dtype):
        plain = router.is_softmax_topk(function, expert_bias, padding_mask, given)
        outputs = router.empty_routing(logits, logits.shape, top_k, logits.dtype, scores_dtype)
        for tensor in outputs:
            tensor.fill_(-77)
        scores, weights, ids, logsumexp = outputs
        kind, *groups, p, epsilon, scale = router.formula(function.code, plain)
        shape = _Shape(logits.size(0), logits.size(1), top_k, p)
        if plain:
            config = tuning.forward(logits.size(1), top_k, False, p not in (0, 1, 2))
            self._call(self._kernels.forward, _Config(*config), *map(_Numbers.of, (logits, scores, weights)), _pointer(ids),
                       _pointer(logsumexp), shape)
            return outputs
        config = tuning.any_function(logits.size(1), top_k)
        given = None if given is None else given.long()
        tensors = _Tensors(_Numbers.of(logits), *map(_address, (expert_bias, padding_mask, given)), _Numbers.of(scores),
                           _Numbers.of(weights), ids.data_ptr(), logsumexp.data_ptr())
        self._call(self._kernels.function_forward, _Config(*config), tensors, shape, _Function(kind, *groups, p != 0, epsilon, scale))
        return outputs

    def backward(self, saved, ids, padding_mask, grad_scores, grad_weights, grad_logsumexp, code, of_scores, dtype):
        kind, *groups, p, epsilon, scale = router.formula(code, of_scores)
        shape, grad = _Shape(saved.size(0), saved.size(1), ids.size(1), p), torch.full(saved.shape, -77, dtype=dtype)
        if of_scores:
            config = tuning.backward(saved.size(1), ids.size(1), dtype == torch.float32, p not in (0, 1, 2))
            self._call(self._kernels.backward, _Config(*config), _Numbers.of(saved), _pointer(ids), _Numbers.of(grad_scores),
                       _Numbers.of(grad_weights), _pointer(grad_logsumexp), _Numbers.of(grad), shape)
            return grad
        config = tuning.any_function_backward(saved.size(1))
        tensors = _Gradients(_Numbers.of(saved), ids.data_ptr(), _address(padding_mask), _Numbers.of(grad_scores),
                             _Numbers.of(grad_weights), _address(grad_logsumexp), _Numbers.of(grad))
        self._call(self._kernels.function_backward, _Config(*config), tensors, shape, _Function(kind, *groups, p != 0, epsilon, scale))
        return grad


def _address(tensor):
    return None if tensor is None else tensor.data_ptr()


def _pointer(tensor):
    return ctypes.c_void_p(_address(tensor))
