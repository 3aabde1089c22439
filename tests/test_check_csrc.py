"""scripts/check_csrc.py: it reads what nvcc prints, and finds kernels that do not fit and symbols that must not be needed."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_csrc.py"


@pytest.fixture(scope="module")
def check():
    sys.path.append(str(SCRIPT.parent))  # for check_wheel, next to it
    spec = importlib.util.spec_from_file_location("check_csrc", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def name_of(element="13__nv_bfloat16", tile=(128, 256, 64, 64, 4, 3), memory=0):
    shape = "".join(f"Li{n}E" for n in tile)
    return (f"_ZN5gbmoe11tensor_core19grouped_gemm_kernelINS0_10GemmTraitsI{element}S3_NS0_9TileShapeI{shape}EELNS0_6MemoryE{memory}E"
            "Lb1EEEvNS0_9ArgumentsE")


def printed(*kernels, code="86"):
    return "ptxas info    : 0 bytes gmem\n" + "".join(
        f"ptxas info    : Compiling entry function '{name}' for 'sm_{code}'\nptxas info    : Function properties for {name}\n"
        f"    {stack} bytes stack frame, {spilled} bytes spill stores, {spilled} bytes spill loads\n"
        f"ptxas info    : Used {registers} registers, used 1 barriers{smem}\nptxas info    : Compile time = 1.000 ms\n"
        for name, stack, spilled, registers, smem in kernels)


def test_stubs_are_left_out_and_do_not_hide_the_kernel_behind_them(check):
    large, small = name_of(memory=1), name_of()
    kernels = check.parse(printed((large, 0, 0, 4, ""), (small, 0, 0, 240, ", 560 bytes smem")))
    assert kernels == {"8.6": [check.Kernel(small, 240, 0, 560)]}
    kernels = kernels["8.6"]
    assert (kernels[0].threads, kernels[0].ctas, kernels[0].shared_bytes) == (256, 1, (4 * 24 << 10) + 560 + 1024)


def test_sums_in_local_memory_are_spilled_though_nothing_is_stored_as_a_spill(check):
    (kernel,) = check.parse(printed((name_of(), 512, 0, 200, "")))["8.6"]
    assert list(kernel.faults("8.0")) == ["512 bytes are spilled"]


def test_kernels_of_several_architectures_are_told_apart(check):
    of_each = {"8.0": ("80", 200), "9.0": ("90a", 220), "12.0": ("120", 240)}
    text = "".join(printed((name_of(), 0, 0, registers, ""), (name_of(memory=1), 0, 0, 4, ""), code=code)
                   for code, registers in of_each.values())
    assert check.parse(text) == {name: [check.Kernel(name_of(), registers, 0, 0)] for name, (_, registers) in of_each.items()}


def test_what_ci_leaves_out_is_of_a_generation_that_it_compiles_for(check):
    """8.0 has the instances for little shared memory, too (has_instances of csrc/tensor_core/traits.cuh)."""
    left_out = check._SHARED_KIB.keys() - check._OF_CI
    assert left_out == {"8.6", "8.9"} and "8.0" in check._OF_CI and set(check._OF_CI) <= check._SHARED_KIB.keys()


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
    (("_ZN5gbmoe8few_rows15few_rows_kernelI13__nv_bfloat16Lb1EEEvNS0_9ArgumentsE", 96, 16, 0), "8.6", None),
    (("_ZN5gbmoe8few_rows15few_rows_kernelI13__nv_bfloat16Lb1EEEvNS0_9ArgumentsE", 96, 24, 0), "8.6", "24 bytes are spilled"),
])
def test_what_does_not_fit_is_found(check, kernel, architecture, words):
    faults = list(check.Kernel(*kernel).faults(architecture))
    assert (faults == []) if words is None else (len(faults) == 1 and re.search(words, faults[0]))


def test_symbols_of_python_and_of_torchs_c_plus_plus_are_found(check, tmp_path):
    """With a C compiler's object, as nvcc's host compiler makes it."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or shutil.which("nm") is None:
        pytest.skip("needs a C compiler and nm")
    for name, wrong in (("PyList_New", True), ("_ZN2at5emptyEv", True), ("_ZNK3c104SizeEv", True), ("aoti_torch_empty", False)):
        source, unit = tmp_path / f"{name}.c", tmp_path / f"{name}.o"
        source.write_text(f"void {name}(void);\nvoid call(void) {{ {name}(); }}\n")
        subprocess.run([compiler, "-c", str(source), "-o", str(unit)], check=True)
        assert check.wrong_symbols(unit) == ([name] if wrong else [])
    (tmp_path / "none.c").write_text("int nothing;\n")
    subprocess.run([compiler, "-c", str(tmp_path / "none.c"), "-o", str(tmp_path / "none.o")], check=True)
    assert check.wrong_symbols(tmp_path / "none.o") == ["it needs no symbol at all"]


def test_types_and_qualified_functions_of_torch_passed_as_the_stable_abi(check, tmp_path):
    """Only the beginnings of five kinds of names were refused. What csrc/ needs of the C++ library and of its own files is let through."""
    if shutil.which("g++") is None or shutil.which("nm") is None:
        pytest.skip("needs g++ and nm")
    source, unit = tmp_path / "wrong.cpp", tmp_path / "wrong.o"
    source.write_text("""
#include <sstream>
#include <stdexcept>
#include <vector>
namespace c10 { struct Error { virtual ~Error(); }; struct List { int size() const&; }; }
namespace torch { struct Library { int size() const; }; }
namespace cutlass { int version(); }
namespace gbmoe { int own(const c10::List&); }
int of_torch(const c10::List&);
template <> std::vector<c10::List>::vector(const std::vector<c10::List>&);
int call(const c10::List& l, const torch::Library& m, const std::vector<c10::List>& v) {
  try { std::stringstream text; text << l.size() << m.size() << cutlass::version() << gbmoe::own(l) << of_torch(l);
        if (std::vector<c10::List>(v).size()) throw c10::Error();
        throw std::runtime_error(text.str().at(0) ? text.str() : std::string()); } catch (const c10::Error&) { return 1; }
}
""")
    subprocess.run(["g++", "-std=c++17", "-O0", "-fPIC", "-c", str(source), "-o", str(unit)], check=True)
    assert sorted(check.wrong_symbols(unit)) == sorted([
        "_ZN3c105ErrorD1Ev", "_ZTIN3c105ErrorE", "_ZTVN3c105ErrorE", "_ZNKR3c104List4sizeEv", "_ZNK5torch7Library4sizeEv",
        "_ZN7cutlass7versionEv", "_Z8of_torchRKN3c104ListE", "_ZNSt6vectorIN3c104ListESaIS1_EEC1ERKS3_"])
