"""The command line: `python -m gbmoe info | verify | bench | convert`, one file a command.

A command's module has add_arguments(parser) and run(arguments), which returns the exit status: 0, or 1 where something is wrong with
gbmoe on this machine. Arguments that make no sense give status 2, as in argparse, and so do broken files; a line on stderr says what is
wrong.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from gbmoe.cli import bench, build, convert, info, verify

_COMMANDS = {
    "info": (info, "versions, device, extension, and each engine or the reason why it cannot run"),
    "build": (build, "compile the CUDA extension into the cache, where nvcc is; needs no GPU"),
    "verify": (verify, "every operator and engine against float64, in under a minute"),
    "bench": (bench, "time layers, products and permutations, each verified first"),
    "convert": (convert, "MoE layers of a safetensors checkpoint from MegaBlocks' layout to transformers', or back"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` defaults to sys.argv[1:]."""
    parser = argparse.ArgumentParser(prog="gbmoe", description="The experts of a Mixture-of-Experts layer: see what is installed,"
                                     " verify it, measure it, and convert checkpoints.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    return arguments.run(arguments)
