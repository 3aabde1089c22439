"""Lays out a wheel of gbmoe as a repository of the kernels hub, which Hugging Face's `kernels` loads. Needs neither torch nor `kernels`.

    python packaging/kernels_hub.py dist/gbmoe-0.2.0+cu13-py3-none-manylinux_2_28_x86_64.whl FOLDER

writes FOLDER/build/torch-stable-abi210-cu130-x86_64-linux/, or build/torch-cpu/ of a wheel without the extension: gbmoe/ as it is in the
wheel, hub_package/'s files, and metadata.json. Wheels of several CUDA versions go into one FOLDER. kernels.get_local_kernel(FOLDER) loads
it.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import zipfile
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_STABLE_ABI = "210"  # TORCH_TARGET_VERSION of gbmoe/extension/build.py: torch 2.10
# The oldest minor version of CUDA that torch 2.10 and later are built for, by major version; an object serves those after it.
_CUDA = {12: "126", 13: "130"}


def lay_out(wheel: Path, folder: Path, version: int) -> Path:
    """Write the build variant of a wheel, in the place of an older one. `version` is the hub's, which counts changes of the interface.

    Returns the variant's folder. Raises ValueError where the wheel is none of gbmoe's, or for no platform that the hub knows.
    """
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("gbmoe/")]
        if "gbmoe/_version.py" not in names:
            raise ValueError(f"wheel: expected a wheel of gbmoe, got {wheel.name}")
        variant, backend = _variant_of(wheel, json.loads(archive.read("gbmoe/_C.so.json")) if "gbmoe/_C.so.json" in names else None)
        target = folder / "build" / variant
        shutil.rmtree(target, ignore_errors=True)
        archive.extractall(target, names)
    for file in (_HERE / "hub_package").glob("*.py"):
        shutil.copy(file, target)
    files = {path.relative_to(target).as_posix(): _digest(path) for path in sorted(target.rglob("*")) if path.is_file()}
    whole = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    # The hub asks for an id that no other build has: the module is called so.
    metadata = {"name": "gbmoe", "id": f"_gbmoe_{backend['type']}_{whole[:8]}", "version": version, "license": "Apache-2.0",
                "python-depends": [], "backend": backend, "digest": {"algorithm": "sha256", "files": files}}
    (target / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n", encoding="utf-8")
    return target


def _variant_of(wheel: Path, facts: dict | None) -> tuple[str, dict]:
    """The variant's name, and the backend in its metadata; `facts` are those of the extension (gbmoe/extension/build.py)."""
    if facts is None:
        return "torch-cpu", {"type": "cpu"}
    machine = re.search(r"linux_(?:\d+_\d+_)?(x86_64|aarch64)\.whl$", wheel.name)
    if machine is None or facts["cuda_major"] not in _CUDA:
        raise ValueError(f"wheel: expected one for linux, x86_64 or aarch64, and CUDA {' or '.join(map(str, _CUDA))}, got {wheel.name} for"
                         f" CUDA {facts['cuda_major']}")
    name = f"torch-stable-abi{_STABLE_ABI}-cu{_CUDA[facts['cuda_major']]}-{machine[1]}-linux"
    return name, {"type": "cuda", "archs": facts["architectures"]}


def _digest(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--version", type=int, default=0, help="the hub's version of the interface; 0 for one that may still change")
    arguments = parser.parse_args()
    print(lay_out(arguments.wheel, arguments.folder, arguments.version))


if __name__ == "__main__":
    main()
