"""The compiled CUDA kernels: loader.py finds and loads them, cache.py keeps objects that were compiled at first use or by `gbmoe build`,
build.py compiles csrc/, and install.py decides what an installation does.

Without the extension every operator still works through PyTorch; with GBMOE_REQUIRE_EXTENSION=1 its absence is an error.
"""

from gbmoe.extension.build import source_folder
from gbmoe.extension.loader import Status, load, loaded, status

__all__ = ["Status", "load", "loaded", "source_folder", "status"]
