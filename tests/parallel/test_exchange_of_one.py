"""What of the exchange between ranks shows where this process is the only one: the order of its steps, and the strides that it takes.

Shape suffixes: T tokens, K slots a token, S rows received, H hidden.
"""

import types

import pytest
import torch
import torch.distributed as dist

import gbmoe
from gbmoe.parallel import experts_by_exchange
from gbmoe.parallel.differentiable_all_to_all import weights_with_ids
from gbmoe.parallel.exact_exchange import exact_experts_by_exchange
from gbmoe.parallel.exchange import as_it_travels
from gbmoe.parallel.placement import Placement

pytestmark = pytest.mark.usefixtures("group_of_one")

TOKENS, TOP_K, EXPERTS, HIDDEN, FFN, CHUNKS = 9, 3, 4, 8, 16, 2


def where(chunks=CHUNKS):
    return Placement(None, 1, 0, EXPERTS, EXPERTS, 1, chunks=chunks)


def drawn():
    """(x, ids, router weights, [w1, w2]), leaves but for the ids."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOP_K).indices
    x, weights, *matrices = (torch.randn(shape, generator=draw).requires_grad_() for shape in (
        (TOKENS, HIDDEN), (TOKENS, TOP_K), (EXPERTS, FFN, HIDDEN), (EXPERTS, FFN, HIDDEN)))
    return x, ids, weights, matrices


def chunk_of(number, matrices, chunks=CHUNKS):
    """The function that computes one chunk."""
    w1, w2 = (matrix.chunk(chunks)[number] for matrix in matrices)
    return lambda rows_SH, plan, weights_SK: gbmoe.expert_mlp(rows_SH, plan, w1, w2, weights_TK=weights_SK)


def results(out, x, weights, matrices, grad=None):
    leaves = [x, weights, *matrices]
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) if grad is None else grad)]


def test_rows_of_a_chunk_waited_for_the_chunk_before(monkeypatch):
    """They travel while it computes, in forward and in backward, which takes the chunks the other way; nothing waits for its rows earlier
    than it reads them."""
    events, exchange = [], dist.all_to_all_single

    def recorded(out, x, receives=None, sends=None, group=None, async_op=False):
        work = exchange(out, x, receives, sends, group, async_op)
        if not async_op:
            return work
        number = sum(event.startswith("send") for event in events)
        events.append(f"send {number}")
        return types.SimpleNamespace(wait=lambda: events.append(f"wait {number}") or work.wait())

    class Computed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows_SH, chunk):
            ctx.chunk = chunk
            events.append(f"compute {chunk}")
            return 2 * rows_SH

        @staticmethod
        def backward(ctx, grad_SH):
            events.append(f"compute {ctx.chunk}")
            return 2 * grad_SH, None

    monkeypatch.setattr(dist, "all_to_all_single", recorded)
    x, ids, weights, _ = drawn()
    chunks = [lambda rows_SH, plan, weights_SK, chunk=chunk: Computed.apply(rows_SH, chunk) for chunk in range(CHUNKS)]
    out, _ = experts_by_exchange(chunks, x, ids, weights, where())
    assert events == ["send 0", "send 1", "wait 0", "compute 0", "send 2", "wait 1", "compute 1", "send 3", "wait 2", "wait 3"]
    events.clear()
    out.backward(torch.ones_like(out))
    assert events == ["send 0", "send 1", "wait 0", "compute 1", "send 2", "wait 1", "compute 0", "send 3", "wait 2", "wait 3"]


@pytest.mark.parametrize("exchange", ["in one chunk", "in chunks", "exact", "exact, weighed by the experts"])
def test_sums_and_gradients_that_do_not_lie_row_after_row_were_sent_as_they_lie(exchange):
    """Whatever strides functions of callers return, in forward and in backward, and ids and router weights that are views of wider ones."""
    x, ids, weights, matrices = drawn()

    class Strided(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows_SH):
            return rows_SH.t().clone(memory_format=torch.contiguous_format).t()

        @staticmethod
        def backward(ctx, grad_SH):
            return grad_SH.t().clone(memory_format=torch.contiguous_format).t()

    def strided(compute):
        return lambda rows_SH, plan, weights_SK: Strided.apply(compute(Strided.apply(rows_SH), plan, weights_SK))

    def exchanged(wrap, x, ids, weights):
        if "exact" in exchange:
            compute, weighs_later = wrap(chunk_of(0, matrices, 1)), "weighed" in exchange
            return exact_experts_by_exchange(compute, x, ids, weights, where(1), weighs_later=weighs_later)[0]
        chunks = CHUNKS if exchange == "in chunks" else 1
        return experts_by_exchange([wrap(chunk_of(chunk, matrices, chunks)) for chunk in range(chunks)], x, ids, weights, where(chunks))[0]

    grad = torch.randn(HIDDEN, TOKENS, generator=torch.Generator().manual_seed(1)).t()
    expected = results(exchanged(lambda compute: compute, x, ids, weights), x, weights, matrices, grad.contiguous())
    out = exchanged(strided, x.t().contiguous().t(), ids.int().repeat(1, 2)[:, :TOP_K], weights.repeat(1, 2)[:, :TOP_K])
    for got, wanted in zip(results(out, x, weights, matrices, grad), expected, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)  # a sum over H may depend on strides


@pytest.mark.parametrize("weighs_later", [None, False, True])
def test_sums_of_another_dtype_travelled_as_they_came(weighs_later):
    """Other ranks send and expect the dtype of the tokens."""
    x, ids, weights, _ = drawn()

    def wide(rows_SH, plan, weights_SK):
        assert rows_SH.dtype == torch.bfloat16
        return rows_SH.double()

    if weighs_later is None:
        out, _ = experts_by_exchange([wide] * CHUNKS, x.bfloat16(), ids, weights, where())
    else:
        out, _ = exact_experts_by_exchange(wide, x.bfloat16(), ids, weights, where(1), weighs_later=weighs_later)
    assert out.dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [0, 1, TOKENS])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("top_k", [1, 3])
def test_router_weights_came_in_the_middle_of_an_element(rows, dtype, top_k):
    """After ids of four bytes each, in one message with them."""
    weights_RK, ids_RK = torch.rand(rows, top_k).to(dtype), torch.arange(rows * top_k, dtype=torch.int32).view(rows, top_k)
    weights_SK, ids_SK = weights_with_ids(weights_RK, ids_RK, [rows], [rows], None)
    assert torch.equal(weights_SK, weights_RK) and torch.equal(ids_SK, ids_RK) and weights_SK.dtype == dtype


@pytest.mark.parametrize("needs_weights", [False, True])
def test_what_cannot_travel_is_refused(needs_weights):
    """Router weights are checked where they may be left out, too."""
    x, ids, weights, _ = drawn()
    for arguments, words in (((x.unsqueeze(1), ids, weights), "x: expected "), ((x, ids, weights.unsqueeze(1)), "weights: expected "),
                             ((x, ids, weights.int()), "weights: expected dtype"), ((x[1:], ids, weights), "x: expected 9 rows"),
                             ((x, ids, weights[:, 1:]), "weights: expected shape")):
        with pytest.raises((TypeError, ValueError), match=f"^name: {words}"):
            as_it_travels("name", *arguments, needs_weights=needs_weights)


@pytest.mark.slow
def test_a_compiler_sliced_no_rows_by_a_number_that_it_did_not_know():
    x, ids, weights, matrices = drawn()
    computes = [chunk_of(chunk, matrices) for chunk in range(CHUNKS)]

    def run(x, ids, weights):
        return experts_by_exchange(computes, 2 * x, ids, weights, where())[0]

    arguments = x[:0], ids[:0], weights[:0]
    graph = torch.compile(run, backend="aot_eager", fullgraph=True)
    for got, wanted in zip(*(results(of(*arguments), x, weights, matrices) for of in (graph, run)), strict=True):
        torch.testing.assert_close(got, wanted)
    torch.compiler.reset()
