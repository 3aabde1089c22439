"""Which products of a layer are computed in blockwise-scaled e4m3, and how."""

from __future__ import annotations

from dataclasses import dataclass

from gbmoe._checks import names_the_nearest_field, require


@names_the_nearest_field
@dataclass(frozen=True)
class Float8BlockScaling:
    """The recipe of DeepSeek-V3: e4m3, with a scale for 1 x 128 activations and gradients, and for 128 x 128 weights.

    Named after TransformerEngine's Float8BlockScaling. Products of rows are computed in float8: both GEMMs of forward, and those of
    backward that give gradients of rows. Each 128 terms are summed by the tensor cores and then added up in float32. Parameters,
    pre-activations and all gradients are stored in the layer's dtype, and gradients of weights are products in that dtype, unless
    float8_weight_gradients.

    Args:
        power_2_scale: round scales to powers of two, so that scaling a number changes its exponent alone. Numbers then use a range up to
            448 down to 224, which costs up to one bit.
        float8_weight_gradients: compute gradients of weights in float8 too. Their sums run over an expert's rows; so both operands are
            quantised once more, with a scale for 128 x 1: the same column of 128 rows.
        keep_weights: quantise weights for backward in forward, from the same read, and keep them until backward: a byte for each number,
            for each forward whose backward is still to come. Without it backward reads and quantises them anew. Results have the same
            bits. It is for expert_mlp, grouped_mlp and layers, and has no effect where x needs no gradient, for an activation without
            a kernel, in the exact mode of expert parallelism over the exchange, and for weights that cached_weights keeps.
            A change of the weights between forward and backward raises if torch counts it. One that it does not count, such as a fused
            optimizer's, is not noticed, as with any of torch's operators: kept weights are forward's, others are what is there then.
        float8_dispatch: x and the gradient of the output are quantised once, each by its rows, and gradients of weights (and of w2's
            biases) are products of what these e4m3 values stand for, rounded to the layer's dtype, instead of the rows themselves. With
            float8_weight_gradients these rounded values are quantised again along an expert's rows, as DeepSeek-V3 does. So ranks of
            expert parallelism need to send no more than e4m3 and scales, half the bytes; one process computes the same from what it
            quantises itself. Forward and gradients of rows have the bits that they have without it. In float16 not with power_2_scale,
            with which finite values would round to infinity.

    Example:
        >>> Float8BlockScaling(power_2_scale=True).engine
        'float8_block_power_2'
    """
    power_2_scale: bool = False
    float8_weight_gradients: bool = False
    keep_weights: bool = True
    float8_dispatch: bool = False

    def __post_init__(self):
        for name in ("power_2_scale", "float8_weight_gradients", "keep_weights", "float8_dispatch"):
            value = getattr(self, name)
            require(isinstance(value, bool), "Float8BlockScaling", name, "a bool", repr(value), TypeError)

    @property
    def engine(self) -> str:
        """The name of the engine that computes this (gbmoe.engines.FLOAT8_ENGINES)."""
        scale = "float8_block_power_2" if self.power_2_scale else "float8_block"
        return scale + "_weights" * self.float8_weight_gradients + "_dispatch" * self.float8_dispatch
