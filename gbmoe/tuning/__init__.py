"""The choices by shape, dtype and device that measurements made: which engine, and which instance of a kernel, computes a call.

Every function here is pure: from shapes, dtypes and a device to a named configuration, without a tensor, so that it is tested on a
CPU. Engines and operators hand the configuration down to the launches (csrc/), which choose nothing themselves and refuse a
configuration that they have no instance for. To tune gbmoe for another GPU, change the files here: grouped_gemm.py (engines, tiles,
where rows are gathered), router.py and permutation.py.

Unless a row says otherwise its figures are of one NVIDIA H200 (132 multiprocessors, 700 W, CUDA 13.0, torch 2.11), bfloat16,
measured in November 2026; docs/notes/ has the races behind them.
"""
