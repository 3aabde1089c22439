"""`gbmoe convert`: MoE layers of a safetensors checkpoint from MegaBlocks' layout to transformers', or back.

    python -m gbmoe convert Mixtral-8x7B-v0.1 mixtral-megablocks --to megablocks
    python -m gbmoe convert mixtral-megablocks mixtral-again --to transformers --experts w1

gbmoe/compat/checkpoints/__init__.py says what the layouts are, and model_types.py in that folder of which models a dMoE computes the
layers.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from gbmoe._atomic_files import one_line
from gbmoe.compat import checkpoints


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare SOURCE, TARGET, --to and --experts."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a .safetensors file, or a directory with"
                        " model.safetensors or model.safetensors.index.json; config.json there says what the layers compute")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the file or directory to write; must not exist")
    parser.add_argument("--to", choices=checkpoints.LAYOUTS, required=True, help="the layout to write; with megablocks also the"
                        " gbmoe.Arguments of the layers, which are printed, and written to gbmoe_arguments.json")
    parser.add_argument("--experts", choices=checkpoints.EXPERT_LAYOUTS, help="with --to transformers: all experts of a"
                        " layer in one tensor (fused, the default, which every model loads), or a tensor for each, named as in most"
                        " models (gate_proj) or as in Mixtral (w1); names that the model in config.json does not load are refused")


def run(arguments: argparse.Namespace) -> int:
    """Convert the checkpoint. Return 1 where it cannot be converted or written, and 2 where it is broken, that is, a checkpoint in no
    layout. The reason is printed, and nothing of TARGET is left behind."""
    if arguments.experts and arguments.to != "transformers":
        print("gbmoe convert: --experts goes with --to transformers", file=sys.stderr)
        return 2
    # A batch job that runs out of time gets SIGTERM. As after an error, what was written so far is then removed.
    handler = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        checkpoints.convert_checkpoint(arguments.source, arguments.target, arguments.to,
                                       experts=arguments.experts or "fused", report=_report)
    except checkpoints.BrokenCheckpoint as broken:
        print(f"gbmoe convert: {one_line(broken)}", file=sys.stderr)
        return 2
    except (ImportError, OSError, ValueError) as error:
        print(f"gbmoe convert: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, handler)
    return 0


def _report(line: str) -> None:
    if line.startswith("warning: "):
        print(f"gbmoe convert: {one_line(line)}", file=sys.stderr)
    else:
        print(one_line(line))
