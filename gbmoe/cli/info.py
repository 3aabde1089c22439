"""`gbmoe info`: versions, device, extension and engines, for people and, with --json, for programs."""

from __future__ import annotations

import argparse
import json

from gbmoe import engines
from gbmoe.cli.describe_system import describe_extension, describe_machine, describe_versions
from gbmoe.cli.layout_table import ENGINES, layouts_by_engine
from gbmoe.cli.text_table import print_table
from gbmoe.layers.arguments import default_device

EXAMPLES = """\
python -m gbmoe info
python -m gbmoe info --json | python -m json.tool
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --json."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def collect() -> dict:
    """Everything that `info` shows. Only where there is a CUDA device, this starts a CUDA context and may build the extension."""
    device = default_device()
    reasons = engines.availability(device) | engines.recipes_availability(device)
    available = {name: {"available": reason is None, "reason": reason} for name, reason in reasons.items()}
    return {"versions": describe_versions(), "machine": describe_machine(device), "extension": describe_extension(),
            "engines": available, "auto": engines.taken_by_auto(device), "layouts": layouts_by_engine()}


def run(arguments: argparse.Namespace) -> int:
    """Print what `collect` returns."""
    found = collect()
    if arguments.json:
        print(json.dumps(found, indent=2))
        return 0
    print(_text(found))
    print("\nWeights that engines read in place, and where the activation is fused into the first product (bfloat16, SwiGLU, rows in"
          " multiples of 8\nelements, many rows an expert; gbmoe.expert_path says it of given tensors, with the reason):")
    print_table([("layout", "<"), *((engine, "<") for engine in ENGINES)],
                [(name, *of_engine.values()) for name, of_engine in found["layouts"].items()])
    return 0


def _text(found: dict) -> str:
    versions, machine, extension = found["versions"], found["machine"], found["extension"]
    gbmoe = versions["gbmoe"]
    if versions["commit"]:
        gbmoe += f", commit {versions['commit'][:12]}{' with changes' if versions['dirty'] else ''}"
    device = machine["name"]
    if machine["device"] == "cuda":
        device += (f", compute capability {machine['capability']}, {machine['memory_bytes'] / 2**30:.0f} GiB,"
                   f" driver {machine['driver'] or 'unknown'}")
    facts = {
        "gbmoe": gbmoe, "python": versions["python"], "torch": versions["torch"], "CUDA": versions["cuda"] or "none",
        "device": f"{machine['device']}: {device}", "CPU": f"{machine['cpu']}, {machine['threads']} threads in use",
        "extension": "loaded" if extension["loaded"] else f"not loaded: {extension['reason']}",
    }
    if extension["remedy"]:
        facts["  what helps"] = extension["remedy"]
    if extension["path"]:
        against = extension["built_against"]
        facts["  file"] = f"{extension['path']}, compiled {extension['compiled']}"
        facts["  built against"] = f"CUDA {against['cuda_major'] or 'unknown'}, stable ABI of torch {against['torch_at_least']}"
        facts["  architectures"] = ", ".join(extension["architectures"]) or "unknown"
    if extension["note"]:
        facts["  note"] = extension["note"]
    facts["engines"] = ""
    for name, engine in found["engines"].items():
        facts[f"  {name}"] = "yes" if engine["available"] else f"no: {engine['reason']}"
    facts["engine auto"] = "takes, for groups of many rows and of few:"
    for dtype, names in found["auto"].items():
        facts[f"  {dtype}"] = ", ".join(names)
    width = max(map(len, facts))
    return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in facts.items())
