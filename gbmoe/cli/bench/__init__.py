"""`gbmoe bench`: time layers and grouped GEMMs; the time of an unverified result is never shown.

gbmoe runs with each of its engines in this process; each of the rivals (rivals/) runs in a process of its own (running/rival_process.py).
A suite is a list of configurations (suites.py). A configuration is a shape with everything that competes on it; each of its
measurements makes a row (running/verify_and_time.py). command.py has the options, table.py and result_file.py what becomes of rows.

This package has what measures one's own layers on one's own machine. In a checkout the command line is that of benchmarks/, which has
the suites of known results, too (checkout.py).
"""

from __future__ import annotations

import argparse

from gbmoe.cli.bench import checkout, command

EXAMPLES = """\
python -m gbmoe bench --shape 8192,4096,14336,8,2                # a layer of yours: tokens, hidden, ffn, experts, top_k
python -m gbmoe bench --suite smoke --json smoke.json            # small layers, their table and their file
torchrun --nproc-per-node 2 -m gbmoe bench --suite parallel      # in a checkout: experts spread over GPUs
python -m gbmoe bench --suite layers --config 3 --output parts   # in a checkout: one configuration of a suite, as a part
python -m gbmoe bench merge parts --json layers.json             # the parts joined
python -m gbmoe bench plot layers.json --output pictures
python -m gbmoe bench report layers.json --output layers.md --pictures pictures
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a run; in a checkout all that benchmarks/ has."""
    (checkout.benchmarks() or command).add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run what add_arguments() declared, and return the exit status."""
    return (checkout.benchmarks() or command).run(arguments)
