"""scripts/check_occupancy.py: it reads what nvcc prints, and finds kernels that do not fit."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_occupancy.py"


@pytest.fixture(scope="module")
def occupancy():
    spec = importlib.util.spec_from_file_location("check_occupancy", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def name_of(element="13__nv_bfloat16", tile=(128, 256, 64, 64, 4, 3), memory=0):
    shape = "".join(f"Li{n}E" for n in tile)
    return (f"_ZN5gbmoe11tensor_core19grouped_gemm_kernelINS0_10GemmTraitsI{element}S3_NS0_9TileShapeI{shape}EELNS0_6MemoryE{memory}E"
            "Lb1EEEvNS0_9ArgumentsE")


def printed(*kernels):
    return "ptxas info    : 0 bytes gmem\n" + "".join(
        f"ptxas info    : Compiling entry function '{name}' for 'sm_86'\nptxas info    : Function properties for {name}\n"
        f"    0 bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers{smem}\nptxas info    : Compile time = 1.000 ms\n"
        for name, spilled, registers, smem in kernels)


def test_stubs_are_left_out_and_do_not_hide_the_kernel_behind_them(occupancy):
    large, small = name_of(memory=1), name_of()
    kernels = occupancy.parse(printed((large, 0, 4, ""), (small, 0, 240, ", 560 bytes smem")))
    assert kernels == [occupancy.Kernel(small, 240, 0, 560)]
    assert (kernels[0].threads, kernels[0].ctas, kernels[0].shared_bytes) == (256, 1, (4 * 24 << 10) + 560 + 1024)


@pytest.mark.parametrize("kernel, architecture, words", [
    ((name_of(), 240, 0, 560), "8.6", None),
    ((name_of(), 240, 8, 560), "8.6", "8 bytes are spilled"),
    ((name_of("f"), 240, 8, 560), "8.6", None),
    ((name_of("f"), 240, 200, 560), "8.6", "200 bytes are spilled"),
    ((name_of(tile=(128, 128, 64, 64, 3, 2)), 255, 0, 560), "8.6", None),
    ((name_of(tile=(128, 128, 64, 64, 4, 2)), 255, 0, 560), "8.6", r"2 CTAs of \d+ bytes of shared memory do not fit into 100 KiB"),
    ((name_of(memory=1), 240, 0, 560), "8.0", None),
    ((name_of(memory=1), 240, 0, 560), "8.6", "1 CTAs of .* do not fit into 100 KiB"),
    ((name_of(tile=(128, 256, 32, 32, 4, 3)), 160, 0, 560), "8.0", "160 registers a thread leave room for 0 CTAs, not 1"),
])
def test_what_does_not_fit_is_found(occupancy, kernel, architecture, words):
    faults = list(occupancy.Kernel(*kernel).faults(architecture))
    assert (faults == []) if words is None else (len(faults) == 1 and re.search(words, faults[0]))
