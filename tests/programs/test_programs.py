"""gbmoe/programs/ on functions of these tests, and on a layer's steps."""

import gc
import subprocess
import sys
import weakref
from types import SimpleNamespace

import pytest
import torch

import gbmoe
from gbmoe import programs as package
from gbmoe.programs import Programs, kind_of, recording, source
from gbmoe.programs.recording import Memory, Name, Statement
from gbmoe.testing.exact_inputs import poison


def record(function, inputs):
    """The function's results, and its program or None."""
    results, recorded = recording.record(function, list(inputs))
    return results, None if recorded is None else source.compiled(recorded, "a test")


def program_of(function, *inputs):
    return record(function, inputs)[1]


def check(function, *calls):
    """The program of the first call does for all of them what the function does."""
    program = program_of(function, *calls[0])
    assert program is not None
    for inputs in calls:
        torch.testing.assert_close(program(list(inputs)), function(list(inputs)), rtol=0, atol=0)


def test_a_program_does_what_the_function_does():
    def function(inputs):
        x, w, number = inputs
        out = x.new_empty(x.size(0), w.size(0))
        torch.mm(x, w.t(), out=out)
        out += number
        first, rest = out.split([1, out.size(0) - 1])
        return out, (first * 2.5, None), torch.zeros_like(rest), x.unsqueeze(0)

    calls = [(torch.randn(5, 4), torch.randn(3, 4), 7) for _ in range(3)]
    check(function, *calls)


def test_writes_to_views_are_kept_and_what_nobody_reads_is_not():
    def function(inputs):
        x, = inputs
        x.exp()  # of no use
        out = torch.zeros(4, 4)
        out[1].copy_(x)
        out.t()[2].add_(1)
        return out

    program = program_of(function, torch.randn(4))
    check(function, (torch.randn(4),), (torch.randn(4),))
    assert "exp" not in str(program.__globals__.keys()) and len(program.__code__.co_names) < 20


def test_memory_is_freed_where_it_was_last_used():
    """By a recording, which holds no tensor, and by a program, of what it makes and of what it is given."""
    made = []

    def function(inputs):
        x, = inputs
        inputs.clear()
        big = x * 2
        made.append(weakref.ref(big))
        small = big.sum()
        del big
        made.append(made[0]() is None)
        return small + 1

    x = torch.randn(8)
    program, given = program_of(function, x), weakref.ref(x)
    assert made[1]
    inputs = [x]
    del x
    program(inputs)
    assert not inputs and given() is None


def test_memory_is_reused_where_it_makes_no_difference():
    """That of a tensor which a launch has read for the last time, and not of one that is returned or may have a view."""
    def empty(name, size):
        memory = Memory((size,), (1,), torch.float32, torch.device("cpu"))
        return Statement(torch.empty, results=[name], memory=memory)

    def call(operator, *reads):
        return Statement(operator, tuple(map(Name, reads)), must_run=True)

    launch, view = SimpleNamespace(namespace="gbmoe_cuda"), Statement(torch.ops.aten.t.default, (Name("v4"),), results=["v5"])
    statements = [empty("v1", 4), call(launch, "v1"), empty("v2", 4), empty("v3", 5), call(launch, "v2", "v3"), empty("v4", 4), view,
                  empty("v6", 4), call(launch, "v6"), empty("v7", 4)]
    recording._reuse_memory(statements, ["v6", "v7", "v5"])
    assert [(s.results[0], s.arguments) for s in statements if s.operator is None] == [("v2", ("v1",)), ("v4", ("v2",))]


def test_results_of_no_elements_were_one_tensor_in_all_calls():
    """So the last call's leaves got the gradients of an earlier one's, and a call without gradients had a graph."""
    programs = Programs(lambda inputs: (inputs[0].new_empty(0, 3), inputs[0].new_zeros(0)), "a test")

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return programs([x])

        @staticmethod
        def backward(ctx, *grads):
            return torch.zeros(0, 5)

    for _ in range(2):
        programs([torch.zeros(0, 5)])
    leaves = [torch.zeros(0, 5, requires_grad=True) for _ in range(2)]
    first, second = (Function.apply(x) for x in leaves)
    assert all(one is not other and one.grad_fn is not other.grad_fn for one, other in zip(first, second))
    first[0].sum().backward()
    assert leaves[0].grad is not None and leaves[1].grad is None
    assert not any(t.requires_grad for t in programs([torch.zeros(0, 5)]))


