"""Checks the wheel of a release: its name, its size, what it links, the symbols that it takes from torch and glibc, its description.

    python scripts/check_wheel.py dist/gbmoe-0.2.0+cu13-py3-none-manylinux_2_28_x86_64.whl
    python scripts/check_wheel.py WHEEL --load environment/bin/python   # also loads the extension with that environment's torch

Needs nm and readelf (binutils) and no GPU.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from pathlib import Path

LARGEST = 100_000_000  # bytes; what package indexes take
# What the extension may need: torch and its cuBLAS, which torch brings, and what every manylinux system has.
_NEEDED = re.compile(r"lib(torch_cuda|torch_cpu|c10)\.so|libcublas\.so\.\d+|lib(stdc\+\+\.so\.6|gcc_s\.so\.1|c\.so\.6|m\.so\.6|dl\.so\.2"
                     r"|pthread\.so\.0|rt\.so\.1)|ld-linux-[\w-]+\.so\.\d")
# The C++ symbols that an object may need: those of the C++ library, unless made for a type of torch's, and those of csrc/, whose files need
# one another. Torch's own change from release to release; its stable ABI has C functions alone.
_CPP_LIBRARY = re.compile(r"_Z(T[VTIS]|GV)?[NVKROP]*(S[taiosd]|9__gnu_cxx|10__cxxabiv1)|_Z(n[wa]|d[la])|_ZT[IS]P?K?[a-z]$")
_OF_CSRC = re.compile(r"_Z(T[VTIS]|GV)?[NVKROP]*5gbmoe")
_OF_TORCH = re.compile(r"(?<!\d)(2at(?!E)|3c10|5torch|6caffe2)")  # "2atE" ends the name of std::string::at
_LINK = re.compile(r"\]\((?!\w+:)[^)]*\)")
_LOAD = """
import sys, torch
torch.ops.load_library(sys.argv[1])
print(f"torch {torch.__version__} loads it; Hopper's kernels inside: {hasattr(torch.ops.gbmoe_cuda, "hopper_rows")}")
"""


def wrong_name(wheel: Path, platform: str) -> list[str]:
    """What is wrong with a wheel's file name: it says the version with the CUDA major version, and the platform."""
    # auditwheel may put an older name of the same platform before it.
    form = rf"gbmoe-\d+(\.\d+)*((a|b|rc)\d+)?\+cu1[23]-py3-none-([\w.]+\.)?{re.escape(platform)}\.whl"
    expected = f"gbmoe-VERSION+cuMAJOR-py3-none-{platform}.whl"
    return [] if re.fullmatch(form, wheel.name) else [f"expected the name {expected}, got {wheel.name!r}"]


def wrong_size(size: int) -> list[str]:
    """What is wrong with a size in bytes."""
    return [] if size <= LARGEST else [f"expected at most {LARGEST / 1e6:.0f} MB, got {size / 1e6:.1f} MB"]


def wrong_libraries(needed: list[str], cuda_major: str) -> list[str]:
    """What is wrong with the libraries that the extension needs."""
    wrong = [f"the extension needs {name}, which not every system has" for name in needed if not _NEEDED.fullmatch(name)]
    cublas = f"libcublas.so.{cuda_major}"
    return wrong if cublas in needed else [*wrong, f"expected the extension to need {cublas}, it needs {', '.join(needed)}"]


def unstable_symbols(undefined: list[str]) -> list[str]:
    """Those of the undefined symbols that would tie an object to one release of torch, of Python or of another C++ library."""
    def is_cpp_library(name: str) -> bool:
        return bool(_CPP_LIBRARY.match(name)) and not _OF_TORCH.search(name)

    return [name for name in undefined if name.startswith(("Py", "_Py"))
            or (name.startswith("_Z") and not (_OF_CSRC.match(name) or is_cpp_library(name)))]


