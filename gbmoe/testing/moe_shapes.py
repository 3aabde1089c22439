"""Shapes of layers, grouped GEMMs and permutations, defined once for the tests, `verify` and `bench`.

Shape letters: T tokens, K slots a token, E experts, H hidden, F ffn hidden, M rows of all groups.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MoeCase:
    """One layer: T tokens, hidden H, ffn F, E experts, top-K."""

    name: str
    tokens: int
    hidden: int
    ffn: int
    experts: int
    top_k: int
    mlp_type: str = "mlp"

    @property
    def slots(self) -> int:
        return self.tokens * self.top_k

    def forward_flops(self) -> int:
        """Multiplications and additions of the experts' products in forward; backward has twice as many."""
        return 2 * self.slots * self.hidden * self.ffn * (3 if self.mlp_type == "glu" else 2)


def own_case(tokens: int, hidden: int, ffn: int, experts: int, top_k: int, mlp_type: str = "glu") -> MoeCase:
    """A layer of a user's, named by its sizes."""
    plain = "-mlp" if mlp_type == "mlp" else ""
    return MoeCase(f"t{tokens}-h{hidden}-f{ffn}-e{experts}-k{top_k}{plain}", tokens, hidden, ffn, experts, top_k, mlp_type)


def _nyu(sequences: int, length: int, hidden: int, experts: int, top_k: int) -> MoeCase:
    name = f"nyu-{sequences}x{length}x{hidden}-e{experts}k{top_k}"
    return MoeCase(name, sequences * length, hidden, 2 * hidden, experts, top_k)


# The cases of "Improving MoE Inference with Variable-Sized Batched GEMM Kernels" (NYU), which gbmoe calls the article: (num_sequences,
# sequence_length, hidden, experts, top_k), ffn = 2 * hidden, a plain MLP.
NYU_CASES = tuple(_nyu(*case) for case in (
    *((16, 1024, 512, e, 1) for e in (1, 2, 4, 8)),
    *((8, 2048, 512, e, 1) for e in (1, 2, 4)),
    *((16, 1024, 512, e, k) for e, k in ((2, 2), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8))),
    (32, 1024, 512, 8, 8),
    (64, 1024, 512, 8, 8),
    (64, 1024, 8192, 8, 8),
    (32, 512, 512, 8, 4),     # on which MegaBlocks' Triton kernels failed
    (64, 1024, 4224, 8, 3),   # the largest before 16 GB ran out
))

# Layers of models of 2026, as transformers 5.24 and Automodel 0.7 have them. Of DeepSeek-V4.1 the top-k is V4's; of Kimi-K3 these are the
# experts alone, which work on half of its hidden size. With all experts on one GPU, forward and backward of DeepSeek-V4-Pro and of
# Kimi-K3 take more than 100 GB.
NEWER_CASES = (
    MoeCase("deepseek-v4-flash", 8192, 4096, 2048, 256, 6, "glu"),
    MoeCase("deepseek-v4-pro", 4096, 7168, 3072, 384, 6, "glu"),
    MoeCase("deepseek-v4.1", 8192, 5120, 2304, 384, 6, "glu"),
    MoeCase("qwen3.8-flash-next", 16384, 2560, 640, 512, 10, "glu"),
    MoeCase("minimax-m3", 8192, 6144, 3072, 128, 4, "glu"),
    MoeCase("glm5-next", 8192, 4096, 2048, 288, 8, "glu"),
    MoeCase("kimi-k3", 8192, 3584, 3072, 896, 16, "glu"),
    MoeCase("gpt-oss-120b", 8192, 2880, 2880, 128, 4, "glu"),
)

# The layers that the rivals are measured on: GLUs of known models, and two plain MLPs. Results name configurations by their index, so new
# ones follow.
LAYER_CASES = (
    MoeCase("mixtral", 8192, 4096, 14336, 8, 2, "glu"),
    MoeCase("olmoe", 16384, 2048, 1024, 64, 8, "glu"),
    MoeCase("qwen3", 16384, 2048, 768, 128, 8, "glu"),
    MoeCase("fine", 24576, 1536, 256, 128, 8, "glu"),
    MoeCase("wide", 32768, 4096, 1024, 128, 8, "glu"),
    MoeCase("megablocks", 16384, 1024, 4096, 64, 1),
    MoeCase("nyu-512", 65536, 512, 2048, 8, 8),
    *NEWER_CASES,
)

# Those that are measured with float8 recipes.
FLOAT8_CASES = tuple(case for case in LAYER_CASES if case.name in ("mixtral", "olmoe", "qwen3"))

