"""The choices by shape, dtype and device: which engine, and which instance of a kernel, computes a call.

Every function here is pure: from shapes, dtypes and a Device (device.py: multiprocessors, bytes of the L2, compute capability) to a
named configuration, without a tensor, so that it is tested on a CPU. Engines and operators hand the configuration down to the launches
(csrc/), which refuse one that they have no instance for. To tune gbmoe for another GPU, change these files:

    engine_order.py         which engines "auto" tries
    groups_of_few_rows.py   when kernels for groups of few rows serve
    hopper_tiles.py         tiles, clusters, schedules and split-K of the Hopper engine's GEMMs
    float8_tiles.py         the same for scaled e4m3 operands
    tensor_core_tiles.py    tiles of the tensor_core engine's GEMMs
    gathering.py            whether rows are gathered before the Hopper engine's GEMMs or
                            inside them
    router_kernels.py       how a warp's lanes share a token's logits
    permute.py              how threads share the gather, and CTAs the sort of a plan

The constants were fitted on an H200, most of them on an H100 as well. On other GPUs what stands for waves of tiles, time or cached bytes
is scaled by what Device says, which was reckoned and not measured. docs/notes/ has the figures.
"""
