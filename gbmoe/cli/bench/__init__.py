"""`gbmoe bench`: time layers, grouped GEMMs and permutations; the time of an unverified result is never shown.

gbmoe runs with each of its engines in this process; each of the peers (peers/) runs in a process of its own (running/peer_process.py).
A suite is a list of configurations (suites.py). A configuration is a shape with everything that competes on it; each of its
measurements makes a row (running/verify_and_time.py).
"""

from __future__ import annotations

import argparse

from gbmoe.cli.bench.commands import merge, plot, report, run_suite

EXAMPLES = """\
python -m gbmoe bench --suite smoke --json smoke.json            # a suite, its table and its file
python -m gbmoe bench --shape 8192,4096,14336,8,2                # a layer of yours: tokens, hidden, ffn, experts, top_k
torchrun --nproc-per-node 2 -m gbmoe bench --suite parallel      # experts spread over GPUs
python -m gbmoe bench --suite layers --config 3 --output parts   # one configuration of it, as a part
python -m gbmoe bench merge parts --json layers.json             # the parts joined
python -m gbmoe bench plot layers.json --output pictures
python -m gbmoe bench report layers.json --output layers.md --pictures pictures
"""
_COMMANDS = {
    "merge": (merge, "join result files of one suite"),
    "plot": (plot, "draw the rows of result files, as PNG and SVG"),
    "report": (report, "write the rows of result files as a Markdown page, and into a README"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that run a suite, and the commands that work on result files."""
    run_suite.add_arguments(parser)
    commands = parser.add_subparsers(metavar="merge | plot | report")
    for name, (module, summary) in _COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run, command=command.prog)


run = run_suite.run
