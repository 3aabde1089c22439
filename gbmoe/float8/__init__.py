"""Blockwise-scaled e4m3: recipe.py says what is computed in it, plain_quantize.py how, to the bit in plain PyTorch,
scaled_tensors.py has what holds it, and weight_cache.py keeps weights that were quantised."""

from gbmoe.float8.recipe import Float8BlockScaling
from gbmoe.float8.scaled_tensors import FLOAT8, TILE, ScaledKBlocks, ScaledRows, ScaledWeights, k_blocks
from gbmoe.float8.weight_cache import cached, cached_weights, keeps_weights, weights_changed
from gbmoe.plain.plain_quantize import quantize_k_blocks, quantize_rows, quantize_weights, tile_scales

__all__ = ["FLOAT8", "TILE", "Float8BlockScaling", "ScaledKBlocks", "ScaledRows", "ScaledWeights", "cached", "cached_weights", "k_blocks",
           "keeps_weights", "quantize_k_blocks", "quantize_rows", "quantize_weights", "tile_scales", "weights_changed"]