def wrong_symbols(undefined: list[str], platform: str) -> list[str]:
    """What is wrong with the symbols that the extension takes from elsewhere: no stable ABI, or a glibc newer than the platform's."""
    wrong = [f"{name} is not in torch's stable ABI" for name in unstable_symbols(undefined)]
    glibc = re.fullmatch(r"manylinux_(\d+)_(\d+)_\w+", platform)
    if glibc:
        oldest = (int(glibc[1]), int(glibc[2]))
        for name in undefined:
            version = re.search(r"@+GLIBC_(\d+)\.(\d+)", name)
            if version and (int(version[1]), int(version[2])) > oldest:
                wrong.append(f"{name} is not in glibc {oldest[0]}.{oldest[1]}")
    return wrong


def wrong_metadata(metadata: str, version: str) -> list[str]:
    """What is wrong with the text of METADATA, for a wheel whose name says `version`."""
    head, _, description = metadata.partition("\n\n")
    wrong = [] if f"Version: {version}" in head.splitlines() else [f"METADATA: expected Version: {version}"]
    if not description.strip():
        wrong.append("METADATA: there is no description")
    return [*wrong, *(f"METADATA: the link {link} leads nowhere outside of the repository" for link in _LINK.findall(description))]


def _lines(*command: str) -> list[str]:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def undefined_symbols(library: Path) -> list[str]:
    """The symbols that `library` takes from others, with their versions."""
    return [line.split()[-1] for line in _lines("nm", "-D", "--undefined-only", "--with-symbol-versions", str(library))]


def needed_libraries(library: Path) -> list[str]:
    """The names of the libraries that `library` is linked to."""
    return [found[1] for line in _lines("readelf", "-dW", str(library)) if (found := re.search(r"\(NEEDED\).*\[(.*)\]", line))]


def check(wheel: Path, platform: str, interpreters: list[str]) -> list[str]:
    """What is wrong with a wheel; prints what was looked at."""
    wrong = wrong_name(wheel, platform)
    if wrong:  # and the version is unknown
        return wrong
    wrong = wrong_size(wheel.stat().st_size)
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(wheel) as archive:
        metadata = next((name for name in archive.namelist() if name.endswith(".dist-info/METADATA")), None)
        if metadata is None:
            return [*wrong, "expected a file METADATA in the wheel"]
        wrong += wrong_metadata(archive.read(metadata).decode(), version)
        if "gbmoe/_C.so" not in archive.namelist():
            return [*wrong, "expected the extension gbmoe/_C.so in the wheel"]
        library = Path(archive.extract("gbmoe/_C.so", folder))
        undefined, needed = undefined_symbols(library), needed_libraries(library)
        wrong += wrong_libraries(needed, version.partition("+cu")[2]) + wrong_symbols(undefined, platform)
        print(f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, the extension {library.stat().st_size / 1e6:.1f} MB")
        print(f"it needs {', '.join(needed)}")
        print(f"it takes {sum(name.startswith(('aoti_torch_', 'torch_')) for name in undefined)} functions from torch, all of them C")
        for python in interpreters:
            loaded = subprocess.run([python, "-c", _LOAD, str(library)], cwd=folder, capture_output=True, text=True)
            print(loaded.stdout, end="")
            if loaded.returncode:
                wrong.append(f"{python} cannot load the extension: {(loaded.stderr.strip().splitlines() or ['no message'])[-1]}")
    return wrong


def main() -> int:
    """Check one wheel. Return 1 if something is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--platform", default="manylinux_2_28_x86_64", help="the platform that its name says (default: %(default)s)")
    parser.add_argument("--load", action="append", default=[], metavar="PYTHON",
                        help="an interpreter whose environment has a torch to load it with")
    arguments = parser.parse_args()
    try:
        wrong = check(arguments.wheel, arguments.platform, arguments.load)
    except (OSError, UnicodeDecodeError, subprocess.CalledProcessError, zipfile.BadZipFile, zlib.error) as error:
        wrong = [f"{str(arguments.wheel)!r}: expected a whole wheel: {error}"]
    for line in wrong:
        print(f"check_wheel.py: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
