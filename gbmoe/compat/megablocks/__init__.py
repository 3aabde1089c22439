"""MegaBlocks: mlp_impl='gbmoe' in the package itself (register), and its ops on gbmoe's operators (.ops).

    import gbmoe.compat.megablocks
    gbmoe.compat.megablocks.register()          # before the first import of megablocks

    from megablocks.layers.arguments import Arguments
    from megablocks.layers.dmoe import dMoE
    layer = dMoE(Arguments(mlp_impl="gbmoe"))   # everything else as before

`python -m gbmoe install-megablocks` installs MegaBlocks next to any torch. For `ops` it need not be installed.
"""

from __future__ import annotations

import importlib
import sys
import warnings

from gbmoe._importable import is_importable
from gbmoe.compat import grouped_gemm

__all__ = ["register"]

_NEEDED = {"megablocks": "megablocks", "stanford-stk": "stk", "numpy": "numpy", "packaging": "packaging"}


def register() -> None:
    """Make megablocks.layers.arguments.Arguments(mlp_impl='gbmoe') work, with mlp_type 'mlp' and 'glu'. Idempotent.

    The installed files of MegaBlocks 0.10 do not change. In this process it gets

    - experts for 'gbmoe' in its registry, and a branch to them in ParallelDroplessMLP: one plan and gbmoe.expert_mlp
      instead of its sort, gathers, products and scatters, also with expert parallelism. Its router, losses, bias,
      shared expert, and the names, shapes and initial values of its parameters remain its own;
    - stand-ins for modules that it imports and that are missing: `megablocks_ops`, its CUDA extension; `grouped_gemm` (see
      gbmoe.compat.grouped_gemm.register); and without Triton the modules that need it. All of its layers then run on a
      CPU, except mlp_impl='sparse';
    - "cpu" as the default of `Arguments.device` where there is no CUDA device, instead of an error.

    Call it before the first import of megablocks, in every process (spawned ones too), so that the stand-ins are found. Where
    MegaBlocks' own extension, grouped_gemm and Triton are installed, the order does not matter.

    Raises:
        ModuleNotFoundError: where MegaBlocks, or something it needs, is not installed.
    """
    for package, module in _NEEDED.items():
        if not is_importable(module):
            raise ModuleNotFoundError(
                f"gbmoe.compat.megablocks.register: expected the package {package}, found no module {module!r};"
                " `python -m gbmoe install-megablocks` installs MegaBlocks and what it needs, next to any torch",
                name=module)
    grouped_gemm.register()
    try:
        import megablocks_ops  # noqa: F401
    except ImportError as error:
        if error.name != "megablocks_ops":  # it is installed, but was built for another torch
            warnings.warn(f"megablocks_ops is installed and cannot be imported; gbmoe's stand-in takes its place: {error}",
                          RuntimeWarning, stacklevel=2)
        _stand_in("megablocks_ops", "megablocks_ops")
    if not is_importable("triton"):
        _stand_in("megablocks.backend.kernels", "kernels")
        _stand_in("stk.backend.triton_kernels", "stk_kernels")
    importlib.import_module("gbmoe.compat.megablocks.layers").install()


def _stand_in(name: str, module: str) -> None:
    sys.modules[name] = importlib.import_module(f"gbmoe.compat.megablocks.{module}")
