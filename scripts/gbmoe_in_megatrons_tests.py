"""A plugin for pytest: gbmoe in Megatron-Core's own unit tests, of its repository, unchanged. conftest.py downloads no data with it.

    git clone --branch core_v0.19.0 https://github.com/NVIDIA/Megatron-LM && cd Megatron-LM
    PYTHONPATH=GBMOE/scripts:GBMOE torchrun --nproc_per_node 2 -m pytest -p gbmoe_in_megatrons_tests \\
        ./tests/unit_tests/transformer/moe

GBMOE is a checkout of gbmoe; scripts/test_frameworks.sh makes the environment. With WITHOUT_GBMOE=1 the same tests run without gbmoe, so
that what fails without it, too, is known. A report (--junit-xml) says of each test, as its property "gbmoe", what of gbmoe it used:
experts-made, experts, permutation, router. test_moe_experts.py, which makes TEGroupedMLP by name, makes gbmoe's experts.

Without TransformerEngine its specifications become Megatron's local ones, and tests that are skipped below its release 2.1.0 run. Without a
GPU what tests put on one is on the CPU, gloo replaces nccl, and TransformerEngine counts as not installed, since its modules need a GPU.
"""

import contextlib
import functools
import gc
import inspect
import os
import sys
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch.overrides import TorchFunctionMode


class _OnTheCpu(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.to:
            args = tuple(map(_cpu, args))
        return function(*args, **{name: _cpu(value) if name == "device" else value for name, value in (kwargs or {}).items()})


def _cpu(value):
    named = isinstance(value, (str, torch.device)) and str(value).startswith("cuda")
    return torch.device("cpu") if named else value


def _without_a_gpu():
    _OnTheCpu().__enter__()
    torch.nn.Module.cuda = lambda self, *_: self
    torch._dynamo.config.disable = True  # what Megatron compiles would be compiled for a GPU
    none = {name: lambda *_, **__: None for name in ("set_device", "synchronize", "manual_seed_all", "empty_cache")}
    state = {"get_rng_state": lambda *_, **__: torch.get_rng_state(), "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
             "manual_seed": lambda seed: torch.default_generator.manual_seed(int(seed))}
    for name, value in {**none, **state, "is_available": lambda: True, "current_device": lambda: torch.device("cpu"), "device_count":
                        lambda: 1, "get_device_capability": lambda *_: (9, 0), "is_current_stream_capturing": lambda: False,
                        "current_stream": lambda *_: mock.MagicMock(), "stream": lambda *_: contextlib.nullcontext(),
                        "Stream": mock.MagicMock, "Event": mock.MagicMock}.items():
        setattr(torch.cuda, name, value)
    torch.cuda.memory.empty_cache = none["empty_cache"]
    init = torch.distributed.init_process_group
    torch.distributed.init_process_group = lambda backend=None, **keywords: init("gloo", **keywords)
    from megatron.core.tensor_parallel import random

    random._set_cuda_rng_state = lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()


def _without_transformer_engine():
    from megatron.core import utils
    from megatron.core.models.gpt import gpt_layer_specs

    wanted = ("1.7.0", "1.7.0.dev0", "1.9.0.dev0", "2.1.0")  # below which tests are skipped
    theirs = utils.is_te_min_version
    utils.is_te_min_version = lambda version, check_equality=True: version in wanted or theirs(version, check_equality)
    local = {name: getattr(gpt_layer_specs, f"get_gpt_layer_local_{name}") for name in ("submodules", "spec")}
    known = inspect.signature(local["submodules"]).parameters
    for name, function in local.items():
        def instead(*args, function=function, **keywords):
            return function(*args, **{keyword: value for keyword, value in keywords.items() if keyword in known})
        setattr(gpt_layer_specs, f"get_gpt_layer_with_transformer_engine_{name}", instead)


def _noted(name, function):
    @functools.wraps(function)
    def noting(*args, **keywords):
        _called.add(name)
        return function(*args, **keywords)
    return noting


def _install_gbmoe():
    from gbmoe.compat.megatron import GroupedExperts, install, installation

    GroupedExperts.__init__ = _noted("experts-made", GroupedExperts.__init__)
    GroupedExperts.forward = _noted("experts", GroupedExperts.forward)
    for kind, functions in (("permutation", installation._PERMUTATION), ("router", installation._ROUTER)):
        functions.update({name: _noted(kind, function) for name, function in functions.items()})
    install()
    return GroupedExperts


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for module in {item.module for item in items if item.path.name == "test_moe_experts.py"}:
        module.TEGroupedMLP = _made_instead or module.TEGroupedMLP
    gc.freeze()  # what was imported is not looked through again before each test


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    # Containers of tests that failed take down the parallel groups when they are collected, which may be in the middle of a later test.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        vars(sys).pop(name, None)
    gc.collect()
    _called.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    finally:
        item.user_properties.append(("gbmoe", " ".join(sorted(_called))))


_called: set[str] = set()  # what the test that runs has used of gbmoe
sys.modules["tests.test_utils.python_scripts.download_unit_tests_dataset"] = mock.MagicMock()
if not torch.cuda.is_available():  # before Megatron is imported, which asks for devices and for TransformerEngine
    sys.modules.update(dict.fromkeys(("transformer_engine", "transformer_engine_torch")))
    _without_a_gpu()
_made_instead = _install_gbmoe() if os.environ.get("WITHOUT_GBMOE") != "1" else None
from megatron.core.extensions.transformer_engine import HAVE_TE  # noqa: E402

if not HAVE_TE:
    _without_transformer_engine()
