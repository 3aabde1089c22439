"""What `import gbmoe` must not do."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_python import python

PROBE = """
import json, sys
before = set(sys.modules)
import torch
with_torch = set(sys.modules)
import gbmoe
print(json.dumps({
    "cuda": torch.cuda.is_initialized(),
    "modules": sorted(m for m in set(sys.modules) - with_torch if "." not in m or m == "torch._dynamo"),
    "names": [n for n in gbmoe.__all__ if not hasattr(gbmoe, n)],
}))
"""


def test_import_starts_no_cuda_and_imports_no_rival_nor_the_compiler():
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, env={**os.environ})
    seen = json.loads(done.stdout)
    assert seen["cuda"] is False
    assert not {"triton", "megablocks", "stk", "grouped_gemm", "transformers", "rich", "matplotlib", "torch._dynamo"} & set(seen["modules"])
    assert seen["names"] == []
    assert done.stderr == ""


STATE = """
import importlib, json, logging, os, pkgutil, signal, sys, threading, types, warnings

warnings.simplefilter("ignore")  # reading every attribute finds deprecated ones
import torch

OTHERS = {others}
for name in OTHERS:
    try:
        importlib.import_module(name)
    except ImportError:  # not installed; or MegaBlocks without Triton
        pass
PACKAGES = ("torch", *(name.partition(".")[0] for name in OTHERS))
# Where torch keeps operators, gbmoe's among them.
OPERATORS = ("torch.library._defs", "torch.library._impls", "torch.jit._builtins._builtin_table", "torch.ops._dir")
# What Python writes into a class that is derived from.
DERIVED = ("__abstractmethods__", "_abc_impl", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__")


def contents(value):
    return [id(value), len(value)] if isinstance(value, (dict, list, set)) else id(value)


def of_the_process():
    loggers = [("root", logging.root), *((name, logging.root.manager.loggerDict[name]) for name in known_loggers)]
    return {{
        "meta_path": repr(sys.meta_path), "path_hooks": repr(sys.path_hooks), "path": list(sys.path), "folder": os.getcwd(),
        "hooks": repr([sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()]),
        "warnings": repr(warnings.filters), "environment": dict(os.environ), "threads": threading.active_count(),
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "logging": [[name, getattr(logger, "level", None), repr(getattr(logger, "handlers", None))] for name, logger in loggers],
        "torch": repr([flag() for flag in (
            torch.get_default_dtype, torch.get_default_device, torch.is_grad_enabled, torch.is_autocast_enabled, torch.get_num_threads,
            torch.are_deterministic_algorithms_enabled, torch.get_float32_matmul_precision, torch.is_anomaly_enabled,
            torch.initial_seed, torch.cuda.is_initialized)]),
        "backends": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark,
                     torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction],
    }}


def of_other_packages():
    found = {{f"sys.modules[{{name!r}}]": id(sys.modules.get(name)) for name in known}}
    for name in known:
        if name.partition(".")[0] not in PACKAGES or not isinstance(sys.modules.get(name), types.ModuleType):
            continue
        for key, value in list(vars(sys.modules[name]).items()):
            if not isinstance(value, types.ModuleType) and f"{{name}}.{{key}}" not in OPERATORS:
                found[f"{{name}}.{{key}}"] = contents(value)
            if isinstance(value, type):
                found.update((f"{{value.__module__}}.{{value.__qualname__}}.{{key}}", id(kept)) for key, kept in list(vars(value).items())
                             if key not in DERIVED)
    return found


known, known_loggers = sorted(sys.modules), sorted(logging.root.manager.loggerDict)
keep = [list(vars(module).values()) for module in sys.modules.values() if hasattr(module, "__dict__")]  # no id is given twice
before = of_the_process() | of_other_packages()

import gbmoe
# __main__ is a program. gbmoe.compat.megablocks.layers imports MegaBlocks, and register() imports it; gbmoe.compat.torchtitan,
# gbmoe.compat.megatron and gbmoe.compat.olmo_core import torchtitan, Megatron-Core and OLMo-core.
imported = [found.name for found in pkgutil.walk_packages(gbmoe.__path__, "gbmoe.")
            if found.name not in ("gbmoe.__main__", "gbmoe.compat.megablocks.layers", "gbmoe.compat.torchtitan", "gbmoe.compat.megatron",
                              "gbmoe.compat.olmo_core")]
unfit = []
for name in imported:
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        unfit.append(error.name)

after = of_the_process() | of_other_packages()
print(json.dumps({{"imported": len(imported), "unfit": unfit, "changed": sorted(key for key in before if before[key] != after.get(key))}}))
"""


@pytest.mark.parametrize("others", [(), ("torch.utils.flop_counter", "transformers", "megablocks", "stk", "matplotlib.pyplot")],
                         ids=["torch alone", "others are imported"])
def test_importing_every_module_changes_nothing_elsewhere(others):
    """`import gbmoe` left a finder in sys.meta_path that patched the loader of a module of torch, and the pictures chose matplotlib's
    backend for the whole process."""
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    done = subprocess.run([python("torch"), "-c", STATE.format(others=others)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["imported"] > 80 and set(seen["unfit"]) <= {"matplotlib"}
    assert seen["changed"] == []


def test_layer_and_operators_on_the_cpu_never_ask_for_the_extension(monkeypatch):
    import torch

    import gbmoe
    from gbmoe.extension import loader

    monkeypatch.setattr(loader, "load", lambda: (_ for _ in ()).throw(AssertionError("asked for the extension")))
    layer = gbmoe.dMoE(gbmoe.Arguments(hidden_size=16, ffn_hidden_size=32, moe_num_experts=2, fp16=False, device="cpu"))
    out, _ = layer(torch.randn(3, 1, 16))
    out.sum().backward()


def test_adapters_imported_what_other_modules_call_private():
    """A name with an underscore is used in its own module alone. A module whose own name has one is private to gbmoe."""
    folder = Path(__file__).parents[1] / "gbmoe"
    taken = []
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "gbmoe":
                source = folder.joinpath(*node.module.split(".")[1:])
                taken += [f"{path.name}: {node.module}.{alias.name}" for alias in node.names
                          if alias.name.startswith("_") and alias.name != "__version__"
                          and not (source / f"{alias.name}.py").exists() and not (source / alias.name).is_dir()]
    assert taken == []
