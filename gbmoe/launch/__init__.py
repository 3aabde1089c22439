"""The functions that operators and engines compute with: each allocates its results and launches CUDA kernels where they are loaded, and
otherwise computes in plain PyTorch (gbmoe/plain/). No autograd. The kernels are in csrc/.

availability.py says whether they are loaded. permute.py, activation.py, quantize.py, dequantize.py, router.py and peers.py are rooms as
csrc/ has them; the functions of the first four are here under their names, as are those of sums_and_copies.py. Launches of GEMMs are with
their engines (gbmoe/engines/).
"""

from gbmoe.launch.activation import (
    activate,
    activate_backward,
    activate_backward_k_blocks,
    activate_backward_scaled,
    activate_pairs,
    activate_pairs_backward,
)
from gbmoe.launch.dequantize import dequantize_gathered, dequantize_rows, requantize_k_blocks
from gbmoe.launch.permute import (
    add_dots,
    clear_rows_without_slot,
    gather,
    map_slots,
    scatter,
    scatter_backward,
    weigh_rows,
    weights_in_columns,
)
from gbmoe.launch.quantize import (
    empty_scaled_rows,
    quantize_gathered,
    quantize_gathered_k_blocks,
    quantize_k_blocks,
    quantize_rows,
    quantize_weights,
    quantize_weights_both_ways,
    reads_weights_in_place,
)
from gbmoe.launch.sums_and_copies import add_to_rows, copy_scaled, with_aligned_rows

__all__ = [
    "activate", "activate_backward", "activate_backward_k_blocks", "activate_backward_scaled", "activate_pairs",
    "activate_pairs_backward", "add_dots", "add_to_rows", "clear_rows_without_slot", "copy_scaled", "dequantize_gathered",
    "dequantize_rows", "empty_scaled_rows", "gather", "map_slots", "quantize_gathered", "quantize_gathered_k_blocks",
    "quantize_k_blocks", "quantize_rows", "quantize_weights", "quantize_weights_both_ways", "reads_weights_in_place",
    "requantize_k_blocks", "scatter", "scatter_backward", "weigh_rows", "weights_in_columns", "with_aligned_rows",
]
