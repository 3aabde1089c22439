"""Programs that csrc/program.cpp runs. It needs no CUDA: where there is a C++ compiler it is compiled here by itself, for torch's CPU."""

import gc
import itertools
import os
import shutil
import subprocess
import threading
import weakref

import pytest
import torch

from gbmoe import extension
from gbmoe.extension.build import TORCH_TARGET_VERSION
from gbmoe.programs import Programs, encoding, recording

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """csrc/program.cpp, loaded into this process."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    if torch.cuda.is_available() and extension.loaded():
        pytest.skip("the extension is loaded: tests/programs/test_programs.py runs it")
    folder, output = os.path.dirname(torch.__file__), tmp_path_factory.mktemp("program") / "program.so"
    subprocess.run([compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Werror=return-type",
                    f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}", f"-I{folder}/include", str(extension.source_folder() / "program.cpp"),
                    "-o", str(output), f"-L{folder}/lib", "-ltorch_cpu", "-lc10"], check=True)
    torch.ops.load_library(output)


@pytest.fixture
def on_cpu(library, monkeypatch):
    monkeypatch.setattr(encoding, "_serves", lambda tensor: True)


def check(function, *calls):
    """The third call and later ones are run by the extension, and do what the function does."""
    programs = Programs(lambda inputs: function(*inputs), "a test")
    for inputs in (calls[0], calls[0], *calls):
        torch.testing.assert_close(programs(list(inputs)), function(*inputs), rtol=0, atol=0)
    table, = programs._tables.values()
    assert len(table.programs) == 1
    return programs


def calls(*shapes, further=()):
    return [[*(torch.randn(shape) for shape in shapes), *further] for _ in range(3)]


def test_views_memory_and_operators(on_cpu):
    def function(x, w, number):
        out = x.new_empty(x.size(0), w.size(0))
        torch.mm(x, w.t(), out=out)
        first, rest = out[1:], torch.zeros_like(out)
        rest.copy_(out.clone())
        return out, (first, None, number), rest.sum(0, dtype=torch.float64), rest.view(-1)[3:], torch.cat([x, x]) if number > 10 else x[0]

    check(function, *calls((5, 4), (3, 4), further=[7]))


def test_what_the_stable_abi_cannot_pass_is_left_to_python(on_cpu):
    programs = Programs(lambda inputs: inputs[0] * 2.5, "a test")  # a Scalar
    for _ in range(4):
        x = torch.randn(3)
        assert torch.equal(programs([x]), x * 2.5)
    assert all(not table.programs for table in programs._tables.values())


def test_kinds_of_tensors_and_all_else_are_told_apart(on_cpu):
    made = []
    programs = Programs(lambda inputs: (made.append(1), inputs[0].t().clone(), inputs[1])[1:], "a test")
    kinds = [[torch.randn(4, 4), 1], [torch.randn(4, 4), 2], [torch.randn(4, 4).t(), 1], [torch.randn(4, 5), 1],
             [torch.randn(17)[1:].view(4, 4), 1], [torch.randn(4, 4).double(), 1]]
    for _, inputs in itertools.product(range(5), kinds):
        result, number = programs(list(inputs))
        assert torch.equal(result, inputs[0].t()) and number == inputs[1]
    assert len(made) == 2 * len(kinds) and sum(len(table.programs) for table in programs._tables.values()) == len(kinds)


def test_one_tensor_for_two_arguments_is_not_run_by_a_program_of_two(on_cpu):
    programs = check(lambda x, y: x.clone().copy_(y.t().clone()), *calls((3, 3), (3, 3)))
    x = torch.randn(3, 3)
    for _ in range(3):
        assert torch.equal(programs([x, x]), x.t())
    assert torch.equal(programs([x, x.view(3, 3)]), x.t())  # nor two tensors in the same memory


def test_memory_is_free_after_its_last_use(on_cpu):
    """That of an input, and what a program makes; nothing is kept after the call."""
    alive = []
    look = torch.library.custom_op("gbmoe_test::look", lambda x: (alive.append(given() is not None), x.clone())[1],
                                                mutates_args=(), schema="(Tensor x) -> Tensor")

    def function(inputs):
        x, small = inputs
        inputs.clear()
        small = small.view(-1).clone()
        y = x.clone()
        del x
        return look(small), y[:1].clone()

    programs = Programs(function, "a test")
    for _ in range(4):
        x = torch.randn(1000)
        given = weakref.ref(x)
        inputs = [x, torch.randn(2, 1)]
        del x
        programs(inputs)
        assert not inputs
        gc.collect()
        assert given() is None
    assert sum(len(table.programs) for table in programs._tables.values()) == 1
    assert alive[-1] is False


def test_an_error_is_that_of_the_statement_and_nothing_is_kept(on_cpu):
    """Torch's exception, with its type and words, of an allocation and of an operator."""
    programs = check(lambda x, i: x.index_select(0, i), [torch.randn(4, 2), torch.tensor([0, 3])])
    x, bad = torch.randn(4, 2), torch.tensor([0, 9])
    given = weakref.ref(x)
    with pytest.raises(IndexError, match="index out of range"):
        programs([x, bad])
    with pytest.raises(RuntimeError, match="no call of this program waits"):
        torch.ops.gbmoe_cuda.run_program(max(number for table in programs._tables.values() for number in table.programs))
    del x
    gc.collect()
    assert given() is None
    assert torch.equal(programs([torch.ones(4, 2), torch.tensor([1, 1])]), torch.ones(2, 2))


