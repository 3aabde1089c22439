"""Train a small byte-level language model, a transformer whose MLPs are dMoE layers of gbmoe, on real text.

    python scripts/train_lm.py                              the Python standard library's sources, on the first GPU or the CPU
    python scripts/train_lm.py books/ notes.txt --impl bmm --device cuda --dtype bfloat16
    torchrun --nproc-per-node 2 scripts/train_lm.py         data parallel: each rank takes a part of every batch
    torchrun --nproc-per-node 2 scripts/train_lm.py --expert-parallel   and has a part of every layer's experts

It writes checkpoint.pt, log.json and loss.png to --out, and resumes from a checkpoint that is there. Ctrl-C, SIGTERM and SIGUSR1
end the run after the current step: it saves and exits, with 130 after Ctrl-C, otherwise with 0. A second Ctrl-C or SIGTERM, or
one before the first step has ended, ends it at once with status 130 or 143. Faults in the arguments, the text or the checkpoint
are reported in one line before the first step, with status 2. If a rank dies or hangs, the others end within --timeout with
status 1 and name it. A resumed run has bit for bit the losses of an uninterrupted one on the same machine with the same numbers
of threads and ranks, and with --expert-parallel set or not as before.

train_lm_arguments.py has the command line, train_lm_text.py the text, train_lm_files.py the checkpoint, train_lm_ranks.py the processes
that train together, and train_lm_signals.py the signals.

Losses are in nats per byte. Balance is, for each layer, the tokens of its busiest expert over the mean.

Shape suffixes: B sequences, S positions, H hidden, N heads, D head, V byte values, L layers, E experts, W held-out windows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

# Threads that spin at OpenMP's barriers make a step tens of times slower if another process uses the same cores. libgomp
# reads this variable when torch loads it.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# cuBLAS sums in a fixed order only with a workspace of fixed size; it reads this variable when CUDA starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from train_lm_signals import STOPPING, Ended, StopSignals

if __name__ == "__main__":
    signals = StopSignals()  # before torch is imported, which takes seconds

import torch
import torch.distributed as dist
import torch.nn.functional as F

import gbmoe
from gbmoe.parallel.failures import CollectiveFailed
from gbmoe.parallel.training import clip_grad_norm_
from train_lm_arguments import VOCABULARY, parse_arguments
from train_lm_files import (
    CHECKPOINT,
    LOG,
    InputError,
    check_optimizer,
    in_one_line,
    make_folder,
    not_a_checkpoint,
    read_checkpoint,
    replace,
)
from train_lm_ranks import Ranks, joined_ranks, own_state, whole_state
from train_lm_text import batch_starts, heldout_starts, load_text, windows

CLIP_NORM = 1.0
# Arguments that may differ between a run and its continuation, because they change no loss, or no more than the number of ranks does,
# which may differ too. The text is compared by its hash.
FREE_ON_RESUME = frozenset({"paths", "device", "out", "resume", "log_every", "save_every", "timeout", "expert_parallel"})


# ------------------------------------------------------------------------------------------------------------------ model


def moe_arguments(args: argparse.Namespace) -> gbmoe.Arguments:
    """The arguments of the dMoE layers. They are built on the CPU, so that a seed gives the same weights on every device."""
    return gbmoe.Arguments(
        hidden_size=args.hidden, ffn_hidden_size=args.ffn, num_layers=args.layers, bias=False, activation_fn=F.silu,
        moe_num_experts=args.experts, moe_top_k=args.top_k,
        moe_normalize_expert_weights=1 if args.top_k > 1 else None,  # one weight divided by itself would give the router no gradient
        moe_loss_weight=args.balance_weight, moe_lbl_in_fp32=True, mlp_type="glu", mlp_impl=args.impl, fp16=False, device="cpu",
        moe_expert_model_parallelism=args.expert_parallel and dist.is_initialized(),
        fp8_recipe=gbmoe.Float8BlockScaling(float8_weight_gradients=args.fp8_weight_gradients) if args.fp8 else None,
        init_method=partial(torch.nn.init.normal_, std=args.hidden**-0.5),
        output_layer_init_method=partial(torch.nn.init.normal_, std=(2 * args.layers * args.ffn) ** -0.5),
    )


class Attention(torch.nn.Module):
    """Causal self-attention with rotary positions."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.heads = args.heads
        self.qkv = torch.nn.Linear(args.hidden, 3 * args.hidden, bias=False)
        self.out = torch.nn.Linear(args.hidden, args.hidden, bias=False)
        torch.nn.init.normal_(self.qkv.weight, std=args.hidden**-0.5)
        torch.nn.init.normal_(self.out.weight, std=(2 * args.layers * args.hidden) ** -0.5)
        half = args.hidden // args.heads // 2
        angle_SD = torch.outer(torch.arange(args.length), 10000 ** (-torch.arange(half) / half))
        self.register_buffer("cos_SD", angle_SD.cos(), persistent=False)
        self.register_buffer("sin_SD", angle_SD.sin(), persistent=False)

    def rotate(self, x_BNSD: torch.Tensor) -> torch.Tensor:
        left, right = x_BNSD.chunk(2, dim=-1)
        rotated = torch.cat([left * self.cos_SD - right * self.sin_SD, left * self.sin_SD + right * self.cos_SD], dim=-1)
        return rotated.to(x_BNSD.dtype)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        B, S, H = x_BSH.shape
        q_BNSD, k_BNSD, v_BNSD = self.qkv(x_BSH).view(B, S, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y_BNSD = F.scaled_dot_product_attention(self.rotate(q_BNSD), self.rotate(k_BNSD), v_BNSD, is_causal=True)
        return self.out(y_BNSD.transpose(1, 2).reshape(B, S, H))


class Block(torch.nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + dMoE(norm(x))."""

    def __init__(self, args: argparse.Namespace):
        super().__init__()
        self.attention_norm = torch.nn.RMSNorm(args.hidden)
        self.attention = Attention(args)
        self.moe_norm = torch.nn.RMSNorm(args.hidden)
        self.moe = gbmoe.dMoE(moe_arguments(args))

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        x_BSH = x_BSH + self.attention(self.attention_norm(x_BSH))
        return x_BSH + self.moe(self.moe_norm(x_BSH))


def byte_lm(args: argparse.Namespace) -> torch.nn.Sequential:
    """A model from bytes [B,S] to the logits of the next byte [B,S,V]. At first all bytes are equally likely."""
    head = torch.nn.Linear(args.hidden, VOCABULARY, bias=False)
    torch.nn.init.zeros_(head.weight)
    blocks = (Block(args) for _ in range(args.layers))
    return torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, args.hidden), *blocks, torch.nn.RMSNorm(args.hidden), head)


# --------------------------------------------------------------------------------------------------------------- training


class Trainer:
    """The model, its optimizer and gradient scaler, with the steps of training and their checkpoint."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks):
        torch.manual_seed(args.seed)
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        self.args, self.ranks = args, ranks
        self.dtype = getattr(torch, args.dtype)
        self.moe_args = moe_arguments(args)
        self.model = byte_lm(args).to(ranks.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), betas=(0.9, 0.95), fused=True)
        self.scaler = torch.amp.GradScaler(ranks.device.type, enabled=self.dtype == torch.float16)

    def loss(self, windows_BS1: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        """Cross-entropy of each byte given those before it. Autocast computes products in --dtype; the loss is in float32."""
        windows_BS1 = windows_BS1.to(self.ranks.device)
        with torch.autocast(self.ranks.device.type, self.dtype, enabled=self.dtype != torch.float32):
            logits_BSV = self.model(windows_BS1[:, :-1])
        return F.cross_entropy(logits_BSV.flatten(0, 1).float(), windows_BS1[:, 1:].flatten(), reduction=reduction)

    def learning_rate(self, step: int) -> float:
        """The learning rate: a linear warm-up, then a cosine down to a twentieth of --lr."""
        warm_up = min(1.0, (step + 1) / self.args.warmup)
        return self.args.lr * warm_up * (0.525 + 0.475 * math.cos(math.pi * step / self.args.steps))

    def train_step(self, windows_BS1: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One update. Returns this rank's loss and the tokens that each expert of each layer got [L,E]."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        self.model.train()
        gbmoe.clear_load_balancing_loss()
        loss = self.loss(windows_BS1)
        counts_LE = torch.stack([counts_E for counts_E, _ in gbmoe.get_load_balancing_loss()])
        self.scaler.scale(loss + gbmoe.batched_load_balancing_loss(self.moe_args)).backward()
        gbmoe.clear_load_balancing_loss()
        self.ranks.average_gradients(self.model, scaled=self.scaler.is_enabled())
        self.scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), CLIP_NORM)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach(), counts_LE

    @torch.no_grad()
    def heldout_loss(self, windows_WS1: torch.Tensor) -> float:
        """Mean loss over the windows, each rank computing its part."""
        self.model.eval()
        total = torch.zeros((), dtype=torch.float64, device=self.ranks.device)
        # Every rank computes the same number of batches, because a layer whose experts are spread needs all ranks.
        batches = math.ceil(math.ceil(len(windows_WS1) / self.ranks.world) / self.args.batch)
        for windows_BS1 in windows_WS1[self.ranks.rank :: self.ranks.world].tensor_split(batches):
            total += self.loss(windows_BS1, reduction="sum")
        return float(self.ranks.sum(total)) / windows_WS1[:, 1:].numel()

    def save(self, step: int, log: dict) -> None:
        """Let rank 0 write checkpoint.pt and log.json. Raises RuntimeError if the ranks' weights are no longer the same."""
        if not self.ranks.hold_same_weights(self.model):
            raise RuntimeError(f"step {step}: expected the same weights on all {self.ranks.world} ranks, got different ones")
        weights, optimizer_state = whole_state(self.model, self.optimizer, keep=self.ranks.rank == 0)
        if self.ranks.rank > 0:
            return
        checkpoint = {"model": weights, "optimizer": optimizer_state,
                      "scaler": self.scaler.state_dict(), "rng": torch.get_rng_state(), "step": step, "log": log}
        replace(Path(self.args.out) / CHECKPOINT, partial(torch.save, checkpoint))
        write_log(log, Path(self.args.out))

    def resume(self, path: Path, log: dict) -> tuple[int, dict]:
        """Load the checkpoint if rank 0 has one, unless --resume is never. Returns its step and log, otherwise (0, log).

        Raises:
            InputError: on all ranks, if it is not a checkpoint, or that of a run with other arguments or another text than `log`'s.
        """
        checkpoint = None
        with self.ranks.together():
            if self.ranks.rank == 0 and self.args.resume == "auto" and path.exists():
                checkpoint = read_checkpoint(path)
        # The other ranks may be on nodes that do not see --out.
        checkpoint = self.ranks.from_first(checkpoint)
        if checkpoint is None:
            return 0, log
        with self.ranks.together():
            require_same_run(path, checkpoint["log"], log)
            try:
                self.load(checkpoint)
            except Exception as error:  # its entries may hold anything, for which the loaders raise many kinds of errors
                raise not_a_checkpoint(path, f"one that does not fit the model ({in_one_line(error)})") from None
        if self.ranks.rank == 0:
            write_log(checkpoint["log"], path.parent)  # log.json may be damaged, or that of a later step than the checkpoint's
        return checkpoint["step"], checkpoint["log"]

    def load(self, checkpoint: dict) -> None:
        """Load model, optimizer, gradient scaler and the state of random numbers."""
        weights, optimizer_state = own_state(self.model, checkpoint["model"], checkpoint["optimizer"])
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer_state)
        check_optimizer(self.optimizer)
        self.scaler.load_state_dict(checkpoint["scaler"])
        torch.set_rng_state(checkpoint["rng"])


