"""The command line: `python -m gbmoe info | verify | bench | convert | ...`, one file a command.

A command's module has add_arguments(parser) and run(arguments), which returns the exit status, and may have EXAMPLES, lines for its
--help.

| status | |
|---|---|
| 0 | all is right; also of `gbmoe` without a command, which lists them |
| 1 | something is wrong with gbmoe, or with what is installed, on this machine; or results are wrong or missing |
| 2 | something is wrong with the call: arguments, or devices and files that are missing, broken or in the way; a line on stderr says what |
| 130 | Ctrl-C: processes that the command started are ended, files that are not complete are removed |
| 141 | nobody reads the output any more |
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from gbmoe._version import __version__
from gbmoe.cli import bench, build, convert, info, install_megablocks, transformers, verify
from gbmoe.cli.signals import ctrl_c_unwinds
from gbmoe.extension.loader import AHEAD_OF_TIME

_COMMANDS = {
    "info": (info, "versions, device, extension, and each engine or the reason why it cannot run"),
    "build": (build, "compile the CUDA extension into the cache; needs nvcc and no GPU"),
    "verify": (verify, "every operator and engine against float64, in under a minute"),
    "bench": (bench, "time layers, products and permutations, each verified first"),
    "convert": (convert, "MoE layers of a safetensors checkpoint from MegaBlocks' layout to transformers', or back"),
    "transformers": (transformers, "the PYTHONPATH with which unedited programs compute transformers' experts with gbmoe"),
    "install-megablocks": (install_megablocks, "MegaBlocks 0.10.0 in this environment, whose torch stays as it is"),
}
_EXAMPLES = """\
python -m gbmoe info                                             # what is installed, and why an engine is not available
python -m gbmoe verify                                           # PASS or FAIL for this machine
python -m gbmoe bench --suite smoke --json smoke.json            # no time is shown for a result that was not verified
python -m gbmoe bench plot smoke.json --output pictures
python -m gbmoe convert Mixtral-8x7B mixtral-mb --to megablocks
python -m gbmoe COMMAND --help                                   # options, and more examples
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; `argv` defaults to sys.argv[1:]. Without a command, list them.

    Raises:
        SystemExit: as argparse does, with status 2, and with 0 after --help; with 143 at SIGTERM, where the command has files to remove.
        KeyboardInterrupt: at Ctrl-C, with the command's name, after what it had begun is undone. gbmoe/__main__.py makes status 130 of it.
    """
    command = "gbmoe"
    try:
        with ctrl_c_unwinds():
            parser = _parser()
            arguments = parser.parse_args(argv)
            if arguments.version:
                print(_version())
                return 0
            if arguments.run is None:
                parser.print_help()
                return 0
            command = arguments.command
            return arguments.run(arguments)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(command) from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gbmoe", formatter_class=argparse.RawDescriptionHelpFormatter, epilog=_epilog(_EXAMPLES),
        description="The experts of a Mixture-of-Experts layer: see what is installed, verify it, measure it, and convert checkpoints.")
    parser.add_argument("--version", action="store_true", help="print the versions of gbmoe, torch and CUDA")
    parser.set_defaults(run=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(
            name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.", epilog=_epilog(getattr(module, "EXAMPLES", "")),
            formatter_class=argparse.RawDescriptionHelpFormatter)
        command.set_defaults(run=module.run, command=command.prog)
        module.add_arguments(command)
    return parser


def _epilog(examples: str) -> str | None:
    """The examples, each a line that can be copied."""
    return "\n".join(["examples:", *(f"  {line}" for line in examples.splitlines())]) if examples else None


def _version() -> str:
    """One line, for which nothing is loaded and CUDA is not started."""
    ahead = "compiled ahead of time" if AHEAD_OF_TIME.exists() else "not compiled ahead of time"
    return f"gbmoe {__version__} (torch {torch.__version__}, CUDA {torch.version.cuda or 'none'}, extension {ahead})"
