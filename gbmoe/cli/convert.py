"""`gbmoe convert`: MoE layers of a safetensors checkpoint in another layout.

gbmoe/compat/checkpoints/__init__.py says what the layouts are, and models.py in that folder has the models whose layers a
dMoE computes.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path

from gbmoe._atomic_files import one_line
from gbmoe.cli.progress import StatusLine, time_left
from gbmoe.cli.signals import sigterm_unwinds
from gbmoe.compat import checkpoints

EXAMPLES = """\
python -m gbmoe convert Mixtral-8x7B-v0.1 mixtral-megablocks --to megablocks
python -m gbmoe convert mixtral-megablocks mixtral-again --to transformers --experts w1
python -m gbmoe convert model.safetensors model-megablocks.safetensors --to megablocks
python -m gbmoe convert DeepSeek-V3-bf16 deepseek-torchtitan --to torchtitan
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare SOURCE, TARGET, --to and --experts."""
    parser.add_argument("source", type=Path, metavar="SOURCE", help="a .safetensors file, or a directory with"
                        " model.safetensors or model.safetensors.index.json; config.json there says what the layers compute")
    parser.add_argument("target", type=Path, metavar="TARGET", help="the file or directory to write; must not exist")
    parser.add_argument("--to", choices=checkpoints.LAYOUTS, required=True, help="the layout to write; with megablocks also the"
                        " gbmoe.Arguments of the layers, which are printed, and written to gbmoe_arguments.json")
    parser.add_argument("--experts", choices=checkpoints.EXPERT_LAYOUTS, help="with --to transformers: all experts of a"
                        " layer in one tensor (fused, the default, which every model loads; in Granite also input_linear), or a tensor for"
                        " each, named as in most models (gate_proj) or as in Mixtral (w1); names that the model in config.json does not"
                        " load are refused")


def run(arguments: argparse.Namespace) -> int:
    """Convert the checkpoint. Return 2 where it cannot be converted or written, and 1 without the package that it needs. The reason is
    printed, and nothing of TARGET is left behind."""
    if arguments.experts and arguments.to != "transformers":
        print("gbmoe convert: --experts goes with --to transformers", file=sys.stderr)
        return 2
    started = time.monotonic()
    try:
        # A batch job that runs out of time gets SIGTERM. As after an error, what was written so far is then removed.
        with sigterm_unwinds(), StatusLine("gbmoe convert") as status:
            checkpoints.convert_checkpoint(
                arguments.source, arguments.target, arguments.to, experts=arguments.experts or "fused", report=partial(_report, status),
                progress=lambda done, total, what: status.show(_progress(done, total, what, time.monotonic() - started)))
    except BrokenPipeError:  # of the output; the conversion ends as other programs do
        raise
    except ImportError as error:
        print(f"gbmoe convert: {error}", file=sys.stderr)
        return 1
    except checkpoints.BrokenCheckpoint as broken:
        print(f"gbmoe convert: {one_line(broken)}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:
        where = ""
        if isinstance(error, OSError) and error.errno and not error.filename:  # as of a full disk
            where = f", while {one_line(arguments.source)} was converted to {one_line(arguments.target)}"
        print(f"gbmoe convert: {error}{where}", file=sys.stderr)
        return 2
    return 0


def _report(status: StatusLine, line: str) -> None:
    if line.startswith("warning: "):
        status.print_above(f"gbmoe convert: {one_line(line)}", sys.stderr)
    else:
        status.print_above(one_line(line))


def _progress(done: int, total: int, what: str, seconds: float) -> str:
    rate = f", {done / seconds / 1e9:.2f} GB/s" if seconds else ""
    return f"{done / 1e9:.2f} of {total / 1e9:.2f} GB{rate}{time_left(seconds, done, total)}: {one_line(what, 200)}"