def require_same_run(path: Path, saved: dict, given: dict) -> None:
    """Raise InputError if the checkpoint's log has other arguments, or another text, than the log of this run."""
    differences = [f"--{name.replace('_', '-')} {saved['args'].get(name)} (got {value})" for name, value in given["args"].items()
                   if name not in FREE_ON_RESUME and saved["args"].get(name) != value]
    if saved["text"] != given["text"]:
        differences.append("the text that it was trained on (got another)")
    if differences:
        raise InputError(f"{path} can only be resumed as it was begun: expected {', '.join(differences)}; give another --out, or"
                         " --fresh to start anew")


def train(args: argparse.Namespace, ranks: Ranks, signals: StopSignals) -> list[str]:
    """Train from the checkpoint, or from nothing, to --steps or to the first signal. Returns the names of the signals that stopped it."""
    started = time.perf_counter()
    out = Path(args.out)
    with ranks.together():
        if ranks.rank == 0:
            make_folder(out)
        train_text, heldout_text, statistics = load_text(args.paths, args.max_bytes, args.length)
    windows_WS1 = windows(heldout_text, heldout_starts(heldout_text, args), args.length)
    trainer = Trainer(args, ranks)
    step, log = trainer.resume(out / CHECKPOINT, new_log(trainer, statistics))
    seconds_before = log["seconds"]
    progress = Progress(args, step, shown=ranks.rank == 0)
    progress.line(f"{statistics['files']} files, {statistics['bytes']:,} bytes, {statistics['heldout_bytes']:,} of them held"
                  f" out; {log['parameters']:,} parameters; {args.impl} {args.dtype} on {log['device']}")
    if step:
        progress.line(f"resumed from {out / CHECKPOINT} after step {step}/{args.steps}")
    stopped_by: list[str] = []  # the signals that any rank got
    with progress.bar or contextlib.nullcontext():
        while step < args.steps and not stopped_by:
            step_started = time.perf_counter()
            starts = batch_starts(train_text, args, step)[ranks.rank :: ranks.world]
            loss, counts_LE = trainer.train_step(windows(train_text, starts, args.length), step)
            # Here all ranks learn which signals any of them got, so that they stop after the same step.
            asked = torch.tensor([signals.asked == number.name for number in STOPPING], device=ranks.device)
            mine = torch.cat([loss.double().view(1), counts_LE.double().flatten(), asked.double()])
            (loss_sum,), counts, asked_of_ranks = (
                part.tolist() for part in ranks.sum(mine).split([1, counts_LE.numel(), len(STOPPING)]))
            stopped_by = [number.name for number, asked_by in zip(STOPPING, asked_of_ranks) if asked_by]
            signals.worth_saving = True
            loads_LE = torch.tensor(counts).view(counts_LE.shape)
            step += 1
            entry = {"step": step, "loss": loss_sum / ranks.world, "balance": (loads_LE.amax(1) / loads_LE.mean(1)).tolist(),
                     "tokens_per_s": args.batch * args.length / (time.perf_counter() - step_started)}
            if not math.isfinite(entry["loss"]):
                raise RuntimeError(f"step {step}: expected a finite loss, got {entry['loss']}")
            log["train"].append(entry)
            progress.step(entry)
            if step % args.eval_every == 0 or step == args.steps:
                log["heldout"].append({"step": step, "loss": trainer.heldout_loss(windows_WS1)})
                progress.line(f"step {step}/{args.steps}  held-out loss {log['heldout'][-1]['loss']:.4f}")
            if stopped_by or step % args.save_every == 0 or step == args.steps:
                log["seconds"] = seconds_before + time.perf_counter() - started
                log["tokens_per_s"] = step / sum(1 / entry["tokens_per_s"] for entry in log["train"])
                trainer.save(step, log)
    if step < args.steps:
        who = signals.asked or f"{' and '.join(stopped_by)} to another rank"
        progress.line(f"stopped by {who}: saved {out / CHECKPOINT} after step {step}/{args.steps}; the same command goes on from there")
        return stopped_by
    if ranks.rank == 0:
        summarize(log, out)
    return []


