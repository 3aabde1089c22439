"""gbmoe as a package of the kernels hub, which `kernels.get_kernel` loads under a name of its own.

gbmoe's modules import one another by the name `gbmoe`, and register their operators under it, so a process has one gbmoe: the first that it
imports. If that is another version than the one in this folder, loading this package is an ImportError.
"""

import importlib.util
import runpy
import sys
from pathlib import Path

# Not resolved: in the hub's cache files are links to files of other names.
_FOLDER = Path(__file__).parent / "gbmoe"


def _load() -> None:
    """Make the gbmoe in this folder the process's, if it has none."""
    version = runpy.run_path(str(_FOLDER / "_version.py"))["__version__"]
    loaded = sys.modules.get("gbmoe")
    if loaded is not None:
        if loaded.__version__ != version:
            raise ImportError(f"gbmoe of the kernels hub: expected no other gbmoe than {version} in this process, got"
                              f" {loaded.__version__} from {loaded.__file__}, which was imported before")
        return
    spec = importlib.util.spec_from_file_location("gbmoe", _FOLDER / "__init__.py")
    sys.modules["gbmoe"] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for name in [name for name in sys.modules if name.partition(".")[0] == "gbmoe"]:
            del sys.modules[name]
        raise


_load()

import gbmoe  # noqa: E402
from gbmoe import *  # noqa: E402, F403

from . import layers  # noqa: E402

__all__ = [*gbmoe.__all__, "gbmoe", "layers"]
