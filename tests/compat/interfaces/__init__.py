"""What training frameworks promise to gbmoe's adapters, written down: as much of each as an adapter touches, on a CPU.

`installed` puts one of them where `import` finds it. Where the package itself is installed, in the release that the adapter was tested
with, the tests run in it instead; scripts/test_frameworks.sh installs them.
"""

import contextlib
import importlib
import importlib.metadata
import sys
from pathlib import Path

HERE = Path(__file__).parent
# The package as pip names it -> its release, and the modules that come with it.
PACKAGES = {"torchtitan": ("0.3.0", ("torchtitan", "spmd_types")), "nemo-automodel": ("0.7.0", ("nemo_automodel",)),
            "prime-rl": ("0.8.0", ("prime_rl",)), "megatron-core": ("0.19.2", ("megatron",)),
            "ai2-olmo-core": ("3.0.0", ("olmo_core",))}


def is_real(package):
    """Whether the package itself is installed, in the release that its adapter was tested with."""
    try:
        return importlib.metadata.version(package).partition("+")[0] == PACKAGES[package][0]
    except importlib.metadata.PackageNotFoundError:
        return False


@contextlib.contextmanager
def installed(package, adapter, folder, version=None):
    """Within it, the package can be imported, and the adapter's module is imported with it.

    Args:
        folder: an empty one, which gets what pip would write about the package.
        version: of the interface; None is the release that the adapter was tested with, and takes the package itself where it is there.
    """
    release, modules = PACKAGES[package]
    if version is None and is_real(package):
        yield
        return
    written = folder / f"{package.replace('-', '_')}-{version or release}.dist-info"
    written.mkdir()
    (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version or release}\n")
    path, others = list(sys.path), _taken_out(adapter, *modules)
    sys.path[:0] = [str(folder), str(HERE)]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = path
        _taken_out(adapter, *modules)
        sys.modules.update(others)


def _taken_out(*modules):
    """The modules of these names and all below them, which are no longer in sys.modules."""
    names = [name for name in sys.modules if any(name == module or name.startswith(f"{module}.") for module in modules)]
    return {name: sys.modules.pop(name) for name in names}