def test_a_call_goes_on_where_a_statement_succeeds_at_the_second_try(on_cpu, monkeypatch):
    """As an allocation may after torch has freed memory that it had cached."""
    programs = check(lambda x, i: x.index_select(0, i).t().clone(), [torch.randn(4, 2), torch.tensor([0, 3])])
    monkeypatch.setattr(recording.Statement, "perform", lambda self, tensors: [torch.full((2, 2), 5.0)])
    assert programs([torch.randn(4, 2), torch.tensor([0, 9])]).tolist() == [[5.0, 5.0]] * 2


def test_copies_in_inference_mode_were_taken_for_views(on_cpu):
    """Where operators that consist of others get to a recording as they are. Later calls read the memory of what had been copied."""
    def function(x):
        return x.reshape(-1).clone(), x.contiguous().view(-1)[1:].clone(), x.flatten().clone()

    batches = [[torch.randn(3, 4).t()] for _ in range(3)]
    with torch.inference_mode():
        programs = check(function, *batches)
    for inputs in batches:
        torch.testing.assert_close(programs(list(inputs)), function(*inputs), rtol=0, atol=0)


def test_a_call_within_a_recorded_one_is_a_part_of_it(on_cpu):
    inner = check(lambda x: x.t().clone(), *calls((3, 4)))
    check(lambda x: inner([x]).t().clone(), *calls((3, 4)))


def test_another_call_may_come_between_those_of_one(on_cpu):
    """As from a finaliser that Python runs where a list is emptied."""
    programs = check(lambda x: x.t().clone(), *calls((3, 4)))
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    encoded = programs._found([x])
    assert torch.equal(programs([y]), y.t()) and torch.equal(encoded.run(), x.t())
    for _ in range(30):  # calls that an exception has left
        programs._found([x])
    assert torch.equal(programs([y]), y.t())


def test_tables_have_a_bound(on_cpu):
    programs = Programs(lambda inputs: inputs[0].t().clone(), "a test", most=4)
    for number in range(20):
        for _ in range(3):
            x = torch.randn(3, 4)
            assert torch.equal(programs([x, number]), x.t())
    assert 0 < sum(len(table.programs) for table in programs._tables.values()) <= 4


def test_memory_is_filled_where_algorithms_are_to_be_deterministic(on_cpu):
    programs = check(lambda x: x.new_zeros(3), *calls((3,)))
    empty = Programs(lambda inputs: inputs[0].new_empty(64), "a test")
    for _ in range(3):
        empty([torch.zeros(3)])
    torch.use_deterministic_algorithms(True)
    try:
        assert empty([torch.zeros(3)]).isnan().all() and not programs([torch.zeros(3)]).any()
    finally:
        torch.use_deterministic_algorithms(False)


def test_threads_have_calls_of_their_own(on_cpu):
    programs = check(lambda x, y: torch.mm(x, y).t().clone(), *calls((8, 8), (8, 8)))
    wrong = []

    def work(seed):
        generator = torch.Generator().manual_seed(seed)
        for _ in range(200):
            x, y = (torch.randn(8, 8, generator=generator) for _ in range(2))
            expected = torch.mm(x, y).t()
            if not torch.equal(programs([x, y]), expected):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_programs_that_are_forgotten_are_recorded_anew(on_cpu):
    programs = check(lambda x: x.t().clone(), *calls((3, 4)))
    programs.forget()
    assert not programs._tables
    x = torch.randn(3, 4)
    for _ in range(4):
        assert torch.equal(programs([x]), x.t())
    assert len(programs._tables) == 1


def test_code_that_is_none_is_refused(library):
    with pytest.raises(RuntimeError, match="ends early"):
        torch.ops.gbmoe_cuda.define_program(10**6, [], [3, 1], [], "")
    with pytest.raises(RuntimeError, match="programs cannot call gbmoe_cuda::nothing"):
        torch.ops.gbmoe_cuda.define_program(10**6, [], [1, 0, 0, 4, 0, 0, 0, 0, 1, 0], [], "gbmoe_cuda::nothing\n\n")
