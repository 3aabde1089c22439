"""Where a layer's rows are gathered."""

import pytest

from gbmoe.tuning import gathering


@pytest.mark.parametrize("hidden, ffn, glu, activation, gather_up, padded, gather_down_backward, gather_weight_gradient, only, two, fuse", [
    (1536, 256, True, "silu", True, True, True, True, True, True, True),              # "fine"
    (2048, 512, True, "gelu_tanh", True, True, False, True, True, True, True),
    (2048, 512, True, "relu", False, False, False, True, True, True, True),
    (2048, 768, True, "silu", True, False, False, False, True, True, True),           # qwen3
    (2048, 768, True, "gelu", False, False, False, False, True, True, True),
    (2048, 768, False, "silu", False, False, False, False, True, True, True),         # three tiles, which do not form pairs
    (2048, 1024, True, "silu", True, False, False, False, True, True, True),          # olmoe
    (2048, 1408, True, "silu", False, False, False, False, True, False, True),        # eleven
    (7168, 2048, True, "silu", True, False, False, False, True, False, True),
    (2048, 2304, True, "silu", False, False, False, False, False, False, True),
    (1024, 4096, False, "silu", False, False, False, False, False, False, False),
])
def test_layer_config(hidden, ffn, glu, activation, gather_up, padded, gather_down_backward, gather_weight_gradient, only, two, fuse):
    """`padded`: whether it gathers in the first GEMM where rows may have no token; `two`: whether one GEMM gathers for the gradients of
    both w1 and v1, where all rows have a token, and `only`: likewise for one gradient alone, of F columns."""
    for rows_are_padded, in_up in ((False, gather_up), (True, padded)):
        assert gathering.layer_config(hidden, ffn, glu, activation, 1 << 30, rows_are_padded) == gathering.LayerConfig(
            in_up, in_up and not rows_are_padded, gather_down_backward, gather_weight_gradient, only and not rows_are_padded,
            two and not rows_are_padded, fuse)


def test_single_ctas_gather_no_rows_for_weights_along_f():
    config = gathering.layer_config(2048, 384, True, "silu", 1 << 30, False)  # three tiles, which do not form pairs
    assert config.gather_up and not config.gather_up_along_f


@pytest.mark.parametrize("rows, groups, ffn, pay", [(32768, 128, 768, True), (32767, 128, 768, False), (512, 128, 512, True)])
def test_rows_pay_for_gathering(rows, groups, ffn, pay):
    assert gathering.rows_pay_for_gathering(rows, groups, ffn) == pay


@pytest.mark.parametrize("token_bytes", [1 << 30, 1 << 36])
@pytest.mark.parametrize("ffn, activation", [(512, "silu"), (513, "silu"), (256, "gelu_tanh"), (256, "relu")])
def test_always_gathers_in_up_is_what_holds_for_rows_with_and_without_padding(ffn, activation, token_bytes):
    both = all(gathering.layer_config(2048, ffn, True, activation, token_bytes, padded).gather_up for padded in (False, True))
    assert gathering.always_gathers_in_up(ffn, activation, token_bytes) == both
