"""The command line of train_lm.py. What is wrong in it ends the process with one line on stderr and status 2.

Shape suffixes as in train_lm.py.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import NoReturn

import torch

VOCABULARY = 256
HELDOUT = 10  # of so many bytes one is held out
COUNT = (1, 2**31 - 1)  # kernels count rows in int32
SEED = (-(2**63), 2**64 - 1)  # torch.manual_seed's
POSITIVE = (math.ulp(0.0), sys.float_info.max)

# Name, default, lowest and highest value, help.
NUMBERS = (
    ("seed", 0, SEED, "of the weights and the batches"),
    ("layers", 3, COUNT, "blocks of attention and dMoE"),
    ("hidden", 128, COUNT, "width"),
    ("heads", 4, COUNT, "of the attention"),
    ("ffn", 192, COUNT, "hidden size of each expert"),
    ("experts", 8, COUNT, "of each layer"),
    ("top-k", 2, COUNT, "experts that a token goes to"),
    ("balance-weight", 0.01, POSITIVE, "of the load-balancing loss"),
    ("length", 128, COUNT, "bytes of a sequence"),
    ("batch", 8, COUNT, "sequences of a step, over all ranks"),
    ("steps", 500, COUNT, "of the whole run, resumed or not"),
    ("lr", 2e-3, POSITIVE, "highest learning rate"),
    ("warmup", 50, COUNT, "steps up to it"),
    ("max-bytes", 1 << 24, (1, 2**63 - 1), "of text to use"),
    ("eval-every", 100, COUNT, "steps between held-out losses"),
    ("eval-windows", 128, COUNT, "sequences of a held-out loss"),
    ("save-every", 200, COUNT, "steps between checkpoints"),
    ("log-every", 20, COUNT, "steps between lines where there is no terminal"),
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, without the usage, which --help prints."""
        self.exit(2, f"train_lm: {' '.join(message.split())}\n")


def parse_arguments(description: str) -> argparse.Namespace:
    """The command line, checked for this machine and number of ranks; ends the process where it is wrong."""
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="*", help="text files, or folders of them; none: the Python standard library's sources")
    add("--impl", choices=("gbmoe", "bmm", "reference"), default="gbmoe", help="how the experts are computed")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:<index>")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="of the products; parameters stay float32")
    add("--out", default="runs/train_lm", help="folder of the checkpoint, the log and the plot")
    add("--resume", choices=("auto", "never"), default="auto", help="go on from --out's checkpoint, if it has one")
    add("--fresh", dest="resume", action="store_const", const="never", default=argparse.SUPPRESS, help="--resume never")
    for name, default, _, text in NUMBERS:
        add(f"--{name}", type=type(default), default=default, help=text)
    args = parser.parse_args()
    try:
        check_numbers(args)
        check_sizes(args, world=int(os.environ.get("WORLD_SIZE", 1)))
        check_device(args.device)
        check_memory(args, world=int(os.environ.get("WORLD_SIZE", 1)))
    except ValueError as error:
        parser.error(str(error))
    return args


def require(condition: bool, name: str, expected: str, got: object) -> None:
    """Raise ValueError unless `condition` holds."""
    if not condition:
        raise ValueError(f"--{name}: expected {expected}, got {got}")


def check_numbers(args: argparse.Namespace) -> None:
    """Raise ValueError where a number is out of its range, or NaN."""
    for name, default, (lowest, highest), _ in NUMBERS:
        value = getattr(args, name.replace("-", "_"))
        expected = "a finite number greater than 0" if isinstance(default, float) else f"a number from {lowest} to {highest}"
        require(lowest <= value <= highest, name, expected, value)


def check_sizes(args: argparse.Namespace, world: int) -> None:
    """Raise ValueError where one size does not go with another."""
    require(args.top_k <= args.experts, "top-k", f"at most the {args.experts} experts", args.top_k)
    require(args.hidden % (2 * args.heads) == 0, "hidden", f"a multiple of 2 * heads == {2 * args.heads}", args.hidden)
    require(args.batch % world == 0, "batch", f"a multiple of the {world} ranks", args.batch)
    require(args.eval_windows >= world, "eval-windows", f"at least the {world} ranks", args.eval_windows)
    text = HELDOUT * (args.length + 1)
    require(args.max_bytes >= text, "max-bytes", f"at least {text} for --length {args.length}", args.max_bytes)


def check_device(name: str) -> None:
    """Raise ValueError unless it is the CPU or a GPU that is there, this process's one where torchrun counts them."""
    kind, colon, index = name.partition(":")
    named = index.isascii() and index.isdecimal() if colon else True
    require(name == "cpu" or (kind == "cuda" and named), "device", "cpu, cuda or cuda:<index>", repr(name))
    if kind == "cuda":
        count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
        got = f"{name!r} with {count} GPUs" + (f" for the process {local} of this node" if local and not colon else "")
        require(int(index or local) < count, "device", "a GPU that is there", got)


def check_memory(args: argparse.Namespace, world: int) -> None:
    """Raise ValueError where the machine's memory cannot hold even what must lie in it at once.

    It is far below what a run takes: this finds the sizes that are absurd, in which torch would overflow or the machine drown.
    """
    block = 4 * args.hidden**2 + args.experts * args.hidden * (1 + 3 * args.ffn)
    # float32: a weight, its gradient and two moments.
    model = 16 * (args.layers * block + 2 * VOCABULARY * args.hidden)
    logits_BSV = 4 * (args.batch // world) * args.length * VOCABULARY
    windows_WS1 = 8 * args.eval_windows * (args.length + 1)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if args.device != "cpu":
        memory += torch.cuda.get_device_properties(args.device).total_memory
    if model + logits_BSV + windows_WS1 > memory:
        raise ValueError(f"expected sizes that fit in {memory / 1e9:,.0f} GB of memory, got at least {model / 1e9:,.0f} GB of"
                         f" model and optimizer (--layers, --hidden, --ffn, --experts), {logits_BSV / 1e9:,.0f} GB of logits"
                         f" (--batch, --length) and {windows_WS1 / 1e9:,.0f} GB of held-out windows (--eval-windows, --length)")
