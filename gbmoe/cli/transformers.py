"""`gbmoe transformers`: how unedited programs compute the experts of transformers' models with gbmoe."""

from __future__ import annotations

import argparse
import os
import sys
from importlib.util import find_spec
from pathlib import Path

EXAMPLES = """\
export PYTHONPATH=$(python -m gbmoe transformers)                # then: trl sft ..., axolotl train ..., llamafactory-cli train ...
PYTHONPATH=$(python -m gbmoe transformers) torchrun --nproc-per-node 8 train.py
GBMOE_TRANSFORMERS=gbmoe_float8 python train.py                  # with that PYTHONPATH: products of rows in float8
GBMOE_TRANSFORMERS=off python train.py                           # with it, this program as before
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing to declare."""


def run(arguments: argparse.Namespace) -> int:
    """Print PYTHONPATH with the folder put first. Status 1 where transformers is not installed."""
    if find_spec("transformers") is None:
        print("gbmoe transformers: transformers is not installed here: pip install 'gbmoe[transformers]'", file=sys.stderr)
        return 1
    folder = str(Path(__file__).parents[1] / "compat" / "startup")
    print(os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH", "")])]))
    return 0
