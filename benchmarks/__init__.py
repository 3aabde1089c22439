"""What a checkout adds to `gbmoe bench` (gbmoe/cli/bench): the suites of known results, and what is made of result files.

known_suites.py lists them; commands/ has the commands, measurements/ and rivals/ what only these suites measure, running/ how rows are
made on several ranks, result_files/ reads result files and makes pages and pictures of them. gbmoe/cli/bench/checkout.py imports
this package.
"""

from __future__ import annotations

import argparse

from benchmarks.commands import merge, parts, plot, report
from benchmarks.known_suites import SUITES
from gbmoe.cli.bench import command

_COMMANDS = {
    "merge": (merge, "join result files of one suite"),
    "plot": (plot, "draw the rows of result files, as PNG and SVG"),
    "report": (report, "write the rows of result files as a Markdown page, and into a README"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that run a suite, and the commands that work on result files."""
    command.add_options(parser, SUITES)
    parts.add_options(parser)
    commands = parser.add_subparsers(metavar=" | ".join(_COMMANDS))
    for name, (module, summary) in _COMMANDS.items():
        subcommand = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(subcommand)
        subcommand.set_defaults(run=module.run, command=subcommand.prog)


def run(arguments: argparse.Namespace) -> int:
    """0; 1 where anything of gbmoe is wrong, whatever becomes of its rivals; 2 for arguments that make no sense."""
    tells = arguments.suite is None or SUITES[arguments.suite].processes.tells()
    planned = command.plan(arguments, SUITES, listing=arguments.list_configs)
    if isinstance(planned, str):
        return command.refused(planned) if tells else 2
    return parts.run(planned)
