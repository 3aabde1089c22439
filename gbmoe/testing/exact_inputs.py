"""Seeded inputs, defined once for the tests, `verify` and `bench`, and memory full of NaN, which shows reads of unwritten memory.

Values are drawn so that bfloat16, float16, float32 and float64 all hold them exactly (multiples of 1/64 below 2). So one float64
reference works for every dtype, and errors against it come from the operator, not from rounded inputs.

Shape suffixes: T tokens, K slots a token, E experts.
"""

from __future__ import annotations

import torch


def generator(device: torch.device | str, seed: int) -> torch.Generator:
    """A seeded generator on `device`."""
    return torch.Generator(device=device).manual_seed(seed)


def exact_values(*shape: int, dtype: torch.dtype, device: torch.device | str, seed: int, scale: float = 1.0) -> torch.Tensor:
    """Bell-shaped values that every floating dtype holds exactly: integers in [-127, 127], divided by 64, times a power of two."""
    values = torch.randn(*shape, generator=generator(device, seed), device=device, dtype=torch.float32)
    return values.mul_(40).round_().clamp_(-127, 127).mul_(scale / 64).to(dtype)


def fan_in_scale(inner: int) -> float:
    """A power of two at most a factor of sqrt(2) from 1 / sqrt(inner): it keeps sums of `inner` products near 1, and values exact."""
    return 2.0 ** -((inner.bit_length()) // 2)


def expert_ids(tokens: int, experts: int, top_k: int, *, device: torch.device | str, seed: int, skew: float = 0.0) -> torch.Tensor:
    """Distinct experts for each token, int64 [T,K]: uniform, or with `skew` s proportional to 1 / rank**s (Zipf)."""
    weight_E = torch.arange(1, experts + 1, device=device, dtype=torch.float32).pow(-skew)
    noise_TE = torch.rand(tokens, experts, generator=generator(device, seed), dtype=torch.float32, device=device).clamp_min_(1e-20)
    # Gumbel's trick: the top k of log-weights plus noise are k draws without replacement.
    return torch.topk(weight_E.log() - (-noise_TE.log()).log(), top_k, dim=1).indices


def poison(device: torch.device | str) -> None:
    """Fill memory with NaN and free it, so that the next allocations start from NaN instead of zeros.

    It fills blocks of several sizes, because allocators take small and large ones from different pools. The CPU's allocator takes large
    ones from the system, as zeros, whatever was freed before, so on a CPU only small blocks are filled.
    """
    sizes = [512, 1 << 12, 1 << 16, 1 << 18]
    if torch.device(device).type != "cpu":
        sizes += [1 << 20, 1 << 24, 1 << 26]
    blocks = [torch.full((size // 4,), float("nan"), dtype=torch.float32, device=device) for size in sizes for _ in range(4)]
    del blocks
