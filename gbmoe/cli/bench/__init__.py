"""`gbmoe bench`: time layers, grouped products and permutations; the time of an unverified result is never shown.

    python -m gbmoe bench --suite smoke --json smoke.json            # a suite, its table and its file
    python -m gbmoe bench --suite layers --config 3 --output parts   # one configuration of it, as a part
    python -m gbmoe bench merge parts --json layers.json             # the parts joined
    python -m gbmoe bench plot layers.json --output pictures
    python -m gbmoe bench report layers.json --output layers.md --pictures pictures

Who: gbmoe with each of its engines, in this process, and the peers (peers/), each in a process of its own (worker.py).
What: a suite's configurations (suites.py), each a shape with all that compete on it, a row for each measurement
(measure.py).
"""

from __future__ import annotations

import argparse

from gbmoe.cli.bench import merge, plot, report, run_suite

_COMMANDS = {
    "merge": (merge, "join parts and files of one suite"),
    "plot": (plot, "draw files' rows, as PNG and SVG"),
    "report": (report, "write files' rows as a Markdown page, and into a README"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what running a suite takes, and the commands for its files."""
    run_suite.add_arguments(parser)
    commands = parser.add_subparsers(metavar="merge | plot | report")
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)


run = run_suite.run