@pytest.mark.slow
def test_the_first_recording_loaded_torchs_compiler():
    """Which took seconds of a training's third step."""
    code = ("import sys, torch\nfrom gbmoe.programs import recording\n"
            "print(recording.record(lambda inputs: inputs[0] + 1, [torch.ones(1)]))\n"
            "sys.exit('torch._dynamo' in sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_random_numbers_that_nobody_reads_are_drawn():
    def function(inputs):
        torch.rand(3)
        return inputs[0] + torch.rand(3)

    program = program_of(function, torch.zeros(3))
    torch.manual_seed(0)
    expected = function([torch.zeros(3)])
    torch.manual_seed(0)
    assert torch.equal(program([torch.zeros(3)]), expected)


def test_arguments_without_a_kind_are_the_functions_to_refuse():
    def function(inputs):
        raise ValueError("expected a str")

    programs = Programs(function, "a test")
    for wrong in (["auto"], torch.zeros(2, 2).to_sparse()):
        for _ in range(3):
            with pytest.raises(ValueError, match="expected a str"):
                programs([torch.zeros(1), wrong])


def test_what_is_recorded_while_all_is_forgotten_is_forgotten():
    calls, function = counted()

    def forgetting(inputs):
        if len(calls) == 1:  # the second call, which is recorded
            package.forget_all()
        return function(inputs)

    programs = Programs(forgetting, "a test")
    for _ in range(3):
        programs([torch.zeros(2), 1])
    assert calls == [1, 1, 1]


@pytest.mark.gpu
def test_numbers_of_an_argument_on_the_host_were_constants():
    results, program = record(lambda inputs: inputs[0] * inputs[1].tolist()[0], [torch.ones(2, device="cuda"), torch.tensor([3])])
    assert program is None and results.tolist() == [3, 3]


@pytest.mark.parametrize("function", [
    pytest.param(lambda inputs: inputs[0] * float(inputs[0].sum()), id="a number is read"),
    pytest.param(lambda inputs: inputs[0] + CONSTANT, id="a tensor from elsewhere"),
    pytest.param(lambda inputs: (inputs[0], CONSTANT), id="a result from elsewhere"),
    pytest.param(lambda inputs: inputs[0] * 2 if inputs[0].max() > 0 else inputs[0], id="a branch"),
])
def test_what_depends_on_more_than_the_kind_has_no_program(function):
    results, program = record(function, [torch.ones(3)])
    torch.testing.assert_close(results, function([torch.ones(3)]))
    assert program is None


CONSTANT = torch.ones(3)


def test_one_tensor_for_two_arguments_is_another_kind_and_is_not_recorded():
    x, y = torch.randn(3), torch.randn(3)
    assert kind_of([x, y]) == kind_of([y, x]) != kind_of([x, x])
    assert program_of(lambda inputs: inputs[0] - inputs[1], x, x) is None


@pytest.mark.parametrize("other", [
    pytest.param(lambda x: x.double(), id="dtype"), pytest.param(lambda x: x.t(), id="strides"),
    pytest.param(lambda x: x[:, :2], id="shape"),
    pytest.param(lambda x: torch.empty(17)[1:].view(4, 4), id="alignment"),
])
def test_kinds_tell_apart_what_a_decision_may_depend_on(other):
    x = torch.randn(4, 4)
    assert kind_of([x, 1]) == kind_of([torch.randn(4, 4), 1]) != kind_of([other(x), 1])
    assert kind_of([x, 1]) != kind_of([x, 2])


def counted():
    calls = []

    def function(inputs):
        calls.append(inputs[1])
        return inputs[0] + inputs[1]

    return calls, function


def test_a_kind_that_comes_again_is_recorded_and_the_oldest_one_makes_room():
    calls, function = counted()
    programs, x = Programs(function, "a test", most=2), torch.zeros(2)
    for number in (1, 1, 1, 1, 2, 2, 2):
        assert programs([x, number]).tolist() == [number] * 2
    assert calls == [1, 1, 2, 2]
    for number in (3, 3, 2, 1):
        programs([x, number])
    assert calls == [1, 1, 2, 2, 3, 3, 1]  # kind 1 had made room
    package.forget_all()
    assert programs([x, 3]).tolist() == [3, 3] and calls[-1] == 3


def test_kinds_that_seldom_come_again_are_not_recorded(monkeypatch):
    """Numbers of rows that change from step to step cost a recording each time that one came twice."""
    calls, function = counted()
    programs, x, recorded = Programs(function, "a test"), torch.zeros(2), []
    monkeypatch.setattr(package, "record", lambda function, inputs: recorded.append(inputs[1]) or (function(inputs), None))
    for _ in range(3):
        for number in range(package._LATELY + 1):
            programs([x, number])
    assert recorded == [] and len(programs._lately) == package._LATELY
    programs([x, 5])
    assert recorded == [5] and len(calls) == 3 * (package._LATELY + 1) + 1


def test_the_environment_turns_programs_off(monkeypatch):
    assert package.is_on(None) and package.is_on("") and package.is_on("1") and not package.is_on("0")
    with pytest.raises(ValueError, match="GBMOE_PROGRAMS: expected 0 or 1, got 'off'"):
        package.is_on("off")
    calls, function = counted()
    monkeypatch.setattr(package, "IS_ON", False)
    programs = Programs(function, "a test")
    for _ in range(3):
        programs([torch.zeros(2), 1])
    assert calls == [1, 1, 1]


def test_an_error_in_a_recorded_call_is_the_callers():
    def function(inputs):
        raise torch.OutOfMemoryError("no room")

    programs = Programs(function, "a test")
    for _ in range(3):
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            programs([torch.zeros(1)])
    assert not package.is_seen_by_recordings_alone()


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(64, 64, 96, 8, 2), (300, 128, 64, 5, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_steps_of_a_layer_have_the_same_bits_and_no_more_memory(shape, dtype):
    """The third step runs programs, with another routing than that of which they were recorded."""
    tokens, hidden, ffn, experts, top_k = shape
    args = gbmoe.Arguments(hidden_size=hidden, ffn_hidden_size=ffn, moe_num_experts=experts, moe_top_k=top_k, mlp_type="glu", bias=False,
                           fp16=False, bf16=dtype == torch.bfloat16, moe_loss_weight=0, device="cuda")
    layer = gbmoe.dMoE(args)
    batches = [torch.randn(tokens, 1, hidden, device="cuda", dtype=dtype) for _ in range(4)]

    def step(x):
        layer.zero_grad(set_to_none=True)
        poison("cuda")
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]  # blocks may be larger, as others left them
        x = x.clone().requires_grad_()
        out = layer(x)
        out.backward(torch.ones_like(out))
        used = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters())], used

    expected = []
    for x in batches:
        package.forget_all()
        expected.append(step(x))
    gc.collect()
    package.forget_all()
    for repeat in range(3):
        for x, (results, peak) in zip(batches, expected):
            got, used = step(x)
            assert all(torch.equal(one, other) for one, other in zip(got, results)), repeat
            assert used <= peak, repeat


