"""Where a layer's rows are gathered in the Hopper engine: by a kernel of its own, or inside the GEMMs that read them; and where
the activation's gradient is computed.

Gathering inside a GEMM saves writing and reading [P,H], which takes time proportional to H. It costs a part of the GEMM's speed,
which is time proportional to H F. So it pays up to some F, which depends on the ratio of the tensor cores' speed to the memory's, not
on the number of multiprocessors, to which both are proportional as DeepGEMM reckons them. The same F is best on an H100 and on an
H200, whose memory is faster.

H is hidden, F ffn hidden, P padded rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from gbmoe.problem import known
from gbmoe.tuning import hopper_tiles

_ACTIVATIONS = ("silu", "gelu_tanh")  # of the family that the first GEMM has instances for which gather
# The largest F for which each pays, fitted on an H200; those of two gradients on an H100.
_IN_UP_BY_COPIES = 512        # single CTAs, whose warps copy rows by cp.async (docs/notes/gather-inside-forward.md)
_IN_UP_IN_PAIRS = 2048        # pairs of CTAs, which load rows by TMA (docs/notes/gather-lines-by-tma.md)
_IN_DOWN_BACKWARD = 256       # the GEMM then cannot fuse the activation's gradient
_IN_WEIGHT_GRADIENT = 512     # two GEMMs read what one gather has written, and each is slower where it gathers
_IN_TWO_GRADIENTS = 1024      # one GEMM for both, whose tiles always form pairs (docs/notes/gather-two-gradients.md)
# A GEMM that gathers stores gradients in lines of 32 bytes, unless weights lie transposed; where groups have fewer rows, the stores take
# most of the time.
_ROWS_FOR_GATHERED_GRADIENTS = 256
# The GEMM hides the activation's gradient in sums of at least so many terms (docs/notes/activation-gradient-epilogue.md).
_TERMS_THAT_HIDE_ACTIVATION = 1536
_MOST_TOKEN_BYTES = 1 << 36   # single CTAs count the tokens' vectors of 16 bytes in 32 bits


@dataclass(frozen=True)
class LayerConfig:
    """How the Hopper engine computes a layer's experts.

    Attributes:
        gather_up: the first GEMM reads its rows from the tokens, instead of rows that were gathered before.
        gather_up_along_f: likewise, of weights that lie contiguous along F, which only pairs of CTAs read.
        gather_down_backward: the GEMM of the output's gradient with w2, and that of w2's gradient, read their rows from the
            tokens' gradients.
        gather_weight_gradient: the GEMMs of w1's and v1's gradients read their rows from the tokens.
        gather_only_weight_gradient: likewise, where no other GEMM reads these rows: of w1 without v1, or of pairs [2F]; see also
            rows_pay_for_gathering.
        gather_two_weight_gradients: of a GLU, one GEMM does so for both, rather than one each; see also rows_pay_for_gathering.
        fuse_activation_gradient: in the GEMM of the output's gradient with w2, warps next to the main loop compute the
            activation's gradient.
    """
    gather_up: bool
    gather_up_along_f: bool
    gather_down_backward: bool
    gather_weight_gradient: bool
    gather_only_weight_gradient: bool
    gather_two_weight_gradients: bool
    fuse_activation_gradient: bool


def always_gathers_in_up(ffn: int, activation: str, token_bytes: int) -> bool:
    """Whether LayerConfig.gather_up holds even if the rows are to be kept; also for a graph that is traced, which may not know
    the bytes."""
    return ffn <= _IN_UP_BY_COPIES and activation in _ACTIVATIONS and known(token_bytes < _MOST_TOKEN_BYTES)


def rows_pay_for_gathering(rows: int, groups: int, columns: int) -> bool:
    """Whether groups have enough rows for LayerConfig.gather_two_weight_gradients, each of so many columns, and for
    gather_only_weight_gradient. They need none up to the number of columns with which any gradient's GEMM gathers."""
    return columns <= _IN_WEIGHT_GRADIENT or rows >= _ROWS_FOR_GATHERED_GRADIENTS * groups


@functools.lru_cache(maxsize=1024)
def layer_config(hidden: int, ffn: int, glu: bool, activation: str, token_bytes: int, padded: bool) -> LayerConfig:
    """Where a layer's rows are gathered, and where its activation's gradient is computed; `padded` as in hopper_tiles.up_gemm."""
    reachable = token_bytes < _MOST_TOKEN_BYTES
    in_pairs = not padded and ffn <= _IN_UP_IN_PAIRS and hopper_tiles.up_forms_pairs(ffn, glu)
    may_gather_up = reachable and activation in _ACTIVATIONS
    return LayerConfig(
        gather_up=may_gather_up and (in_pairs or ffn <= _IN_UP_BY_COPIES),
        gather_up_along_f=may_gather_up and in_pairs,
        gather_down_backward=reachable and ffn <= _IN_DOWN_BACKWARD,
        gather_weight_gradient=reachable and ffn <= _IN_WEIGHT_GRADIENT,
        gather_only_weight_gradient=reachable and not padded and ffn <= 2 * _IN_TWO_GRADIENTS,
        gather_two_weight_gradients=reachable and not padded and ffn <= _IN_TWO_GRADIENTS,
        fuse_activation_gradient=hidden >= _TERMS_THAT_HIDE_ACTIVATION,
    )


@functools.lru_cache(maxsize=1024)
def layer_config_of_gathered(hidden: int, ffn: int, glu: bool, activation: str) -> LayerConfig:
    """layer_config of rows that lie gathered in memory: no GEMM gathers them."""
    return replace(layer_config(hidden, ffn, glu, activation, 0, False), gather_up=False, gather_up_along_f=False,
                   gather_down_backward=False, gather_weight_gradient=False, gather_only_weight_gradient=False,
                   gather_two_weight_gradients=False)