# Those whose experts transformers computes in several ways; the last is a rank's share of DeepSeek-V3's.
TRANSFORMERS_CASES = (
    *(case for case in LAYER_CASES if case.name in ("mixtral", "qwen3")),
    MoeCase("dsv3-share", 4096, 7168, 2048, 32, 8, "glu"),
)

# Layers of known models, with the tokens of one rank, whose experts are spread over ranks.
PARALLEL_CASES = (
    *(case for case in LAYER_CASES if case.name in ("mixtral", "qwen3")),
    MoeCase("dsv3", 4096, 7168, 2048, 64, 8, "glu"),
)


def _swept(**sizes: int) -> MoeCase:
    sizes = {"tokens": 16384, "hidden": 2048, "experts": 64} | sizes
    return MoeCase("t{tokens}-h{hidden}-e{experts}".format(**sizes), ffn=1024, top_k=8, mlp_type="glu", **sizes)


# One size of one layer swept, the others kept: how cost grows.
SCALING_CASES = {
    "experts": tuple(_swept(experts=e) for e in (8, 16, 32, 64, 128, 256)),
    "tokens": tuple(_swept(tokens=t) for t in (1024, 4096, 16384, 65536)),
    "hidden": tuple(_swept(hidden=h) for h in (512, 1024, 2048, 4096, 8192)),
}

# A few tokens: one sequence's next token, and small batches of them.
INFERENCE_CASES = tuple(MoeCase(f"{name}-t{tokens}", tokens, *sizes, "glu")
                        for name, sizes in (("mixtral", (4096, 14336, 8, 2)), ("qwen3", (2048, 768, 128, 8)))
                        for tokens in (1, 8, 64, 512))

# Layers whose kernels are about as short as the host's work for them.
HOST_CASES = tuple(MoeCase(f"{t}x{h}-e{e}k{k}", t, h, f, e, k, "glu") for t, h, f, e, k in (
    (64, 1024, 2816, 8, 2),
    (64, 2048, 768, 128, 8),
    (512, 1024, 2816, 16, 2),
    (1024, 2048, 768, 128, 8),
    (2048, 1536, 512, 40, 8),
    (4096, 1024, 2816, 16, 2),
))

# Single grouped GEMMs: a[M,H] @ b[E][H,F], M = T * K.
GEMM_CASES = (
    MoeCase("mixtral", 16384, 4096, 14336, 8, 2),
    MoeCase("olmoe", 16384, 2048, 1024, 64, 8),
    MoeCase("qwen3-30b", 16384, 2048, 768, 128, 8),
    MoeCase("megablocks", 16384, 1024, 4096, 64, 1),
    MoeCase("nyu-512", 65536, 512, 2048, 8, 8),
    MoeCase("nyu-4224", 65536, 4224, 4224, 8, 3),
)


def _permutation(tokens: int, experts: int, hidden: int, top_k: int) -> MoeCase:
    return MoeCase(f"{tokens}x{hidden}-e{experts}k{top_k}", tokens, hidden, 0, experts, top_k)


# Permutations, (tokens, experts, hidden, top_k); they have no ffn. The plan is also built for one more.
PERMUTE_CASES = tuple(_permutation(*case) for case in (
    (4096, 256, 7168, 8),
    (16384, 128, 4096, 6),
    (16384, 4, 7168, 1),
    (16384, 8, 1024, 4),
    (65536, 8, 1024, 1),
    (16384, 64, 2048, 8),
))
PLAN_CASES = (*PERMUTE_CASES, _permutation(16384, 128, 2048, 8))

# Small layers for the command line's smoke suite and for a CPU.
SMOKE_CASES = (
    MoeCase("tiny-mlp", 256, 64, 128, 4, 2),
    MoeCase("tiny-glu", 256, 64, 128, 8, 2, "glu"),
    MoeCase("small-glu", 1024, 128, 256, 16, 4, "glu"),
)


def scaled_down(case: MoeCase) -> MoeCase:
    """The case at a size for a CPU: the same experts and top-k, few tokens, a narrow layer."""
    hidden = min(case.hidden, 48)
    return MoeCase(f"{case.name}-small", max(16, case.tokens // 256), hidden, 2 * hidden, case.experts, case.top_k, case.mlp_type)


# Rows of each group: the shapes that a grouped GEMM gets wrong first.
GROUP_SIZES = {
    "equal": (16, 16, 16, 16),
    "uneven": (37, 5, 64, 22),
    "one-row": (1, 1, 1),
    "empty-first": (0, 24, 8),
    "empty-middle": (24, 0, 0, 9),
    "empty-last": (24, 9, 0),
    "everything-in-one": (0, 0, 96, 0),
    "single-group": (40,),
    "all-empty": (0, 0, 0),
}