@pytest.mark.gpu
def test_memory_that_ran_out_in_a_program_is_torchs_error():
    """With its type and words, and the next step is as before: the extension's own allocations know no types of errors."""
    args = gbmoe.Arguments(hidden_size=512, ffn_hidden_size=1024, moe_num_experts=4, moe_top_k=2, mlp_type="glu", bias=False, fp16=False,
                           bf16=True, moe_loss_weight=0, device="cuda")
    layer, x = gbmoe.dMoE(args), torch.randn(4096, 1, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step():
        layer.zero_grad(set_to_none=True)
        x.grad = None
        out = layer(x)
        out.backward(torch.ones_like(out))
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]

    for _ in range(3):
        expected = step()
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        for more in range(0, 64, 4):  # MiB; it runs out at another statement each time
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (more << 20)) / total)
            try:
                step()
            except torch.OutOfMemoryError as error:
                assert "CUDA out of memory" in str(error)
            gc.collect()
            torch.cuda.empty_cache()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert all(torch.equal(one, other) for one, other in zip(step(), expected))


@pytest.mark.gpu
def test_a_step_of_programs_is_one_cuda_graph():
    args = gbmoe.Arguments(hidden_size=64, ffn_hidden_size=96, moe_num_experts=8, moe_top_k=2, mlp_type="glu", bias=False, fp16=False,
                           bf16=True, moe_loss_weight=0, device="cuda")
    layer, x = gbmoe.dMoE(args), torch.randn(64, 1, 64, device="cuda", dtype=torch.bfloat16)
    weights = list(layer.parameters())

    def step():
        out = layer(x)
        return [out, *torch.autograd.grad(out.square().sum(), weights)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    x.copy_(torch.randn_like(x))
    graph.replay()
    assert all(torch.equal(one, other) for one, other in zip(results, step()))


@pytest.mark.gpu
def test_a_program_runs_where_its_tensors_are():
    """Not on the device that is the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = []
    for device in ("cuda:1", "cuda:0"):
        args = gbmoe.Arguments(hidden_size=64, ffn_hidden_size=96, moe_num_experts=8, moe_top_k=2, mlp_type="glu", bias=False, fp16=False,
                               bf16=True, moe_loss_weight=0, device=device)
        torch.manual_seed(0)
        layer = gbmoe.dMoE(args)
        for parameter in layer.parameters():
            parameter.data.copy_(torch.randn(parameter.shape) / 8)
        x = torch.randn(64, 1, 64).to(device, torch.bfloat16)
        for _ in range(4):
            out = layer(x)
            results.append([t.cpu() for t in (out.detach(), *torch.autograd.grad(out.square().sum(), list(layer.parameters())))])
    assert all(torch.equal(one, other) for step in results for one, other in zip(step, results[0]))