# ----------------------------------------------------------------------------------------------------------------- output


def git_commit() -> str | None:
    """The commit of the checkout that this file is in, if it is in one."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def new_log(trainer: Trainer, statistics: dict) -> dict:
    """The contents of log.json before the first step."""
    device = trainer.ranks.device
    cpu = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    return {
        "args": vars(trainer.args), "text": statistics, "commit": git_commit(), "ranks": trainer.ranks.world,
        "versions": {"gbmoe": gbmoe.__version__, "torch": str(torch.__version__), "python": platform.python_version()},
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
        "parameters": trainer.ranks.parameters(trainer.model),
        "train": [], "heldout": [], "seconds": 0.0, "tokens_per_s": None,
    }


def write_log(log: dict, out: Path) -> None:
    replace(out / LOG, lambda path: path.write_text(json.dumps(log, indent=1)))


class Progress:
    """Shows progress, if `shown`: with rich's bar on a terminal, otherwise with a line every --log-every steps."""

    def __init__(self, args: argparse.Namespace, first_step: int, shown: bool):
        self.args, self.shown, self.bar = args, shown, None
        if not (shown and sys.stdout.isatty()):
            return
        try:
            from rich.progress import BarColumn, Progress as Bar, TextColumn, TimeRemainingColumn
        except ImportError:
            return
        self.bar = Bar(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
        self.task = self.bar.add_task("", total=args.steps, completed=first_step)

    def line(self, text: str) -> None:
        if self.bar is not None:
            self.bar.console.print(text, highlight=False, markup=False, soft_wrap=True)
        elif self.shown:
            print(text, flush=True)

    def step(self, entry: dict) -> None:
        """Show a step's entry of the log, with the balance of the least balanced layer."""
        text = (f"step {entry['step']}/{self.args.steps}  loss {entry['loss']:.4f}  {entry['tokens_per_s']:,.0f} tokens/s"
                f"  balance {max(entry['balance']):.2f}")
        if self.bar is not None:
            self.bar.update(self.task, completed=entry["step"], description=text)
        elif entry["step"] % self.args.log_every == 0:
            self.line(text)


def plot(log: dict, path: Path) -> None:
    """Draw the losses against the step. Raises ImportError without matplotlib."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot([e["step"] for e in log["train"]], [e["loss"] for e in log["train"]], linewidth=0.8, label="train")
    axes.plot([e["step"] for e in log["heldout"]], [e["loss"] for e in log["heldout"]], marker="o", label="held-out")
    axes.axhline(log["text"]["unigram_entropy"], color="gray", linestyle="--", label="unigram entropy")
    axes.set(xlabel="step", ylabel="nats per byte", title=f"byte-level MoE: {log['args']['impl']}, {log['args']['dtype']}")
    axes.legend()
    replace(path, partial(figure.savefig, dpi=150, format="png"))
    plt.close(figure)


def summarize(log: dict, out: Path) -> None:
    """Draw the plot and print a summary."""
    heldout, entropy = log["heldout"][-1]["loss"], log["text"]["unigram_entropy"]
    try:
        plot(log, out / "loss.png")
    except ImportError as error:
        print(f"no loss.png: matplotlib cannot be imported: {error}")
    print(f"{log['seconds']:.1f} s, {log['tokens_per_s']:,.0f} tokens/s; results in {out}")
    print(f"held-out loss {heldout:.4f} nats/byte ({heldout / math.log(2):.3f} bits/byte), unigram entropy {entropy:.4f}"
          f" ({entropy / math.log(2):.3f}), gap {entropy - heldout:.4f}")


# ------------------------------------------------------------------------------------------------------------------- main


def leave(status: int) -> NoReturn:
    """End the process. Among several ranks without what the interpreter does at its end: libraries may wait there for ranks that have
    ended, or abort, as gloo was seen to in one of seven runs on a busy machine ("terminate called without an active exception"), also
    after a run that succeeded.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main(signals: StopSignals) -> None:
    stopped_by: list[str] = []
    try:
        args = parse_arguments(__doc__.partition("\n")[0])
        with joined_ranks(args.device, args.timeout) as ranks:
            stopped_by = train(args, ranks, signals)
    except InputError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print("train_lm:", " ".join(str(error).split()), file=sys.stderr, flush=True)
        leave(2)
    except CollectiveFailed as error:
        print(" ".join(str(error).split()), file=sys.stderr, flush=True)
        leave(1)
    except Ended as ended:
        os._exit(ended.code)  # SIGTERM waits for nothing
    signals.ignore()
    leave(128 + signal.SIGINT if "SIGINT" in stopped_by else 0)


if __name__ == "__main__":
    main(signals)
