"""The command line of train_lm.py. A fault in it ends the process with one line on stderr and status 2.

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
HELDOUT = 10  # one of this many bytes is held out
COUNT = (1, 2**31 - 1)  # kernels count rows in int32
SEED = (-(2**63), 2**64 - 1)  # the range of torch.manual_seed
POSITIVE = (math.ulp(0.0), sys.float_info.max)

# Name, default, lowest and highest value, help.
NUMBERS = (
    ("seed", 0, SEED, "seed of the weights and the batches"),
    ("layers", 3, COUNT, "blocks of attention and dMoE"),
    ("hidden", 128, COUNT, "width"),
    ("heads", 4, COUNT, "heads of the attention"),
    ("ffn", 192, COUNT, "hidden size of each expert"),
    ("experts", 8, COUNT, "experts of each layer"),
    ("top-k", 2, COUNT, "experts that a token goes to"),
    ("balance-weight", 0.01, POSITIVE, "weight of the load-balancing loss"),
    ("length", 128, COUNT, "bytes of a sequence"),
    ("batch", 8, COUNT, "sequences of a step, over all ranks"),
    ("steps", 500, COUNT, "steps of the whole run, also if it is resumed"),
    ("lr", 2e-3, POSITIVE, "highest learning rate"),
    ("warmup", 50, COUNT, "steps until the learning rate is highest"),
    ("max-bytes", 1 << 24, (1, 2**63 - 1), "bytes of text to use at most"),
    ("eval-every", 100, COUNT, "steps between held-out losses"),
    ("eval-windows", 128, COUNT, "sequences of a held-out loss"),
    ("save-every", 200, COUNT, "steps between checkpoints"),
    ("log-every", 20, COUNT, "steps between lines where there is no terminal"),
    ("timeout", 600, COUNT, "seconds that ranks wait for one another before they end"),
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Print the error in one line, without the usage, which --help prints."""
        self.exit(2, f"train_lm: {' '.join(message.split())}\n")


def parse_arguments(description: str) -> argparse.Namespace:
    """The parsed command line, checked for this machine and the number of ranks. Ends the process where it is wrong."""
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("paths", nargs="*", help="text files, or folders of them (default: the Python standard library's sources)")
    add("--impl", choices=("gbmoe", "bmm", "reference"), default="gbmoe", help="how the experts are computed")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:<index>")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="float32",
        help="dtype of the products; parameters stay float32")
    add("--fp8", action="store_true", help="compute the experts' products of rows in float8 (gbmoe.Float8BlockScaling); --impl gbmoe only")
    add("--fp8-weight-gradients", action="store_true", help="with --fp8: compute gradients of weights in float8, too")
    add("--expert-parallel", action="store_true",
        help="spread every layer's experts over the ranks; with more ranks than experts, several ranks share an expert")
    add("--out", default="runs/train_lm", help="folder of the checkpoint, the log and the plot")
    add("--resume", choices=("auto", "never"), default="auto", help="auto: resume from a checkpoint in --out, if there is one")
    add("--fresh", dest="resume", action="store_const", const="never", default=argparse.SUPPRESS, help="the same as --resume never")
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
    """Raise ValueError where two sizes do not fit each other."""
    require(args.top_k <= args.experts, "top-k", f"at most the {args.experts} experts", args.top_k)
    require(args.hidden % (2 * args.heads) == 0, "hidden", f"a multiple of 2 * heads == {2 * args.heads}", args.hidden)
    if args.fp8:
        require(args.impl == "gbmoe", "impl", "gbmoe with --fp8", args.impl)
        require(args.dtype != "float32", "dtype", "bfloat16 or float16 with --fp8", args.dtype)
        for name in ("hidden", "ffn"):
            require(getattr(args, name) % 16 == 0, name, "a multiple of 16 with --fp8", getattr(args, name))
    require(args.fp8 or not args.fp8_weight_gradients, "fp8", "it with --fp8-weight-gradients", "none")
    require(args.batch % world == 0, "batch", f"a multiple of the {world} ranks", args.batch)
    if args.expert_parallel:
        divides = args.experts % world == 0 or world % args.experts == 0
        require(divides, "experts", f"a multiple or a divisor of the {world} ranks with --expert-parallel", args.experts)
        shards = max(1, world // args.experts)
        require(args.ffn % shards == 0, "ffn", f"a multiple of the {shards} ranks that share an expert", args.ffn)
    require(args.eval_windows >= world, "eval-windows", f"at least the {world} ranks", args.eval_windows)
    text = HELDOUT * (args.length + 1)
    require(args.max_bytes >= text, "max-bytes", f"at least {text} for --length {args.length}", args.max_bytes)


def check_device(name: str) -> None:
    """Raise ValueError unless `name` is the CPU or a GPU of this machine; under torchrun, "cuda" is the GPU of this process."""
    kind, colon, index = name.partition(":")
    named = index.isascii() and index.isdecimal() if colon else True
    require(name == "cpu" or (kind == "cuda" and named), "device", "cpu, cuda or cuda:<index>", repr(name))
    if kind == "cuda":
        count, local = torch.cuda.device_count(), int(os.environ.get("LOCAL_RANK", 0))
        got = f"{name!r} with {count} GPUs" + (f" for the process {local} of this node" if local and not colon else "")
        require(int(index or local) < count, "device", "a GPU that is there", got)


def check_memory(args: argparse.Namespace, world: int) -> None:
    """Raise ValueError where the machine's memory cannot even hold the tensors that are needed at the same time.

    A run takes far more. This only finds absurd sizes, with which torch would overflow or the machine run out of memory.
    """
    rows = math.ceil(3 * args.experts * args.ffn / (world if args.expert_parallel else 1))
    block = 4 * args.hidden**2 + args.hidden * (args.experts + rows)
    # 16 bytes a weight: itself, its gradient and two moments, in float32.
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
