"""What an installation does about the CUDA extension. setup.py asks `decide_here`; scripts/setup_env.sh runs this file with -m before it
calls pip, which shows nothing of a build that succeeds.

GBMOE_BUILD=1 asks for the extension and 0 for a package without it; GBMOE_REQUIRE_EXTENSION=1 is an older name of the former. Standard
library only: setup.py runs this file before gbmoe can be imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from pathlib import Path

from . import build, jobs
from .architectures import architectures
from .toolkit import CompileError, Nvcc, Torch, fitting_nvcc, way_out, why_not

OLDEST_SETUPTOOLS = 77  # the first that reads pyproject.toml's license
_NOT_ISOLATED = "pip install . --no-build-isolation, after: pip install 'setuptools>=77' wheel torch"


class Action(Enum):
    """What to do about the extension."""
    COMPILE = "compile"
    PURE = "leave out"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Decision:
    """What an installation does, why, and what helps where that is not what the user wants."""
    action: Action
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        """The error of a refused installation, in plain lines."""
        return f"gbmoe: the CUDA extension cannot be compiled: {self.reason}\n  remedy: {self.remedy}"


def decide(environment: Mapping[str, str], torch: Torch | None, nvcc: Nvcc | None, platform: str = sys.platform) -> Decision:
    """What an installation does. `torch` is the one that can be imported in the build; None in an isolated build."""
    wanted = environment.get("GBMOE_BUILD", "").strip()
    if wanted not in ("", "0", "1"):
        return Decision(Action.REFUSE, f"GBMOE_BUILD: expected 0 or 1, got {wanted!r}",
                        "set GBMOE_BUILD to 1 (compile), to 0 (leave out), or unset it")
    if wanted == "0":
        return Decision(Action.PURE, "GBMOE_BUILD=0")
    asked = "GBMOE_BUILD=1" if wanted else "GBMOE_REQUIRE_EXTENSION=1" if environment.get("GBMOE_REQUIRE_EXTENSION") == "1" else ""
    why = f" ({asked} asks for it)" if asked else ""
    if torch is None:
        isolated = f"torch cannot be imported in this build: an isolated build has none{why}"
        return Decision(Action.REFUSE if asked else Action.PURE, isolated, _NOT_ISOLATED)
    reason = why_not(nvcc, torch)
    if reason is None:
        return Decision(Action.COMPILE, "")
    if torch.cuda is not None and platform == "linux":  # then only the compiler is missing
        return Decision(Action.REFUSE, reason + why, f"{way_out(torch)}; or GBMOE_BUILD=0 installs gbmoe without kernels")
    return Decision(Action.REFUSE if asked else Action.PURE, reason + why, f"{way_out(torch)}{f', or unset {asked[:-2]}' if asked else ''}")


def importable_torch() -> Torch | None:
    """The torch of this environment; None where there is none. Raises CompileError where it is there and cannot be imported."""
    if find_spec("torch") is None:
        return None
    try:
        return Torch.imported()
    except Exception as error:  # a broken torch raises whatever its libraries do
        raise CompileError(f"torch is installed and cannot be imported: {error}", "repair torch; python -c 'import torch' shows how far") \
            from error


def decide_here() -> Decision:
    """`decide` for this process' environment."""
    if os.environ.get("GBMOE_BUILD", "").strip() == "0":
        return decide(os.environ, None, None)  # neither torch nor nvcc need be started
    try:
        torch = importable_torch()
    except CompileError as error:
        return Decision(Action.REFUSE, str(error), f"{error.remedy}; or GBMOE_BUILD=0 installs gbmoe without kernels")
    return decide(os.environ, torch, Nvcc.find() if torch is not None and torch.cuda else None)


def announcement(nvcc: Nvcc, chosen: list[str], limits: jobs.Jobs) -> str:
    """What will be compiled, and how long that takes."""
    seconds = build.estimate(build.source_folder(), chosen, limits.count)
    return (f"compiling the CUDA extension with nvcc {nvcc.version[0]}.{nvcc.version[1]} for {', '.join(chosen)}:"
            f" about {build.duration(seconds)} with {limits}; TORCH_CUDA_ARCH_LIST=9.0, or that of your GPU, is quicker")


def compile_ahead(folder: Path, target: Path) -> None:
    """Compile csrc/ in `folder` to `target` and record what it was made of, with a line for each step. Raises SystemExit, because editable
    installs swallow every Exception."""
    try:
        torch = Torch.imported()
        nvcc = fitting_nvcc(torch)
        chosen, limits = architectures(nvcc), jobs.jobs()
        facts = build.Facts(build.source_digest(folder), torch.cuda_major, tuple(chosen))
        if build.read_facts(target) == facts and build.whole(target):  # as when scripts/setup_env.sh installs the checkout again
            _say(f"{target} is up to date")
            return
        remove(target)
        _say(announcement(nvcc, chosen, limits))
        build.build(folder, target, nvcc, torch, chosen, limits, _say)
        build.record_facts(target, facts)
    except (CompileError, OSError) as error:
        remedy = getattr(error, "remedy", None)
        raise SystemExit(f"gbmoe: the CUDA extension failed to compile:\n{error}" + (f"\n  remedy: {remedy}" if remedy else "")) from error
    _say(f"compiled the CUDA extension for {', '.join(chosen)}")


def remove(target: Path) -> None:
    """Remove an object that was compiled ahead of time, and its facts."""
    for old in (target, build.facts_file(target)):
        old.unlink(missing_ok=True)


def _say(line: str) -> None:
    print(f"gbmoe: {line}", flush=True)


def too_old(setuptools_version: str) -> str | None:
    """None if this setuptools can build gbmoe, otherwise an error."""
    major = setuptools_version.split(".")[0]
    if major.isdigit() and int(major) >= OLDEST_SETUPTOOLS:
        return None
    return (f"gbmoe: setuptools {setuptools_version} is too old to build gbmoe, which needs {OLDEST_SETUPTOOLS} or newer\n"
            f"  remedy: pip install 'setuptools>={OLDEST_SETUPTOOLS}' wheel")


def main() -> int:
    """Print in one line what `pip install --no-build-isolation` will do here. Return 1 if it will refuse, so that a script can decide."""
    decision = decide_here()
    try:
        if decision.action == Action.COMPILE:
            nvcc = Nvcc.find()
            assert nvcc is not None
            print(announcement(nvcc, architectures(nvcc), jobs.jobs()))
        elif decision.action == Action.PURE:
            print(f"no CUDA extension: {decision.reason}")
        else:
            print(f"{decision.reason}. {decision.remedy}")
    except CompileError as error:
        print(error)
        return 1
    return 1 if decision.action == Action.REFUSE else 0


if __name__ == "__main__":
    sys.exit(main())
