"""Describe what gbmoe runs on: device, versions, extension and engines, for `info` and for a benchmark's result file."""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

import gbmoe
from gbmoe import engines, extension
from gbmoe.extension import build, loader
from gbmoe.problem import Problem, allows_tf32

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


def device_argument(text: str) -> torch.device:
    """argparse type of --device: cpu or cuda."""
    if text not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"expected cpu or cuda, got {text!r}")
    if text == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"torch {torch.__version__} sees no CUDA device")
    return torch.device("cuda", torch.cuda.current_device())


def _output(*command: str) -> str | None:
    """The output of a command, or None where it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _cpu_name() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def describe_machine(device: torch.device) -> dict:
    """The device and the CPU. The CUDA driver is asked only about a CUDA device."""
    machine = {"device": device.type, "cpu": _cpu_name(), "cpu_cores": os.cpu_count(),
               "threads": torch.get_num_threads()}
    if device.type != "cuda":
        return machine | {"name": machine["cpu"]}
    properties = torch.cuda.get_device_properties(device)
    driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return machine | {
        "name": properties.name, "capability": f"{properties.major}.{properties.minor}",
        "memory_bytes": properties.total_memory, "l2_bytes": properties.L2_cache_size,
        "driver": driver.splitlines()[0] if driver else None,
    }


def describe_clocks(device: torch.device) -> dict | None:
    """The current clocks in MHz, power in W and temperature in degrees Celsius of a CUDA device; None for other devices."""
    if device.type != "cuda":
        return None
    fields = ("clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.draw", "power.limit",
              "temperature.gpu")
    # By its UUID, because the driver's numbers of devices differ from those of torch under CUDA_VISIBLE_DEVICES.
    line = _output("nvidia-smi", f"--id=GPU-{str(torch.cuda.get_device_properties(device).uuid).removeprefix('GPU-')}",
                   f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    return dict(zip(fields, line.split(", "))) if line else None


def describe_versions() -> dict:
    """Versions, and the commit where gbmoe is imported from a checkout (`dirty`: tracked files differ from it).

    GBMOE_COMMIT names the commit for a copy that has no .git, or another repository's, as on a compute node.
    """
    root = Path(gbmoe.__file__).parent.parent
    told = os.environ.get("GBMOE_COMMIT")
    ask = told is None and (root / ".git").exists()
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD") if ask else None
    changes = _output("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no") if commit else None
    return {
        "gbmoe": gbmoe.__version__, "commit": commit or told, "dirty": bool(changes) if commit else None,
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
    }


def describe_extension() -> dict:
    """Whether the CUDA extension is loaded, its file and architectures, and the CUDA and torch versions that it was built against; else
    why not, and what helps. Where there is no GPU, the file is the one that would be loaded."""
    status = extension.status()
    path, architectures = status.path, status.architectures
    if path is None:
        ready = next(iter(loader.usable()), None)
        path, architectures = (ready.path, ready.architectures) if ready else (None, ())
    if path is None and loader.AHEAD_OF_TIME.exists():
        path = loader.AHEAD_OF_TIME
    described = {"loaded": status.loaded, "reason": status.reason, "remedy": status.remedy, "note": status.note,
                 "path": str(path) if path else None, "architectures": list(architectures), "compiled": None, "built_against": None}
    if path is not None:
        # The only trace of the CUDA version in the file is the name of the cuBLAS library that it links.
        cublas = re.search(rb"libcublas\.so\.(\d+)", path.read_bytes())
        target = int(build.TORCH_TARGET_VERSION, 16)
        described["compiled"] = "ahead of time" if path == loader.AHEAD_OF_TIME else "into the cache"
        described["built_against"] = {"cuda_major": int(cublas[1]) if cublas else None,
                                      "torch_at_least": f"{target >> 56}.{target >> 48 & 0xFF}"}
    return described


def refusal(engine: str, device: torch.device, dtype: torch.dtype, rows: int, groups: int, inner: int,
            columns: int) -> str | None:
    """None if `engine` can compute a product of these shapes and both its gradients, otherwise the reason why not."""
    if engine == "auto":
        return None
    problems = [Problem(device, dtype, rows, groups, *shape, k_grouped, tf32=allows_tf32(dtype))
                for shape in ((inner, columns), (columns, inner)) for k_grouped in (False, True)]
    return next(filter(None, map(engines.ENGINES[engine].refuses, problems)), None)
